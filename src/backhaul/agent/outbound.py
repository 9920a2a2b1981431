"""Outbound: requests to one peer, and their replies. The thread that waits reads.

Theory of operation
-------------------
Requests leave, and replies come, on one channel. There is no thread that only reads:

- A thread that waits for a reply takes the **reader role** (the lock ``_reading``) if it is
  free, reads, and hands out whatever arrives, also what others wait for. When its own
  reply has come it wakes one of the others, which takes the role over.
- A thread that finds the role taken sleeps until its reply or the role comes to it.
- Futures that nobody waits for are read by the watch thread (`watch`), which looks after
  an outbound once it has had outstanding futures and no reader for a moment.
- A thread whose request does not fit into the socket reads replies while it waits for room.
  Otherwise two workers that send to each other could both wait for ever.

Nothing of the user's runs while a lock or a role is held: futures with callbacks, and those that
the watch thread reads, are completed elsewhere (`completions`).

A role is never lost: who gives it up looks for sleepers *after* releasing it, and a sleeper
looks whether it is free *after* putting itself on the list.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from backhaul.agent.future import Future
from backhaul.agent.news import Bell, News
from backhaul.agent.pending import Pending, Slot, wake
from backhaul.errors import ProtocolError, RpcTimeoutError, WorkerLostError, WorkerUnresponsiveError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode, join
from backhaul.wire.messages import NEWS, Failure, Goodbye, Ping, Result

if TYPE_CHECKING:
    from backhaul.agent.completions import Completions
    from backhaul.agent.execution import Execution
    from backhaul.agent.serving import Serving
    from backhaul.agent.watch import Watch

_SEND_POLL = 0.1
# So many calls of a peer's are outstanding that one more can wait a moment, if it is small.
_BACKLOG = 16
_MAX_HELD = 16
_SMALL = 4096
_REPLIES = (Result, Failure)


class _Reply(Future[Any]):
    """A future of the reply to one request."""

    def __init__(self, outbound: Outbound, slot: Slot) -> None:
        super().__init__()
        self._outbound = outbound
        self._slot: Slot | None = slot

    def help(self) -> None:
        slot = self._slot
        if slot is not None:
            self._outbound.wait(slot)

    def attend(self) -> None:
        slot = self._slot
        if slot is not None:
            self._outbound.attend(slot)

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        self._slot = None
        super().settle(value, error)


class Outbound:
    """The calling side of a connection to ``peer``. All methods are thread-safe."""

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
        on_lost: Callable[[Outbound, WorkerLostError], None],
    ) -> None:
        self.peer = peer
        self._channel = channel
        self._execution = execution
        self._serving = serving
        self._completions = completions
        self._watch = watch
        self._patience = math.inf if unresponsive_after is None else unresponsive_after
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._pending = Pending()
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._guard = threading.Lock()  # of _pending's deadlines and of lost
        self._unflushed = False  # guarded by _sending
        self._held: list[Frame] = []  # guarded by _sending: calls that have not left
        self._urgent: set[int] = set()  # slots whose futures have callbacks; some may be done
        self._sleepers: deque[tuple[Slot, threading.Lock]] = deque()
        self._news: dict[int, News] = {}
        self._bell: Bell | None = None  # made when it is first needed
        self._reads = 0  # how often something has come
        self._unheard = 0  # how often nothing has, since the ping
        self._pinged: float | None = None  # when a ping left that nothing has answered
        self.lost: WorkerLostError | None = None
        """Why the connection has ended, if it has."""
        self.calls_sent = 0  # guarded by _sending; user calls only
        self.calls_settled = 0  # guarded by _guard; counted after the callbacks of a future
        watch.add(self)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    def ask(self, make: Callable[[int], Frame], what: str, deadline: float, *, is_call: bool) -> Any:
        """Send a request and return its reply's value, or raise."""
        slot = Slot(next(self._ids), what, deadline, is_call)
        frame = make(slot.id)
        self._pending.open(slot, watched=False)
        self._send_request(slot, frame)
        if not slot.done:
            self.wait(slot)
        return self._open_reply(slot)

    def ask_async(self, make: Callable[[int], Frame], what: str, deadline: float, *, is_call: bool) -> Future[Any]:
        """Send a request; return a future of its reply's value."""
        slot = Slot(next(self._ids), what, deadline, is_call)
        future = _Reply(self, slot)
        slot.future = future
        frame = make(slot.id)
        with self._guard:
            self._pending.open(slot, watched=True)
        self._send_request(slot, frame, hold=is_call and len(self._pending) > _BACKLOG and frame.size <= _SMALL)
        self._watch.look_after(self, deadline)
        return future

    def _send_request(self, slot: Slot, frame: Frame, *, hold: bool = False) -> None:
        try:
            if self.lost is not None:  # looked at after opening the slot: lose() may not have found it
                raise ChannelClosed("lost")
            if not hold or not self._hold(frame):
                self._send(frame, slot.deadline, is_call=slot.is_call)
        except (ChannelClosed, ProtocolError) as error:
            self.lose(error)
            if self._pending.take(slot.id) is not None:  # not among those that lose() failed
                self._fail(slot, self._loss(), inline=True)
        except BaseException:
            self._pending.take(slot.id)
            self._count_settled(slot)
            raise

    def post(self, frame: Frame) -> None:
        """Send a one-way message. Raises `ChannelClosed`."""
        self._send(frame, math.inf, is_call=False)

    def _hold(self, frame: Frame) -> bool:
        """Keep a call back, so that it leaves together with others. False if it is to be sent now.

        That is for peers that have so much to do already that they would not come to it at once. It leaves when
        somebody waits for a reply or hangs a callback on one, when there are enough of them, or at the next tick.
        """
        with self._sending:
            if len(self._held) >= _MAX_HELD or self._unflushed or self.lost is not None:
                return False
            self._held.append(frame)
            self.calls_sent += 1
            first = len(self._held) == 1
        if first:
            self._watch.remind(self)
        return True

    def send_held(self) -> bool:
        """Send what is held back, as far as that can be done without waiting. False if some of it is left."""
        if not self._held and not self._unflushed:
            return True
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._unflushed:
                self._unflushed = not self._channel.flush()
            if self._held and not self._unflushed:
                held, self._held = self._held, []
                self._unflushed = not self._channel.write(join(held))
            return not self._unflushed
        except ChannelClosed:
            return True  # the next read says so too
        finally:
            self._sending.release()

    def _send(self, frame: Frame | None, deadline: float, *, is_call: bool) -> None:
        """Send a frame, if given, after what is held back. Waits for room if need be."""
        with self._sending:
            if is_call:
                self.calls_sent += 1
            frames = [] if frame is None else [frame]
            if self._held:
                held, self._held = self._held, []
                frames = [join([*held, *frames])] if frame is None or not frame.keep else [join(held), frame]
            while frames and not self._unflushed:
                self._unflushed = not self._channel.write(frames.pop(0))
            if not self._unflushed:
                return
            handling = self._serving.about_to_wait()
            try:
                self._push(deadline)
                for later in frames:
                    self._unflushed = not self._channel.write(later)
                    self._push(deadline)
            finally:
                if handling:
                    self._serving.resumed()

    def _send_held_first(self, slot: Slot) -> None:
        """A thread is about to wait for this slot: send what is held back."""
        try:
            self._send(None, slot.deadline, is_call=False)
        except (ChannelClosed, ProtocolError) as error:
            self.lose(error)
        except RpcTimeoutError:
            pass  # so will be the wait for the reply

    def _push(self, deadline: float) -> None:
        """Finish the frame that did not fit, reading replies meanwhile. Holds ``_sending``."""
        heard = time.monotonic()
        while not self._channel.flush():
            now = time.monotonic()
            if now - heard > self._patience:
                raise ChannelClosed(f"it has taken nothing of a message for {self._patience:g} s")
            if now >= deadline:
                self._watch.remind(self)  # there may be other calls in it
                raise RpcTimeoutError(
                    f"worker {self.peer.name!r} did not take all of a message in time: RPC ran for more than "
                    "set timeout"
                )
            reads = self._reading.acquire(blocking=False)
            try:
                finished = self._receive(0) if reads else []
            finally:
                if reads:
                    self._reading.release()
            self._settle_all(finished, inline=False)
            if reads:
                self._pass_on()
            if self._channel.wait(read=reads, write=True, timeout=min(_SEND_POLL, deadline - now)):
                heard = now
        self._unflushed = False

    def wait(self, slot: Slot) -> None:
        """Return when the slot is done, reading replies as long as it is not."""
        if self._held:
            self._send_held_first(slot)
        handling = self._serving.about_to_wait()
        try:
            while not slot.done:
                timeout = min(slot.deadline - time.monotonic(), self._patience / 4)
                if timeout <= 0:
                    self._time_out(slot)
                elif self._reading.acquire(blocking=False):
                    self._read(slot, timeout)
                else:
                    self._sleep(slot, timeout)
        finally:
            if self._sleepers and not self._reading.locked():
                self._pass_on()
            if handling:
                self._serving.resumed()

    def listen(self, about: int) -> News | None:
        """Let messages about this come where replies do, for the calling thread to wait for; None if that cannot be."""
        if not self._channel.hears_bells:
            return None
        with self._guard:
            if self.lost is not None:
                return None
            if self._bell is None:
                self._bell = Bell()
            news = self._news[about] = News(self, about, self._bell)
            return news

    def close_news(self, about: int) -> None:
        self._news.pop(about, None)

    def await_news(self, news: News, seconds: float) -> None:
        """See `News.wait`."""
        slot = news.slot
        deadline = time.monotonic() + seconds
        try:
            while not slot.done and (timeout := deadline - time.monotonic()) > 0:
                if self.lost is not None:
                    # Nothing comes any more, and the descriptors may be somebody else's: who waits is to be rung for.
                    _sleep_on(slot, timeout)
                elif self._reading.acquire(blocking=False):
                    self._read(slot, timeout, news.bell)
                else:
                    self._sleep(slot, timeout)
        finally:
            if self._sleepers and not self._reading.locked():
                self._pass_on()

    def _read(self, slot: Slot, timeout: float, bell: Bell | None = None) -> None:
        """Read once, and hand out what came. Holds the reader role, and gives it up."""
        problem: Exception | None = None
        finished: list[Slot] = []
        reads = self._reads
        try:
            if not slot.done and self.lost is None:  # who loses it closes the channel with this role, after that
                finished = self._receive(None if timeout == math.inf else timeout, bell)
        except (ChannelClosed, ProtocolError) as error:
            problem = error
        finally:
            self._reading.release()
        if problem is not None:
            self.lose(problem)
        elif finished:
            self._settle_all(finished, inline=True)
        elif bell is not None:
            bell.hush()
        elif self._reads == reads and not slot.done and timeout >= self._patience / 4:
            self.check_alive()

    def _sleep(self, slot: Slot, timeout: float) -> None:
        """Sleep until the reply or the reader role comes to this thread."""
        waiter = threading.Lock()
        waiter.acquire()
        slot.add_waiter(waiter)
        self._sleepers.append((slot, waiter))
        if not slot.done and self._reading.locked():
            waiter.acquire(timeout=-1 if timeout == math.inf else min(timeout, threading.TIMEOUT_MAX))
        slot.remove_waiter(waiter)
        wake(waiter)  # released, so that `_pass_on` skips what is left of it on the list

    def _pass_on(self) -> None:
        """Wake one thread that can take the reader role."""
        while True:
            try:
                slot, waiter = self._sleepers.popleft()
            except IndexError:
                return
            if not slot.done and waiter.locked():
                wake(waiter)
                return

    def _receive(self, timeout: float | None, bell: Bell | None = None) -> list[Slot]:
        """Read once, and finish the slots whose replies are complete. Holds the reader role.

        The futures among them are still to be settled, without the role. But they are *done* before it is
        given up: whoever takes it next must not wait for a reply that has been read.
        """
        channel = self._channel
        finished: list[Slot] = []
        if channel.read(timeout, None if bell is None else bell.fileno()):
            self._pinged = None
            self._reads += 1
            try:
                while (envelope := channel.next()) is not None:
                    slot = self._take(envelope)
                    if slot is not None:
                        finished.append(slot)
            except BaseException:
                self._settle_all(finished, inline=False)  # what came before the bad bytes is good
                raise
        return finished

    def _take(self, envelope: Envelope) -> Slot | None:
        """The slot that waits for this reply, finished."""
        message = envelope.message
        if not isinstance(message, _REPLIES):
            self._take_news(envelope)
            return None
        if message.refs:
            self._execution.traffic.arriving(message.refs, self.peer)
        slot = self._pending.take(message.id)
        if slot is None:  # it comes too late, or answers a ping
            self._execution.discard(envelope)
            return None
        slot.envelope = envelope
        slot.finish()
        return slot

    def _take_news(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, NEWS):
            raise ProtocolError(f"a {type(message).__name__} where replies are expected")
        news = self._news.get(message.backward.id)
        if news is not None:  # otherwise it has been given up
            news.arrived.append(envelope)
            news.slot.finish()

    def _settle_all(self, finished: list[Slot], *, inline: bool) -> None:
        plain: list[tuple[Slot, Future[Any]]] = []
        for slot in finished:
            if slot.future is None:
                self._count_settled(slot)
            elif slot.future.has_callbacks:
                self._completions.add(partial(self._settle, slot, slot.future))
            elif inline:
                self._settle(slot, slot.future)
            else:
                plain.append((slot, slot.future))
        if plain:  # none of them waits for another
            self._completions.add(partial(self._settle_each, plain))

    def _settle_each(self, plain: list[tuple[Slot, Future[Any]]]) -> None:
        for slot, future in plain:
            self._settle(slot, future)

    def _fail(self, slot: Slot, error: BaseException | None, *, inline: bool = False) -> None:
        """Finish a slot without a reply."""
        slot.error = error
        slot.finish()
        self._settle_all([slot], inline=inline)

    def _settle(self, slot: Slot, future: Future[Any]) -> None:
        slot.future = None  # they refer to each other, and to tensors that are not to wait for the garbage collector
        try:
            value = self._open_reply(slot)
        except BaseException as error:  # belongs to who waits for the future
            future.settle(None, error)
        else:
            future.settle(value)
        self._count_settled(slot)

    def _open_reply(self, slot: Slot) -> Any:
        if slot.envelope is not None:
            return self._execution.open(slot.envelope, self.peer)
        error, slot.error = slot.error or ProtocolError("a request ended without a reply"), None
        try:
            raise error
        finally:
            del error  # which refers to this frame now

    def _count_settled(self, slot: Slot) -> None:
        if slot.is_call:
            with self._guard:
                self.calls_settled += 1

    def drain(self) -> bool:
        """Read what is there without waiting. False if another thread is reading."""
        if not self._reading.acquire(blocking=False):
            return False
        problem: Exception | None = None
        finished: list[Slot] = []
        try:
            while found := self._receive(0):
                finished += found
        except (ChannelClosed, ProtocolError) as error:
            problem = error
        finally:
            self._reading.release()
        self._settle_all(finished, inline=False)
        self._pass_on()
        if problem is not None:
            self.lose(problem)
        return True

    def attend(self, slot: Slot) -> None:
        """Something is to happen when the reply comes, and no thread waits for it."""
        self._urgent.add(slot.id)
        self.send_held()
        self._watch.attend(self)

    def is_urgent(self) -> bool:
        """Whether something happens as soon as one of the replies comes, though no thread waits for it."""
        while self._urgent:
            id = self._urgent.pop()
            if id in self._pending:
                self._urgent.add(id)
                return True
        return False

    def being_read(self) -> bool:
        return self._reading.locked()

    def next_deadline(self) -> float:
        with self._guard:
            return self._pending.next_deadline()

    def expire(self, now: float) -> None:
        """Fail the futures whose deadline has passed."""
        with self._guard:
            overdue = self._pending.expire(now)
        for slot in overdue:
            self._fail(slot, self._timeout_of(slot))

    def _time_out(self, slot: Slot) -> None:
        if self._pending.take(slot.id) is not None:
            self._fail(slot, self._timeout_of(slot))
        else:
            # Its reply has just been taken out; whoever did that is about to finish it.
            waiter = threading.Lock()
            waiter.acquire()
            slot.add_waiter(waiter)
            if not slot.done:
                waiter.acquire()

    def _timeout_of(self, slot: Slot) -> RpcTimeoutError:
        return RpcTimeoutError(
            f"RPC ran for more than set timeout: {slot.what} on worker {self.peer.name!r} has not answered; "
            "a longer one can be given as timeout=, 0 meaning none"
        )

    def check_alive(self) -> None:
        """Ping a silent peer; lose it if a ping has gone unanswered for too long.

        By the clock, and by how often there was a look at it: this process may have been stopped itself, or all of the
        machine, and then a single look says nothing.
        """
        if self._patience == math.inf:
            return
        now = time.monotonic()
        self._unheard += 1
        if self._pinged is None:
            self._pinged, self._unheard = now, 0
            if self._sending.acquire(blocking=False):
                try:
                    if not self._unflushed:
                        self._unflushed = not self._channel.write(encode(Ping(0)))
                except ChannelClosed:
                    pass  # the next read says so too
                finally:
                    self._sending.release()
        elif now - self._pinged >= self._patience * 0.75 and self._unheard > 1:
            self.lose(
                WorkerUnresponsiveError(
                    f"worker {self.peer.name!r} has not answered for {self._patience:g} s: it is stopped, hangs "
                    "in code that holds the interpreter, or the network is gone (option unresponsive_after)",
                    self.peer.name,
                )
            )

    def lose(self, reason: Exception) -> None:
        """Close the connection and fail everything that waits for it."""
        with self._guard:
            if self.lost is not None:
                return
            if isinstance(reason, WorkerLostError):
                self.lost = reason
            else:
                self.lost = WorkerLostError(f"worker {self.peer.name!r} is lost: {reason}", self.peer.name)
            slots = self._pending.drain()
            bell, self._bell = self._bell, None
        self._channel.shutdown()
        self._watch.remove(self)
        # Both locks are free soon: the channel is shut, so nobody waits on it.
        with self._reading, self._sending:
            self._channel.close()
            self._held = []
        if bell is not None:
            bell.close()
        for news in list(self._news.values()):
            news.slot.finish()
        for slot in slots:
            self._fail(slot, self._loss())
        self._pass_on()
        self._on_lost(self, self.lost)

    def say_goodbye(self) -> None:
        """Tell the peer that this worker leaves, if that can be done without waiting."""
        if self._sending.acquire(blocking=False):
            try:
                if not self._unflushed:
                    self._unflushed = not self._channel.write(encode(Goodbye()))
            except ChannelClosed:
                pass  # it is gone already
            finally:
                self._sending.release()

    def abandon(self) -> None:
        """In a forked child: close the descriptors, and leave the connection to the parent."""
        self._channel.close()
        if self._bell is not None:
            self._bell.close()

    def _loss(self) -> WorkerLostError | None:
        """The loss as an exception of its own: one that several threads raise collects all their frames."""
        lost = self.lost
        return None if lost is None else type(lost)(str(lost), lost.worker)


def _sleep_on(slot: Slot, timeout: float) -> None:
    """Sleep until the slot is done, or for so many seconds."""
    waiter = threading.Lock()
    waiter.acquire()
    slot.add_waiter(waiter)
    if not slot.done:
        waiter.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
    slot.remove_waiter(waiter)
