"""A model of `agent.calling` in a `link_simulation`: the same steps in the same order, over a simulated channel.

Every call into the state is one atomic step, and so is every look at something that other threads change. Names are
those of `Calling`, `Reading`, `Vigil` and `Line`, so that model and driver can be laid side by side.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from simulated_channel import Frame, Future, Joined
from simulated_reading import Reading
from simulated_threads import Steps, Until
from simulated_waiting import Sleeper, keep_vigil

from backhaul.agent.link_state import LinkState
from backhaul.agent.outbox import Departure
from backhaul.agent.pending import Slot
from backhaul.errors import RpcTimeoutError
from backhaul.transport.base import ChannelClosed

if TYPE_CHECKING:
    from link_simulation import Simulation


class Calling(Reading):
    """A line to a peer. Each step notes what the simulation checks."""

    def __init__(self, world: Simulation, name: str, patience: float, state: LinkState[Sleeper]) -> None:
        super().__init__(world, name, patience, state)
        self.ids = itertools.count(1)
        self.watch.add(self)

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

    def time_out(self, slot: Slot) -> Steps:
        ended = self.state.give_up(slot)
        yield
        if ended:
            yield from self.fail(slot)
        else:
            yield from self.sleep(slot, math.inf)

    def other_readable(self) -> Steps:
        others = []
        for line in sorted(self.watch.unread, key=str):
            if not line.futures:
                yield from self.watch.forget_read(line)
            elif line is not self:
                others.append(line)
        return others

    def wait_for_all(self, slot: Slot, others: list[Reading], timeout: float) -> Steps:
        vigil = Sleeper()
        self.state.watch(slot, vigil)
        yield
        yield from keep_vigil(vigil, [self, *others], lambda: slot.done, self.world.now + timeout, (self, slot))
        self.state.stop_watching(slot, vigil)
        yield

    def begin_reading_for(self, slot: Slot) -> Steps:
        yield from ()
        return self.begin_reading() if slot.id in self.state else 0
