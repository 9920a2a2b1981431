"""Serving: the lines that peers have opened. The thread that reads a request also runs it.

Theory of operation
-------------------
`leading` says which thread reads which line. This file has the rules for all leads of a worker.

Requests that run without a lead are *detached*. While ``num_worker_threads`` requests are detached, ticks pass on no
more leads as long as some request finishes now and then. If none finishes, the requests may be blocking each other, and
the lead is passed on regardless. A request that waits for a call does not count. So no pool size can deadlock nested
calls, and no burst of slow requests starts thousands of threads at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from backhaul.agent.activity import Activity, Description
from backhaul.agent.leading import SLOW, Lead, Pace
from backhaul.agent.line import Line, Stalled, named
from backhaul.agent.observing import (
    Encoded,
    LinkLost,
    Observers,
    Queued,
    Resumes,
    Starts,
    Stops,
    Waits,
)
from backhaul.agent.pool import Pool
from backhaul.errors import ProtocolError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, is_failure
from backhaul.wire.messages import Goodbye, Refs

if TYPE_CHECKING:
    from backhaul.agent.watch import Watch

_log = logging.getLogger(__name__)

_STALLED_TICKS = 5
_YOUNG = 0.0005  # a request that has run for less than this, in seconds, is probably short
_OLD = 0.004
_MAX_CONNECTIONS = 8

Handler = Callable[[Line, Envelope], Frame | None]
"""Handles a message. Returns the reply to send, or None if there is no reply or it comes later."""


class Admission(Protocol):
    """The interface of `trust.guard`: judges the messages of peers that are not fully trusted."""

    def __call__(self, line: Line, envelope: Envelope) -> Frame | None:
        """The reply to a refused message; None if the message is accepted. Raises if the connection must end."""

    def pause(self, peer: WorkerInfo) -> float:
        """For how many seconds not to read from a peer whose messages keep being refused."""

    def charges(self, message: Any) -> bool:
        """Whether a message counts against the quota until its reply has left."""

    def finished(self, peer: WorkerInfo, count: int = 1) -> None:
        """Note that ``count`` calls of a peer are over."""

    def let_go(self, peer: WorkerInfo, size: int) -> None:
        """Note that a call of a peer has run. ``size`` is the size of its request in bytes."""

    def refuse_reply(self, line: Line, frame: Frame, waiting: int) -> Frame:
        """The reply to send instead of ``frame``, because ``waiting`` bytes for this peer are still unsent."""


class _ThreadState(threading.local):
    handling: bool = False  # this thread runs a request
    lead: tuple[Lead, int] | None = None  # the lead that this thread has, and its token

    def __init__(self, activity: Activity) -> None:  # runs once in each thread that uses this object
        self.note = activity.new_note()


class Served(Line):
    """A line that ``peer`` has opened."""

    def __init__(self, peer: WorkerInfo, channel: Channel, serving: Serving) -> None:
        super().__init__(peer, channel, serving)
        self.made = time.monotonic()
        self.pace = Pace(SLOW)
        self.lead: Lead | None = None
        """The lead that the line belongs to."""
        self.over = threading.Event()
        """Set when everything that the peer sent has been read."""

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    @property
    def is_full(self) -> bool:
        """Whether the peer does not read its replies, so that its next request must wait."""
        return self._outbox.full

    def _broke(self, error: Exception) -> None:
        if isinstance(error, Stalled):
            _log.warning("closing the connection from %s: %s", self.peer.name, error)
        self.shutdown()  # the leader notices

    def fail(self, error: Exception) -> None:
        """End a line that another thread leads now."""
        self._report(error)
        self.shutdown()

    def end(self, error: Exception, charged: int) -> None:
        """End a line that no thread reads any more. ``charged`` calls are released from the peer's quota."""
        if charged and self._serving.guard is not None:
            self._serving.guard.finished(self.peer, charged)
        self._report(error)
        self.channel.shutdown()
        self.close()
        self._serving.ended(self, error)
        if self._serving.observers:
            self._serving.observers.emit(LinkLost(peer=self.peer.name, served=True, reason=str(error)))
        self.over.set()

    def _report(self, error: Exception) -> None:
        if not isinstance(error, ChannelClosed):
            own = not isinstance(error, ProtocolError)
            _log.error("closing the connection from %s: %s", self.peer.name, error, exc_info=error if own else None)


