"""A model of `agent.reading` and `agent.settling` in a `link_simulation`. See `simulated_calling`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from simulated_channel import Future, News
from simulated_line import Line
from simulated_threads import Steps, Until
from simulated_waiting import Sleeper

from backhaul.agent.link_state import LinkState
from backhaul.agent.pending import Slot
from backhaul.transport.base import ChannelClosed

if TYPE_CHECKING:
    from link_simulation import Simulation


class Reading(Line):
    """The reader role, what becomes of replies, and the end of the line."""

    looks_once = False
    """A planted mistake: a vigil that finds the role taken, and then free, does not try again."""

    def __init__(self, world: Simulation, name: str, patience: float, state: LinkState[Sleeper]) -> None:
        super().__init__(world, name, patience)
        self.state = state
        self.lost = False
        self.urgent: set[int] = set()
        self.looks: list[float] | None = None  # since the ping

    @property
    def futures(self) -> int:
        return self.state.futures

    def send_held(self) -> Steps:
        raise NotImplementedError

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
