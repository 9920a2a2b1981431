"""Outbox: what a line has to send, in which order, and which thread sees to it. Pure: no lock, no thread, no clock.

Theory of operation
-------------------
A frame that the channel takes at once is never here. A frame that does not fit becomes a **departure**, and so does
every frame that comes after it, until all have left. They leave in the order of their coming, except that small ones
pass a large one between two of its slices (`wire.lanes`). Calls of one thread keep their order: a thread may make
its next call if it does not wait for the last one to leave, so no call passes a call that nobody waits for.

**Pumping** is the duty to write whenever there is room. One thread has it as long as a frame is under way: `add` gives
it to the thread that finds nobody pumping. A thread whose frame must not change before it has left waits for it, and
pumps if the duty comes to it; when its frame has left, or its time is up, `hand_over` names the thread that is next.
If no thread waits, the driver has the pool do it.

**Bounds.** ``limit`` is for the bytes that wait behind the frame under way. While there are more, a frame that comes
has its thread wait until it has left, and the peer's requests wait to begin (`full`).

The driver (`line.Line`) serialises all calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from backhaul.wire.frames import Frame

W = TypeVar("W")


class Departure(msgspec.Struct, gc=False, eq=False):
    """A frame that did not leave at once."""

    frame: Frame
    passes: bool
    """It may leave between two slices of another one."""
    calls: bool = False
    """There are calls in it."""
    number: int = 0
    """How many came before it."""
    waiter: Any = None
    """The thread that waits for it, or for the duty to pump."""
    afterwards: Callable[[], None] | None = None
    """Called when it has left, or never will."""
    begun: bool = False
    left: bool = False
    lost: bool = False
    """The channel ended before it left."""
    pumps: bool = False
    """The duty to pump has come to its thread."""


class Outbox(Generic[W]):
    """``W`` is what waiting threads are known by. See the module's docstring."""

    __slots__ = (
        "_came",
        "_limit",
        "_rest",
        "_room",
        "_small",
        "full",
        "passing",
        "pumped",
        "under_way",
        "waiting",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._came = 0
        self._small: deque[Departure] = deque()  # may pass the one under way
        self._rest: deque[Departure] = deque()
        self._room: list[W] = []
        self.waiting = 0
        """Bytes that wait behind the frame under way."""
        self.full = False
        """These are too many."""
        self.under_way: Departure | None = None
        self.passing: Departure | None = None
        """The small frame that is under way between two slices of that one."""
        self.pumped = False
        """A thread has the duty to pump."""

    def add(self, departure: Departure) -> bool:
        """A frame that comes after others. True if its thread is to wait until it has left."""
        waits = bool(departure.frame.keep) or self.full  # its memory is not ours, or there is too much already
        self._came += 1
        departure.number = self._came
        if departure.passes and departure.calls and any(map(_may_be_followed, (self.under_way, *self._rest))):
            departure.passes = False
        (self._small if departure.passes else self._rest).append(departure)
        self._count(departure.frame.size)
        return waits

    def begin(self, departure: Departure) -> None:
        """The channel has begun with a frame, and nothing else is under way."""
        departure.begun = True
        self.under_way = departure

    def take_duty(self) -> bool:
        """True if the calling thread has to see to it that somebody pumps."""
        if self.pumped:
            return False
        self.pumped = True
        return True

    def next_small(self) -> Departure | None:
        """What to write between two slices."""
        if self._small and self._small[0].calls and _may_be_followed(self.under_way):
            return None  # a small one itself, which all that came later would have to pass
        return self._take(self._small, passing=True)

    def next(self) -> Departure | None:
        """What to write when the frame under way has left. None if there is nothing more."""
        # A large one first: small ones pass it, and it does not wait for all of them.
        if self._rest and self._rest[0].calls:
            number = self._rest[0].number
            if any(_may_be_followed(each) and each.number < number for each in self._small):
                return self._take(self._small, passing=False)
        return self._take(self._rest, passing=False) or self._take(self._small, passing=False)

    def _take(self, lane: deque[Departure], *, passing: bool) -> Departure | None:
        if not lane:
            return None
        departure = lane.popleft()
        departure.begun = True
        self._count(-departure.frame.size)
        if passing:
            self.passing = departure
        else:
            self.under_way = departure
        return departure

    def passed(self) -> Departure | None:
        """The small frame between two slices has left, if there was one."""
        departure, self.passing = self.passing, None
        if departure is not None:
            departure.left = True
        return departure

    def left(self) -> Departure | None:
        """The frame under way has left."""
        departure, self.under_way = self.under_way, None
        if departure is not None:
            departure.left = True
        return departure

    def hand_over(self, by: Departure | None = None) -> Departure | None:
        """The pumping thread stops: whose thread has the duty now. None if no thread waits: the duty stays taken."""
        for departure in (self.under_way, *self._rest, *self._small):
            if departure is not None and departure is not by and departure.waiter is not None:
                departure.pumps = True
                return departure
        return None

    def give_up(self, departure: Departure) -> bool:
        """Its thread waits no longer. True if the frame has not begun, and will not leave."""
        departure.waiter = None
        if departure.begun:
            return False
        (self._small if departure.passes else self._rest).remove(departure)
        self._count(-departure.frame.size)
        return True

    def await_room(self, waiter: W) -> bool:
        """Have a thread woken when there is room again. False if there is."""
        if self.full:
            self._room.append(waiter)
        return self.full

    def take_room(self) -> list[W]:
        """The threads to wake because there is room."""
        if self.full or not self._room:
            return []
        waiters, self._room = self._room, []
        return waiters

    def lose(self) -> list[Departure]:
        """The channel has ended: what has not left, and never will."""
        lost = [each for each in (self.under_way, self.passing, *self._rest, *self._small) if each is not None]
        for departure in lost:
            departure.lost = True
        self._small.clear()
        self._rest.clear()
        self.under_way = self.passing = None
        self.waiting = 0
        self.full = False
        return lost

    def _count(self, size: int) -> None:
        self.waiting += size
        self.full = self.waiting > self._limit


def _may_be_followed(departure: Departure | None) -> bool:
    """Whether a call has not left that its thread may have made another one after."""
    return departure is not None and departure.calls and departure.waiter is None
