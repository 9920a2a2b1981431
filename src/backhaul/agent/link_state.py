"""LinkState: everything that a worker knows about its link with one peer, and the decisions that follow from it.

Theory of operation
-------------------
A `calling.Calling` drives the state. The driver owns the lock, the channel and the clock, tells the state what has
happened, and does what the state returns. The state has no lock, socket, thread or clock of its own, so a simulation
can drive it through any order of events (tests/agent/link_simulation.py).

**Requests.** A request opens a slot. The reply, the deadline or the loss of the peer takes the slot out, whichever
comes first. So a slot is finished exactly once. Finishing a slot fills it in and marks it done in one step, and returns
the threads that wait for it.

**Reading.** There is no dedicated reader thread: a waiting thread reads. Reading is a `role`. A thread that wants to
wait for a slot either becomes the reader or lines up. It checks the slot in the same step. So no thread goes to sleep
when its slot is done or the role is free.

**Holding back.** A small call to a peer that already has enough calls queued may wait a moment, so that several calls
leave in one write. Every send takes the held calls along, in order.

**Silence.** A peer that owes an answer and stays silent is pinged. If the ping goes unanswered for too long, the peer
is lost. Two cases do not count as silence:

- A look comes late. Then this process itself was stopped. The silence so far does not count, however many threads look
  at once, and the peer is pinged again.
- The peer's side takes bytes that were sent long ago. Over a slow connection an answer takes as long as the bytes ahead
  of it. Bytes that were sent a moment ago prove nothing, since the system of a stopped process accepts those as well.

**Loss** takes out all slots at once. The thread that loses the link closes the channel. If another thread is reading,
that reader closes the channel when it gives up the role. So no thread polls a closed descriptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from backhaul.agent.pending import Pending, Slot
from backhaul.agent.role import NOBODY, Role
from backhaul.transport.base import Way
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame

W = TypeVar("W")

BACKLOG = 16
"""With this many requests under way, a small call to the peer may be held back."""
MOST_HELD = 16
SMALL = 4096

_LOST_AFTER = 0.75  # share of the patience after the ping; the rest of the patience passed before the ping
_MUCH = 16 * 1024
_NOWHERE = Way()
_LATE = 0.5  # share of the patience between two looks; only threads that were stopped look less often


class LinkState(Generic[W]):
    """See the module's docstring. ``W`` is the type that represents a waiting thread. The driver holds its lock."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.lost = False
        self.calls_sent = 0
        """User calls that have left, or are about to leave."""
        self.calls_settled = 0
        """User calls that are over, including the callbacks of their futures."""
        self.reads = 0
        """A change counter: only whether it changed matters."""
        self.futures = 0
        """Requests under way that are futures. Perhaps no thread waits for them."""
        self._pending = Pending()
        self._reader: Role[W] = Role()
        self._held: list[Frame] = []
        self._pinged: float | None = None  # when the unanswered ping left; None if there is none
        self._looked = 0.0  # when a thread last looked
        self._unclosed = False  # the link is lost, and the reader must close the channel
        self._much = False  # at the last look, many of the sent bytes had not arrived
        self._arrived = 0  # bytes that had arrived at the last look

    # Requests.

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, id: int) -> bool:
        return id in self._pending

    def unanswered(self) -> list[Slot]:
        """The requests that await their reply."""
        return self._pending.all()

    def open(self, slot: Slot, *, watched: bool) -> bool:
        """Open the slot of a request that is about to be sent. False if the link is lost."""
        if self.lost:
            return False
        self._pending.open(slot, watched=watched)
        self.futures += watched
        return True

    def answered(self, id: int, envelope: Envelope) -> Slot | None:
        """Finish the slot of a reply that has come, and return it. None if the slot has been taken out already."""
        slot = self._take(id)
        if slot is not None:
            slot.envelope = envelope
            slot.done = True
            if slot.future is None and slot.is_call:
                self.calls_settled += 1  # a blocking call has no callbacks
        return slot

    def give_up(self, slot: Slot) -> bool:
        """Take out a request that ends without a reply. If True, call `finish`. False if it was taken out already."""
        return self._take(slot.id) is not None

    def _take(self, id: int) -> Slot | None:
        slot = self._pending.take(id)
        if slot is not None and slot.future is not None:
            self.futures -= 1
        return slot

    def expire(self, now: float) -> list[Slot]:
        """Take out the overdue futures and return their slots. Call `finish` for each."""
        overdue = self._pending.expire(now)
        self.futures -= len(overdue)
        return overdue

    def finish(self, slot: Slot, error: BaseException | None) -> tuple[W, ...]:
        """End a request that was taken out without a reply. Returns the threads to wake."""
        slot.error = error
        slot.done = True
        return slot.waiters

    def next_deadline(self) -> float:
        """When the next future is overdue; infinity if none ever is."""
        return self._pending.next_deadline()

    # Reading.

    def read(self) -> int:
        """Become the reader. Returns a token, or `NOBODY` if another thread reads or the link is lost."""
        return NOBODY if self.lost else self._reader.take()

    def wait(self, slot: Slot, waiter: W) -> bool:
        """Line up for a slot and for the reader role. False if the slot is done or the role is free."""
        if slot.done:
            return False
        # If the slot was taken out, another thread is about to finish it, so this thread need not read.
        if slot.id in self._pending and not self._reader.line_up(waiter):
            return False
        slot.waiters += (waiter,)
        return True

    def watch(self, slot: Slot, waiter: W) -> None:
        """Have a thread woken when a slot is finished, whether the thread reads or not."""
        slot.waiters += (waiter,)

    def stop_watching(self, slot: Slot, waiter: W) -> None:
        slot.waiters = tuple(other for other in slot.waiters if other is not waiter)

    def stop_waiting(self, slot: Slot, waiter: W) -> W | None:
        """End a `wait`, for whatever reason. Returns another thread to wake, if there is one."""
        self.stop_watching(slot, waiter)
        return self._reader.leave(waiter)

    def line_up(self, waiter: W) -> bool:
        """Line up for the reader role. False if the role is free or the link is lost."""
        return not self.lost and self._reader.line_up(waiter)

    def leave(self, waiter: W) -> W | None:
        """Undo `line_up`. Returns another thread to wake, if there is one."""
        return self._reader.leave(waiter)

    def stop_reading(self, token: int) -> W | None:
        """Give up the reader role. Returns the thread to wake, if there is one. Then ask `must_close`."""
        return self._reader.release(token)

    def must_close(self) -> bool:
        """True once if the link was lost while a thread read. That reader must then close the channel."""
        unclosed, self._unclosed = self._unclosed, False
        return unclosed

    @property
    def being_read(self) -> bool:
        return not self._reader.free

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for the reader role."""
        return self._reader.wanted

    # Holding back.

    def may_hold(self, size: int) -> bool:
        """Whether a call of this size can be held back: the peer has enough calls queued, and few calls are held."""
        return size <= SMALL and len(self._pending) > BACKLOG and len(self._held) < MOST_HELD and not self.lost

    def hold(self, frame: Frame) -> bool:
        """Hold a frame back. True if it is the first one: the caller must then make sure that it leaves."""
        self._held.append(frame)
        return len(self._held) == 1

    def take_held(self) -> Sequence[Frame]:
        """Return the held frames. The caller must send them now, before anything else."""
        held, self._held = self._held, []
        return held

    @property
    def holds(self) -> int:
        return len(self._held)

    # Silence.

    def heard(self) -> None:
        """Note that something has come from the peer."""
        self._pinged = None
        self.reads += 1

    def look(self, now: float, way: Way = _NOWHERE) -> Literal["ping", "lose"] | None:
        """What to do about a peer that owes an answer and has been silent for a while."""
        if self.lost:
            return None
        late = now - self._looked > self.patience * _LATE
        self._looked = now
        moves = self._much and way.arrived > self._arrived
        self._much, self._arrived = way.outstanding > _MUCH, way.arrived
        if self._pinged is None or late or moves:
            self._pinged = now
            return "ping"
        return "lose" if now - self._pinged >= self.patience * _LOST_AFTER else None

    def silent(self, now: float) -> float:
        """For how many seconds a ping has gone unanswered; 0 if none has."""
        pinged = self._pinged
        return 0.0 if pinged is None else max(0.0, now - pinged)

    # Loss.

    def lose(self) -> list[Slot] | None:
        """Lose the link. Returns the slots that it takes out; call `finish` for each. None if it was lost before."""
        if self.lost:
            return None
        self.lost = True
        self.futures = 0
        self._held = []
        return self._pending.drain()

    def close(self) -> bool:
        """Decide who closes a lost link's channel: True if the caller must, False if the reader will.

        The channel must be shut down and removed from the watch thread first.
        """
        self._unclosed = not self._reader.free
        return not self._unclosed
