"""A model of `agent.line` in a `link_simulation`: sending and pumping over a simulated channel.

See `simulated_calling`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from simulated_channel import SMALL, Channel, Frame, Joined
from simulated_threads import Mutex, Steps, Until
from simulated_waiting import Sleeper

from backhaul.agent.outbox import Departure, Outbox
from backhaul.errors import RpcTimeoutError
from backhaul.transport.base import ChannelClosed

if TYPE_CHECKING:
    from link_simulation import Simulation


class Line(Channel):
    """The sending side of a line. A call that loses the line is a step of the layer above."""

    def __init__(self, world: Simulation, name: str, patience: float) -> None:
        super().__init__(world, name)
        self.watch = world.watch
        self.patience = patience
        self.sending = Mutex()
        self.unflushed = False
        self.dead = False
        self.departures: Outbox[Sleeper] = world.outbox(3 * SMALL)

    def read_meanwhile(self) -> Steps:
        raise NotImplementedError

    def lose(self) -> Steps:
        raise NotImplementedError

    def put(self, frame: Frame | Joined, *, waits: bool) -> Departure | None:
        """Has ``sending``."""
        if self.unflushed:
            if self.dead:
                raise ChannelClosed
            departure = Departure(frame, passes=not frame.holds)  # type: ignore[arg-type]
            if self.departures.add(departure) and waits:
                departure.waiter = Sleeper()
            return departure
        if self.write(frame):
            return None
        self.unflushed = True
        departure = Departure(frame, passes=False)  # type: ignore[arg-type]
        if frame.holds and waits:
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

    def close(self) -> Steps:
        yield from self.end_sending()
        yield from self.sending.acquire()
        self.world.judge_close(self)
        self.sending.release()
        yield
