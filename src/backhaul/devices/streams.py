"""Streams: on which streams of the GPUs a worker's functions run, and what they may rely on.

Each thread that handles requests has a stream of torch's pool on every GPU, so that calls of several threads can use a
GPU side by side. What users may rely on is the order of the host: for the device, the work of a call is over before
anything that a later call enqueues. For that, a thread *leaves word* before others can learn what it has done: its
streams have something that others have not waited for. And a thread *catches up* when it begins something, or gets a
value that another thread has made: its streams wait for those. Nobody waits for the device, and a thread that is alone
enqueues nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from backhaul.devices import driver

_Key = tuple[int, int, int]
"""Names a stream to torch: its id, the index of its device, and the kind of device."""


def mark(value: Any) -> Callable[[Any], None] | None:
    """A value has been made on the current streams: what makes it ready on those of another thread, if needed."""
    tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_cuda]
    if not tensors:
        return None
    events = []
    for device in {tensor.device for tensor in tensors}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append((device, event))

    def ready(_: Any) -> None:
        for device, event in events:
            torch.cuda.current_stream(device).wait_event(event)
        use(tensors)

    return ready


def use(tensors: Sequence[torch.Tensor]) -> None:
    """The current streams use these tensors, which were made on others: their memory is not to be reused early."""
    for tensor in tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if tensor.layout is torch.strided:
                tensor.record_stream(stream)
            elif tensor.layout is torch.sparse_coo:
                for part in (tensor._indices(), tensor._values()):
                    part.record_stream(stream)


@contextmanager
def fresh(devices: Sequence[int]) -> Iterator[None]:
    """Inside, the current stream of each of these GPUs is one of torch's pool."""
    before = [torch._C._cuda_getCurrentStream(device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
    _make_current([_key(each) for each in streams])
    try:
        yield
    finally:
        _make_current(before)


def _key(stream: torch.cuda.Stream) -> _Key:
    return stream.stream_id, stream.device_index, stream.device_type


def _make_current(keys: Sequence[_Key]) -> None:
    """Torch also changes the current device when it changes a stream; here that stays as it is."""
    others = [key for key in keys if torch._C._cuda_getCurrentStream(key[1]) != key]
    if others:
        here = torch._C._cuda_getDevice()
        for id, index, kind in others:
            torch._C._cuda_setStream(stream_id=id, device_index=index, device_type=kind)
        torch._C._cuda_setDevice(here)


class _ThreadState(threading.local):
    streams: tuple[torch.cuda.Stream, ...] | None = None
    """Of a thread of the worker's own."""
    keys: tuple[_Key, ...] = ()


class Streams:
    """The streams of one worker, on those of its GPUs that take part. Thread-safe."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self._state = _ThreadState()
        self._lock = threading.Lock()
        # Guarded by _lock; by device, streams on which something was enqueued that others have not waited for:
        self._fresh: dict[int, set[driver.Stream]] = {device: set() for device in devices}
        self._events: dict[int, torch.cuda.Event] = {}

    def adopt_thread(self) -> None:
        """The calling thread is the worker's own: it gets streams of its own with its first request."""
        self._state.streams = ()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Inside, a request is handled. The current streams wait for what was before.

        A thread of the worker's own has its own streams, and a thread of the user's those that the user has chosen.
        """
        self.begin()
        try:
            yield
        finally:
            self.leave_word()

    def begin(self) -> None:
        """The calling thread begins something new: see `handling`. It calls `leave_word` when that is over."""
        if self._state.streams is not None:
            self._take_streams()
        self.catch_up()

    def _take_streams(self) -> None:
        state = self._state
        if not state.streams:
            state.streams = tuple(torch.cuda.Stream(device) for device in self.devices)  # type: ignore[no-untyped-call]
            state.keys = tuple(map(_key, state.streams))
        _make_current(state.keys)

    def catch_up(self) -> None:
        """What the calling thread enqueues from now on waits for what others have enqueued before."""
        with self._lock:
            for device, fresh in self._fresh.items():
                mine = driver.current_stream(device)
                for other in fresh - {mine}:
                    event = self._event(device)
                    driver.record(event, other)
                    driver.wait(event, mine)
                    fresh.remove(other)
                    fresh.add(mine)

    def leave_word(self) -> None:
        """Others wait for what is on the current streams of the calling thread."""
        with self._lock:
            for device, fresh in self._fresh.items():
                fresh.add(driver.current_stream(device))

    def _event(self, device: int) -> int:
        """An event for one record and one wait, which refers to what was recorded when it is called."""
        event = self._events.get(device)
        if event is None:
            with torch.cuda.device(device):
                event = self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()  # makes it
        return int(event.cuda_event)
