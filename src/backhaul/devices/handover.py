"""Handover: how the work that one thread enqueues on a GPU comes before the work of a thread that uses its results.

Pure: a `Driver` carries it out. The work of a stream is done in order. Between streams, the device may choose any
order, unless one of them waits for an event of the other. All steps here only enqueue work; no thread waits for the
device.

`Streams` is for the threads that serve a worker and for those that call it. They are synchronised in two steps. A
thread *leaves word* before others can see what it has done: its streams are noted as having work that other streams
have not waited for. A thread *catches up* when it begins something, or gets a value that another thread has made: its
streams wait for the noted ones. A thread that is alone enqueues nothing.

`Baton` is for threads that take turns by means of a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Key = tuple[int, int, int]
"""A stream as torch names it: its id, the index of its device, and the type of device. A default one has the id 0."""


class Event(Protocol):
    """An event of a device. It ends with this object."""

    number: int


class Driver(Protocol):
    """The operations of GPUs on streams. Streams and events are given by number, as in `discipline.Device`."""

    def current_key(self, device: int, /) -> Key:
        """The current stream of the calling thread on a device."""

    def current_stream(self, device: int) -> int:
        """The number of the current stream. After this, the thread can use `record` and `wait` on that device."""

    def handle(self, key: Key) -> int:
        """The number of a stream."""

    def new_stream(self, device: int) -> Key: ...

    def make_current(self, keys: Sequence[Key]) -> None:
        """Make these the current streams of the calling thread, each on its device."""

    def new_event(self, device: int) -> Event: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int, stream: int) -> None:
        """Later work on this stream waits for the work before the last `record` of the event, on any stream."""


class _ThreadState(threading.local):
    is_own = False
    """Whether the thread belongs to the worker."""
    is_ready = False
    """Whether the worker's streams are current on this thread when it does nothing."""


class Streams:
    """The streams of one worker on the GPUs that it uses. Thread-safe.

    Nearly always all work is on one stream, and there is nothing to wait for. That is decided without the lock, by
    `_only`. It is None from before a thread records an event until the wait for that event is enqueued. So a thread
    that finds its stream there knows two things: the work that it has enqueued comes before any record that others
    make later, and no other stream has work that it must wait for.
    """

    def __init__(self, devices: Sequence[int], driver: Driver) -> None:
        self.devices = tuple(devices)
        self._driver = driver
        self._current = driver.current_key  # called for each message
        self._state = _ThreadState()
        self._lock = threading.Lock()
        # Written under _lock:
        self._own: tuple[Key, ...] = ()  # the worker's streams, made with the first request
        # By device, streams with work that other streams have not waited for:
        self._fresh: dict[int, set[Key]] = {device: set() for device in devices}
        self._only: dict[int, Key | None] = dict.fromkeys(devices)  # the only stream in `_fresh`, if there is one
        self._events: dict[int, Event] = {}

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

    def enter(self) -> Sequence[Key]:
        """Begin to handle a request on the calling thread. Pass the result to `leave` afterwards.

        The current streams wait for earlier work. The worker's own threads get the worker's streams; user threads keep
        the streams that the user has chosen. A thread that interrupts other work, as at a gate, gets the streams of
        that work back from `leave`.
        """
        before: Sequence[Key] = ()
        if self._state.is_own:
            before = [self._current(device) for device in self.devices]
            if (*before,) == self._own:
                before = ()  # nothing to restore
            else:
                self._driver.make_current(self._own or self._make())
                if not self._state.is_ready and not any(id for id, _, _ in before):
                    self._state.is_ready = True
                    before = ()  # no stream was chosen on this thread yet, so it keeps those of the worker
        self.catch_up()
        return before

    def leave(self, before: Sequence[Key]) -> None:
        """End what `enter` has begun."""
        self.leave_word()
        if before:
            self._driver.make_current(before)

    def begin(self) -> None:
        """Set the streams for new work of the calling thread, as `enter` does. Call `leave_word` at its end."""
        if self._state.is_own:
            self._driver.make_current(self._own or self._make())
        self.catch_up()

    def _make(self) -> tuple[Key, ...]:
        with self._lock:
            if not self._own:
                self._own = tuple(map(self._driver.new_stream, self.devices))
            return self._own

    def catch_up(self) -> None:
        """Later work of the calling thread waits for the work that others have enqueued before."""
        for device, only in self._only.items():
            if only is None or self._current(device) != only:
                self._wait_on(device)

    def _wait_on(self, device: int) -> None:
        driver = self._driver
        mine = self._current(device)
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
            mine = self._current(device)
            if only != mine:
                with self._lock:
                    fresh = self._fresh[device]
                    fresh.add(mine)
                    self._only[device] = mine if len(fresh) == 1 else None

    def _event(self, device: int) -> int:
        """An event for one record followed by one wait. The wait refers to the latest record, so it can be reused."""
        event = self._events.get(device)
        if event is None:
            event = self._events[device] = self._driver.new_event(device)
        return event.number


class Baton:
    """Orders the GPU work of threads that take turns: work of a thread waits for the work of the threads before it.

    A lock orders threads, but not the work that they have enqueued. So a thread that gets the lock also takes the
    baton, and leaves it before it releases the lock. Thread-safe: several locks may have one baton.
    """

    def __init__(self, driver: Driver, devices: Collection[int]) -> None:
        """``devices``: the GPUs that are in use. Others may be added to the collection later."""
        self._driver = driver
        self._devices = devices
        self._lock = threading.Lock()
        self._left: dict[int, Event] = {}  # by device

    def take(self) -> None:
        """Later work of the calling thread waits for the work that was enqueued before the baton was left."""
        if self._left:
            with self._lock:
                self._wait()

    def leave(self) -> None:
        if self._devices:
            with self._lock:
                self._wait()  # another thread may have left the baton meanwhile
                for device in tuple(self._devices):
                    stream = self._driver.current_stream(device)
                    event = self._left.get(device)
                    if event is None:
                        event = self._driver.new_event(device)
                    self._driver.record(event.number, stream)
                    self._left[device] = event

    def _wait(self) -> None:
        for device, event in self._left.items():
            self._driver.wait(event.number, self._driver.current_stream(device))
