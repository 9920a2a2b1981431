"""Where a module lives: a worker and one of its devices, written as ``"worker1/cuda:0"``."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from backhaul import rpc
from backhaul.errors import OptionError, UnknownWorkerError
from backhaul.ids import WorkerInfo
from backhaul.worker import current

_FORMATS = (
    'a remote device is "<worker>/<device>", "<worker>", "rank:<rank>/<device>" or "rank:<rank>", as in "worker1/cpu"'
)
_RANK = "rank:"


class Place(NamedTuple):
    """A worker, and the device that a module there is moved to."""

    worker: WorkerInfo
    device: str


def place(remote_device: str) -> Place:
    """The place that a string names. If the string names no device, it is the CPU.

    Raises `OptionError` for a malformed string, and `UnknownWorkerError` if there is no such worker.
    """
    if not isinstance(remote_device, str):
        raise OptionError(f"{remote_device!r} is not a string: {_FORMATS}")
    worker, _, device = remote_device.rpartition("/") if "/" in remote_device else (remote_device, "", "cpu")
    if worker and not device:
        raise OptionError(f"{remote_device!r}: Device string must not be empty; {_FORMATS}")
    if not worker or "/" in worker:
        raise OptionError(
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>'; {_FORMATS}"
        )
    try:
        named = str(torch.device(device))
    except RuntimeError as error:
        raise OptionError(f"{remote_device!r}: {device!r} is not a torch device ({error}); {_FORMATS}") from error
    rank = worker.removeprefix(_RANK)
    if worker.startswith(_RANK) and not rank.isdecimal():
        raise OptionError(f"{remote_device!r}: {rank!r} is not a rank; {_FORMATS}")
    try:
        return Place(rpc.get_worker_info(int(rank) if worker.startswith(_RANK) else worker), named)
    except UnknownWorkerError as error:
        raise UnknownWorkerError(f"{remote_device!r}: {error}; {_FORMATS}") from None


def device_of(module: torch.nn.Module, otherwise: str) -> torch.device:
    """The device of the module's first tensor, or ``otherwise`` if it has none. Parts on other workers do not count."""
    for part in module.modules():
        for tensor in chain(part._parameters.values(), part._buffers.values()):
            if tensor is not None:
                return tensor.device
    return torch.device(otherwise)


def devices_mapped(owner: str) -> tuple[str, ...]:
    """The devices of ``owner`` in this worker's device maps. Tensors on them come here without a copy to the CPU."""
    devices = current().agent.devices
    return () if devices is None else devices.mapped(owner)


def devices_fetched(owner: str, by: str) -> tuple[str, ...]:
    """The devices of ``owner`` from which worker ``by`` fetches the value of a reference without a copy to the CPU."""
    devices = current().agent.devices
    return () if devices is None else devices.fetched(owner, by)


def arrived(value: Any, device: torch.device) -> Any:
    """The arguments of a module on ``device``, moved to that device."""
    return value if device.type == "cpu" else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def leaving(value: Any, device: torch.device) -> Any:
    """The result of a module on ``device``, with its tensors moved to the CPU for sending."""
    return value if device.type == "cpu" else tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)
