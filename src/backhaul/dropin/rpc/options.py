"""The options of torch's backends, over `backhaul.options.RpcOptions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backhaul.dropin.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from backhaul.options import RpcOptions

Device = torch.device | str | int


class RpcBackendOptions:
    """Options of any backend: a timeout and the init method."""

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            raise TypeError(f"incompatible constructor arguments: rpc_timeout is in seconds, not {rpc_timeout!r}")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """torch's options, as far as they mean something here.

    ``_transports`` and ``_channels`` name parts of torch's transport and are ignored.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps = {to: _device_map(map_) for to, map_ in (device_maps or {}).items()}
        self.devices = [_gpu(device) for device in devices or ()]

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Map devices of this worker to devices of worker ``to``."""
        new = _device_map(device_map)
        known = self.device_maps.setdefault(to, {})
        for source, target in new.items():
            if source in known and known[source] != target:
                raise ValueError(f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target}")
            if target in known.values() and known.get(source) != target:
                raise ValueError(f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target}")
            known[source] = target

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the devices of this worker that take part."""
        self.devices = [_gpu(device) for device in devices]

    def ours(self) -> RpcOptions:
        return RpcOptions(
            rpc_timeout=self.rpc_timeout,
            init_method=self.init_method,
            num_worker_threads=self.num_worker_threads,
            device_maps={
                to: {str(source): str(target) for source, target in entries.items()}
                for to, entries in self.device_maps.items()
            }
            or None,
            devices=[device.index for device in self.devices],
        )


def _device(device: Any) -> torch.device:
    return device if isinstance(device, torch.device) else torch.device(device)


def _gpu(device: Any) -> torch.device:
    found = _device(device)
    if found.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {found.type}.")
    return found


def _device_map(given: Mapping[Any, Any]) -> dict[torch.device, torch.device]:
    found: dict[torch.device, torch.device] = {}
    for source, target in given.items():
        if _device(target) in found.values():
            raise ValueError(f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target}")
        found[_device(source)] = _device(target)
    return found
