"""Table: the rounds of every figure, their medians and ratios, as text and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from workloads import Figure

import backhaul

RATIOS = (("torch", "backhaul"), ("backhaul", "ping-pong"))
"""How many times longer the first takes than the second."""

STALL_SECONDS = 3.0
"""Longer than any system takes for a repetition, so something hung."""

_PLAIN_WIDTH = 200  # wide enough for every row on one line


class Spread(NamedTuple):
    """The median of the rounds, and the quartiles, between which half of them lie."""

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
    """One figure: for each system that has it, the number of each round; or a note why it has none."""

    figure: Figure
    rounds: Mapping[str, list[float]]
    notes: Mapping[str, str]

    def spread(self, system: str) -> Spread | None:
        rounds = self.rounds.get(system)
        return Spread.of(rounds) if rounds else None

    def ratio(self, over: str, under: str) -> Spread | None:
        """Of the rounds, pair by pair: what disturbs a round disturbs both."""
        above, below = self.rounds.get(over), self.rounds.get(under)
        if not above or not below:
            return None
        return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def write(rows: Sequence[Row], stalls: Sequence[Stall], systems: Sequence[str], file: TextIO) -> None:
    """Print the table, ruled on a terminal and plainly aligned elsewhere, and what stalled."""
    terminal = file.isatty()
    console = Console(file=file, width=None if terminal else _PLAIN_WIDTH, highlight=False)
    table = RichTable(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    table.add_column("work", no_wrap=True)
    for heading in (*systems, *(f"{over}/{under}" for over, under in RATIOS)):
        table.add_column(heading, justify="right", no_wrap=not terminal)
    for row in rows:
        times = (row.notes.get(system) or _text(row.spread(system), row.figure) for system in systems)
        ratios = (_ratio_text(row.ratio(over, under)) for over, under in RATIOS)
        table.add_row(row.figure.name, *times, *ratios)
    console.print(table)
    for stall in stalls:
        console.print(f"stalled: {stall.system}, {stall.work}: {stall.seconds:.1f} s for one repetition")


def as_json(rows: Sequence[Row], stalls: Sequence[Stall], systems: Sequence[str], load: float) -> dict[str, Any]:
    """The table as plain data: times in seconds per call under "seconds", a share under "share"."""
    return {
        "host": {
            "cpus": os.cpu_count(),
            "load_before": load,
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backhaul": backhaul.__version__,
        },
        "rows": [
            {
                "work": row.figure.name,
                "share" if row.figure.unit == "share" else "seconds": {
                    system: {**spread._asdict(), "rounds": list(row.rounds[system])}
                    for system in systems
                    if (spread := row.spread(system)) is not None
                },
                "notes": dict(row.notes),
                "ratios": {
                    f"{over}/{under}": ratio._asdict()
                    for over, under in RATIOS
                    if (ratio := row.ratio(over, under)) is not None
                },
            }
            for row in rows
        ],
        "stalls": [stall._asdict() for stall in stalls],
    }


def _text(spread: Spread | None, figure: Figure) -> str:
    if spread is None:
        return "-"
    if figure.unit == "share":
        median, low, high = (_digits(100 * share) for share in spread)
        return f"{median} % ({low}..{high})"
    if figure.unit == "calls per second":
        return f"{1 / spread.median:,.0f}/s ({1 / spread.high:,.0f}..{1 / spread.low:,.0f})"
    scale, unit = (1e3, "ms") if spread.median >= 1e-3 else (1e6, "us")
    median, low, high = (_digits(seconds * scale) for seconds in spread)
    return f"{median} {unit} ({low}..{high})"


def _ratio_text(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    median, low, high = map(_digits, spread)
    return f"{median}x ({low}..{high})"


def _digits(number: float) -> str:
    """About three digits: 0.42, 4.21, 42.1, 421."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"
