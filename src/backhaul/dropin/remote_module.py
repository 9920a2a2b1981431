"""The contents of ``torch.distributed.nn.api.remote_module``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from backhaul import nn as ours
from backhaul.errors import MisuseError, UnsendableError
from backhaul.nn.device import devices_mapped, place
from backhaul.rpc import RRef

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)


class RemoteModule(ours.RemoteModule):
    """See `backhaul.nn.RemoteModule`. As in torch, attributes that users set on it are not sent with it."""

    @property
    def is_device_map_set(self) -> bool:
        """Whether GPU tensors of the module's worker arrive here as GPU tensors."""
        return bool(devices_mapped(self.on))

    generated_methods = ("forward_async", "forward")

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is not None:
            raise MisuseError(
                "a RemoteModule that can be called inside TorchScript needs torch's own RPC agent, which Backhaul "
                "replaces: leave out _module_interface_cls and call it from Python"
            )
        super().__init__(remote_device, module_cls, args, kwargs)

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """As in torch, the named worker need not be the module's owner; the owner is used."""
        device = place(remote_device).device
        made = super().init_from_module_rref(f"{module_rref.owner_name()}/{device}", module_rref)
        assert isinstance(made, RemoteModule)
        return made

    def _rpc_reduce(self) -> tuple[Any, ...]:
        blank, args, state = super()._rpc_reduce()
        known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "training", "_kind", "_key"}
        return blank, args, {name: value for name, value in state.items() if name in known}

    def __reduce__(self) -> NoReturn:
        raise UnsendableError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )


_RemoteModule = RemoteModule
