"""Staging: how the tensors of one message leave a worker, and where they go."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from backhaul.compat import tolerate_streams
from backhaul.devices import driver, maps, names
from backhaul.devices.discipline import Event, HostCopy
from backhaul.devices.maps import Devices
from backhaul.devices.segments import MAX_NEW, DeviceLending
from backhaul.devices.streams import new_streams
from backhaul.errors import UnsendableError
from backhaul.wire import headers
from backhaul.wire.frames import DEVICE_PLACE
from backhaul.wire.landing import pin
from backhaul.wire.tensors import view_of


class Codes(dict[torch.device, int]):
    """A device map as the codes of the wire. A tensor on a GPU without an entry raises `UnsendableError`."""

    def __init__(self, map: Mapping[str, str], peer: str, *, reply: bool) -> None:
        super().__init__()
        for source, target in map.items():
            self[torch.device(source)] = _code(target)
        self.moves_cpu = _CPU in self
        """Whether tensors on the CPU go to a GPU."""
        self.has_any = bool(map)
        self._peer = peer
        self._reply = reply

    def __missing__(self, device: torch.device) -> int:
        if device.type == "cpu":
            return headers.CPU
        raise UnsendableError(
            f"{'Response' if self._reply else 'Request'} device mapping is not available for destination {self._peer}: "
            f"the device map has no entry for {device}. Give RpcOptions(device_maps={{worker: {{{device.index}: index"
            "}}) on the worker that makes the call, or send tensor.cpu()"
        )


_CPU = torch.device("cpu")
_NO_CODES = Codes({}, "", reply=False)


class Staging:
    """How the tensors of one message go to a peer. Implements `wire.tensors.Staging`."""

    def __init__(self, codes: Codes, lending: DeviceLending | None) -> None:
        self._codes = codes
        self._lending = lending
        self._new = 0

    def code(self, device: torch.device) -> int:
        return self._codes[device]

    def stage(self, memory: torch.Tensor, size: int, code: int) -> tuple[int, memoryview | None, Any]:
        if self._lending is not None and code != headers.CPU and self._new < MAX_NEW:
            placed = self._lending.place(memory, size)
            if placed is not None:
                self._new += bool(placed.descriptors)
                return placed.id | DEVICE_PLACE, None, placed
        copied = _ToHost(memory, size)
        return 0, view_of(copied.host, size), copied


class Gradients(Staging):
    """How gradients go to a peer: each to the device from which its tensor came, which the receiver knows."""

    def __init__(self, lending: DeviceLending | None) -> None:
        super().__init__(_NO_CODES, lending)

    def code(self, device: torch.device) -> int:
        return headers.EXPECTED


class _ToHost:
    """A copy in pinned memory of the first bytes of a tensor, enqueued on the current stream. A `filling.Copying`."""

    def __init__(self, memory: torch.Tensor, size: int) -> None:
        _free_ended()
        self.size = size
        self.host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        device = memory.get_device()
        stream = driver.current_stream(device)
        # The message may drop the last reference to the tensor before the copy begins.
        driver.record_use(memory, driver.torch_stream(device))
        take, give_back = partial(_event, device), _spare.setdefault(device, []).append
        self.copy = HostCopy(driver, self.host.data_ptr(), memory.data_ptr(), size, stream, take, give_back)

    def done(self) -> int:
        return self.copy.done()

    def __del__(self) -> None:
        # The message did not leave. Torch's allocator, which does not know of the copy, would reuse the pinned memory.
        with contextlib.suppress(AttributeError, driver.DriverError):
            if not self.copy.is_over:
                _ended.append(_Ended(self.host, self.copy))


class _Ended(NamedTuple):
    host: torch.Tensor
    copy: HostCopy


# Global to the process, as its GPUs are.
_ended: deque[_Ended] = deque()
"""Copies that no message needs, and their memory, until the device has made them."""
_freeing = threading.Lock()
_spare: dict[int, list[Event]] = {}
"""Unused events, by device."""


def _free_ended() -> None:
    with _freeing:
        for _ in range(len(_ended)):
            ended = _ended.popleft()
            if not ended.copy.is_over:
                _ended.append(ended)


def _event(device: int) -> Event:
    try:
        return _spare[device].pop()
    except IndexError:
        return driver.new_event(device)


def own_devices(device_maps: Any, used: Sequence[int]) -> Devices:
    """What this worker tells the others about its devices."""
    if device_maps is None and not used:
        return Devices(_count())
    same = device_maps == "same"
    return Devices(_count(), {} if same or device_maps is None else device_maps, same, tuple(used))


def _count() -> int:
    """The number of GPUs. Asking for it does not start CUDA in this process."""
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0  # type: ignore[no-untyped-call]


def no_map(peer: str, *, reply: bool = False) -> str:
    """The error message for a tensor on a GPU without a device map. It contains torch's own message."""
    if reply:
        return (
            f"Response device mapping is not available for destination {peer}: the result has a tensor on a GPU, and "
            "the caller has no device map for it. Give the caller RpcOptions(device_maps=...), or return tensor.cpu()"
        )
    return (
        f"a tensor on a GPU cannot go to worker {peer!r}. TensorPipe RPC backend only supports CPU tensors by default, "
        "and so does Backhaul: move the tensor with .cpu(), or call `set_device_map` on `TensorPipeRpcBackendOptions` "
        'or RpcOptions, or give RpcOptions(device_maps="same")'
    )