class Serving:
    """All lines that peers have opened to a worker, and the rules for its threads."""

    def __init__(
        self,
        pool: Pool,
        watch: Watch,
        handle: Handler,
        num_worker_threads: int,
        observers: Observers,
        activity: Activity,
        max_unsent_bytes: int,
        patience: float | None,
        most_awake: float,
    ) -> None:
        self.pool = pool
        self.watch = watch
        self.handle = handle
        self.observers = observers
        self.activity = activity
        self.max_unsent_bytes = max_unsent_bytes
        """How many bytes may wait to be sent to one peer."""
        self.patience = math.inf if patience is None else patience
        """For how many seconds a peer may accept no bytes before its connection counts as stalled."""
        self.on_end: Callable[[Served, Exception], None] = lambda line, error: None
        self.guard: Admission | None = None
        """Judges each message before it is handled, in the order of reading. None if peers are fully trusted."""
        self.arriving: Callable[[Refs, WorkerInfo], None] = lambda refs, sender: None
        """Called with the references in each request, in the order of reading. Not called if there is a guard."""
        self.state = _ThreadState(activity)
        self.detached: set[int] = set()
        self.finished = 0  # a change counter: only whether it changed matters
        self.lines: set[Served] = set()
        self.active: set[Lead] = set()
        """The leads that a tick looks at. A leader adds its lead after it has begun a request."""
        self._by_rank: dict[int, set[Served]] = {}
        self._adding = threading.Lock()
        # Held while a reply is compared with what waits on the peer's other lines. Otherwise the threads of several
        # lines would all find that nothing waits, and would all begin to write.
        self._offering = threading.Lock()
        self._max_detached = num_worker_threads
        self._most_awake = most_awake
        self._shared = Lead(self, most_awake)
        self._seen: dict[Lead, int] = {}
        self._seen_finished = 0
        self._stalled = 0

    def add(self, line: Served) -> None:
        """Serve a connection that has been admitted."""
        excess: list[Served] = []
        with self._adding:
            if self.guard is not None:
                # A peer that keeps opening connections loses its own old ones, and takes no threads from other peers.
                others = self._by_rank.get(line.peer.id, ())
                same = sorted((other for other in others if other.peer == line.peer), key=lambda other: other.made)
                excess = same[: max(0, len(same) + 1 - _MAX_CONNECTIONS)]
            self.lines.add(line)
            self._by_rank.setdefault(line.peer.id, set()).add(line)
        for old in excess:
            old.shutdown()
        if self.guard is None:
            self.lead_together(line)
        else:
            line.lead = Lead(self, self._most_awake, line)
            line.lead.start()

    def lead_together(self, line: Served) -> None:
        """Have a line led together with others."""
        line.lead = self._shared
        self._shared.adopt(line)

    def run_apart(self, line: Line, envelope: Envelope) -> None:
        """Judge a message, and have a pool thread handle it. For a reader that must not run the message itself.

        A `Goodbye` is handled at once: it must be known before the end of the connection is noticed.

        Raises an exception that must end the connection.
        """
        if self.guard is not None:
            refused = self.guard(line, envelope)
            if refused is not None:
                self.pool.run(lambda: line.reply(refused))
                return
        elif getattr(envelope.message, "refs", ()):
            self.arriving(envelope.message.refs, line.peer)
        if type(envelope.message) is Goodbye:
            self.handle(line, envelope)
            return
        if self.observers:
            self.observers.emit(Queued())
        self.hand_over(line, envelope)

    def hand_over(self, line: Line, envelope: Envelope) -> None:
        """Have a pool thread handle a message that has already been judged."""
        self.pool.run(lambda: self._run(line, envelope))

    def _run(self, line: Line, envelope: Envelope) -> None:
        if self.observers:
            self.observers.emit(Starts(**named(line, envelope)))
        self.state.handling = True
        note = self.state.note
        note.handles = (line.peer, envelope, monotonic())
        try:
            frame = self.handle(line, envelope)
        finally:
            note.handles = None
            self.state.handling = False
            self.detached.discard(threading.get_ident())
            self.finished += 1
        if frame is not None:
            if self.observers:
                self.observers.emit(Encoded())
            line.reply(frame, releases=self.guard is not None and self.guard.charges(envelope.message))
        if self.observers:
            self.observers.emit(Stops(replies=frame is not None, failed=frame is not None and is_failure(frame)))

    def ended(self, line: Served, error: Exception) -> None:
        with self._adding:
            self.lines.discard(line)
            same = self._by_rank.get(line.peer.id, set())
            same.discard(line)
            if not same:
                self._by_rank.pop(line.peer.id, None)
        self.on_end(line, error)

    def lines_of(self, rank: int) -> list[Served]:
        """The lines that the worker of this rank has opened. The rank of guests stands for all guests."""
        with self._adding:
            return list(self._by_rank.get(rank, ()))

    def offer(self, line: Line, size: int) -> int:
        """Count a reply of this size that is about to be written, and return 0. Call `withdraw` when it is written.

        If too much waits for the peer, on all its connections, the reply does not count and must not be written.
        Returns how many bytes wait then, without the frame under way on this line.
        """
        with self._offering:
            others = (other for other in self.lines_of(line.peer.id) if other is not line)
            waiting = line.unsent + sum(other.unsent + other.under_way + other.offered for other in others)
            if waiting and waiting + size > self.max_unsent_bytes:
                return waiting
            line.offered += size
            return 0

    def withdraw(self, line: Line, size: int) -> None:
        """Note that an offered reply has left or failed, or that the line's outbox counts it now."""
        with self._offering:
            line.offered -= size

    def about_to_wait(self, *, watches: bool = False) -> bool:
        """Note that the calling thread is about to wait for a peer. If True, call `resumed` after the wait.

        A leader passes its lead on. With ``watches`` it keeps a shared lead for now: the thread must poll
        `watched_beside` as well, and call `stop_leading` when that is readable, or before it waits in another way.
        """
        state = self.state
        if not state.handling:
            return False
        lead = state.lead
        if lead is not None and not (watches and lead[0].begin_waiting(lead[1])):
            self.stop_leading()
        self.detached.discard(threading.get_ident())
        state.handling = False
        return True

    def watched_beside(self) -> int:
        """The descriptor of the lead that the calling thread keeps while it waits; -1 if it has none."""
        lead = self.state.lead
        return -1 if lead is None else lead[0].fileno()

    def stop_leading(self) -> None:
        """Pass on the lead that the calling thread has, if any."""
        lead = self.state.lead
        if lead is None:
            return
        try:
            lead[0].pass_on(lead[1])
        except BaseException:  # no thread is available
            lead[0].resume(lead[1])
            raise
        self.state.lead = None

    def resumed(self) -> None:
        """Note that the wait is over and the request continues."""
        state = self.state
        state.handling = True
        lead = state.lead
        if lead is not None and lead[0].resume(lead[1]):
            self.active.add(lead[0])
            if self.watch.asleep:
                self.watch.wake()
            return
        state.lead = None
        self.detached.add(threading.get_ident())

    @contextmanager
    def pause(self, describe: Callable[[], Description]) -> Iterator[None]:
        """A context in which the calling thread waits for something that only peers can cause, other than a reply.

        ``describe()`` describes the wait for people.
        """
        handling = self.about_to_wait()
        if self.observers:
            self.observers.emit(Waits())
        try:
            with self.activity.waits(describe):
                yield
        finally:
            if self.observers:
                self.observers.emit(Resumes())
            if handling:
                self.resumed()

    def tick(self) -> bool:
        """Pass on the leads of requests that take long. False if no request has run since the last tick.

        The watch thread calls this every few milliseconds while requests come in. A request is long if two ticks have
        seen it, or if it is old. If it has only just begun, it is probably short, so the next tick may take its time.
        """
        active = False
        seen: dict[Lead, int] = {}
        now = 0.0
        for lead in list(self.active):
            turn = lead.turn
            before = self._seen.get(lead)
            seen[lead] = turn
            if before == turn and (lead.waits or not lead.busy):
                self.active.discard(lead)
                if lead.turn != turn:  # a request began meanwhile, perhaps before the lead was discarded
                    self.active.add(lead)
            elif lead.busy and not lead.waits:
                active = True
                now = now or time.monotonic()
                age = now - lead.began
                if age >= _YOUNG:
                    self.watch.hurry()  # the next tick checks whether this is still the same request
                if (before == turn or age >= _OLD) and self._may_detach(lead):
                    lead.pass_on(turn=turn)
            elif before != turn:
                active = True
        self._seen = seen
        return active

    def abandon(self) -> None:
        """In a forked child: close the descriptors."""
        self._shared.abandon()

    def _may_detach(self, lead: Lead) -> bool:
        if self.guard is not None and lead.line is not None and lead.line.under_way:
            # The peer does not read its replies. Its calls run one at a time: otherwise results would pile up.
            return False
        if len(self.detached) < self._max_detached:
            return True
        if self.finished != self._seen_finished:
            self._seen_finished = self.finished
            self._stalled = 0
            return False
        self._stalled += 1
        if self._stalled < _STALLED_TICKS:
            return False
        self._stalled = 0
        return True
