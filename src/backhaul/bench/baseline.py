"""A baseline: a file that says how many times faster than torch each figure was, to compare later runs with.

Only ratios: they carry over to other machines, and to other days, better than times do. Not every
figure is included: `Figure.steady` says which are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backhaul.bench.rows import SPEED, Row

MOST_LOST = 0.25
"""The share of a ratio that may be lost. Runs of few rounds can differ by more, so a loss is measured twice."""


class BadBaseline(Exception):
    """The file is missing, or `write` did not write it."""


class Loss(NamedTuple):
    """A figure that has become slower relative to torch."""

    work: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.work}: {self.now:.2f}x, was {self.before:.2f}x ({self.now / self.before - 1:+.0%})"


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Figure -> how many times longer torch takes, for figures that can be compared between runs."""
    found = {row.figure.name: row.speed for row in rows if row.figure.steady}
    return {name: ratio.median for name, ratio in found.items() if ratio is not None}


def losses(now: Mapping[str, float], before: Mapping[str, float]) -> list[Loss]:
    """The figures in both that have lost too much."""
    both = (Loss(work, before[work], ratio) for work, ratio in now.items() if work in before)
    return [loss for loss in both if loss.now < loss.before * (1 - MOST_LOST)]


def gone(before: Mapping[str, float], figures: Collection[str]) -> list[str]:
    """Figures of the baseline that no benchmark measures any more. Nobody would notice if they became slower."""
    return [work for work in before if work not in figures]


def write(path: Path, rows: Sequence[Row], host: Mapping[str, Any]) -> None:
    rounded = {work: round(ratio, 3) for work, ratio in ratios(rows).items()}
    path.write_text(json.dumps({"host": host, "/".join(SPEED): rounded}, indent=1) + "\n")


def read(path: Path) -> dict[str, float]:
    """The ratios of a file. Raises `BadBaseline`."""
    try:
        found = json.loads(path.read_text())["/".join(SPEED)]
        return {str(work): float(ratio) for work, ratio in found.items()}
    except OSError as error:
        raise BadBaseline(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBaseline(
            f"{path} is not a baseline; write one with: backhaul bench --write-baseline {path}"
        ) from error
