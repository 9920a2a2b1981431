"""Reading: a line that this worker has opened, as the threads see it that read the replies on it.

Theory of operation
-------------------
`link_state` decides, and this file acts. There is no dedicated reader thread:

- A thread that waits for a reply takes the reader role if the role is free. It reads and hands out everything that
  arrives, including the replies of other threads. When its own reply has come, it wakes one of the other threads, which
  takes over the role.
- A thread that finds the role taken lines up for it (`calling`).
- A thread that waits while futures to other peers are outstanding reads those lines as well (`waiting.Vigil`).
- The watch thread reads the replies to futures that no thread waits for, once a tick has found them without a reader.
- A thread whose request does not fit into the socket reads replies while it waits for room.
  Otherwise two workers that send to each other could both wait forever.

Other messages may come on this line, too: the peer uses it for messages that a thread of this worker waits for. Each
goes to the thread that listens for it, or to the pool (``deliver``).

No user code runs while a lock or the role is held: `settling` says what becomes of the replies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul.agent.line import Line
from backhaul.agent.link_state import LinkState
from backhaul.agent.observing import Came, HandedOut, LinkLost, Losing, Read
from backhaul.agent.pending import Slot
from backhaul.agent.settling import Settling
from backhaul.agent.waiting import Vigil, Waiter
from backhaul.errors import ProtocolError, RpcTimeoutError, WorkerLostError, WorkerUnresponsiveError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import encode
from backhaul.wire.messages import REPLIES, Ping

if TYPE_CHECKING:
    from backhaul.agent.completions import Completions
    from backhaul.agent.execution import Execution
    from backhaul.agent.serving import Serving
    from backhaul.agent.watch import Watch

Sleeper = Waiter | Vigil


class Reading(Line):
    """The reader role of a line, the deadlines of its requests, and its end. All methods are thread-safe.

    `calling.Calling` adds the requests, and the threads that wait for their replies.
    """

    def __init__(
        self,
        peer: WorkerInfo,
        channel: Channel,
        *,
        execution: Execution,
        serving: Serving,
        completions: Completions,
        watch: Watch,
        unresponsive_after: float | None,
        deliver: Callable[[Line, Envelope], None],
        on_lost: Callable[[Line, WorkerLostError], None],
        explain: Callable[[WorkerInfo, WorkerLostError, Callable[[WorkerLostError], None]], None],
    ) -> None:
        super().__init__(peer, channel, serving)
        self._execution = execution
        self._watch = watch
        self._patience = math.inf if unresponsive_after is None else unresponsive_after
        self._deliver = deliver
        self._on_lost = on_lost
        self._explain = explain
        self._state: LinkState[Sleeper] = LinkState(self._patience)  # guarded by _lock
        self._settling = Settling(peer, self._state, self._lock, execution, completions, self._observers)
        self._settle_all = self._settling.settle_all  # bound here: the reader calls it for each batch of replies
        self._urgent: set[int] = set()  # ids of slots whose futures have callbacks; some slots may be done
        self._ending: list[Slot] = []  # slots of a lost line; they end once the reason is known; guarded by _lock
        self.lost: WorkerLostError | None = None
        """Why the connection ended; None while it is open."""

    @property
    def ended(self) -> bool:
        return self.lost is not None

    broken = ended

    def silent(self, now: float) -> float:
        return self._state.silent(now)

    @property
    def outstanding(self) -> int:
        """How many requests await their reply."""
        return len(self._state)

    def unanswered(self) -> list[tuple[int, str]]:
        """The id and the readable name of each request that awaits its reply."""
        with self._lock:
            return [(slot.id, slot.what) for slot in self._state.unanswered()]

    @property
    def futures(self) -> int:
        """How many outstanding requests are futures. Perhaps no thread waits for them."""
        return self._state.futures

    @property
    def calls_sent(self) -> int:
        return self._state.calls_sent

    @property
    def calls_settled(self) -> int:
        return self._state.calls_settled

    # Reading.

    def begin_reading(self, slot: Slot | None = None) -> int:
        """Take the reader role. Returns a token, or 0 if another thread has the role or the line is lost.

        Also returns 0 if the reply of ``slot`` has been read. The check and the taking of the role are one step:
        otherwise a thread would wait for a reply that has already come.
        """
        with self._lock:
            return self._state.read() if slot is None or slot.id in self._state else 0

    def finish_reading(self, token: int, timeout: float | None, *, inline: bool = True) -> None:
        """Read what arrives within ``timeout`` seconds, give up the reader role, and hand out what was read.

        ``inline``: this thread may complete futures.
        """
        problem: Exception | None = None
        slots: list[Slot] = []
        others: list[Envelope] = []
        try:
            if self.lost is None:
                self._receive(timeout, slots, others)
        except (ChannelClosed, ProtocolError) as error:
            problem = error
        finally:
            closes = self.stop_reading(token)
        if closes:
            self.close()
        if slots or others:
            try:
                self._hand_out(slots, others, inline=inline)
            except ProtocolError as error:
                problem = error
        if problem is not None:
            self.lose(problem)

    def stop_reading(self, token: int) -> bool:
        """Give up the reader role. True if the line was lost meanwhile: the caller must then close it."""
        state = self._state
        with self._lock:
            following = state.stop_reading(token)
            closes = state.lost and state.must_close()
        if following is not None:
            following.wake()
        return closes

    def end_vigil(self, token: int, *, comes: bool) -> None:
        """Give up the reader role after waiting for several lines. ``comes``: data is ready, so read it first."""
        if comes:
            self.finish_reading(token, 0)
        elif self.stop_reading(token):
            self.close()

    def line_up(self, waiter: Sleeper) -> bool:
        """Have a thread woken when it can read this line. False if it can read now, or if the line is lost."""
        with self._lock:
            return self._state.line_up(waiter)

    def leave(self, waiter: Sleeper) -> None:
        """Undo `line_up`."""
        with self._lock:
            other = self._state.leave(waiter)
        if other is not None:
            other.wake()

    def _hand_out(self, slots: list[Slot], others: list[Envelope], *, inline: bool) -> None:
        try:
            if slots:
                self._settle_all(slots, inline=inline)
            for envelope in others:
                self._deliver(self, envelope)
        finally:
            if self._observers:
                count = len(slots) + len(others)
                self._observers.emit(HandedOut(peer=self.peer.name, line=self.descriptor, count=count))

    def _receive(self, timeout: float | None, slots: list[Slot], others: list[Envelope]) -> bool:
        """Read once. The caller holds the reader role. False if nothing came.

        Slots are marked done before the role is given up: the next reader must not wait for a reply that has been read.
        """
        channel = self.channel
        if not channel.read(timeout):
            return False
        following = channel.next
        if self._observers:
            following = self._observed(following, slots, others)
        self._state.heard()
        while (envelope := following()) is not None:
            message = envelope.message
            if not isinstance(message, REPLIES):
                others.append(envelope)
                continue
            if message.refs:
                self._execution.traffic.arriving(message.refs, self.peer)
            with self._lock:
                slot = self._state.answered(message.id, envelope)
            if slot is None:  # the reply is too late, or answers a ping
                self._execution.discard(envelope)
                continue
            for waiter in slot.waiters:
                waiter.wake()
            if slot.future is not None:
                slots.append(slot)
        return True

    def _observed(
        self, following: Callable[[], Envelope | None], slots: list[Slot], others: list[Envelope]
    ) -> Callable[[], Envelope | None]:
        """Wrap ``following``: emit `Read` now, and `Came` when no message is left."""
        self._observers.emit(Read(peer=self.peer.name, line=self.descriptor))
        frames = 0

        def told() -> Envelope | None:
            nonlocal frames
            envelope = following()
            if envelope is not None:
                frames += 1
                return envelope
            count = len(slots) + len(others)
            self._observers.emit(Came(peer=self.peer.name, line=self.descriptor, count=count, frames=frames))
            return None

        return told

    def drain(self) -> bool:
        """Read what has arrived, without waiting. False if another thread is reading."""
        while token := self.begin_reading():
            reads = self._state.reads
            self.finish_reading(token, 0, inline=False)
            if self._state.reads == reads:
                return True
        return self.lost is not None

    def _read_meanwhile(self) -> bool:
        """`drain`, for a pumping thread. If this raises, the caller loses the line."""
        token = self.begin_reading()
        if not token:
            return False
        slots: list[Slot] = []
        others: list[Envelope] = []
        try:
            self._receive(0, slots, others)
        finally:
            if self.stop_reading(token):
                self.close()
            self._hand_out(slots, others, inline=False)
        return True

    # For the watch thread.

    def attend(self, slot: Slot) -> None:
        """Have the watch thread read the reply at once: a callback depends on it, and no thread waits for it."""
        self._urgent.add(slot.id)
        self.send_held()
        self._watch.attend(self)

    def is_urgent(self) -> bool:
        """Whether an outstanding reply has callbacks, so that it must be read as soon as it comes."""
        while self._urgent:
            id = self._urgent.pop()
            if id in self._state:
                self._urgent.add(id)
                return True
        return False

    def being_read(self) -> bool:
        return self._state.being_read

    def next_deadline(self) -> float:
        with self._lock:
            return self._state.next_deadline()

    def expire(self, now: float) -> None:
        """Fail the futures whose deadline has passed."""
        with self._lock:
            overdue = self._state.expire(now)
        for slot in overdue:
            self._settling.fail(slot, self._overdue(slot))

    def _overdue(self, slot: Slot) -> RpcTimeoutError:
        return RpcTimeoutError(
            f"RPC ran for more than set timeout: {slot.what} on worker {self.peer.name!r} has not answered; "
            "pass a longer timeout=, or 0 for no timeout"
        )

    def check_alive(self) -> None:
        """Ping a silent peer. Lose the line if a ping has gone unanswered for too long."""
        if self._patience == math.inf:
            return
        way = self.channel.way()
        with self._lock:
            action = self._state.look(time.monotonic(), way)
        if action == "ping":
            self.try_send(encode(Ping(0)))
        elif action == "lose":
            self.lose(
                WorkerUnresponsiveError(
                    f"worker {self.peer.name!r} has not answered for {self._patience:g} s: it is stopped, hangs "
                    "in code that holds the interpreter, or the network is gone (option unresponsive_after)",
                    self.peer.name,
                )
            )

    def heard(self) -> None:
        """Note that the peer is alive: it has sent something on another line."""
        self._state.heard()

    # The end.

    def _broke(self, error: Exception) -> None:
        self.lose(error)

    def lose(self, reason: Exception) -> None:
        """Close the connection and fail every request that waits for a reply. Later calls do nothing."""
        if not isinstance(reason, WorkerLostError):
            reason = WorkerLostError(f"worker {self.peer.name!r} is lost: {reason}", self.peer.name)
        with self._lock:
            slots = self._state.lose()
            if slots is None:
                return
            self.lost = reason
            self._ending = slots
        if self._observers:
            self._observers.emit(Losing(peer=self.peer.name))
        self.shutdown()
        self._watch.remove(self)
        with self._lock:
            closes = self._state.close()
        if closes:
            self.close()

        def end(reason: WorkerLostError) -> None:
            self.lost = reason
            for slot in slots:
                self._settling.fail(slot, self._loss())
            self._ending = []
            self._on_lost(self, reason)
            if self._observers:
                self._observers.emit(LinkLost(peer=self.peer.name, served=False, reason=str(reason)))

        self._explain(self.peer, reason, end)

    def _loss(self) -> WorkerLostError | None:
        """A fresh copy of the loss: an exception that several threads raise would collect the frames of all of them."""
        lost = self.lost
        return None if lost is None else type(lost)(str(lost), lost.worker)
