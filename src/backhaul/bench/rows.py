"""Rows: the numbers of every round, figure by figure; their medians, spreads and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backhaul.bench.ports import BACKHAUL, BACKHAUL_TLS, MEMCPY, PING_PONG, SSL, TCP, TORCH
from backhaul.bench.workloads import Figure

SPEED = (TORCH, BACKHAUL)
RATIOS = {
    BACKHAUL: (SPEED, (BACKHAUL, PING_PONG), (BACKHAUL, MEMCPY)),
    BACKHAUL_TLS: ((TORCH, BACKHAUL_TLS), (SSL, BACKHAUL_TLS), (BACKHAUL_TLS, TCP), (BACKHAUL_TLS, BACKHAUL)),
}
"""For rows about the key: how many times longer the first takes than the second."""

STALL_SECONDS = 3.0
"""Longer than any system takes for a repetition: something hung."""


class Spread(NamedTuple):
    """The median of the rounds, and the quartiles, between which half of the rounds lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Spread:
        if len(rounds) == 1:
            return cls(rounds[0], rounds[0], rounds[0])
        low, median, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return cls(median, low, high)


class Stall(NamedTuple):
    """A repetition, perhaps of a warm-up, that took longer than `STALL_SECONDS`."""

    system: str
    work: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One figure: the number of each round, for each system that has it; or a note why a system has none."""

    figure: Figure
    rounds: dict[str, list[float]]
    notes: dict[str, str] = field(default_factory=dict)

    def spread(self, system: str) -> Spread | None:
        rounds = self.rounds.get(system)
        return Spread.of(rounds) if rounds else None

    def give_up(self, system: str, note: str) -> None:
        """Put a note in place of a system's numbers."""
        self.rounds.pop(system, None)
        self.notes[system] = note

    @property
    def speed(self) -> Spread | None:
        """How many times longer torch takes than the system of this row."""
        return self.ratio(TORCH, self.figure.ours)

    def ratio(self, over: str, under: str) -> Spread | None:
        """The ratio of the rounds, pair by pair: a disturbance affects both. One system may have fewer: it failed."""
        above, below = self.rounds.get(over), self.rounds.get(under)
        ratios = [a / b for a, b in zip(above or (), below or (), strict=False) if b]  # idle workers may use nothing
        return Spread.of(ratios) if ratios else None
