"""Floors: how many times faster than torch RPC each figure must be, and its aim.

For tensors over TLS the comparison is Python's own `ssl` over a bare socket. Pinned to one
processor, where no thread can poll, nothing may be slower than torch pinned likewise. But torch does not encrypt, so
tensors over TLS keep their floors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from backhaul.bench.footprint import idle_figure, launched_figures
from backhaul.bench.launched import CLUSTER, RUN
from backhaul.bench.ports import BACKHAUL, MEMCPY, PING_PONG, SSL, TORCH
from backhaul.bench.rows import Row
from backhaul.bench.workloads import Figure


class Floor(NamedTuple):
    """Ratios to torch, or to ``against``, of the medians of one run."""

    at_least: float
    aim: float
    against: str = TORCH
    beside: tuple[str, float] | None = None  # part of the aim: at most this many times the bare limit


FLOORS = {
    "no-op p50": Floor(3.0, 5.0, beside=(PING_PONG, 2.5)),
    "echo 1 KiB": Floor(2.0, 3.0),
    "echo 64 KiB": Floor(2.0, 3.0),
    "echo 1 MiB": Floor(2.0, 4.0),
    "echo 16 MiB": Floor(2.0, 4.0),
    "echo 64 MiB": Floor(3.0, 6.0, beside=(MEMCPY, 2.0)),
    "5,000 in flight": Floor(5.0, 12.0),
    "two clients": Floor(3.0, 6.0),
    "chain of 1": Floor(1.5, 2.5),
    "chain of 4": Floor(2.0, 3.0),
    "chain of 16": Floor(2.0, 3.0),
    "fan-out of 8": Floor(2.0, 3.0),
    "U-shape": Floor(1.5, 2.0),
    "parameter server": Floor(1.5, 2.0),
    "transformer in two": Floor(1.0, 1.05),
    "1,500 nodes, no calls": Floor(0.97, 1.0),
    "chain of 4 over 2": Floor(2.0, 3.0),
    "chain of 4 over 3": Floor(2.0, 3.0),
    "chain of 16 over 2": Floor(2.0, 3.0),
    "chain of 16 over 3": Floor(2.0, 3.0),
    "fan-out of 8 over 2": Floor(2.0, 3.0),
    "fan-out of 8 over 4": Floor(2.0, 3.0),
    "pipeline of 3": Floor(2.0, 3.0),
    "ring of 4 x 8": Floor(2.0, 3.0),
    "parameter server, 3 trainers": Floor(2.0, 3.0),
    "no-op, busy callee p50": Floor(1.0, 2.0),
    "start to first call": Floor(1.0, 1.1),
    "TLS no-op p50": Floor(2.0, 3.0),
    "TLS echo 64 MiB": Floor(0.6, 0.9, against=SSL),
}

CEILINGS = {idle_figure(10.0).name: (0.1, 0.02)}
"""The same for figures that are counted rather than compared: the maximum, and the aim."""

for _launcher in (CLUSTER, RUN):
    _cpu, _wake_ups = launched_figures(_launcher, 10.0)
    CEILINGS[_cpu.name] = (0.02, 0.02)
    CEILINGS[_wake_ups.name] = (50, 50)

_PINNED = Floor(1.0, 1.0)


class Standing(NamedTuple):
    met: Literal["nothing", "floor", "aim"]
    text: str


def floor_of(figure: Figure, pinned: bool = False) -> Floor | None:
    """The floor of a figure; ``pinned`` is for runs on one processor."""
    floor = FLOORS.get(figure.name)
    if pinned and (floor.against == TORCH if floor else figure.ours == BACKHAUL):
        return _PINNED
    return floor


def standing(row: Row, pinned: bool = False) -> Standing | None:
    """How a row compares with its floor or ceiling; None if there is none, or nothing to compare with."""
    name = row.figure.name
    if name in CEILINGS and (spread := row.spread(BACKHAUL)) is not None:
        at_most, aim = CEILINGS[name]
        if spread.median > at_most:
            return Standing("nothing", f"ABOVE {at_most:g}")
        return Standing("aim", f"aim <{aim:g}") if spread.median <= aim else Standing("floor", f"floor <{at_most:g}")
    floor = floor_of(row.figure, pinned)
    ratio = None if floor is None else row.ratio(floor.against, row.figure.ours)
    if floor is None or ratio is None:
        return None
    if ratio.median < floor.at_least:
        return Standing("nothing", f"BELOW {floor.at_least:g}x")
    if ratio.median < floor.aim or not _is_near(row, floor):
        return Standing("floor", f"floor {floor.at_least:g}x")
    return Standing("aim", f"aim {floor.aim:g}x")


def _is_near(row: Row, floor: Floor) -> bool:
    if floor.beside is None:
        return True
    limit, times = floor.beside
    ratio = row.ratio(row.figure.ours, limit)
    return ratio is None or ratio.median <= times
