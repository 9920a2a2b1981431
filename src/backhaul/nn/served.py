"""The functions that a module's owner runs for `RemoteModule`s of other workers. All of them are called by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from backhaul.errors import OptionError
from backhaul.nn.conversion import Conversion
from backhaul.nn.device import arrived, device_of, leaving
from backhaul.nn.members import Elsewhere, Kind, Member, members
from backhaul.nn.modes import Modes
from backhaul.nn.state import Loading, State, load, save
from backhaul.rpc import RRef

_NOT_PASSED_ON = ("requires_grad_", "zero_grad")
"""Methods that visit parameters and not children, so they miss modules on other workers."""


class Portrait(NamedTuple):
    """What a `RemoteModule` knows about its module without asking the owner."""

    kind: str
    training: bool
    device: str
    key: int
    """Unique among the modules of its worker, as long as there is a reference to the module."""


def create(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> tuple[RRef[nn.Module], Portrait]:
    """Make a module, and move it to a device of this worker."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise OptionError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but {getattr(module_cls, '__qualname__', module_cls)} returned {type(module).__name__}: module_cls must "
            "be an nn.Module class, or a function that returns an nn.Module"
        )
    module.to(device)
    return RRef(module), portrait(module, device)


def duplicate(rref: RRef[nn.Module], device: str) -> tuple[RRef[nn.Module], Portrait]:
    module = copy.deepcopy(rref.local_value())
    return RRef(module), portrait(module, device)


def describe(rref: RRef[Any], device: str) -> Portrait:
    module = rref.local_value()
    if not isinstance(module, nn.Module):
        raise OptionError(f"module_rref refers to a {type(module).__name__}, which is not an nn.Module")
    return portrait(module, device)


def portrait(module: nn.Module, device: str) -> Portrait:
    return Portrait(type(module).__name__, module.training, str(device_of(module, device)), id(module))


def run(
    rref: RRef[nn.Module],
    device: str,
    modes: Modes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mapped: Collection[str] = (),
) -> Any:
    """Call the module under the caller's ``modes``. ``device`` counts if the module has no tensors of its own.

    ``mapped`` are the devices of this worker in the caller's device maps: results on them are sent from there.
    """
    module = rref.local_value()
    where = device_of(module, device)
    with modes.entered():
        result = module(*arrived(args, where), **arrived(kwargs, where))
        return result if str(where) in mapped else leaving(result, where)


def change(rref: RRef[nn.Module], device: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Portrait:
    """Call a method that changes the module."""
    module = rref.local_value()
    getattr(module, method)(*args, **kwargs)
    if method in _NOT_PASSED_ON:
        for part in module.modules():
            if isinstance(part, Elsewhere):
                getattr(part, method)(*args, **kwargs)
    return portrait(module, device)


def convert(rref: RRef[nn.Module], conversion: Conversion) -> None:
    rref.local_value()._apply(conversion.apply)  # type: ignore[no-untyped-call]


def save_state(rref: RRef[nn.Module], prefix: str, keep_vars: bool) -> State:
    return save(rref.local_value(), prefix, keep_vars)


def load_state(rref: RRef[nn.Module], loading: Loading) -> tuple[list[str], list[str], list[str]]:
    return load(rref.local_value(), loading)


def list_members(rref: RRef[nn.Module], kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> list[Member]:
    return members([(prefix, rref.local_value())], kind, recurse, remove_duplicate)


def get_member(rref: RRef[nn.Module], method: str, target: str) -> RRef[Any]:
    return RRef(getattr(rref.local_value(), method)(target))


def register_hook(
    rref: RRef[nn.Module], method: str, hook: Callable[..., Any], options: Mapping[str, bool]
) -> RRef[Any]:
    """A reference to the handle."""
    return RRef(getattr(rref.local_value(), method)(hook, **options))


def step(
    rref: RRef[nn.Module],
    device: str,
    modes: Modes,
    inputs: tuple[Any, ...] | RRef[Any],
    before: RRef[Any] | None,
    mapped: Collection[str] = (),
) -> Any:
    """Run one micro-batch through a stage of a pipeline.

    ``inputs`` are arguments, or a reference to the previous stage's output for this micro-batch. ``before`` refers to
    this stage's output for the previous micro-batch, which must be made first. If that fails, this call fails too.
    ``mapped`` are the devices of this worker from which the next stage, or the pipeline's caller, takes tensors.
    """
    with modes.entered():
        # The inputs are fetched first, so that they are here when the stage is free. There is no timeout: a stage
        # cannot know how long the others take, and the pipeline's caller has a timeout.
        value = inputs.to_here(0) if isinstance(inputs, RRef) else inputs
    if before is not None:
        before.to_here(0)
    return run(rref, device, modes, value if isinstance(value, tuple) else (value,), {}, mapped)


def finish(rref: RRef[Any]) -> None:
    """Wait until this worker has made the value, or has failed to."""
    with suppress(Exception):
        rref.to_here(0)
