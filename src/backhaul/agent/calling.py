"""Calling: the line that this worker has opened to a peer. Requests leave on it, and waiting threads read the replies.

Theory of operation
-------------------
`link_state` decides, and this file acts. There is no dedicated reader thread:

- A thread that waits for a reply takes the reader role if the role is free. It reads and hands out everything that
  arrives, including the replies of other threads. When its own reply has come, it wakes one of the other threads, which
  takes over the role.
- A thread that finds the role taken sleeps until it gets its reply or the role.
- A thread that waits while futures to other peers are outstanding reads those lines as well (`waiting.Vigil`).
- The watch thread reads the replies to futures that no thread waits for, once a tick has found them without a reader.
- A thread whose request does not fit into the socket reads replies while it waits for room.
  Otherwise two workers that send to each other could both wait forever.

Other messages may come on this line, too: the peer uses it for messages that a thread of this worker waits for. Each
goes to the thread that listens for it, or to the pool (``deliver``).

No user code runs while a lock or a role is held. Futures with callbacks, and futures whose replies the watch thread
reads, are completed elsewhere (`completions`).
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from backhaul.agent.activity import Description, Wait
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.link_state import MOST_HELD, SMALL, LinkState
from backhaul.agent.observing import (
    Came,
    HandedOut,
    LinkLost,
    Losing,
    Read,
    Resumes,
    Sent,
    Settled,
    Waits,
)
from backhaul.agent.outbox import Departure
from backhaul.agent.pending import Slot
from backhaul.agent.waiting import Vigil, Vigils, Waiter
from backhaul.errors import ProtocolError, RpcTimeoutError, WorkerLostError, WorkerUnresponsiveError
from backhaul.ids import WorkerInfo
from backhaul.transport.awake import Ready, Rhythm, poll_awake
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode, join
from backhaul.wire.messages import Failure, Ping, Result

if TYPE_CHECKING:
    from backhaul.agent.completions import Completions
    from backhaul.agent.execution import Execution
    from backhaul.agent.serving import Serving
    from backhaul.agent.watch import Watch

_REPLIES = (Result, Failure)

Sleeper = Waiter | Vigil


class _Reply(Future[Any]):
    """A future of the reply to one request."""

    def __init__(self, line: Calling, slot: Slot) -> None:
        super().__init__()
        self._line = line
        self._slot: Slot | None = slot

    def help(self) -> None:
        slot = self._slot
        if slot is not None:
            self._line.wait_noted(slot)

    def attend(self) -> None:
        slot = self._slot
        if slot is not None:
            self._line.attend(slot)

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        self._slot = None
        super().settle(value, error)


class Calling(Line):
    """See the module's docstring. All methods are thread-safe."""

    def __init__(
        self,
        peer: WorkerInfo,
        channel: Channel,
        *,
        execution: Execution,
        serving: Serving,
        completions: Completions,
        watch: Watch,
        vigils: Vigils,
        unresponsive_after: float | None,
        deliver: Callable[[Line, Envelope], None],
        on_lost: Callable[[Calling, WorkerLostError], None],
        explain: Callable[[WorkerInfo, WorkerLostError, Callable[[WorkerLostError], None]], None],
    ) -> None:
        super().__init__(peer, channel, serving)
        self._execution = execution
        self._completions = completions
        self._watch = watch
        self._vigils = vigils
        self._patience = math.inf if unresponsive_after is None else unresponsive_after
        self._deliver = deliver
        self._on_lost = on_lost
        self._explain = explain
        self._state: LinkState[Sleeper] = LinkState(self._patience)  # guarded by _lock
        self._urgent: set[int] = set()  # ids of slots whose futures have callbacks; some slots may be done
        self._ending: list[Slot] = []  # slots of a lost line; they end once the reason is known; guarded by _lock
        self._beside: tuple[int, Callable[[Any], Ready]] | None = None  # polls this line beside a lead; see _watch_lead
        self._beside_rhythm = Rhythm()
        self.lost: WorkerLostError | None = None
        """Why the connection ended; None while it is open."""
        watch.add(self)

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

    # Requests.

    def ask(self, id: int, frame: Frame, what: str, deadline: float, *, is_call: bool) -> Any:
        """Send a request and return the value of its reply, or raise. No other request may have the same ``id``."""
        slot = Slot(id, what, deadline, is_call, thread=get_ident())
        self._request(slot, frame, watched=False)
        if not slot.done:
            self.wait(slot)
        return self._open_observed(slot) if self._observers else self._open_reply(slot)

    def ask_async(self, id: int, frame: Frame, what: str, deadline: float, *, is_call: bool) -> Future[Any]:
        """Send a request and return a future of its reply's value. No other request may have the same ``id``."""
        slot = Slot(id, what, deadline, is_call)
        future = _Reply(self, slot)
        slot.future = future
        self._request(slot, frame, watched=True)
        self._watch.look_after(self, deadline)
        return future

    def _request(self, slot: Slot, frame: Frame, *, watched: bool) -> None:
        with self._lock:
            opened = self._state.open(slot, watched=watched)
        try:
            if not opened:
                raise ChannelClosed("lost")
            if not (watched and slot.is_call and not frame.keep and self._hold(frame)):
                self._send(frame, slot.deadline, is_call=slot.is_call)
        except (ChannelClosed, ProtocolError) as error:
            self.lose(error)
            if not opened:
                self._fail(slot, self._loss(), inline=True)
        except BaseException as error:
            with self._lock:
                ended = self._state.give_up(slot)
            if ended:
                self._count_settled(slot)
            if slot.is_call:
                self._execution.accounts.count_error("sent", error)
            if self._observers:
                self._observers.emit(Settled(peer=self.peer.name, call=slot.id, failed=True))
            raise

    def post(self, frame: Frame) -> None:
        """Send a one-way message. Raises `ChannelClosed`."""
        if self.lost is not None:
            raise ChannelClosed("lost")
        self._send(frame, math.inf, is_call=False)

    def post_lazily(self, frame: Frame) -> bool:
        """Send a small one-way message with the next frame, or at the next tick. False if the message cannot wait."""
        if frame.keep or frame.size > SMALL:
            return False
        with self._sending, self._lock:
            if self._unflushed or self._state.lost or self._state.holds >= MOST_HELD:
                return False
            first = self._state.hold(frame)
        if first:
            self._watch.remind(self)
        return True

    # Sending.

    def _hold(self, frame: Frame) -> bool:
        """Hold a call back so that it leaves together with others. False if the caller must send it now.

        Held calls leave when a thread waits for a reply or adds a callback to a future, when enough calls are held, or
        at the next tick.
        """
        if not self._state.may_hold(frame.size):
            return False
        with self._sending, self._lock:
            if self._unflushed or not self._state.may_hold(frame.size):
                return False
            self._state.calls_sent += 1
            first = self._state.hold(frame)
        if first:
            self._watch.remind(self)
        return True

    def send_held(self) -> bool:
        """Send the held frames without waiting. False if some bytes have not left and no thread is sending them."""
        if not self._state.holds:
            return self.send_rest()
        try:
            with self._sending:
                if held := self._take_held():
                    self._put(join(held), waits=False)
        except ChannelClosed as error:
            self.lose(error)
            return True
        if held and self._observers:
            self._tell_sent(sum(frame.size for frame in held), len(held))
        return self.send_rest()

    def _take_held(self) -> list[Frame]:
        if not self._state.holds:
            return []
        with self._lock:
            return list(self._state.take_held())

    def _send(self, frame: Frame | None, deadline: float, *, is_call: bool) -> None:
        """Send the held frames, and then ``frame`` if given.

        Waits if the frame refers to memory that may change before the frame has left, or if the outbox is full.
        """
        departure = None
        if self._unflushed:
            with self._turn:
                self._sending.acquire()
        else:
            self._sending.acquire()
        try:
            if is_call:
                self._state.calls_sent += 1
            held = self._take_held()
            if held and (frame is None or frame.keep or self._unflushed):
                departure = self._put(join(held), waits=False)
            elif held and frame is not None:
                frame = join([*held, frame])
            if frame is not None and (self._unflushed or not self.channel.write(frame)):
                departure = self._depart(frame, waits=True)
            duty = departure is not None and self._outbox.take_duty()
        finally:
            self._sending.release()
        if departure is not None:
            self._see_off_call(departure, duty, deadline, is_call=is_call)
        if self._observers:
            if frame is not None:
                self._tell_sent(frame.size, 1 + len(held))
            elif held:
                self._tell_sent(sum(each.size for each in held), len(held))

    def _see_off_call(self, departure: Departure, duty: bool, deadline: float, *, is_call: bool) -> None:
        try:
            self._see_off(departure, duty, deadline)
        except RpcTimeoutError:
            if is_call and not departure.begun:
                with self._lock:  # the call was counted as sent, and is about to be counted as settled
                    self._state.calls_sent -= 1
                    self._state.calls_settled -= 1
            raise

    def _tell_sent(self, size: int, frames: int) -> None:
        sent = Sent(peer=self.peer.name, line=self.descriptor, size=size, replies=False, frames=frames)
        self._observers.emit(sent)

    def _pump(self, departure: Departure | None, deadline: float) -> bool:
        try:
            return super()._pump(departure, deadline)
        finally:
            self._watch.take_over()

    def _broke(self, error: Exception) -> None:
        self.lose(error)

    def _send_held_first(self, slot: Slot) -> None:
        """Send the held frames, because a thread is about to wait for this slot."""
        try:
            self._send(None, slot.deadline, is_call=False)
        except (ChannelClosed, ProtocolError) as error:
            self.lose(error)
        except RpcTimeoutError:
            pass  # the wait for the reply times out, too

    # Waiting.

    def wait(self, slot: Slot) -> None:
        """Return when the slot is done. Reads replies until then."""
        if self._state.holds:
            self._send_held_first(slot)
        unread = self._watch.unread
        handling = self._serving.about_to_wait(watches=True)
        if self._observers:
            self._observers.emit(Waits(slot=slot))
        now = time.monotonic()
        slot.since = now
        try:
            while not slot.done:
                timeout = min(slot.deadline - now, self._patience / 4)
                reads = self._state.reads
                if timeout <= 0:
                    self._time_out(slot)
                elif unread and (others := self._other_readable(unread)):
                    if handling:
                        self._serving.stop_leading()
                    self._wait_for_all(slot, others, timeout)
                elif token := self.begin_reading(slot):
                    if handling and (beside := self._serving.watched_beside()) >= 0:
                        self._read_beside(beside, token, timeout)
                    else:
                        self.finish_reading(token, None if timeout == math.inf else timeout)
                else:
                    if handling:
                        self._serving.stop_leading()
                    self._sleep(slot, timeout)
                if not slot.done:
                    began, now = now, time.monotonic()
                    # Also at the deadline: otherwise calls with short timeouts would never notice a stuck link.
                    if self._state.reads == reads and (now - began >= self._patience / 4 or now >= slot.deadline):
                        self.check_alive()
        except BaseException:  # the thread was interrupted: the slot stays, but no longer counts as waited for
            slot.since = 0.0
            raise
        finally:
            if unread:
                self._watch.take_over()
            if self._observers:
                self._observers.emit(Resumes(slot=slot))
            if handling:
                self._serving.resumed()

    def wait_noted(self, slot: Slot) -> None:
        """`wait` for the slot of a future. Several threads may wait for the same slot at once."""
        waiting = self._serving.activity.waiting
        thread = get_ident()
        before = waiting.get(thread)
        waiting[thread] = Wait(partial(self._describe, slot), time.monotonic(), before)
        try:
            self.wait(slot)
        finally:
            if before is None:
                del waiting[thread]
            else:
                waiting[thread] = before

    def waits(self) -> list[tuple[int, Wait]]:
        with self._lock:
            slots = [*self._state.unanswered(), *self._ending]
        return [
            (slot.thread, Wait(partial(self._describe, slot), slot.since))
            for slot in slots
            if slot.thread and slot.since and not slot.done
        ]

    def _describe(self, slot: Slot) -> Description:
        return {"kind": "reply", "peer": self.peer.name, "call": slot.id, "what": slot.what, "deadline": slot.deadline}

    def _read_beside(self, beside: int, token: int, timeout: float) -> None:
        """`finish_reading` for a thread that leads, and watches the lines of its lead by the descriptor ``beside``.

        If something comes there, the thread passes on its lead.
        """
        ready: Ready = []
        try:
            if self._beside is None or self._beside[0] != beside:
                poll = select.poll()
                poll.register(self.descriptor, select.POLLIN)
                poll.register(beside, select.POLLIN)
                self._beside = beside, poll.poll
            seconds = None if timeout == math.inf else timeout
            ready = poll_awake(self._beside[1], self._beside_rhythm, seconds, self._vigils.most_awake)
        finally:
            comes = any(descriptor == self.descriptor for descriptor, _ in ready)
            self.end_vigil(token, comes=comes)
        if ready and not comes:
            self._serving.stop_leading()

    def _sleep(self, slot: Slot, timeout: float) -> None:
        """Sleep until this thread gets its reply or the reader role."""
        waiter = Waiter()
        with self._lock:
            sleeps = self._state.wait(slot, waiter)
        if not sleeps:
            return
        waiter.sleep(timeout)
        with self._lock:
            other = self._state.stop_waiting(slot, waiter)
        if other is not None:
            other.wake()

    def _other_readable(self, unread: set[Calling]) -> list[Calling]:
        """The other lines whose outstanding futures may have no reader."""
        others = []
        for line in list(unread):
            if not line.futures:
                self._watch.forget_read(line)
            elif line is not self:
                others.append(line)
        return others

    def _wait_for_all(self, slot: Slot, others: list[Calling], timeout: float) -> None:
        """Wait for the slot, and meanwhile read the other lines with outstanding futures."""
        try:
            vigil = self._vigils.take()
        except OSError:  # no descriptor is left for a vigil; the watch thread reads the other lines
            if token := self.begin_reading(slot):
                self.finish_reading(token, None if timeout == math.inf else timeout)
            else:
                self._sleep(slot, timeout)
            return
        with self._lock:
            self._state.watch(slot, vigil)
        try:
            vigil.wait([self, *others], lambda: slot.done, timeout)
        finally:
            with self._lock:
                self._state.stop_watching(slot, vigil)
            self._vigils.give_back(vigil)

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
            if not isinstance(message, _REPLIES):
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

    # What becomes of replies.

    def _settle_all(self, finished: Iterable[Slot], *, inline: bool) -> None:
        plain: list[tuple[Slot, Future[Any]]] = []
        for slot in finished:
            if slot.future is None:
                self._count_settled(slot)  # a blocking call that failed
            elif slot.future.has_callbacks:
                self._completions.add(partial(self._settle, slot, slot.future))
            elif inline:
                self._settle(slot, slot.future)
            else:
                plain.append((slot, slot.future))
        if plain:  # in one batch: without callbacks, none can wait for another
            self._completions.add(partial(self._settle_each, plain))

    def _settle_each(self, plain: list[tuple[Slot, Future[Any]]]) -> None:
        for slot, future in plain:
            self._settle(slot, future)

    def _fail(self, slot: Slot, error: BaseException | None, *, inline: bool = False) -> None:
        """Finish a slot without a reply. The slot has been taken out already."""
        with self._lock:
            waiters = self._state.finish(slot, error)
        for waiter in waiters:
            waiter.wake()
        self._settle_all([slot], inline=inline)

    def _settle(self, slot: Slot, future: Future[Any]) -> None:
        slot.future = None  # break the cycle: their tensors must not wait for the garbage collector
        try:
            value = self._open_observed(slot) if self._observers else self._open_reply(slot)
        except BaseException as error:  # raised in the thread that waits for the future
            future.settle(None, error)
        else:
            future.settle(value)
        self._count_settled(slot)

    def _open_reply(self, slot: Slot) -> Any:
        try:
            if slot.envelope is not None:
                return self._execution.open(slot.envelope, self.peer)
            self._raise(slot)
        except BaseException as error:
            if slot.is_call:
                self._execution.accounts.count_error("sent", error)
            raise

    def _open_observed(self, slot: Slot) -> Any:
        failed = True
        try:
            value = self._open_reply(slot)
            failed = False
        finally:
            self._observers.emit(Settled(peer=self.peer.name, call=slot.id, failed=failed))
        return value

    def _raise(self, slot: Slot) -> NoReturn:
        error, slot.error = slot.error or ProtocolError("a request ended without a reply"), None
        try:
            raise error
        finally:
            del error  # break the cycle: its traceback refers to this frame

    def _count_settled(self, slot: Slot) -> None:
        if slot.is_call:
            with self._lock:
                self._state.calls_settled += 1

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
            self._fail(slot, self._timeout_of(slot))

    def _time_out(self, slot: Slot) -> None:
        with self._lock:
            ended = self._state.give_up(slot)
        if ended:
            self._fail(slot, self._timeout_of(slot))
        else:
            self._sleep(slot, math.inf)  # another thread has taken the slot out and is about to finish it

    def _timeout_of(self, slot: Slot) -> RpcTimeoutError:
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
                self._fail(slot, self._loss())
            self._ending = []
            self._on_lost(self, reason)
            if self._observers:
                self._observers.emit(LinkLost(peer=self.peer.name, served=False, reason=str(reason)))

        self._explain(self.peer, reason, end)

    def _loss(self) -> WorkerLostError | None:
        """A fresh copy of the loss: an exception that several threads raise would collect the frames of all of them."""
        lost = self.lost
        return None if lost is None else type(lost)(str(lost), lost.worker)
