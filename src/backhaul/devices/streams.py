"""Streams: on which streams of the GPUs a worker's functions run, and which order they can rely on.

A worker has one stream of torch's pool on every GPU that it uses, and all threads that handle its requests use that
stream. So their work runs on the device in the order in which it was enqueued, memory that one thread frees is not
reused before the others are done with it, and a lock orders the work on the device as it orders the threads. A function
that should overlap with others on the device must use its own stream, as in any torch program.

User threads use the streams that the user has chosen. They are synchronised in two steps. A thread *leaves word* before
others can see what it has done: its streams are noted as having work that other streams have not waited for. A thread
*catches up* when it begins something, or gets a value that another thread has made: its streams wait for the noted
ones. No thread waits for the device, and a thread that is alone enqueues nothing.
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
"""A stream as torch names it: its id, the index of its device, and the type of device."""


def on_gpus(value: Any) -> list[torch.Tensor]:
    """The tensors of a value that are on GPUs."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_cuda]


def mark(value: Any) -> Callable[[Any], None] | None:
    """Call this after a value was made on the current streams. Returns a function that another thread must call before
    it uses the value; None if the value has no tensors on GPUs.
    """
    tensors = on_gpus(value)
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
    """Note that the current streams use these tensors, so that torch does not reuse their memory too early."""
    for tensor in tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if tensor.layout is torch.strided:
                tensor.record_stream(stream)
            elif tensor.layout is torch.sparse_coo:
                for part in (tensor._indices(), tensor._values()):
                    part.record_stream(stream)


_in_use: set[int] = set()
"""The GPUs that the workers of this process use. What a `Baton` orders may be shared by workers."""


class Baton:
    """Orders the GPU work of threads that take turns: work of a thread waits for the work of the threads before it.

    A lock orders threads, but not the work that they have enqueued. So a thread that gets the lock also takes the
    baton, and leaves it before it releases the lock. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, torch.cuda.Event] = {}  # by device

    def take(self) -> None:
        """Later work of the calling thread waits for the work that was enqueued before the baton was left."""
        if self._left:
            with self._lock:
                self._wait()

    def leave(self) -> None:
        if _in_use:
            with self._lock:
                self._wait()  # another thread may have left the baton meanwhile
                for device in _in_use:
                    self._left[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._left[device].record(torch.cuda.current_stream(device))

    def _wait(self) -> None:
        for device, event in self._left.items():
            torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def fresh(devices: Sequence[int]) -> Iterator[None]:
    """A block in which the current stream of each of these GPUs is a new one from torch's pool."""
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
    """Set the current streams. Torch also changes the current device then; this restores it."""
    others = [key for key in keys if torch._C._cuda_getCurrentStream(key[1]) != key]
    if others:
        here = torch._C._cuda_getDevice()
        for id, index, kind in others:
            torch._C._cuda_setStream(stream_id=id, device_index=index, device_type=kind)
        torch._C._cuda_setDevice(here)


class _ThreadState(threading.local):
    is_own = False
    """Whether the thread belongs to the worker."""


class Streams:
    """The streams of one worker on the GPUs that it uses. Thread-safe."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        _in_use.update(devices)
        self._state = _ThreadState()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._own: tuple[_Key, ...] = ()  # the worker's streams, made with the first request
        # By device, streams with work that other streams have not waited for:
        self._fresh: dict[int, set[driver.Stream]] = {device: set() for device in devices}
        self._events: dict[int, torch.cuda.Event] = {}

    def adopt_thread(self) -> None:
        """Make the calling thread one of the worker's own, which handle requests on the worker's streams."""
        self._state.is_own = True

    @contextmanager
    def handling(self) -> Iterator[None]:
        """A block in which the thread handles a request. The current streams wait for earlier work.

        The worker's own threads get the worker's streams; user threads keep the streams that the user has chosen. After
        the block, the streams from before are current again, for a thread that interrupted other work, as at a gate.
        """
        before = [torch._C._cuda_getCurrentStream(device) for device in self.devices] if self._state.is_own else ()
        self.begin()
        try:
            yield
        finally:
            self.leave_word()
            _make_current(before)

    def begin(self) -> None:
        """Set the streams for new work of the calling thread, as `handling` does. Call `leave_word` at its end."""
        if self._state.is_own:
            _make_current(self._own or self._make())
        self.catch_up()

    def _make(self) -> tuple[_Key, ...]:
        with self._lock:
            if not self._own:
                streams = [torch.cuda.Stream(device) for device in self.devices]  # type: ignore[no-untyped-call]
                self._own = tuple(map(_key, streams))
            return self._own

    def catch_up(self) -> None:
        """Later work of the calling thread waits for the work that others have enqueued before."""
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
        """Note that the current streams of the calling thread have work that others must wait for."""
        with self._lock:
            for device, fresh in self._fresh.items():
                fresh.add(driver.current_stream(device))

    def _event(self, device: int) -> int:
        """An event for one record followed by one wait. The wait refers to the latest record, so it can be reused."""
        event = self._events.get(device)
        if event is None:
            with torch.cuda.device(device):
                event = self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()  # makes it
        return int(event.cuda_event)
