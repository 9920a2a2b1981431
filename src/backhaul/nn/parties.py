"""The caller's side of a `backhaul.federation.Party`: what a `RemoteModule` asks of a party in a federation.

Members of a cluster call the functions of `served` by name. In a federation the methods of a party take their place.
A request that a party does not offer is refused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from backhaul import rpc
from backhaul.errors import MisuseError, OptionError, QuotaError, RefusedError
from backhaul.ids import WorkerInfo
from backhaul.nn import served
from backhaul.nn.members import Kind, Member
from backhaul.nn.modes import Modes
from backhaul.nn.state import State
from backhaul.rpc import Future, RRef
from backhaul.wire import callables
from backhaul.worker import current


class PartyParameters(NamedTuple):
    """Stands for all parameters of a party in a list of references to parameters. They stay with the party."""

    party: RRef[Any]


def in_federation() -> bool:
    return not current().options.policy.runs_any_function


def create(
    worker: WorkerInfo, made_by: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> tuple[RRef[Any], served.Portrait]:
    """Call an exposed class or function of a worker. Returns a reference to the party that it makes, and its portrait.

    Raises `RefusedError` with what the worker must expose, and `OptionError` if the party is on another device.
    """
    with _explained(worker.name, made_by):
        rref = rpc.remote(worker, made_by, args=tuple(args), kwargs=dict(kwargs))
        portrait = _portrait(rref)
    if device not in ("cpu", portrait.device):
        raise OptionError(
            f"the party on {worker.name!r} has its module on {portrait.device}, not on {device}: omit the device"
        )
    return rref, portrait


def describe(rref: RRef[Any]) -> served.Portrait:
    with _explained(rref.owner_name(), None):
        return _portrait(rref)


def _portrait(rref: RRef[Any]) -> served.Portrait:
    found = rref.rpc_sync().describe()
    if type(found) is not tuple or tuple(map(type, found)) != (str, bool, str, int):
        raise MisuseError(
            f"the object on {rref.owner_name()!r} does not describe itself as a backhaul.federation.Party does: a "
            "RemoteModule in a federation needs a Party"
        )
    return served.Portrait(*found)


class _explained:
    """A block that adds to a `RefusedError` what the other worker has to write."""

    def __init__(self, worker: str, made_by: Callable[..., Any] | None) -> None:
        self._worker = worker
        self._made_by = made_by

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if not isinstance(error, RefusedError) or isinstance(error, QuotaError):
            return
        me = rpc.get_worker_info().name
        name = "" if self._made_by is None else callables.name_of(self._made_by)
        module, _, qualname = name.partition(":")
        what = f"{qualname} of module {module}" if name else "this reference"
        raise RefusedError(
            f"worker {self._worker!r} does not let {me!r} use {what} as a RemoteModule. In a federation it must be a "
            f"backhaul.federation.Party that {self._worker!r} fills with its own module and exposes: "
            f"@rpc.expose(to={me!r}) over `class {qualname or 'Name'}(Party)`, or over a function that returns one. "
            f"The log of {self._worker!r} says what is missing"
        ) from error


def ask(rref: RRef[Any], function: Any, args: tuple[Any, ...]) -> Any:
    """Ask the party to do what a function of `served` does. Raises `MisuseError` if parties do not offer it."""
    if function is served.run:
        _, modes, given, kwargs = args[:4]
        return _seen(rref.rpc_sync().forward(*given, **kwargs), modes)
    if function is served.change:
        return _change(rref, *args)
    if function is served.save_state:
        prefix = args[0]
        return State({prefix + name: value for name, value in rref.rpc_sync().state().items()}, {})
    _refuse(rref, _NAMES.get(function, "this"))


def ask_async(rref: RRef[Any], function: Any, args: tuple[Any, ...]) -> Future[Any]:
    if function is served.run:
        _, modes, given, kwargs = args[:4]
        answer: Future[Any] = rref.rpc_async().forward(*given, **kwargs)
        return answer if modes.grad else answer.then(lambda done: _seen(done.value(), modes))
    _refuse(rref, _NAMES.get(function, "this"))


def members_of(rref: RRef[Any], key: int, kind: Kind, prefix: str) -> list[Member]:
    """A party's parameters as others see them: one entry stands for all of them."""
    if kind == "buffers":
        return []
    return [Member(prefix, (rref.owner().id, key), PartyParameters(rref))]


def _seen(value: Any, modes: Modes) -> Any:
    """The result, detached if grad mode is off at the caller."""
    return value if modes.grad else tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _change(rref: RRef[Any], device: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if method == "train":
        rref.rpc_sync().train(*args)
    elif method == "zero_grad":
        rref.rpc_sync().zero_grad()
    else:
        _refuse(rref, f"{method}()")
    return _portrait(rref)


def _refuse(rref: RRef[Any], what: str) -> NoReturn:
    raise MisuseError(
        f"{what} is not allowed on the module of a party: let {rref.owner_name()!r} do it, where it makes its Party"
    )


_NAMES: dict[Any, str] = {
    served.duplicate: "copying",
    served.convert: "a conversion, such as half() or to(dtype),",
    served.load_state: "load_state_dict()",
    served.get_member: "get_parameter() or get_buffer()",
    served.register_hook: "registering a hook",
}
