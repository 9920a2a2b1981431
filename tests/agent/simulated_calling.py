"""A model of `agent.calling` in a `link_simulation`: the same steps in the same order, over a simulated channel.

Every call into the state is one atomic step, and so is every look at something that other threads change. Names are
those of `Calling`, `Vigil` and `Line`, so that model and driver can be laid side by side.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from simulated_channel import SMALL, Channel, Frame, Future, Joined, News
from simulated_threads import Mutex, Steps, Until
from simulated_waiting import Sleeper, keep_vigil

from backhaul.agent.link_state import LinkState
from backhaul.agent.outbox import Departure, Outbox
from backhaul.agent.pending import Slot
from backhaul.errors import RpcTimeoutError
from backhaul.transport.base import ChannelClosed

if TYPE_CHECKING:
    from link_simulation import Simulation


class Calling(Channel):
    """A line to a peer. Each step notes what the simulation checks."""

    looks_once = False
    """A planted mistake: a vigil that finds the role taken, and then free, does not try again."""

    def __init__(self, world: Simulation, name: str, patience: float, state: LinkState[Sleeper]) -> None:
        super().__init__(world, name)
        self.watch = world.watch
        self.patience = patience
        self.state = state
        self.lost = False
        self.sending = Mutex()
        self.unflushed = False
        self.dead = False
        self.departures: Outbox[Sleeper] = world.outbox(3 * SMALL)
        self.urgent: set[int] = set()
        self.ids = itertools.count(1)
        self.looks: list[float] | None = None  # since the ping
        self.watch.add(self)

    @property
    def futures(self) -> int:
        return self.state.futures

    # Requests.

    def new_slot(self, deadline: float, *, is_call: bool = True, future: Future | None = None) -> Slot:
        slot = Slot(next(self.ids), "call", deadline, is_call, future)  # type: ignore[arg-type]
        self.world.note("makes", self, slot.id, "" if deadline == math.inf else f"until {deadline:.2f}")
        return slot

    def ask(self, frame_size: int, deadline: float) -> Steps:
        slot = self.new_slot(deadline)
        try:
            yield from self.request(slot, frame_size, watched=False)
        except RpcTimeoutError:
            return
        if not slot.done:
            yield from self.wait(slot)
        self.world.judge_reply(self, slot)

    def ask_async(self, frame_size: int, deadline: float, *, is_call: bool = True) -> Steps:
        """Returns the slot and the future."""
        future = Future()
        slot = self.new_slot(deadline, is_call=is_call, future=future)
        try:
            yield from self.request(slot, frame_size, watched=True)
        except RpcTimeoutError:
            return None
        yield from self.watch.look_after(self, deadline)
        return slot, future

    def wait_for(self, slot: Slot, future: Future) -> Steps:
        """`Future.wait`."""
        if not future.settled:
            yield from self.wait(slot)
            yield Until(lambda: future.settled)
        self.world.judge_reply(self, slot)

    def request(self, slot: Slot, size: int, *, watched: bool) -> Steps:
        frame = Frame(slot.id, size, may_be_ignored=slot.deadline != math.inf)
        opened = self.state.open(slot, watched=watched)
        self.world.judge_open(self, slot, opened)
        yield
        try:
            if not opened:
                raise ChannelClosed
            if not (watched and slot.is_call and (yield from self.hold(frame))):
                yield from self.send(frame, slot.deadline, is_call=slot.is_call)
        except ChannelClosed:
            yield from self.lose()
            if not opened:
                yield from self.fail(slot, inline=True)
        except RpcTimeoutError:
            if self.state.give_up(slot):
                self.world.judge_end(self, slot, "not sent")
                yield
                self.count_settled(slot)
            raise

    # Sending.

    def hold(self, frame: Frame) -> Steps:
        if not self.state.may_hold(frame.size):
            return False
        yield
        yield from self.sending.acquire()
        if self.unflushed or not self.state.may_hold(frame.size):
            self.sending.release()
            return False
        self.state.calls_sent += 1
        first = self.state.hold(frame)  # type: ignore[arg-type]
        self.ordered.append(frame)
        self.world.judge_held(self)
        self.sending.release()
        yield
        if first:
            self.watch.holding.add(self)
        return True

    def send_held(self) -> Steps:
        if not self.state.holds:
            return True
        yield
        yield from self.sending.acquire()
        duty = False
        try:
            held = self.take_held()
            yield
            if held is not None:
                self.put(held, waits=False)
            duty = self.unflushed and not self.dead and self.departures.take_duty()
        except ChannelClosed:
            pass
        finally:
            self.sending.release()
        if duty:
            self.pump_elsewhere()
        return True

    def take_held(self) -> Joined | None:
        return Joined(tuple(self.state.take_held())) if self.state.holds else None  # type: ignore[arg-type]

    def send(self, frame: Frame | None, deadline: float, *, is_call: bool) -> Steps:
        yield from self.sending.acquire()
        departure: Departure | None = None
        try:
            if is_call:
                self.state.calls_sent += 1
            if frame is not None:
                self.ordered.append(frame)
            yield
            held = self.take_held()
            yield
            if held is not None:
                departure = self.put(held, waits=False)
            if frame is not None:
                departure = self.put(frame, waits=True)
            duty = departure is not None and self.departures.take_duty()
        finally:
            self.sending.release()
        yield
        if departure is None:
            return
        try:
            yield from self.see_off(departure, duty, deadline)
        except RpcTimeoutError:
            if is_call and not departure.begun:
                self.state.calls_sent -= 1
                self.state.calls_settled -= 1
            raise

    def put(self, frame: Frame | Joined, *, waits: bool) -> Departure | None:
        """Has ``sending``."""
        if self.unflushed:
            if self.dead:
                raise ChannelClosed
            departure = Departure(frame, passes=not frame.keep)  # type: ignore[arg-type]
            if self.departures.add(departure) and waits:
                departure.waiter = Sleeper()
            return departure
        if self.write(frame):
            return None
        self.unflushed = True
        departure = Departure(frame, passes=False)  # type: ignore[arg-type]
        if frame.keep and waits:
            departure.waiter = Sleeper()
        self.departures.begin(departure)
        return departure

    def see_off(self, departure: Departure, duty: bool, deadline: float) -> Steps:
        if departure.waiter is None:
            if duty:
                self.pump_elsewhere()
            return
        departure.pumps = departure.pumps or duty
        while not departure.left:
            yield
            if departure.lost:
                raise ChannelClosed
            if departure.pumps:
                in_time = yield from self.pump(departure, deadline)
            else:
                waiter = departure.waiter
                yield Until(lambda: waiter.woken, deadline)  # noqa: B023
                in_time = waiter.woken
                waiter.woken = False
            if not in_time:
                yield from self.give_up_departure(departure)

    def give_up_departure(self, departure: Departure) -> Steps:
        yield from self.sending.acquire()
        if departure.left or departure.lost:
            self.sending.release()
            return
        if self.departures.give_up(departure):
            self.world.judge_unsent(self, departure.frame)
        pumps, departure.pumps = departure.pumps, False
        self.sending.release()
        yield
        if pumps:
            yield from self.stop_pumping(departure)
        raise RpcTimeoutError

    def pump(self, departure: Departure | None, deadline: float) -> Steps:
        start = self.world.now
        try:
            while True:
                yield from self.sending.acquire()
                left: list[Departure] = []
                try:
                    if self.dead:
                        raise ChannelClosed
                    done = self.advance(left)
                finally:
                    self.sending.release()
                    self.tell(left)
                yield
                if done:
                    return True
                if departure is not None and departure.left:
                    yield from self.stop_pumping(departure)
                    return True
                if self.world.now >= deadline:
                    return False
                if self.world.now - start > self.patience:
                    raise ChannelClosed
                reads = yield from self.read_meanwhile()
                yield Until(
                    lambda reads=reads: self.room or self.shut or (reads and self.readable),
                    min(deadline, self.world.now + 0.1),
                )
        except ChannelClosed:
            yield from self.end_sending()
            raise
        finally:
            yield from self.watch.take_over()

    def advance(self, left: list[Departure]) -> bool:
        """Has ``sending``."""
        out = not self.between and self.flush()
        slices = 0
        while True:
            if out:
                if (done := self.departures.left()) is not None:
                    left.append(done)
                following = self.departures.next()
                if following is None:
                    self.unflushed = self.departures.pumped = False
                    return True
                out = self.write(following.frame)  # type: ignore[arg-type]
            elif self.between:
                if (done := self.departures.passed()) is not None:
                    left.append(done)
                if (small := self.departures.next_small()) is not None:
                    self.interject(small.frame)  # type: ignore[arg-type]
                elif slices == 2:
                    return False
                else:
                    slices += 1
                    out = self.flush()
            else:
                return False

    def stop_pumping(self, departure: Departure) -> Steps:
        yield from self.sending.acquire()
        if not self.unflushed or self.dead:
            self.sending.release()
            return
        successor = self.departures.hand_over(departure)
        waiter = None if successor is None else successor.waiter
        self.sending.release()
        yield
        if waiter is None:
            self.pump_elsewhere()
        else:
            waiter.wake()

    def pump_elsewhere(self) -> None:
        self.world.start(f"pumps {self}", self.pump_alone())

    def pump_alone(self) -> Steps:
        try:
            yield from self.pump(None, math.inf)
        except ChannelClosed:
            yield from self.lose()

    def end_sending(self) -> Steps:
        yield from self.sending.acquire()
        self.dead = True
        self.unflushed = True
        lost = self.departures.lose()
        self.sending.release()
        yield
        self.tell(lost)

    def tell(self, departures: list[Departure]) -> None:
        for departure in departures:
            if departure.waiter is not None:
                departure.waiter.wake()

    def try_send_ping(self) -> Steps:
        yield from self.sending.acquire()
        duty = False
        try:
            departure = self.put(Frame(0, 1), waits=False)
            duty = departure is not None and self.departures.take_duty()
        except ChannelClosed:
            pass
        finally:
            self.sending.release()
        yield
        if duty:
            self.pump_elsewhere()

    # Waiting.

    def wait(self, slot: Slot) -> Steps:
        if self.state.holds:
            yield
            try:
                yield from self.send(None, slot.deadline, is_call=False)
            except ChannelClosed:
                yield from self.lose()
            except RpcTimeoutError:
                pass
        unread = self.watch.unread
        while not slot.done:
            yield
            now = self.world.now
            timeout = min(slot.deadline - now, self.patience / 4)
            reads = self.state.reads
            if timeout <= 0:
                yield from self.time_out(slot)
            elif unread and (others := (yield from self.other_readable())):
                yield from self.wait_for_all(slot, others, timeout)
            elif token := (yield from self.begin_reading_for(slot)):
                yield
                yield from self.finish_reading(token, timeout)
            else:
                yield from self.sleep(slot, timeout)
            if not slot.done and self.state.reads == reads and self.world.now - now >= self.patience / 4:
                yield
                yield from self.check_alive()
        if unread:
            yield from self.watch.take_over()

    def sleep(self, slot: Slot, timeout: float) -> Steps:
        waiter = Sleeper()
        yield
        sleeps = self.state.wait(slot, waiter)
        yield
        if not sleeps:
            return
        self.world.note("sleeps for", self, slot.id)
        yield Until(lambda: waiter.woken, self.world.now + timeout, beside=(self, slot))
        other = self.state.stop_waiting(slot, waiter)
        yield
        if other is not None:
            other.wake()

    def other_readable(self) -> Steps:
        others = []
        for line in sorted(self.watch.unread, key=str):
            if not line.futures:
                yield from self.watch.forget_read(line)
            elif line is not self:
                others.append(line)
        return others

    def wait_for_all(self, slot: Slot, others: list[Calling], timeout: float) -> Steps:
        vigil = Sleeper()
        self.state.watch(slot, vigil)
        yield
        yield from keep_vigil(vigil, [self, *others], lambda: slot.done, self.world.now + timeout, (self, slot))
        self.state.stop_watching(slot, vigil)
        yield

    # Reading.

    def begin_reading_for(self, slot: Slot) -> Steps:
        yield from ()
        return self.begin_reading() if slot.id in self.state else 0

    def begin_reading(self) -> int:
        token = self.state.read()
        if token:
            self.world.judge_reading(self, token)
        return token

    def finish_reading(self, token: int, timeout: float, *, inline: bool = True) -> Steps:
        slots: list[Slot] = []
        news: list[News] = []
        problem = False
        try:
            if not self.lost:
                yield from self.receive(timeout, slots, news)
        except ChannelClosed:
            problem = True
        yield
        if (yield from self.stop_reading(token)):
            yield from self.close()
        yield from self.hand_out(slots, news, inline=inline)
        if problem:
            yield from self.lose()

    def stop_reading(self, token: int) -> Steps:
        self.readers.discard(token)
        following = self.state.stop_reading(token)
        closes = self.state.must_close()
        yield
        if following is not None:
            following.wake()
            yield
        return closes

    def end_vigil(self, token: int, *, comes: bool) -> Steps:
        if comes:
            yield from self.finish_reading(token, 0)
        elif (yield from self.stop_reading(token)):
            yield from self.close()

    def receive(self, timeout: float, slots: list[Slot], news: list[News]) -> Steps:
        if timeout:
            yield Until(lambda: self.readable, self.world.now + timeout)
        messages = self.world.read(self)
        yield
        if not messages:
            return
        self.state.heard()
        self.looks = None
        yield
        for message in messages:
            if isinstance(message, News):
                news.append(message)
                continue
            slot = self.state.answered(message.id, message)  # type: ignore[arg-type]
            if slot is None:
                yield
                continue
            self.world.judge_end(self, slot, "answered")
            yield
            for waiter in slot.waiters:
                waiter.wake()
                yield
            if slot.future is not None:
                slots.append(slot)

    def drain(self) -> Steps:
        while token := self.begin_reading():
            yield
            reads = self.state.reads
            yield from self.finish_reading(token, 0, inline=False)
            if self.state.reads == reads:
                return True
        yield
        return self.lost

    def read_meanwhile(self) -> Steps:
        token = self.begin_reading()
        yield
        if not token:
            return False
        slots: list[Slot] = []
        news: list[News] = []
        try:
            yield from self.receive(0, slots, news)
        finally:
            if (yield from self.stop_reading(token)):
                yield from self.close()
            yield from self.hand_out(slots, news, inline=False)
        return True

    # What becomes of replies.

    def hand_out(self, slots: list[Slot], news: list[News], *, inline: bool) -> Steps:
        for slot in slots:
            future: Any = slot.future
            if future is None:
                self.count_settled(slot)
                yield
            elif inline and not future.has_callbacks:
                yield from self.settle(slot, future)
            else:
                self.world.start(f"settles {self}.{slot.id}", self.settle(slot, future))
        for message in news:
            yield
            if not message.listener.over:
                message.listener.arrived += 1
                yield
                message.listener.vigil.wake()

    def settle(self, slot: Slot, future: Future) -> Steps:
        yield
        slot.future = None
        self.world.judge_settled(self, slot, future)
        future.settled = True
        yield
        self.count_settled(slot)

    def count_settled(self, slot: Slot) -> None:
        if slot.is_call:
            self.state.calls_settled += 1

    def fail(self, slot: Slot, *, inline: bool = False) -> Steps:
        waiters = self.state.finish(slot, TimeoutError())
        self.world.judge_end(self, slot, "failed")
        yield
        for waiter in waiters:
            waiter.wake()
            yield
        yield from self.hand_out([slot], [], inline=inline)

    # For the watch thread.

    def attend(self, slot: Slot) -> Steps:
        self.urgent.add(slot.id)
        yield from self.send_held()
        self.watch.attend(self)
        yield

    def is_urgent(self) -> bool:
        self.urgent = {id for id in self.urgent if id in self.state}
        return bool(self.urgent)

    def expire(self) -> Steps:
        overdue = self.state.expire(self.world.now)
        yield
        for slot in overdue:
            yield from self.fail(slot)

    def time_out(self, slot: Slot) -> Steps:
        ended = self.state.give_up(slot)
        yield
        if ended:
            yield from self.fail(slot)
        else:
            yield from self.sleep(slot, math.inf)

    def check_alive(self) -> Steps:
        if self.patience == math.inf:
            return
        action = self.state.look(self.world.now, self.way())
        self.world.judge_look(self, action)
        yield
        if action == "ping":
            yield from self.try_send_ping()
        elif action == "lose":
            yield from self.lose()

    # The end.

    def lose(self) -> Steps:
        slots = self.state.lose()
        if slots is None:
            yield
            return
        self.world.note("loses", self)
        self.lost = True
        yield
        self.shut = True
        yield
        self.watch.remove(self)
        yield
        closes = self.state.close()
        yield
        if closes:
            yield from self.close()
        for slot in slots:
            yield from self.fail(slot)
        yield from self.world.tell_listeners(self)

    def close(self) -> Steps:
        yield from self.end_sending()
        yield from self.sending.acquire()
        self.world.judge_close(self)
        self.sending.release()
        yield
