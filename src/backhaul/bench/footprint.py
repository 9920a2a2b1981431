"""Footprint: what a system costs before its first call and between calls.

Each of these starts processes of its own, so they are measured a few times rather than in every round: the time from
nothing to a first reply, and then, with three workers who have all called each other and have nothing to
do, their CPU time and the memory that each has for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from backhaul.bench.ports import BACKHAUL, CLIENT, NO_SYSTEM, SECOND, SERVER, TORCH
from backhaul.bench.rows import Row
from backhaul.bench.systems import System
from backhaul.bench.workloads import Figure

START_UP, IDLE, MEMORY = "start-up", "idle", "memory"
NAMES = (START_UP, IDLE, MEMORY)
SYSTEMS = (BACKHAUL, TORCH)

_TOTAL = Figure("start to first call")
_OWN = Figure("... without torch's import", steady=False)  # the small difference of two large numbers, and few of them
_MEMORY = Figure("memory of an idle worker", unit="bytes")
FIGURES = {START_UP: [_TOTAL.name, _OWN.name], MEMORY: [_MEMORY.name]}


class Times(NamedTuple):
    """How often to measure, and for how long workers are idle."""

    start_ups: int
    rests: int
    idle_seconds: float


def idle_figure(seconds: float) -> Figure:
    # Not steady: next to nothing is compared with next to everything.
    return Figure(f"3 idle workers, {seconds:g} s", unit="CPU seconds", steady=False)


def measure(wanted: Collection[str], systems: Sequence[str], times: Times, say: Callable[[str], None]) -> list[Row]:
    """A row for each figure of the names that are wanted. Raises `SystemFailed`."""
    systems = [system for system in systems if system in SYSTEMS]
    rows = []
    if START_UP in wanted:
        say("start-up")
        rows += _start_ups(systems, times.start_ups)
    if IDLE in wanted or MEMORY in wanted:
        say("idle workers")
        idle, memory = _rests(systems, times.rests, times.idle_seconds)
        rows += [idle] if IDLE in wanted else []
        rows += [memory] if MEMORY in wanted else []
    return rows


def _start_ups(systems: Sequence[str], count: int) -> list[Row]:
    total = Row(_TOTAL, {system: [] for system in systems})
    own = Row(_OWN, {system: [] for system in systems})
    for turn in range(count):
        for name in _rotated(systems, turn):
            with System(name) as system:
                start_up = system.start_up
            total.rounds[name].append(start_up.seconds)
            own.rounds[name].append(start_up.seconds - start_up.import_seconds)
    return [total, own]


def _rests(systems: Sequence[str], count: int, seconds: float) -> tuple[Row, Row]:
    with System(NO_SYSTEM, (CLIENT,)) as bare:
        (imported,) = bare.rest(0.0).bytes
    idle = Row(idle_figure(seconds), {system: [] for system in systems})
    memory = Row(_MEMORY, {system: [] for system in systems})
    for turn in range(count):
        for name in _rotated(systems, turn):
            with System(name, (SERVER, CLIENT, SECOND)) as system:
                system.meet()
                rest = system.rest(seconds)
            idle.rounds[name].append(rest.cpu_seconds)
            memory.rounds[name].append(sum(rest.bytes) / len(rest.bytes) - imported)
    return idle, memory


def _rotated(systems: Sequence[str], turn: int) -> Sequence[str]:
    first = turn % len(systems)
    return (*systems[first:], *systems[:first])