class WorkerDevices:
    """The GPUs of a worker and of its peers. Exists only if some worker of the group has a device map."""

    def __init__(self, me: str, all: Mapping[str, Devices]) -> None:
        self._me = me
        self._all = all
        mine = set(all[me].used)
        for name in all:
            mine.update(_indices(maps.map_between(all, me, name)))
            mine.update(_indices(maps.inverted(maps.map_between(all, name, me))))
        tolerate_streams()
        self.streams = new_streams(sorted(mine))
        if mine:
            pin()
        self.crosses = maps.cross(all)
        """Whether some device map leads from the CPU of one worker to a GPU of another, or the reverse."""
        self._codes: dict[tuple[str, bool], Codes] = {}

    def staging(
        self, peer: str, lending: DeviceLending | None, tensors: Sequence[torch.Tensor], *, reply: bool
    ) -> Staging | None:
        """The staging for a message with these tensors; None if all are on the CPU and stay there.

        ``reply``: the message answers a request, so the map of the request's sender counts. Raises `UnsendableError` if
        a tensor is on a GPU and there is no map.
        """
        codes = self._codes.get((peer, reply))
        if codes is None:
            if reply:
                found = maps.inverted(maps.map_between(self._all, peer, self._me))
            else:
                found = maps.map_between(self._all, self._me, peer)
            codes = self._codes[peer, reply] = Codes(found, peer, reply=reply)
        if not codes.moves_cpu and not any(tensor.is_cuda for tensor in tensors):
            return None
        if not codes.has_any and not reply:
            raise UnsendableError(no_map(peer))
        return Staging(codes, lending)

    def mapped(self, peer: str) -> tuple[str, ...]:
        """The GPUs of a peer in this worker's map: results on them come here without a copy to the CPU."""
        return self._mapped(self._me, peer)

    def fetched(self, owner: str, by: str) -> tuple[str, ...]:
        """The GPUs of an owner from which worker ``by`` fetches the value of a reference without a copy to the CPU.

        A worker that fetches its own value needs no map.
        """
        if owner == by:
            return tuple(f"cuda:{index}" for index in range(self._all[owner].count))
        return self._mapped(by, owner)

    def _mapped(self, source: str, target: str) -> tuple[str, ...]:
        return tuple(there for there in maps.map_between(self._all, source, target).values() if there != names.CPU)


def needs_devices(all: Mapping[str, Devices]) -> bool:
    return any(each.maps or each.same for each in all.values())


def _indices(map: Mapping[str, str]) -> list[int]:
    return [index for source in map if (index := names.index_of(source)) is not None]


def _code(target: str) -> int:
    index = names.index_of(target)
    return headers.CPU if index is None else headers.GPU + index
