"""Shares: where the time of each worker went.

At each moment the threads of a worker are in the states that `replay` finds. If some of them work (compute or wire),
the moment is divided evenly among those. Otherwise it belongs to the gates that threads wait at; if there
are none, to the replies that threads wait for; else the worker is idle. So a worker's shares add up to the wall time.

**Waiting for the interpreter** is an estimate. A thread that works but gets no processor time waits for
something. A part of that time counts as waiting for the interpreter: the proportion of samples, around that time, in
which the probe of its process did not get the interpreter at once either. The rest stays where it is: a function that
sleeps or reads a file counts as compute.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from backhaul.profiler.replay import COMPUTE, GATES, IDLE, REPLIES, WIRE, Piece

INTERPRETER = "interpreter"
COLUMNS = (COMPUTE, WIRE, GATES, INTERPRETER, REPLIES, IDLE)


class Shares(msgspec.Struct, frozen=True):
    """Seconds of one worker, by state. They add up to ``wall``."""

    worker: str
    wall: float
    seconds: dict[str, float]

    def part(self, state: str) -> float:
        return self.seconds[state] / self.wall if self.wall else 0.0


class Interpreter:
    """How often the interpreter of a process was held, according to the samples of its probe."""

    def __init__(self, looks: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(looks)
        self._times = [at for at, _ in ordered]
        self._held = [0]
        for _, waited in ordered:
            self._held.append(self._held[-1] + (waited > 0))

    def held(self, begin: int, end: int) -> float:
        """The fraction of samples that had to wait: of those in that time, else of the two around it."""
        if not self._times:
            return 0.0
        first, last = bisect_left(self._times, begin), bisect_right(self._times, end)
        if first == last:
            first, last = max(0, first - 1), min(len(self._times), last + 1)
        return (self._held[last] - self._held[first]) / (last - first)


def shares(worker: str, threads: Iterable[Sequence[Piece]], interpreter: Interpreter, begin: int, end: int) -> Shares:
    """What a worker's threads did between ``begin`` and ``end``."""
    changes: list[tuple[int, str, int, float]] = []
    for pieces in threads:
        for piece in pieces:
            since, until = max(piece.begin, begin), min(piece.end, end)
            if since >= until or piece.state == IDLE:
                continue
            stalled = _stalled(piece, interpreter) if piece.state in (COMPUTE, WIRE) else 0.0
            changes.append((since, piece.state, 1, stalled))
            changes.append((until, piece.state, -1, -stalled))
    changes.sort(key=lambda change: change[0])
    count = dict.fromkeys((COMPUTE, WIRE, GATES, REPLIES), 0)
    stalls = {COMPUTE: 0.0, WIRE: 0.0}
    seconds = dict.fromkeys(COLUMNS, 0.0)
    now = begin
    for at, state, change, stalled in [*changes, (end, COMPUTE, 0, 0.0)]:
        _divide(seconds, count, stalls, (at - now) / 1e9)
        now = at
        count[state] += change
        if state in stalls:
            stalls[state] = stalls[state] + stalled if count[state] else 0.0
    return Shares(worker, (end - begin) / 1e9, seconds)


def _stalled(piece: Piece, interpreter: Interpreter) -> float:
    """The part of a piece in which its thread waited for the interpreter."""
    without = max(0.0, 1 - piece.processor / (piece.end - piece.begin))
    return without * interpreter.held(piece.begin, piece.end) if without else 0.0


def _divide(seconds: dict[str, float], count: dict[str, int], stalls: dict[str, float], time: float) -> None:
    working = count[COMPUTE] + count[WIRE]
    if working:
        for state in (COMPUTE, WIRE):
            stalled = min(max(stalls[state], 0.0), count[state])
            seconds[state] += time * (count[state] - stalled) / working
            seconds[INTERPRETER] += time * stalled / working
    elif count[GATES]:
        seconds[GATES] += time
    elif count[REPLIES]:
        seconds[REPLIES] += time
    else:
        seconds[IDLE] += time
