"""``backhaul bench --looking --off``: the cost of being ready for observers, with nothing switched on.

Ordinary Backhaul runs beside Backhaul without the code that checks for observers or takes notes (`bare`). The
difference is a percent or two of some microseconds, so the comparison must be precise:

- A *pair* is one fresh group of each kind: a driver and two workers, three processes. Where the system places their
  memory differs from process to process, and is worth a percent by itself, so there are many pairs. While one is
  measured, the next one imports torch on another processor.
- All processes run on one processor. So the work of both ends counts in full, and no other processor's sleep and
  wake-up counts.
- The two groups of a pair take turns in short rounds: as it is, without, without, as it is; then the other way round. A
  round's ratio is that of the sums, in which a steady drift of the machine cancels.
- A pair's figure is the median of its rounds' ratios, the result the mean of the pairs' figures. Its interval comes
  from a bootstrap that draws pairs first, and then rounds within each.

Processor time, of all three processes together, stands beside wall time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
_CLOCKS: tuple[Clock, ...] = ("wall", "processor")
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
    found: dict[tuple[str, Clock], list[list[float]]] = {(work, clock): [] for work in WORKS for clock in _CLOCKS}
    times: dict[tuple[str, str], list[float]] = {(work, how): [] for work in WORKS for how in _VARIANTS}
    places = 0
    following: _Pair | None = _Pair(0, processor)
    for number in range(1, pairs + 1):
        assert following is not None
        pair, following = following, _Pair(number, processor) if number < pairs else None
        try:
            places = pair.begin()
            for each in found.values():
                each.append([])
            for turn in range(rounds):
                for work in WORKS:
                    turns = [(how, pair.groups[how].ask(work, _TURN_SECONDS)) for how in order(turn)]
                    for how, took in turns:
                        times[work, how].append(took.wall)
                    for clock in _CLOCKS:
                        found[work, clock][-1].append(ratio(turns, clock))
            pair.end()
        except BaseException:
            for each_pair in filter(None, (pair, following)):
                each_pair.kill()
            raise
        print(f"pair {number} of {pairs}", end="\r", file=sys.stderr, flush=True)
    counted = bare.count()
    title = (
        f"with nothing switched on, beside the same without {places} places: "
        f"on one processor, 95 % intervals; pairs of groups: {pairs}; rounds of each: {rounds}"
    )
    table = Table("work", "as it is", "without", "more, wall time", "more, processor time", "bytecodes", title=title)
    for work in WORKS:
        seen, without = (f"{statistics.median(times[work, how]) * 1e6:.1f} µs" for how in _VARIANTS)
        wall, processors = (estimate(found[work, clock]) for clock in _CLOCKS)
        codes = "{:,} of {:,} ({:.1%})".format(*counted[work], counted[work][0] / counted[work][1])
        table.add_row(work, seen, without, f"{wall}: {wall.verdict}", f"{processors}: {processors.verdict}", codes)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


class _Group:
    """A driver and two workers, told what to do over the driver's standard input."""

    def __init__(self, how: str, place: str, processor: int) -> None:
        """The driver imports what it needs, and waits."""
        self._process = subprocess.Popen(
            [sys.executable, bare.__file__, how, place, str(processor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )

    def begin(self) -> int:
        """Start its workers; how many places are left out."""
        self._write("begin")
        return int(json.loads(self._read()))

    def ask(self, work: str, seconds: float) -> Turn:
        self._write(json.dumps([work, seconds]))
        return Turn(*json.loads(self._read()))

    def end(self) -> None:
        """Have the driver shut its group down."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._wait()

    def kill(self) -> None:
        """Its workers end by themselves: they lose their driver."""
        self._process.kill()
        self._wait()

    def _wait(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the comparison has ended; it says above why")
        return line


class _Pair:
    """A fresh group of each kind. Which of them starts first changes from pair to pair."""

    def __init__(self, number: int, processor: int) -> None:
        self._place = tempfile.TemporaryDirectory()
        order = _VARIANTS[::-1] if number % 2 else _VARIANTS
        self.groups = {how: _Group(how, self._place.name, processor) for how in order}

    def begin(self) -> int:
        """Start the workers; how many places are left out."""
        return max([group.begin() for group in self.groups.values()])

    def end(self) -> None:
        for group in self.groups.values():
            group.end()
        self._place.cleanup()

    def kill(self) -> None:
        for group in self.groups.values():
            group.kill()
        self._place.cleanup()


def _environment() -> dict[str, str]:
    """Environment variables with which a process imports the same Backhaul as this one."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(bare.__file__))))
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
