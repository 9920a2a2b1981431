"""A model of `agent.watch` in a `link_simulation`: its sets of lines, its ticks, and what it does with an event."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_threads import Steps, Until

if TYPE_CHECKING:
    from simulated_reading import Reading

TICK = 0.01


class Watch:
    """Names are those of `watch.Watch`. A line is armed for replies, for a hang-up only, or not at all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lines: list[Reading] = []
        self.armed: set[Reading] = set()
        self.unread: set[Reading] = set()
        self.soon: set[Reading] = set()
        self.watched: set[Reading] = set()
        self.holding: set[Reading] = set()
        self.deadline = math.inf
        self.check_at = math.inf
        self.ticked = 0.0

    def add(self, line: Reading) -> None:
        self.lines.append(line)
        self.armed.add(line)

    def remove(self, line: Reading) -> None:
        for lines in (self.soon, self.watched, self.unread, self.armed):
            lines.discard(line)
        if line in self.lines:
            self.lines.remove(line)

    # For other threads.

    def look_after(self, line: Reading, deadline: float) -> Steps:
        self.unread.add(line)
        yield
        if line not in self.watched and line not in self.soon:
            yield
            self.soon.add(line)
        self.deadline = min(deadline, self.deadline)
        yield

    def take_over(self) -> Steps:
        for line in sorted(self.unread, key=str):
            if not line.futures:
                yield from self.forget_read(line)
            elif line not in self.watched and line not in self.soon:
                yield
                self.soon.add(line)

    def forget_read(self, line: Reading) -> Steps:
        yield
        self.unread.discard(line)
        yield
        if line.futures:
            self.unread.add(line)

    def attend(self, line: Reading) -> None:
        if line not in self.watched:
            self.arm(line, replies=True)
            self.check_soon(line)

    # Its own thread.

    def events(self) -> list[Reading]:
        return [
            line
            for line in self.lines
            if line in self.armed and (line.readable if line in self.watched else line.hangs_up)
        ]

    def steps(self) -> Steps:
        while True:
            if (self.soon or self.holding) and self.clock() >= self.ticked + TICK:
                self.ticked = self.clock()
                yield from self.tick()
            yield Until(lambda: bool(self.events()), self.next_time)
            for line in self.events():
                yield from self.handle(line)
            if self.clock() >= self.deadline:
                yield from self.expire()
            if self.clock() >= self.check_at:
                yield from self.check_peers()

    def next_time(self) -> float:
        tick = self.ticked + TICK if self.soon or self.holding else math.inf
        return min(self.deadline, self.check_at, tick)

    def tick(self) -> Steps:
        for line in sorted(self.soon, key=str):
            self.soon.discard(line)
            yield
            reading = line.state.being_read and not line.lost
            yield
            if not reading:
                yield from self.settle(line)
            self.check_soon(line)
        for line in sorted(self.holding, key=str):
            self.holding.discard(line)
            yield
            if not (yield from line.send_held()):
                self.holding.add(line)

    def check_soon(self, line: Reading) -> None:
        if self.check_at == math.inf and line.patience != math.inf:
            self.check_at = self.clock() + line.patience / 4

    def handle(self, line: Reading) -> Steps:
        self.armed.discard(line)
        yield
        drained = yield from line.drain()
        if line in self.lines:
            self.soon.add(line)
            self.watched.discard(line)
        yield
        if drained and (line.is_urgent() or not line.futures):
            yield from self.settle(line)

    def settle(self, line: Reading) -> Steps:
        replies = bool(line.futures)
        yield
        self.arm(line, replies=replies)
        yield
        if line.futures and line not in self.watched:
            self.arm(line, replies=True)

    def arm(self, line: Reading, *, replies: bool) -> None:
        if line not in self.lines:
            return
        self.armed.add(line)
        self.soon.discard(line)
        if replies:
            self.watched.add(line)
        else:
            self.watched.discard(line)

    def expire(self) -> Steps:
        self.deadline = math.inf
        lines = list(self.lines)
        yield
        for line in lines:
            yield from line.expire()
        for line in lines:
            self.deadline = min(self.deadline, line.state.next_deadline())
            yield

    def check_peers(self) -> Steps:
        self.check_at = math.inf
        for line in sorted(self.unread | self.watched, key=str):
            yield
            if line.futures:
                yield from line.check_alive()
                self.check_soon(line)
