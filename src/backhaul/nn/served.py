"""What the owner of a module runs for the `RemoteModule`s of others. All of it is called by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from backhaul.errors import OptionError
from backhaul.nn.device import arrived, device_of, leaving
from backhaul.nn.members import Kind, Member, members
from backhaul.rpc import RRef


class Portrait(NamedTuple):
    """What a `RemoteModule` knows of its module without asking."""

    kind: str
    training: bool
    device: str


def create(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> tuple[RRef[nn.Module], Portrait]:
    """Make a module, and move it to a device of this worker."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"{getattr(module_cls, '__qualname__', module_cls)} returned {type(module).__name__}: module_cls must be an "
            "nn.Module class, or a function that returns an nn.Module"
        )
    module.to(device)
    return RRef(module), _portrait(module, device)


def describe(rref: RRef[Any], device: str) -> Portrait:
    module = rref.local_value()
    if not isinstance(module, nn.Module):
        raise OptionError(f"module_rref refers to {type(module).__name__}, which is no nn.Module")
    return _portrait(module, device)


def _portrait(module: nn.Module, device: str) -> Portrait:
    return Portrait(type(module).__name__, module.training, str(device_of(module, device)))


def run(rref: RRef[nn.Module], device: str, grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module. ``device`` is for one that has no tensors of its own; ``grad`` is the caller's grad mode."""
    return call(rref.local_value(), device, grad, args, kwargs)


def call(module: nn.Module, device: str, grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    where = device_of(module, device)
    with torch.set_grad_enabled(grad):
        return leaving(module(*arrived(args, where), **arrived(kwargs, where)), where)


def list_members(rref: RRef[nn.Module], kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> list[Member]:
    return members([(prefix, rref.local_value())], kind, recurse, remove_duplicate)
