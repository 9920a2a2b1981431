"""Outbox: small frames pass large ones, and the calls of one thread still leave in their order."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from backhaul.agent import outbox
from backhaul.agent.outbox import Departure, Outbox

SMALL, IN_A_SEGMENT, LARGE = "small", "in a segment", "large"


class World:
    """Threads that send to one outbox, and a channel that takes what it gives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.outbox: Outbox[Any] = Outbox(10_000)
        self.made: dict[int, int] = defaultdict(int)  # calls by thread
        self.sent: list[tuple[int, int]] = []  # thread and number of each call, as they left
        self.passed = 0
        self.frames: dict[int, tuple[int, int]] = {}

    def send(self, thread: int, kind: str) -> None:
        """A call, or a reply for thread -1. A thread whose frame is waited for makes no other call meanwhile."""
        if any(each.waiter == thread for each in self.all()):
            return
        frame: Any = SimpleNamespace(keep=kind == LARGE, size=10)
        departure = Departure(frame, kind == SMALL, calls=thread >= 0)
        if thread >= 0:
            self.frames[id(departure)] = (thread, self.made[thread])
            self.made[thread] += 1
        if self.outbox.under_way is None:
            self.outbox.begin(departure)
            waits = kind == LARGE
        else:
            waits = self.outbox.add(departure)
        if waits and thread >= 0:
            departure.waiter = thread
        self.kept.append(departure)

    kept: list[Departure]

    def all(self) -> list[Departure]:
        return [each for each in self.kept if not each.left]

    def pump(self) -> None:
        box = self.outbox
        if self.random.random() < 0.5 and box.under_way is not None and box.next_small() is not None:
            self.passed += 1
            self.left(box.passed())
        elif box.under_way is not None:
            self.left(box.left())
            box.next()

    def left(self, departure: Departure | None) -> None:
        if departure is not None and id(departure) in self.frames:
            self.sent.append(self.frames[id(departure)])


def run(seed: int) -> World:
    world = World(seed)
    world.kept = []
    chance = world.random
    for _ in range(200):
        if chance.random() < 0.5:
            world.send(chance.randrange(-1, 3), chance.choice([SMALL, SMALL, IN_A_SEGMENT, LARGE]))
        else:
            world.pump()
    while world.outbox.under_way is not None:
        world.pump()
    return world


def in_order(world: World) -> bool:
    return all(
        [number for sender, number in world.sent if sender == thread] == list(range(count))
        for thread, count in world.made.items()
    )


@pytest.mark.parametrize("seed", range(100))
def test_the_calls_of_each_thread_leave_in_their_order(seed: int) -> None:
    assert in_order(run(seed))


def test_small_ones_do_pass() -> None:
    assert sum(run(seed).passed for seed in range(20)) > 100


def test_without_the_rule_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_may_be_followed", lambda departure: False)
    assert not all(in_order(run(seed)) for seed in range(20))
