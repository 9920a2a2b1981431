"""Pending: the requests that await their reply, by id, and their deadlines. Pure: no locks, no clock."""

from __future__ import annotations

import heapq
import math
from typing import Any

import msgspec

from backhaul.agent.future import Future
from backhaul.wire.decoder import Envelope


class Slot(msgspec.Struct, gc=False, eq=False):
    """One outstanding request. The thread that reads the reply fills the slot.

    The garbage collector does not track slots: thousands of calls in flight would make it run often, and each run also
    visits all other objects. A slot and its future refer to each other until the future is settled.
    """

    id: int
    what: str
    deadline: float
    is_call: bool
    """True for a user call, False for an internal request."""
    future: Future[Any] | None = None
    done: bool = False
    envelope: Envelope | None = None
    error: BaseException | None = None
    waiters: tuple[Any, ...] = ()
    """The threads that wait for this slot; see `link_state`."""
    thread: int = 0
    """The thread that made the request; 0 if it got a future."""
    since: float = 0.0
    """When ``thread`` began to wait; 0 if it does not wait. For inspection; see `activity`."""


class Pending:
    """The outstanding requests of one direction between two workers."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, id: int) -> bool:
        return id in self._slots

    def all(self) -> list[Slot]:
        return list(self._slots.values())

    def open(self, slot: Slot, *, watched: bool) -> None:
        """Add a slot that awaits its reply. ``watched``: `expire` takes the slot out when it is overdue."""
        self._slots[slot.id] = slot
        if watched and slot.deadline != math.inf:
            heapq.heappush(self._deadlines, (slot.deadline, slot.id))
            # A reply does not remove its deadline. Stale deadlines are dropped when they outnumber the others.
            if len(self._deadlines) > 2 * len(self._slots) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._slots]
                heapq.heapify(self._deadlines)

    def take(self, id: int) -> Slot | None:
        """Take out a slot, for example because its reply has come. None if it was taken out before."""
        return self._slots.pop(id, None)

    def next_deadline(self) -> float:
        """When the next watched slot is overdue; infinity if none ever is."""
        while self._deadlines and self._deadlines[0][1] not in self._slots:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def expire(self, now: float) -> list[Slot]:
        """Take out the watched slots whose deadline has passed."""
        overdue = []
        while self.next_deadline() <= now:
            slot = self._slots.pop(heapq.heappop(self._deadlines)[1], None)
            if slot is not None:
                overdue.append(slot)
        return overdue

    def drain(self) -> list[Slot]:
        """Take out all slots and return them."""
        slots, self._slots, self._deadlines = self._slots, {}, []
        return list(slots.values())
