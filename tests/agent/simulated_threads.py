"""Simulated threads: generators that yield between atomic steps, and a seeded scheduler that interleaves them.

A thread that yields nothing lets any other thread go first. A thread that yields an `Until` waits. While a thread can
run, time stands still, except for the jumps that the schedule makes on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from random import Random
from typing import Any, TypeAlias

_MOST_LINES = 150


class SimulationError(AssertionError):
    """A check has failed. The text says which, and how to replay the schedule."""


class Until:
    """What a thread waits for: something to become true, or a time."""

    __slots__ = ("at", "beside", "ready")

    def __init__(
        self,
        ready: Callable[[], bool],
        at: float | Callable[[], float] = math.inf,
        beside: Any = None,
    ) -> None:
        self.ready = ready
        self.at = at
        self.beside = beside
        """The line beside whose reader the thread sleeps, and the slot that it sleeps for."""

    @property
    def time(self) -> float:
        return self.at() if callable(self.at) else self.at


Steps: TypeAlias = Generator[Until | None, None, Any]


class Thread:
    """One simulated thread. Threads of the *world* do not belong to the worker: they act for peers and faults."""

    def __init__(self, name: str, steps: Steps, *, world: bool, daemon: bool) -> None:
        self.name = name
        self.steps = steps
        self.world = world
        self.daemon = daemon
        self.until: Until | None = None
        self.over = False

    def __repr__(self) -> str:
        return self.name


class Mutex:
    """A lock. Threads get it in any order."""

    def __init__(self) -> None:
        self.taken = False

    def try_acquire(self) -> bool:
        taken, self.taken = self.taken, True
        return not taken

    def acquire(self) -> Steps:
        while not self.try_acquire():
            yield Until(lambda: not self.taken)

    def release(self) -> None:
        self.taken = False


class Threads:
    """The scheduler, the clock and the record of what has happened."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.threads: list[Thread] = []
        self.running: Thread | None = None
        self.steps = 0
        self._events: list[str] = []
        self._chance = self.random.choice([0.1, 0.5, 1.0])
        self._priorities: dict[Thread, float] = {}

    def start(self, name: str, steps: Steps, *, world: bool = False, daemon: bool = False) -> Thread:
        thread = Thread(name, steps, world=world, daemon=daemon)
        self.threads.append(thread)
        self._priorities[thread] = self.random.random()
        return thread

    def note(self, *what: object) -> None:
        self._events.append(f"{self.now:7.2f} {self.running or 'world'!s:>12}  " + " ".join(map(str, what)))

    def story(self) -> list[str]:
        return self._events

    def failure(self, what: str) -> SimulationError:
        left_out = max(0, len(self._events) - _MOST_LINES)
        lines = "\n    ".join([what, f"({left_out} lines left out)", *self._events[left_out:]])
        return SimulationError(f"{lines}\nreplay: python tests/agent/link_simulation.py {self.seed}")

    def runnable(self) -> list[Thread]:
        found = []
        for thread in self.threads:
            until = thread.until
            if until is None or until.time <= self.now or until.ready():
                found.append(thread)
        return found

    def choose(self, runnable: list[Thread]) -> Thread:
        """At random, or by priorities that stay the same for a while: rare races need long delays of one thread."""
        if self.random.random() < self._chance:
            return self.random.choice(runnable)
        chosen = max(runnable, key=self._priorities.__getitem__)
        if self.random.random() < 0.05:
            self._priorities[chosen] = -self.random.random()
        return chosen

    def step(self, thread: Thread) -> None:
        self.running = thread
        self.steps += 1
        try:
            thread.until = next(thread.steps)
        except StopIteration:
            thread.over = True
            self.threads.remove(thread)
        finally:
            self.running = None

    def next_time(self) -> float:
        """The time at which the first waiting thread gives up."""
        return min((thread.until.time for thread in self.threads if thread.until is not None), default=math.inf)
