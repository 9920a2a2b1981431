"""Calling: the line that this worker has opened to a peer. Requests leave on it, and threads wait for their replies.

- A small call may be held back, so that several leave in one write (`link_state` decides).
- A waiting thread takes the reader role of the line if the role is free, and reads (`reading` has the theory).
- A thread that finds the role taken sleeps until it gets its reply or the role.
- A thread that waits while futures to other peers are outstanding reads those lines as well (`waiting.Vigil`).
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from backhaul.agent.activity import Description, Wait
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.link_state import MOST_HELD, SMALL
from backhaul.agent.observing import Resumes, Sent, Settled, Waits
from backhaul.agent.outbox import Departure
from backhaul.agent.pending import Slot
from backhaul.agent.reading import Reading
from backhaul.agent.waiting import Vigils, Waiter
from backhaul.errors import ProtocolError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.transport.awake import Ready, Rhythm, poll_awake
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, join

if TYPE_CHECKING:
    from backhaul.agent.completions import Completions
    from backhaul.agent.execution import Execution
    from backhaul.agent.serving import Serving
    from backhaul.agent.watch import Watch


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


class Calling(Reading):
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
        on_lost: Callable[[Line, WorkerLostError], None],
        explain: Callable[[WorkerInfo, WorkerLostError, Callable[[WorkerLostError], None]], None],
    ) -> None:
        super().__init__(
            peer,
            channel,
            execution=execution,
            serving=serving,
            completions=completions,
            watch=watch,
            unresponsive_after=unresponsive_after,
            deliver=deliver,
            on_lost=on_lost,
            explain=explain,
        )
        self._open_reply = self._settling.open  # bound here: each call needs it
        self._vigils = vigils
        self._beside: tuple[int, Callable[[Any], Ready]] | None = (
            None  # polls this line beside a lead; see _read_beside
        )
        self._beside_rhythm = Rhythm()
        watch.add(self)

    # Requests.

    def ask(self, id: int, frame: Frame, what: str, deadline: float, *, is_call: bool) -> Any:
        """Send a request and return the value of its reply, or raise. No other request may have the same ``id``."""
        slot = Slot(id, what, deadline, is_call, thread=get_ident())
        self._request(slot, frame, watched=False)
        if not slot.done:
            self.wait(slot)
        return self._settling.open_observed(slot) if self._observers else self._open_reply(slot)

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
                self._send(frame, slot.deadline, is_call=slot.is_call, stays=not watched)
        except (ChannelClosed, ProtocolError) as error:
            self.lose(error)
            if not opened:
                self._settling.fail(slot, self._loss(), inline=True)
        except BaseException as error:
            with self._lock:
                ended = self._state.give_up(slot)
            if ended:
                self._settling.count(slot)
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

    @property
    def retains(self) -> bool:
        return bool(self._state.holds) or self._unflushed

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

    def _send(self, frame: Frame | None, deadline: float, *, is_call: bool, stays: bool = False) -> None:
        """Send the held frames, and then ``frame`` if given.

        Waits if the frame refers to memory that may change before the frame has left, or if the outbox is full.
        ``stays``: see `_depart`.
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
                departure = self._depart(frame, waits=True, stays=stays)
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

    def _time_out(self, slot: Slot) -> None:
        with self._lock:
            ended = self._state.give_up(slot)
        if ended:
            self._settling.fail(slot, self._overdue(slot))
        else:
            self._sleep(slot, math.inf)  # another thread has taken the slot out and is about to finish it

    def _other_readable(self, unread: set[Reading]) -> list[Reading]:
        """The other lines whose outstanding futures may have no reader."""
        others: list[Reading] = []
        for line in list(unread):
            if not line.futures:
                self._watch.forget_read(line)
            elif line is not self:
                others.append(line)
        return others

    def _wait_for_all(self, slot: Slot, others: list[Reading], timeout: float) -> None:
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
