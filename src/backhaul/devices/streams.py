"""Streams: on which streams of the GPUs a worker's functions run, and what they may rely on.

A worker has one stream of torch's pool on every GPU that takes part, and all threads that handle its requests use it.
So what they enqueue keeps the order of the host, memory that one of them frees is not reused before the others are done
with it, and a lock orders the device as it orders the threads. A function that is to overlap with others on the device
uses a stream of its own, as anywhere else.

Threads of the user's have the streams that the user has chosen. For them, word is left and caught up with: a thread
*leaves word* before others can learn what it has done, so that it is known that its streams have something that others
have not waited for. And a thread *catches up* when it begins something, or gets a value that another thread has made:
its streams wait for those. Nobody waits for the device, and a thread that is alone enqueues nothing.
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


def on_gpus(value: Any) -> list[torch.Tensor]:
    """The tensors of a value that are on GPUs."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_cuda]


def mark(value: Any) -> Callable[[Any], None] | None:
    """A value has been made on the current streams: what makes it ready on those of another thread, if needed."""
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
    """The current streams use these tensors, which were made on others: their memory is not to be reused early."""
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
    """For threads that take turns with something on GPUs: each finds on the device what those before have left there.

    A lock orders what threads do, and not what they have enqueued: whoever gets the lock also takes the baton, and
    leaves it before the lock is free. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, torch.cuda.Event] = {}  # by device

    def take(self) -> None:
        """What the calling thread enqueues from now on waits for what was enqueued until the baton was left."""
        if self._left:
            with self._lock:
                self._wait()

    def leave(self) -> None:
        if _in_use:
            with self._lock:
                self._wait()  # others may have left it meanwhile
                for device in _in_use:
                    self._left[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._left[device].record(torch.cuda.current_stream(device))

    def _wait(self) -> None:
        for device, event in self._left.items():
            torch.cuda.current_stream(device).wait_event(event)


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
    is_own = False
    """It is a thread of the worker's own."""


class Streams:
    """The streams of one worker, on those of its GPUs that take part. Thread-safe."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        _in_use.update(devices)
        self._state = _ThreadState()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._own: tuple[_Key, ...] = ()  # the worker's streams, once there was a request
        # By device, streams on which something was enqueued that others have not waited for:
        self._fresh: dict[int, set[driver.Stream]] = {device: set() for device in devices}
        self._events: dict[int, torch.cuda.Event] = {}

    def adopt_thread(self) -> None:
        """The calling thread is the worker's own: it handles requests on the worker's streams."""
        self._state.is_own = True

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Inside, a request is handled. The current streams wait for what was before.

        A thread of the worker's own has the worker's, and a thread of the user's those that the user has chosen. A
        thread that is in the middle of something else, as at a gate, finds its own streams again afterwards.
        """
        before = [torch._C._cuda_getCurrentStream(device) for device in self.devices] if self._state.is_own else ()
        self.begin()
        try:
            yield
        finally:
            self.leave_word()
            _make_current(before)

    def begin(self) -> None:
        """The calling thread begins something new: see `handling`. It calls `leave_word` when that is over."""
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
