"""A baseline: how many times faster than torch each figure was, in a file to hold later runs against.

Only ratios: they carry over to other machines, and to the same machine on another day, better than times do. Not every
figure is in it: `Figure.steady` says which are worth it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backhaul.bench.rows import SPEED, Row

MOST_LOST = 0.25
"""The share of a ratio that may be lost. Runs of few rounds can differ by more: hence the second look."""


class BadBaseline(Exception):
    """The file is missing, or is not one that `write` has written."""


class Loss(NamedTuple):
    """A figure that has become slower, as measured against torch."""

    work: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.work}: {self.now:.2f}x, was {self.before:.2f}x ({self.now / self.before - 1:+.0%})"


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Figure -> how many times longer torch takes, for those that can be held against another run."""
    found = {row.figure.name: row.speed for row in rows if row.figure.steady}
    return {name: ratio.median for name, ratio in found.items() if ratio is not None}


def losses(now: Mapping[str, float], before: Mapping[str, float]) -> list[Loss]:
    """What has lost too much, of the figures that both have."""
    both = (Loss(work, before[work], ratio) for work, ratio in now.items() if work in before)
    return [loss for loss in both if loss.now < loss.before * (1 - MOST_LOST)]


def gone(before: Mapping[str, float], figures: Collection[str]) -> list[str]:
    """What the baseline has and no benchmark makes any more. Nobody would notice if that had become slower."""
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
