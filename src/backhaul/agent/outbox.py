"""Outbox: the frames that a line must send, their order, and the thread that sends them. No lock, thread or clock.

Theory of operation
-------------------
A frame that the channel accepts at once never enters the outbox. A frame that does not fit becomes a **departure**. So
does every later frame, until all have left. Departures leave in the order in which they came, except that small frames
pass a large one between two of its slices (`wire.lanes`). The calls of one thread keep their order: if a thread does
not wait for a call to leave, it may already have made its next call. So no call passes a call that no thread waits for.

**Pumping** is the duty to write whenever there is room. One thread has the duty while a frame is under way: `take_duty`
gives it to the first thread that asks while no thread pumps. If a frame's memory must not change before the frame has
left, its thread waits, and pumps if it gets the duty. When its frame has left or its time is up, `hand_over` names the
next thread. If no thread waits, the driver has the pool pump.

**Bounds.** ``limit`` bounds the bytes that wait behind the frame under way. While more bytes wait, the outbox is
`full`: the thread of a new frame waits until that frame has left, and the peer's requests do not begin.

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
    """The frame may leave between two slices of another frame."""
    calls: bool = False
    """The frame contains calls."""
    number: int = 0
    """The position in the order of arrival."""
    waiter: Any = None
    """The thread that waits for the frame to leave, or for the duty to pump."""
    afterwards: Callable[[], None] | None = None
    """Called when the frame has left or is lost."""
    begun: bool = False
    left: bool = False
    lost: bool = False
    """The channel ended before the frame left."""
    pumps: bool = False
    """The thread of this frame has the duty to pump."""


class Outbox(Generic[W]):
    """See the module's docstring. ``W`` is the type that represents a waiting thread."""

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
        self._small: deque[Departure] = deque()  # may pass the frame under way
        self._rest: deque[Departure] = deque()
        self._room: list[W] = []
        self.waiting = 0
        """How many bytes wait behind the frame under way."""
        self.full = False
        """More bytes wait than the limit allows."""
        self.under_way: Departure | None = None
        self.passing: Departure | None = None
        """The small frame that is leaving between two slices of ``under_way``."""
        self.pumped = False
        """A thread has the duty to pump."""

    def add(self, departure: Departure) -> bool:
        """Queue a frame behind others. True if its thread must wait until the frame has left."""
        waits = departure.frame.holds or self.full  # the memory is the user's, or too much waits already
        self._came += 1
        departure.number = self._came
        if departure.passes and departure.calls and any(map(_may_be_followed, (self.under_way, *self._rest))):
            departure.passes = False
        (self._small if departure.passes else self._rest).append(departure)
        self._count(departure.frame.size)
        return waits

    def begin(self, departure: Departure) -> None:
        """Note that the channel has begun to send a frame. No other frame may be under way."""
        departure.begun = True
        self.under_way = departure

    def take_duty(self) -> bool:
        """Take the duty to pump. True if the calling thread must now pump, or have another thread pump."""
        if self.pumped:
            return False
        self.pumped = True
        return True

    def next_small(self) -> Departure | None:
        """The next frame to write between two slices; None if there is none."""
        if self._small and self._small[0].calls and _may_be_followed(self.under_way):
            return None  # the frame under way is itself such a call, and no later call may pass it
        return self._take(self._small, passing=True)

    def next(self) -> Departure | None:
        """The next frame to write after the frame under way has left; None if there is none."""
        # A large frame goes first: small frames can still pass it, and it does not wait for all of them.
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
        """Note that the small frame between two slices has left. Returns it, if there was one."""
        departure, self.passing = self.passing, None
        if departure is not None:
            departure.left = True
        return departure

    def left(self) -> Departure | None:
        """Note that the frame under way has left. Returns it, if there was one."""
        departure, self.under_way = self.under_way, None
        if departure is not None:
            departure.left = True
        return departure

    def hand_over(self, by: Departure | None = None) -> Departure | None:
        """Pass the duty to pump to the thread of the returned departure.

        None if no other thread waits. The duty then stays taken, and the caller must have the pool pump.
        """
        for departure in (self.under_way, *self._rest, *self._small):
            if departure is not None and departure is not by and departure.waiter is not None:
                departure.pumps = True
                return departure
        return None

    def give_up(self, departure: Departure) -> bool:
        """Stop waiting for a departure. True if the frame had not begun to leave, so that it is dropped."""
        departure.waiter = None
        if departure.begun:
            return False
        (self._small if departure.passes else self._rest).remove(departure)
        self._count(-departure.frame.size)
        return True

    def await_room(self, waiter: W) -> bool:
        """Have a thread woken when there is room again. False if there is room now."""
        if self.full:
            self._room.append(waiter)
        return self.full

    def take_room(self) -> list[W]:
        """The threads to wake because there is room again."""
        if self.full or not self._room:
            return []
        waiters, self._room = self._room, []
        return waiters

    def lose(self) -> list[Departure]:
        """Note that the channel has ended. Returns the frames that are lost."""
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
    """Whether this is an unsent call that its thread does not wait for, so that a later call may follow it."""
    return departure is not None and departure.calls and departure.waiter is None
