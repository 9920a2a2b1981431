"""Serving: requests from peers. The thread that reads a request runs it.

Theory of operation
-------------------
Each inbound channel has one **leader**, a thread of the pool that reads it. It runs each
request itself, right where it read it, so that a short request costs no hand-over between
threads. It gives the lead to another thread only when it must:

- when its request is about to wait for a call of its own (`about_to_wait`), or
- when two ticks of the watch thread have found it at the same request (`tick`).

The old leader then goes on with its request alone, replies, and returns to the pool. A
leader's *generation* tells it whether it still leads: giving the lead away increments it.

Replies to requests that came in one read leave in one write. They are held in ``_out`` while
further requests are at hand, and whoever takes the lead away sends them first.

Requests that run without a lead are *detached*. When as many as ``num_worker_threads`` are,
ticks give no more leads away as long as some request finishes now and then; if none does, they
may be blocking each other, and the lead goes on regardless. A request that waits for
a call does not count. So no pool size can deadlock nested calls, and no burst of slow
requests makes thousands of threads at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from backhaul.agent.pool import Pool
from backhaul.errors import ProtocolError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, join
from backhaul.wire.messages import Refs

if TYPE_CHECKING:
    from backhaul.agent.watch import Watch

_log = logging.getLogger(__name__)

_MAX_HELD = 64
_MAX_HELD_BYTES = 256 * 1024
_STALLED_TICKS = 5
_MAX_CONNECTIONS = 8

Handler = Callable[["Inbound", Envelope], Frame | None]
"""Handles a message; returns the reply to send, or None if there is none, or not yet."""


class Guard(Protocol):
    """See `agent.guard`."""

    def __call__(self, inbound: Inbound, envelope: Envelope) -> Frame | None:
        """What to answer instead of handling a message, if it is refused. Raises if the connection is to end."""

    def finished(self, peer: WorkerInfo) -> None:
        """A call of that peer is over."""


class _ThreadState(threading.local):
    handling: bool = False  # this thread runs a request
    lead: tuple[Inbound, int] | None = None  # and still leads this inbound in this generation


class Inbound:
    """The serving side of a connection from ``peer``."""

    def __init__(self, peer: WorkerInfo, channel: Channel, serving: Serving) -> None:
        self.peer = peer
        self.said_goodbye = False
        self.made = time.monotonic()
        self.over = threading.Event()
        """Everything that the peer sent has been read."""
        self.calls_started = 0  # written by the leader only; user calls only
        self.calls_finished = 0  # guarded by _lock
        self._channel = channel
        self._serving = serving
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        # Guarded by _lock:
        self._generation = 0
        self._out: list[Frame] = []
        self._out_bytes = 0
        self._runner = 0  # the leader's thread
        # Written by the leader, read by ticks:
        self.turn = 0  # counts requests
        self.busy = False

    def lead(self) -> None:
        """Read and run requests until the lead is given away or the channel ends."""
        serving = self._serving
        state = serving.state
        watch = serving.watch
        channel = self._channel
        handle = serving.handle
        guard = serving.guard
        with self._lock:
            self._generation += 1
            generation = self._generation
            self._runner = threading.get_ident()
        lead = (self, generation)
        try:
            while True:
                envelope = channel.next()
                if envelope is None:
                    if self._out:
                        self._send_held()
                    channel.read(None)
                    continue
                if guard is not None:
                    refused = guard(self, envelope)
                    if refused is not None:
                        self.reply(refused)
                        continue
                elif getattr(envelope.message, "refs", ()):
                    # Now, while this thread cannot lose the lead: the next message must not overtake it.
                    serving.arriving(envelope.message.refs, self.peer)
                self.turn += 1
                self.busy = True
                state.lead = lead
                state.handling = True
                if watch.asleep:
                    watch.wake()
                frame = handle(self, envelope)
                state.handling = False
                state.lead = None
                with self._lock:
                    leading = self._generation == generation
                    if leading:
                        self.busy = False
                        if frame is not None and not frame.keep:
                            self._out.append(frame)
                            self._out_bytes += frame.size
                if not leading:
                    serving.detached.discard(threading.get_ident())
                    serving.finished += 1
                    if frame is not None:
                        self.reply(frame)
                    return
                if frame is None:
                    continue
                if frame.keep:
                    # It refers to the user's own tensors: the next request may change them.
                    if self._out:
                        self._send_held()
                    self.reply(frame)
                elif len(self._out) >= _MAX_HELD or self._out_bytes >= _MAX_HELD_BYTES:
                    self._send_held()
        except Exception as error:
            state.handling = False
            state.lead = None
            self._end(error)

    def reply(self, frame: Frame) -> None:
        """Send one frame now, waiting for room if need be. A caller that is gone loses it."""
        try:
            with self._sending:
                if self._channel.write(frame):
                    return
                handling = self._serving.about_to_wait()
                try:
                    while not self._channel.flush():
                        self._channel.wait(read=False, write=True, timeout=None)
                finally:
                    if handling:
                        self._serving.resumed()
        except ChannelClosed:
            _log.debug("= the reply to %s finds nobody", self.peer.name)

    def reply_late(self, frame: Frame) -> None:
        """Send the reply to a call after its request has been handled."""
        self.reply(frame)
        self.count_finished()

    def count_finished(self) -> None:
        with self._lock:
            self.calls_finished += 1
        if self._serving.guard is not None:
            self._serving.guard.finished(self.peer)

    def give_away(self, generation: int, turn: int | None = None) -> bool:
        """Give the lead to another thread, unless it has moved on. Never waits."""
        with self._lock:
            if self._generation != generation or not self.busy or turn not in (None, self.turn):
                return False
            self._generation += 1
            self.busy = False
            held, self._out, self._out_bytes = self._out, [], 0
            self._serving.detached.add(self._runner)
        self._serving.pool.run(lambda: self._take_over(held))
        return True

    def give_away_if_busy(self, turn: int) -> bool:
        return self.give_away(self._generation, turn)

    def shutdown(self) -> None:
        """End the channel; the leader notices and cleans up."""
        self._channel.shutdown()

    def abandon(self) -> None:
        """In a forked child: close the descriptor, and leave the connection to the parent."""
        self._channel.close()

    def _take_over(self, held: list[Frame]) -> None:
        if held:
            self.reply(join(held))
        self.lead()

    def _send_held(self) -> None:
        """Send the held replies. Only the leader calls it, and not while it runs a request."""
        held, self._out, self._out_bytes = self._out, [], 0
        self.reply(join(held))

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._generation += 1
            self._out = []
        if not isinstance(error, ChannelClosed):
            own = not isinstance(error, ProtocolError)
            _log.error("closing the connection from %s: %s", self.peer.name, error, exc_info=error if own else None)
        self._channel.shutdown()
        with self._sending:
            self._channel.close()
        self._serving.ended(self, error)
        self.over.set()


class Serving:
    """All inbound connections of a worker, and the rules for its threads."""

    def __init__(self, pool: Pool, watch: Watch, handle: Handler, num_worker_threads: int) -> None:
        self.pool = pool
        self.watch = watch
        self.handle = handle
        self.on_end: Callable[[Inbound, Exception], None] = lambda inbound, error: None
        self.guard: Guard | None = None
        """Judges each message before it is handled, in the order of reading, if peers are not trusted with all."""
        self.arriving: Callable[[Refs, WorkerInfo], None] = lambda refs, sender: None
        """Called with the references that a request brings, in the order of reading, if there is no guard."""
        self.on_pause: Callable[[int], None] = lambda change: None
        """Called with -1 and +1 around a `pause`; a test's scheduler counts with it what runs and does not wait."""
        self.state = _ThreadState()
        self.detached: set[int] = set()
        self.finished = 0  # a count that only its changes matter of; not exact
        self.inbounds: set[Inbound] = set()
        self._max_detached = num_worker_threads
        self._seen: dict[Inbound, int] = {}
        self._seen_finished = 0
        self._stalled = 0

    def add(self, inbound: Inbound) -> None:
        """Serve a connection that was let in."""
        if self.guard is not None:
            # One that opens new connections all the time loses its old ones, and nobody else a thread.
            same = [other for other in list(self.inbounds) if other.peer == inbound.peer]
            same.sort(key=lambda other: other.made)
            for old in same[: max(0, len(same) + 1 - _MAX_CONNECTIONS)]:
                old.shutdown()
        self.inbounds.add(inbound)
        self.pool.run(inbound.lead)

    def ended(self, inbound: Inbound, error: Exception) -> None:
        self.inbounds.discard(inbound)
        self.on_end(inbound, error)

    def about_to_wait(self) -> bool:
        """The calling thread is about to wait for a peer. True: call `resumed` after it."""
        state = self.state
        if not state.handling:
            return False
        lead = state.lead
        if lead is not None:
            state.lead = None
            lead[0].give_away(lead[1])
        self.detached.discard(threading.get_ident())
        state.handling = False
        return True

    def resumed(self) -> None:
        """The wait is over; the request goes on."""
        self.state.handling = True
        self.detached.add(threading.get_ident())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, the calling thread waits for something other than a reply that only peers can bring about."""
        handling = self.about_to_wait()
        self.on_pause(-1)
        try:
            yield
        finally:
            self.on_pause(1)
            if handling:
                self.resumed()

    def tick(self) -> bool:
        """Give away the leads of requests that take long. False when all has been quiet.

        Called every few milliseconds by the watch thread while requests come in.
        """
        active = False
        seen: dict[Inbound, int] = {}
        for inbound in list(self.inbounds):
            turn = inbound.turn
            before = self._seen.get(inbound)
            seen[inbound] = turn
            if inbound.busy:
                active = True
                self.watch.hurry()  # to see whether it is the same request then
                if before == turn and self._may_detach():
                    inbound.give_away_if_busy(turn)
            elif before != turn:
                active = True
        self._seen = seen
        return active

    def _may_detach(self) -> bool:
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
