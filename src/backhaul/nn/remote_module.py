"""RemoteModule: an nn.Module whose module lives on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from backhaul import rpc
from backhaul.errors import OptionError
from backhaul.nn import served
from backhaul.nn.device import place
from backhaul.nn.members import Kind, Member
from backhaul.rpc import Future, RRef

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class RemoteModule(nn.Module):
    """A module that another worker makes, keeps and runs; or this one.

    ``remote_device`` says where: ``"worker1/cpu"``, ``"worker1"``, ``"rank:1/cuda:0"``. ``module_cls(*args, **kwargs)``
    makes the module there; it is an ``nn.Module`` class, or a function that returns an ``nn.Module``. Returns when the
    module is there, and raises what making it raised.

    It can be sent in calls, and be part of other modules; the module itself stays where it is. All that it offers is
    one call to the module's owner.
    """

    on: str
    """The name of the worker."""
    device: str
    """The device on that worker."""
    module_rref: RRef[nn.Module]
    is_scriptable: bool

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        worker, device = place(remote_device)
        if not callable(module_cls):
            raise OptionError(
                f"module_cls must be an nn.Module class, or a function that returns one, not {module_cls!r}"
            )
        if isinstance(module_cls, nn.Module):
            raise OptionError(
                "module_cls is a module, not a class: give the class and its arguments, so that the module is made on "
                f"{worker.name!r}; for a copy of one that you have, give a module-level function that returns its argument"
            )
        if args is not None and not isinstance(args, tuple | list):
            raise OptionError(f"args must be a tuple, as in args=(20, 30), not a {type(args).__name__}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise OptionError(f"kwargs must be a dict, not a {type(kwargs).__name__}")
        rref, portrait = rpc.rpc_sync(
            worker, served.create, args=(module_cls, tuple(args or ()), dict(kwargs or {}), device)
        )
        self._adopt(rref, portrait)

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """One more RemoteModule for a module that exists. ``remote_device`` must name the worker that has it."""
        worker, device = place(remote_device)
        if not isinstance(module_rref, RRef):
            raise OptionError(f"module_rref must be an RRef to an nn.Module, not {type(module_rref).__name__}")
        if module_rref.owner() != worker:
            raise OptionError(
                f"remote_device {remote_device!r} is not where the module is: it is on {module_rref.owner_name()!r}"
            )
        self = _blank(cls)
        self._adopt(module_rref, rpc.rpc_sync(worker, served.describe, args=(module_rref, device)))
        return self

    def _adopt(self, rref: RRef[nn.Module], portrait: served.Portrait) -> None:
        self.module_rref = rref
        self.on = rref.owner_name()
        self.is_scriptable = False
        self._kind, self.training, self.device = portrait

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name not in _OF_EVERY_MODULE}
        return _blank, (type(self),), state

    def extra_repr(self) -> str:
        return f"{self._kind} on {self.on}/{self.device}"

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments, hooks included. Raises what it raises."""
        return self._there(served.run, self.device, torch.is_grad_enabled(), args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future of what `forward` returns."""
        return self._there_async(served.run, self.device, torch.is_grad_enabled(), args, kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, in the order of its ``parameters()``."""
        found = self._ask_for_members("parameters", "", recurse, True).wait()
        return [member.rref for member in found]

    def _ask_for_members(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Future[list[Member]]:
        return self._there_async(served.list_members, kind, prefix, recurse, remove_duplicate)

    def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of `served` on the owner, with the module."""
        rref = self.module_rref
        return rpc.rpc_sync(rref.owner(), function, args=(rref, *args))

    def _there_async(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        rref = self.module_rref
        return rpc.rpc_async(rref.owner(), function, args=(rref, *args))


def _blank(cls: type[RemoteModule]) -> RemoteModule:
    """One without a module yet."""
    self = cls.__new__(cls)
    nn.Module.__init__(self)
    return self
