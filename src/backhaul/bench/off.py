"""``backhaul bench --looking --off``: what it costs to be ready for lookers, with nothing switched on.

Backhaul as it is runs beside Backhaul without the places that ask whether somebody looks, or take notes (`bare`). The
difference is a percent or two of microseconds, so the comparison is made to see that little:

- A *pair* is one fresh group of each kind: a driver and two workers, three processes. Where the system places their
  memory differs from process to process, and is worth a percent by itself, so there are several pairs.
- All processes run on one processor. So the work of both ends counts in full, and no other processor's sleep and
  wake-up counts.
- The two groups of a pair take turns in short rounds: as it is, without, without, as it is; then the other way round. A
  round's ratio is that of the sums, in which a steady drift of the machine cancels.
- A pair's figure is the median of its rounds' ratios, the result the mean of the pairs' figures. Its interval comes
  from a bootstrap that draws pairs first, and then rounds within each.

Processor time, of all three processes together, stands beside wall time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from backhaul.bench import bare
from backhaul.bench.watched_work import WORKS

MOST = 0.02
"""What being ready may cost, as a share of what the work takes without."""

_VARIANTS = _SEEN, _BARE = ("seen", "bare")
_TURN_SECONDS = 0.05
_DRAWS = 2000
_CONFIDENCE = 0.95

Clock = Literal["wall", "processor"]
Pairs = Sequence[Sequence[float]]
"""The ratios of the rounds of each pair."""


class Turn(NamedTuple):
    """Seconds for one run of a work: by the clock on the wall, and of all processes together."""

    wall: float
    processor: float


class Estimate(NamedTuple):
    """How much more it takes, as a share, and between which bounds that is with a confidence of 95 %."""

    point: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """What can be said about the limit of 2 %."""
        if self.high < MOST:
            return f"under {MOST:.0%}"
        return f"over {MOST:.0%}" if self.low > MOST else "undecided"

    def __str__(self) -> str:
        return f"{self.point:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


def estimate(pairs: Pairs) -> Estimate:
    """From the ratios of the rounds of each pair. The same input gives the same estimate."""
    draw = random.Random(0)
    means = sorted(
        statistics.fmean(
            statistics.median(draw.choices(rounds, k=len(rounds))) for rounds in draw.choices(pairs, k=len(pairs))
        )
        for _ in range(_DRAWS)
    )
    tail = int(_DRAWS * (1 - _CONFIDENCE) / 2)
    point = statistics.fmean(statistics.median(rounds) for rounds in pairs)
    return Estimate(point - 1, means[tail] - 1, means[-1 - tail] - 1)


def ratio(turns: Sequence[tuple[str, Turn]], clock: Clock) -> float:
    """Of one round: the time as it is, by the time without."""
    seen, without = (sum(getattr(turn, clock) for who, turn in turns if who == how) for how in _VARIANTS)
    return float(seen / without)


def order(number: int) -> tuple[str, str, str, str]:
    """Whose turn it is in a round."""
    return (_SEEN, _BARE, _BARE, _SEEN) if number % 2 else (_BARE, _SEEN, _SEEN, _BARE)


def measure(pairs: int, rounds: int) -> None:
    """Compare, and print the table."""
    processor = max(os.sched_getaffinity(0))
    found: dict[tuple[str, Clock], list[list[float]]] = {}
    times: dict[tuple[str, str], list[float]] = {}
    places = 0
    for pair in range(pairs):
        for each in found.values():
            each.append([])
        with _groups(processor, first=pair % 2) as groups:
            places = groups[_BARE].places
            for number in range(rounds):
                for work in WORKS:
                    turns = [(how, groups[how].ask(work, _TURN_SECONDS)) for how in order(number)]
                    for how, turn in turns:
                        times.setdefault((work, how), []).append(turn.wall)
                    for clock in ("wall", "processor"):
                        found.setdefault((work, clock), [[]])[-1].append(ratio(turns, clock))
            print(f"pair {pair + 1} of {pairs}", end="\r", file=sys.stderr, flush=True)
    counted = bare.count()
    title = (
        f"with nothing switched on, beside the same without {places} places: "
        f"on one processor, 95 % intervals; pairs of groups: {pairs}; rounds of each: {rounds}"
    )
    table = Table("work", "as it is", "without", "more, wall time", "more, processor time", "bytecodes", title=title)
    for work in WORKS:
        seen, without = (f"{statistics.median(times[work, how]) * 1e6:.1f} µs" for how in _VARIANTS)
        wall, processors = (estimate(found[work, clock]) for clock in ("wall", "processor"))
        codes = "{:,} of {:,} ({:.1%})".format(*counted[work], counted[work][0] / counted[work][1])
        table.add_row(work, seen, without, f"{wall}: {wall.verdict}", f"{processors}: {processors.verdict}", codes)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


class _Group:
    """A driver and two workers, told what to do over the driver's standard input."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.places = 0
        """The places that are left out."""

    def begin(self) -> None:
        """Wait until the group is there."""
        self.places = int(json.loads(self._read()))

    def ask(self, work: str, seconds: float) -> Turn:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([work, seconds]) + "\n")
        self._process.stdin.flush()
        return Turn(*json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the comparison has ended; it says above why")
        return line


@contextlib.contextmanager
def _groups(processor: int, first: int) -> Iterator[dict[str, _Group]]:
    """A pair. Which of them starts first changes from pair to pair."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        names = _VARIANTS[::-1] if first else _VARIANTS
        groups = {how: stack.enter_context(_group(how, place, processor)) for how in names}
        for group in groups.values():
            group.begin()
        yield groups


@contextlib.contextmanager
def _group(how: str, place: str, processor: int) -> Iterator[_Group]:
    command = [sys.executable, bare.__file__, how, place, str(processor)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _Group(process)
    finally:
        process.stdin.close()  # its loop ends, and it shuts its group down
        process.stdout.close()
        process.wait()


def _environment() -> dict[str, str]:
    """With the Backhaul that runs here, wherever it is, and without a launcher's word on who this is."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(bare.__file__))))
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
