"""LinkState: everything that a worker knows about its relation with one peer, and what follows from it.

Theory of operation
-------------------
A `link.Link` drives it: it owns the lock, the channels and the clock, tells the state what has happened, and does what
the state returns. The state has no lock, socket, thread or clock of its own, so a simulation can drive it through
any order of events (tests/agent/link_simulation.py).

**Requests.** A request opens a slot; its reply, its deadline or the loss of the peer takes the slot out, whichever
comes first. So a slot is finished exactly once. Finishing a slot fills it in and marks it done in one step, and returns
the threads that wait for it.

**Reading.** Replies have no thread of their own: a thread that waits reads. Reading is a `role`. A thread that wants to
wait for a slot either becomes the reader or lines up, and it does so in one step with the look at the slot. So nobody
goes to sleep over a slot that is done, or beside a role that is free.

**Holding back.** A small call to a peer that has enough to do already may wait a moment, so that several calls leave in
one write. Whatever is sent takes along what is held, in order.

**Silence.** A peer that owes an answer and says nothing is pinged, and lost if nothing comes of that for long. A look
that comes late means that this process was stopped itself: then the silence counts for nothing, however many threads
look at once, and the peer is pinged anew. Nor is a peer silent whose side takes bytes that were sent long ago: over a
slow connection an answer takes as long as what is before it. What was sent a moment ago does not count, since the
system of a stopped process takes that as well.

**Loss** takes out all slots at once. The channel is closed by the thread that loses the link or, if a thread is
reading, by the reader when it gives up the role: nobody polls a descriptor that is closed.
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

_LOST_AFTER = 0.75  # of the patience, since the ping: the rest of it passed before the ping
_MUCH = 16 * 1024
_NOWHERE = Way()
_LATE = 0.5  # of the patience, since the look before: threads look more often than that, unless they were stopped


class LinkState(Generic[W]):
    """``W`` is what waiting threads are known by. See the module's docstring."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.lost = False
        self.calls_sent = 0
        """Calls of the user's that have left, or are about to."""
        self.calls_settled = 0
        """Those that are over, the callbacks of their futures included."""
        self.reads = 0
        """A change counter: only whether it changed matters."""
        self.futures = 0
        """Requests under way whose callers may not wait for them."""
        self._pending = Pending()
        self._reader: Role[W] = Role()
        self._held: list[Frame] = []
        self._pinged: float | None = None  # when a ping left that nothing has answered
        self._looked = 0.0  # when a thread last looked
        self._unclosed = False  # lost, and a reader is to close the channel
        self._much = False  # much of what was sent had not arrived at that look
        self._arrived = 0  # what had

    # Requests.

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, id: int) -> bool:
        return id in self._pending

    def unanswered(self) -> list[Slot]:
        """The requests that await their reply."""
        return self._pending.all()

    def open(self, slot: Slot, *, watched: bool) -> bool:
        """A request is about to be sent. False if the link is lost."""
        if self.lost:
            return False
        self._pending.open(slot, watched=watched)
        self.futures += watched
        return True

    def answered(self, id: int, envelope: Envelope) -> Slot | None:
        """A reply has come: its slot, which is done now; None if nobody waits for it any more."""
        slot = self._take(id)
        if slot is not None:
            slot.envelope = envelope
            slot.done = True
            if slot.future is None and slot.is_call:
                self.calls_settled += 1  # no callbacks hang on it
        return slot

    def give_up(self, slot: Slot) -> bool:
        """Take a request out that ends without a reply; `finish` follows. False if somebody else has taken it out."""
        return self._take(slot.id) is not None

    def _take(self, id: int) -> Slot | None:
        slot = self._pending.take(id)
        if slot is not None and slot.future is not None:
            self.futures -= 1
        return slot

    def expire(self, now: float) -> list[Slot]:
        """Take out the futures that are overdue; `finish` follows."""
        overdue = self._pending.expire(now)
        self.futures -= len(overdue)
        return overdue

    def finish(self, slot: Slot, error: BaseException | None) -> tuple[W, ...]:
        """A request that was taken out ends without a reply: the threads to wake."""
        slot.error = error
        slot.done = True
        return slot.waiters

    def next_deadline(self) -> float:
        """When `expire` will next have something to do; infinity if never."""
        return self._pending.next_deadline()

    # Reading.

    def read(self) -> int:
        """Become the reader: a token, or `NOBODY` if there is one already or nothing to read from."""
        return NOBODY if self.lost else self._reader.take()

    def wait(self, slot: Slot, waiter: W) -> bool:
        """Wait for a slot beside the reader. False if there is no need: the slot is done, or the role is free."""
        if slot.done:
            return False
        # A slot that was taken out is about to be finished, whoever reads.
        if slot.id in self._pending and not self._reader.line_up(waiter):
            return False
        slot.waiters += (waiter,)
        return True

    def watch(self, slot: Slot, waiter: W) -> None:
        """Have a thread woken when a slot is finished, whether it reads or not."""
        slot.waiters += (waiter,)

    def stop_watching(self, slot: Slot, waiter: W) -> None:
        slot.waiters = tuple(other for other in slot.waiters if other is not waiter)

    def stop_waiting(self, slot: Slot, waiter: W) -> W | None:
        """The end of a `wait`, however it came. Another thread to wake, if there is one."""
        self.stop_watching(slot, waiter)
        return self._reader.leave(waiter)

    def line_up(self, waiter: W) -> bool:
        """Wait for the role itself. False if it is free, or the link is lost."""
        return not self.lost and self._reader.line_up(waiter)

    def leave(self, waiter: W) -> W | None:
        """The end of that. Another thread to wake, if there is one."""
        return self._reader.leave(waiter)

    def stop_reading(self, token: int) -> W | None:
        """The reader gives up the role: the thread to wake, if there is one. See `must_close`."""
        return self._reader.release(token)

    def must_close(self) -> bool:
        """True, once, for the reader of a link that was lost meanwhile: it closes the channel."""
        unclosed, self._unclosed = self._unclosed, False
        return unclosed

    @property
    def being_read(self) -> bool:
        return not self._reader.free

    @property
    def wanted(self) -> bool:
        """Some thread waits for the role of the reader."""
        return self._reader.wanted

    # Holding back.

    def may_hold(self, size: int) -> bool:
        """Whether a call of that size can be held back: the peer has enough to do, and there is room."""
        return size <= SMALL and len(self._pending) > BACKLOG and len(self._held) < MOST_HELD and not self.lost

    def hold(self, frame: Frame) -> bool:
        """Hold a call back. True if it is the first one: somebody has to see to it that it leaves."""
        self._held.append(frame)
        return len(self._held) == 1

    def take_held(self) -> Sequence[Frame]:
        """What is held back, to be sent now, before anything else."""
        held, self._held = self._held, []
        return held

    @property
    def holds(self) -> int:
        return len(self._held)

    # Silence.

    def heard(self) -> None:
        """Something has come from the peer."""
        self._pinged = None
        self.reads += 1

    def look(self, now: float, way: Way = _NOWHERE) -> Literal["ping", "lose"] | None:
        """The peer owes an answer and has been silent for a while: what to do about it."""
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
        """The link is lost: the slots that end with it, taken out; `finish` follows. None if it was lost before."""
        if self.lost:
            return None
        self.lost = True
        self.futures = 0
        self._held = []
        return self._pending.drain()

    def close(self) -> bool:
        """The channel of a lost link is shut down and unwatched: True if the caller closes it, else the reader does."""
        self._unclosed = not self._reader.free
        return not self._unclosed
