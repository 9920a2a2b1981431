"""Calls that await their reply, by id, and which of them are overdue.

Pure: no locks, no clock. Its driver (`outbound`) serialises `open`, `expire` and `drain`;
`take` is a single dictionary operation and may be called from any thread.
"""

from __future__ import annotations

import heapq
import math
import threading
from typing import Any

import msgspec

from backhaul.agent.future import Future
from backhaul.wire.decoder import Envelope


class Slot(msgspec.Struct, gc=False, eq=False):
    """One outstanding request: filled by whoever reads its reply.

    The garbage collector does not look at it: thousands of calls in flight would have it look at everything else, too.
    A slot and its future refer to each other until the future is settled.
    """

    id: int
    what: str
    deadline: float
    is_call: bool
    """A call of the user's, not one of our own questions."""
    future: Future[Any] | None = None
    done: bool = False
    envelope: Envelope | None = None
    error: BaseException | None = None
    waiters: tuple[threading.Lock, ...] = ()
    """Each held by a thread that sleeps on it."""

    def finish(self) -> None:
        """Mark it done, and wake who sleeps on it.

        A sleeper adds its lock first and looks at ``done`` then, so none is missed.
        """
        self.done = True
        for waiter in self.waiters:
            wake(waiter)

    def add_waiter(self, waiter: threading.Lock) -> None:
        with _waiting:
            self.waiters += (waiter,)

    def remove_waiter(self, waiter: threading.Lock) -> None:
        with _waiting:
            self.waiters = tuple(other for other in self.waiters if other is not waiter)


_waiting = threading.Lock()


def wake(waiter: threading.Lock) -> None:
    """Release the lock that a thread sleeps on; twice does no harm."""
    try:
        waiter.release()
    except RuntimeError:
        pass


class Pending:
    """The outstanding requests of one direction between two workers."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, id: int) -> bool:
        return id in self._slots

    def open(self, slot: Slot, *, watched: bool) -> None:
        """Await a reply. ``watched``: `expire` is to find it when it is overdue."""
        self._slots[slot.id] = slot
        if watched and slot.deadline != math.inf:
            heapq.heappush(self._deadlines, (slot.deadline, slot.id))
            # Replies do not look for their deadline; the stale ones go when they outnumber the rest.
            if len(self._deadlines) > 2 * len(self._slots) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._slots]
                heapq.heapify(self._deadlines)

    def take(self, id: int) -> Slot | None:
        """The slot whose reply has come; None if it no longer waits."""
        return self._slots.pop(id, None)

    def next_deadline(self) -> float:
        """When `expire` will next have something to do; infinity if never."""
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
        """Take out all of them."""
        slots, self._slots, self._deadlines = self._slots, {}, []
        return list(slots.values())
