"""Clocks: how far a worker's clock is from the profiling worker's clock, and how certain that is.

A round trip asks for the time of the other clock, which is read between the question and the answer. The offset is the
difference to the middle of the round trip. The true moment may be anywhere inside, so the error is half of the round
trip. The shortest of several round trips has the smallest error. Workers of one host have one clock: their offset is 0,
unless the measurement contradicts that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec


class Alignment(msgspec.Struct, frozen=True):
    """All in nanoseconds. ``offset`` is how far the other clock is ahead, correct to within ``error``."""

    offset: int
    error: int
    measured_offset: int
    measured_error: int
    rounds: int
    method: str

    def to_home(self, at: int) -> int:
        """A time of the other clock, converted to the clock of the profiling worker."""
        return at - self.offset


HOME = Alignment(0, 0, 0, 0, 0, "this worker's own clock")


class RoundTrip(msgspec.Struct, frozen=True, gc=False):
    asked: int
    there: int
    answered: int

    @property
    def delay(self) -> int:
        return self.answered - self.asked


def align(trips: Iterable[RoundTrip], *, same_host: bool) -> Alignment:
    """The alignment computed from these round trips."""
    found = list(trips)
    best = min(found, key=lambda trip: trip.delay)
    error = (best.delay + 1) // 2
    offset = best.there - (best.asked + best.answered) // 2
    if same_host and abs(offset) <= error:
        return Alignment(0, 0, offset, error, len(found), "one host has one clock")
    return Alignment(offset, error, offset, error, len(found), "round trips")


def trips(ask: Callable[[], int], rounds: int) -> list[RoundTrip]:
    """Ask for the other clock's time ``rounds`` times."""
    found = []
    for _ in range(rounds):
        asked = time.perf_counter_ns()
        there = ask()
        found.append(RoundTrip(asked, there, time.perf_counter_ns()))
    return found
