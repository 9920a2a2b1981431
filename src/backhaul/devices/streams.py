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

_Key = driver.Key
_current: Callable[[int], _Key] = getattr(torch._C, "_cuda_getCurrentStream", lambda device: (0, device, 1))
"""The current stream of the calling thread on a device. A torch without CUDA has no such function."""


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
            stream = driver.torch_stream(tensor.get_device())
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
    before = list(map(_current, devices))
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
    others = [key for key in keys if _current(key[1]) != key]
    if others:
        here = torch._C._cuda_getDevice()
        for id, index, kind in others:
            torch._C._cuda_setStream(stream_id=id, device_index=index, device_type=kind)
        torch._C._cuda_setDevice(here)


class _ThreadState(threading.local):
    is_own = False
    """Whether the thread belongs to the worker."""
    is_ready = False
    """Whether the worker's streams have been made current on this thread."""


class Streams:
    """The streams of one worker on the GPUs that it uses. Thread-safe.

    Nearly always all work is on one stream, and there is nothing to wait for. That is decided without the lock, by
    `_only`. It is None from before a thread records an event until the wait for that event is enqueued. So a thread
    that finds its stream there knows two things: the work that it has enqueued comes before any record that others
    make later, and no other stream has work that it must wait for.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        _in_use.update(devices)
        self._state = _ThreadState()
        self._lock = threading.Lock()
        # Written under _lock:
        self._own: tuple[_Key, ...] = ()  # the worker's streams, made with the first request
        # By device, streams with work that other streams have not waited for:
        self._fresh: dict[int, set[_Key]] = {device: set() for device in devices}
        self._only: dict[int, _Key | None] = dict.fromkeys(devices)  # the only stream in `_fresh`, if there is one
        self._events: dict[int, torch.cuda.Event] = {}

    def adopt_thread(self) -> None:
        """Make the calling thread one of the worker's own, which handle requests on the worker's streams."""
        self._state.is_own = True

    @contextmanager
    def handling(self) -> Iterator[None]:
        """A block in which the thread handles a request: see `enter`."""
        before = self.enter()
        try:
            yield
        finally:
            self.leave(before)

    def enter(self) -> Sequence[_Key]:
        """Begin to handle a request on the calling thread. Pass the result to `leave` afterwards.

        The current streams wait for earlier work. The worker's own threads get the worker's streams; user threads keep
        the streams that the user has chosen. A thread that interrupts other work, as at a gate, gets the streams of
        that work back from `leave`.
        """
        before: Sequence[_Key] = ()
        if self._state.is_own:
            if self._state.is_ready:
                before = [_current(device) for device in self.devices]
                if (*before,) != self._own:
                    _make_current(self._own)
                else:
                    before = ()  # nothing to restore
            else:
                _make_current(self._own or self._make())
                self._state.is_ready = True
        self.catch_up()
        return before

    def leave(self, before: Sequence[_Key]) -> None:
        """End what `enter` has begun."""
        self.leave_word()
        if before:
            _make_current(before)

    def begin(self) -> None:
        """Set the streams for new work of the calling thread, as `enter` does. Call `leave_word` at its end."""
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
        for device, only in self._only.items():
            if only is None or _current(device) != only:
                self._wait_on(device)

    def _wait_on(self, device: int) -> None:
        mine = _current(device)
        with self._lock:
            fresh = self._fresh[device]
            others = fresh - {mine}
            if not others:
                return
            self._only[device] = None
            here = driver.current_stream(device)  # before any other call of the driver on this thread
            event = self._event(device)
            for other in others:
                driver.record(event, driver.handle(other))
                driver.wait(event, here)
            fresh.clear()
            fresh.add(mine)
            self._only[device] = mine

    def leave_word(self) -> None:
        """Note that the current streams of the calling thread have work that others must wait for."""
        for device, only in self._only.items():
            mine = _current(device)
            if only != mine:
                with self._lock:
                    fresh = self._fresh[device]
                    fresh.add(mine)
                    self._only[device] = mine if len(fresh) == 1 else None

    def _event(self, device: int) -> int:
        """An event for one record followed by one wait. The wait refers to the latest record, so it can be reused."""
        event = self._events.get(device)
        if event is None:
            with torch.cuda.device(device):
                event = self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()  # makes it
        return int(event.cuda_event)
