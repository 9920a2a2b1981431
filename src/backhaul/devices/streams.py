"""Streams: on which streams of the GPUs a worker's functions run, and what they may rely on.

Each thread that handles requests has a stream of torch's pool on every GPU, so that calls of several threads can use a
GPU side by side. What users may rely on is the order of the host: for the device, the work of a call is over before
anything that a later call enqueues. For that, a thread that begins a request has its streams wait for those on which
others have enqueued something since. Nobody waits for the device, and a thread that is alone enqueues nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from backhaul.devices import driver


class _ThreadState(threading.local):
    streams: tuple[torch.cuda.Stream, ...] | None = None
    """Of a thread of the worker's own."""
    keys: tuple[tuple[int, int, int], ...] = ()


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
        if self._state.streams is not None:
            self._take_streams()
        self.catch_up()
        try:
            yield
        finally:
            self.leave_word()

    def _take_streams(self) -> None:
        state = self._state
        if not state.streams:
            state.streams = tuple(torch.cuda.Stream(device) for device in self.devices)  # type: ignore[no-untyped-call]
            state.keys = tuple((each.stream_id, each.device_index, each.device_type) for each in state.streams)
        for device, key in zip(self.devices, state.keys, strict=True):
            if torch._C._cuda_getCurrentStream(device) != key:  # at first, or since a function has changed it
                id, index, kind = key
                torch._C._cuda_setStream(stream_id=id, device_index=index, device_type=kind)

    def mark(self, value: Any) -> Callable[[Any], None] | None:
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
            self.use(tensors)

        return ready

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current streams use these tensors, which were made on others: their memory is not to be reused early."""
        for tensor in tensors:
            if tensor.is_cuda:
                stream = torch.cuda.current_stream(tensor.device)
                if tensor.layout is torch.strided:
                    tensor.record_stream(stream)
                elif tensor.layout is torch.sparse_coo:
                    for part in (tensor._indices(), tensor._values()):
                        part.record_stream(stream)

    def catch_up(self) -> None:
        """What the calling thread enqueues from now on waits for what others have enqueued before."""
        for device in self.devices:
            fresh = self._fresh[device]
            if not fresh:
                continue
            mine = driver.current_stream(device)
            if len(fresh) == 1 and mine in fresh:
                continue
            with self._lock:
                for other in fresh - {mine}:
                    event = self._event(device)
                    driver.record(event, other)
                    driver.wait(event, mine)
                fresh.clear()
                fresh.add(mine)

    def leave_word(self) -> None:
        """Others wait for what is on the current streams of the calling thread."""
        for device in self.devices:
            mine = driver.current_stream(device)
            if mine not in self._fresh[device]:
                with self._lock:
                    self._fresh[device].add(mine)

    def _event(self, device: int) -> int:
        """An event for one record and one wait, which refers to what was recorded when it is called."""
        event = self._events.get(device)
        if event is None:
            with torch.cuda.device(device):
                event = self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()  # makes it
        return int(event.cuda_event)
