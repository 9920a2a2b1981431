"""A model of `agent.calling` in a `link_simulation`: the same steps in the same order, over a simulated channel.

Every call into the state is one atomic step, and so is every look at something that other threads change. Names are
those of `Calling`, `Vigil` and `Line`, so that model and driver can be laid side by side.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from simulated_channel import Channel, Frame, Future, News
from simulated_threads import Mutex, Steps, Until
from simulated_waiting import Sleeper, keep_vigil

from backhaul.agent.link_state import LinkState
from backhaul.agent.pending import Slot
from backhaul.errors import RpcTimeoutError
from backhaul.transport.base import ChannelClosed

if TYPE_CHECKING:
    from link_simulation import Simulation


class Calling(Channel):
    """A line to a peer. What the judge of the simulation wants to know is noted at each step."""

    looks_once = False
    """A mistake: a vigil that finds the role taken, and then free, does not try again."""

    def __init__(self, world: Simulation, name: str, patience: float, state: LinkState[Sleeper]) -> None:
        super().__init__(world, name)
        self.watch = world.watch
        self.patience = patience
        self.state = state
        self.lost = False
        self.sending = Mutex()
        self.unflushed = False
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
            self.world.judge_unsent(self, slot.id)
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
        self.ordered.append(frame.id)
        self.world.judge_held(self)
        self.sending.release()
        yield
        if first:
            self.watch.holding.add(self)
        return True

    def send_held(self) -> Steps:
        if not self.state.holds and not self.unflushed:
            return True
        yield
        if not self.sending.try_acquire():
            return False
        try:
            if self.unflushed:
                self.unflushed = not self.flush()
            if not self.unflushed and self.state.holds:
                yield
                held = self.state.take_held()
                yield
                self.unflushed = not self.write(held)
            return not self.unflushed
        except ChannelClosed:
            return True
        finally:
            self.sending.release()

    def send(self, frame: Frame | None, deadline: float, *, is_call: bool) -> Steps:
        yield from self.sending.acquire()
        try:
            if is_call:
                self.state.calls_sent += 1
            if frame is not None:
                self.ordered.append(frame.id)
            yield
            if self.unflushed:
                yield from self.push_out(deadline)
            frames: list[Any] = list(self.state.take_held()) if self.state.holds else []
            frames += [] if frame is None else [frame]
            yield
            if frames:
                self.unflushed = not self.write(frames)
            if self.unflushed:
                yield from self.push_out(deadline)
        finally:
            self.sending.release()

    def push_out(self, deadline: float) -> Steps:
        try:
            start = self.world.now
            while not self.flush():
                yield
                if self.world.now - start > self.patience:
                    raise ChannelClosed
                if self.world.now >= deadline:
                    self.watch.holding.add(self)
                    raise RpcTimeoutError
                reads = yield from self.read_meanwhile()
                yield Until(
                    lambda reads=reads: self.room or self.shut or (reads and self.readable),
                    min(deadline, self.world.now + 0.1),
                )
        finally:
            yield from self.watch.take_over()
        self.unflushed = False

    def try_send_ping(self) -> Steps:
        if self.sending.try_acquire():
            yield
            try:
                if not self.unflushed:
                    self.unflushed = not self.write([Frame(0, 1)])
            except ChannelClosed:
                pass
            finally:
                self.sending.release()

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
            elif slot.id in self.state and (token := self.begin_reading()):
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
                self.world.judge_close(self)
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
        action = self.state.look(self.world.now)
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
        yield from self.sending.acquire()
        self.world.judge_close(self)
        self.sending.release()
        yield
