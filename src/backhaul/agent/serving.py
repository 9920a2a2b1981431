"""Serving: the lines that peers have opened. The thread that reads a request also runs it.

Theory of operation
-------------------
Each line has one **leader**, a pool thread that reads the line. The leader runs each request itself, so a short request
costs no hand-over between threads. Leading is a `role`. The leader passes the lead on in only two cases:

- Its request is about to wait for a call of its own (`about_to_wait`).
- Two ticks of the watch thread have found it at the same request (`tick`). Exception: if peers are not trusted, a line
  whose peer does not read its replies keeps its leader.

The old leader then finishes its request alone, replies, and returns to the pool.

Replies to requests that came in one read leave in one write. They are held in ``_out`` while more requests are ready,
and a thread that takes over the lead sends them first.

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
from backhaul.agent.line import Line, Stalled, named
from backhaul.agent.observing import (
    Began,
    Encoded,
    Ended,
    LinkLost,
    Observers,
    Queued,
    Read,
    Resumes,
    Starts,
    Stops,
    Waits,
)
from backhaul.agent.pool import Pool
from backhaul.agent.role import Role
from backhaul.errors import ProtocolError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, is_failure, join
from backhaul.wire.messages import Call, Create, Fetch, Refs

if TYPE_CHECKING:
    from backhaul.agent.watch import Watch

_log = logging.getLogger(__name__)

_MAX_HELD = 64
_MAX_HELD_BYTES = 256 * 1024
_STALLED_TICKS = 5
_MAX_CONNECTIONS = 8
_REQUESTS = (Call, Create, Fetch)

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
    lead: tuple[Served, int] | None = None  # the line that this thread leads, and its token

    def __init__(self, activity: Activity) -> None:  # runs once in each thread that uses this object
        self.note = activity.new_note()


class Served(Line):
    """A line that ``peer`` has opened."""

    def __init__(self, peer: WorkerInfo, channel: Channel, serving: Serving) -> None:
        super().__init__(peer, channel, serving)
        self.made = time.monotonic()
        self.over = threading.Event()
        """Set when everything that the peer sent has been read."""
        # Guarded by _lock, except fields that only the leader writes:
        self._role: Role[Any] = Role()
        self._out: list[Frame] = []
        self._out_bytes = 0
        self._out_charged = 0  # how many frames in _out count against the quota
        self._runner = 0  # the leader's thread

    def lead(self) -> None:
        """Read and run requests until the lead is passed on or the channel ends."""
        with self._lock:
            token = self._role.take()
        if token:
            self._lead(token)

    def _lead(self, token: int) -> None:
        serving = self._serving
        state = serving.state
        watch = serving.watch
        channel = self.channel
        role = self._role
        handle = serving.handle
        observers = serving.observers
        guard = serving.guard
        outbox = self._outbox
        charged = 0
        self._runner = threading.get_ident()
        lead = (self, token)
        peer = self.peer
        note = state.note
        try:
            while True:
                envelope = channel.next()
                if envelope is None:
                    if self._out:
                        self._send_held(token)
                    if guard is not None and (pause := guard.pause(self.peer)):
                        time.sleep(pause)
                    channel.read(None)
                    if observers:
                        observers.emit(Read(peer=self.peer.name, line=self.descriptor))
                    continue
                if outbox.full and isinstance(envelope.message, _REQUESTS):
                    self._send_held(token)
                    self.await_room()
                if guard is not None:
                    refused = guard(self, envelope)
                    if refused is not None:
                        self.reply(refused)
                        continue
                    charged = guard.charges(envelope.message)
                elif getattr(envelope.message, "refs", ()):
                    # Before this thread can lose the lead: the next message must not overtake these references.
                    serving.arriving(envelope.message.refs, self.peer)
                role.begin()
                serving.active.add(self)
                state.lead = lead
                state.handling = True
                if watch.asleep:
                    watch.wake()
                note.handles = (peer, envelope, monotonic())
                frame = self._handle_observed(envelope) if observers else handle(self, envelope)
                note.handles = None
                if frame is not None and frame.keep:
                    # The frame refers to the user's own tensors, which this thread's next request may change. So the
                    # frame leaves first. If it must wait for room, this thread passes on the lead.
                    self._send_held(token)
                    self.reply(frame, releases=charged)
                    frame = None
                state.handling = False
                state.lead = None
                with self._lock:
                    leading = role.finish(token)
                    if leading and frame is not None:
                        self._out.append(frame)
                        self._out_bytes += frame.size
                        self._out_charged += charged
                if not leading:
                    serving.detached.discard(threading.get_ident())
                    serving.finished += 1
                    if frame is not None:
                        self.reply(frame, releases=charged)
                    return
                if frame is not None and (len(self._out) >= _MAX_HELD or self._out_bytes >= _MAX_HELD_BYTES):
                    self._send_held(token)
        except Exception as error:
            state.handling = False
            state.lead = None
            note.handles = None
            self._end(error)

    def _handle_observed(self, envelope: Envelope) -> Frame | None:
        observers = self._observers
        observers.emit(Began(**named(self, envelope)))
        frame = self._serving.handle(self, envelope)
        if frame is not None:
            observers.emit(Encoded())
        failed = frame is not None and is_failure(frame)
        observers.emit(Ended(**named(self, envelope), replies=frame is not None, failed=failed))
        return frame

    def pass_on(self, token: int | None = None, turn: int | None = None) -> bool:
        """Pass the lead to another thread. False if the lead, or its leader, has moved on. Never waits.

        ``token``: the calling thread leads. ``turn``: the request that the leader has been running for too long.
        """
        with self._lock:
            if token is not None and not self._role.holds(token):
                return False
            before = self._role.holder
            successor = self._role.pass_on(turn)
            if not successor:
                return False
            held, self._out, self._out_bytes = self._out, [], 0
            charged, self._out_charged = self._out_charged, 0
            runner = self._runner
            self._serving.detached.add(runner)
        try:
            self._serving.pool.run(lambda: self._take_over(successor, held, charged))
        except BaseException:
            # No thread is available. The old leader keeps the lead, and the next tick tries again.
            with self._lock:
                self._role.undo(successor, before)
                self._out = held + self._out
                self._out_bytes = sum(frame.size for frame in self._out)
                self._out_charged += charged
                self._serving.detached.discard(runner)
            raise
        return True

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    @property
    def turn(self) -> int:
        """The number of requests begun so far."""
        return self._role.turn

    @property
    def busy(self) -> bool:
        """Whether the leader is running a request."""
        return self._role.busy

    def _take_over(self, token: int, held: list[Frame], charged: int) -> None:
        if held:
            self.reply(join(held), len(held), charged)
        self._lead(token)

    def _send_held(self, token: int) -> None:
        """Send the held replies. If the lead has been passed on, the new leader sends them instead."""
        with self._lock:
            if not self._out or not self._role.holds(token):
                return
            held, self._out, self._out_bytes = self._out, [], 0
            charged, self._out_charged = self._out_charged, 0
        self.reply(join(held), len(held), charged)

    def _broke(self, error: Exception) -> None:
        if isinstance(error, Stalled):
            _log.warning("closing the connection from %s: %s", self.peer.name, error)
        self.shutdown()  # the leader notices

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._role.end()
            self._out = []
            charged, self._out_charged = self._out_charged, 0
        if charged and self._serving.guard is not None:
            self._serving.guard.finished(self.peer, charged)
        if not isinstance(error, ChannelClosed):
            own = not isinstance(error, ProtocolError)
            _log.error("closing the connection from %s: %s", self.peer.name, error, exc_info=error if own else None)
        self.channel.shutdown()
        self.close()
        self._serving.ended(self, error)
        if self._serving.observers:
            self._serving.observers.emit(LinkLost(peer=self.peer.name, served=True, reason=str(error)))
        self.over.set()


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
        self.active: set[Served] = set()
        """The lines that a tick looks at. A leader adds its line after it has begun a request."""
        self._by_rank: dict[int, set[Served]] = {}
        self._adding = threading.Lock()
        self._max_detached = num_worker_threads
        self._seen: dict[Served, int] = {}
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
        self.pool.run(line.lead)

    def run_apart(self, line: Line, envelope: Envelope) -> None:
        """Judge a message, and have a pool thread handle it. For a reader that must not run the message itself.

        Raises an exception that must end the connection.
        """
        if self.guard is not None:
            refused = self.guard(line, envelope)
            if refused is not None:
                self.pool.run(lambda: line.reply(refused))
                return
        elif getattr(envelope.message, "refs", ()):
            self.arriving(envelope.message.refs, line.peer)
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
            self.active.discard(line)
            same = self._by_rank.get(line.peer.id, set())
            same.discard(line)
            if not same:
                self._by_rank.pop(line.peer.id, None)
        self.on_end(line, error)

    def lines_of(self, rank: int) -> list[Served]:
        """The lines that the worker of this rank has opened. The rank of guests stands for all guests."""
        with self._adding:
            return list(self._by_rank.get(rank, ()))

    def unsent_beside(self, line: Line) -> int:
        """Unsent bytes for the peer of a line, on all its connections, without the frame under way on this line."""
        others = (other for other in self.lines_of(line.peer.id) if other is not line)
        return line.unsent + sum(other.unsent + other.under_way for other in others)

    def about_to_wait(self) -> bool:
        """Note that the calling thread is about to wait for a peer. If True, call `resumed` after the wait."""
        state = self.state
        if not state.handling:
            return False
        lead = state.lead
        if lead is not None:
            lead[0].pass_on(lead[1])
            state.lead = None
        self.detached.discard(threading.get_ident())
        state.handling = False
        return True

    def resumed(self) -> None:
        """Note that the wait is over and the request continues."""
        self.state.handling = True
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

        The watch thread calls this every few milliseconds while requests come in.
        """
        active = False
        seen: dict[Served, int] = {}
        for line in list(self.active):
            turn = line.turn
            before = self._seen.get(line)
            seen[line] = turn
            if before == turn and not line.busy:
                self.active.discard(line)
                if line.turn != turn:  # a request began meanwhile, perhaps before the line was discarded
                    self.active.add(line)
            elif line.busy:
                active = True
                self.watch.hurry()  # the next tick checks whether this is still the same request
                if before == turn and self._may_detach(line):
                    line.pass_on(turn=turn)
            elif before != turn:
                active = True
        self._seen = seen
        return active

    def _may_detach(self, line: Served) -> bool:
        if self.guard is not None and line.under_way:
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
