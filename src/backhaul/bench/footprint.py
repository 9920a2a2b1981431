"""Footprint: the cost of a system before its first call and between calls.

Each measurement starts its own processes, so there are only a few rather than one in every round: the time from
nothing to a first reply; the CPU time and private memory of three idle workers that have all called each other;
and the resources of idle workers as a launcher leaves them.
"""

from __future__ import annotations

import compileall
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from backhaul.bench import launched
from backhaul.bench.entrants import Fault
from backhaul.bench.ports import BACKHAUL, CLIENT, NO_SYSTEM, SECOND, SERVER, TORCH
from backhaul.bench.rows import Row
from backhaul.bench.systems import System, SystemFailed
from backhaul.bench.workloads import Figure

START_UP, IDLE, MEMORY, LAUNCHED = "start-up", "idle", "memory", "idle, launched"
NAMES = (START_UP, IDLE, MEMORY, LAUNCHED)
SYSTEMS = (BACKHAUL, TORCH)

_TOTAL = Figure("start to first call")
_OWN = Figure("... without torch's import", steady=False)  # the small difference of two large numbers, from few rounds
_MEMORY = Figure("memory of an idle worker", unit="bytes")
FIGURES = {START_UP: [_TOTAL.name, _OWN.name], MEMORY: [_MEMORY.name]}


class Times(NamedTuple):
    """How often to measure, and how long workers are idle."""

    start_ups: int
    rests: int
    launches: int
    idle_seconds: float


def idle_figure(seconds: float) -> Figure:
    # Not steady: a figure near zero is compared with a large one.
    return Figure(f"3 idle workers, {seconds:g} s", unit="CPU seconds", steady=False)


def launched_figures(launcher: str, seconds: float) -> tuple[Figure, Figure]:
    """The CPU time of a launcher's workers, and how often they wake up."""
    return (
        Figure(f"{launcher}, idle {seconds:g} s", unit="CPU seconds", steady=False),
        Figure(f"{launcher}, idle {seconds:g} s, wake-ups", unit="wake-ups", steady=False),
    )


def measure(
    wanted: Collection[str],
    systems: Sequence[str],
    times: Times,
    say: Callable[[str], None],
    tell: Callable[[Fault], None],
) -> list[Row]:
    """A row for each wanted figure. If a system fails, its rows say so and the fault is reported."""
    systems = [system for system in systems if system in SYSTEMS]
    rows = []
    if START_UP in wanted:
        say("start-up")
        rows += _start_ups(systems, times.start_ups, tell)
    if IDLE in wanted or MEMORY in wanted:
        say("idle workers")
        idle, memory = _rests(systems, times.rests, times.idle_seconds, tell)
        rows += [idle] if IDLE in wanted else []
        rows += [memory] if MEMORY in wanted else []
    if LAUNCHED in wanted:
        for launcher in (launched.CLUSTER, launched.RUN):
            say(f"idle workers of {launcher}")
            rows += _launches(launcher, times.launches, times.idle_seconds, tell)
    return rows


def _start_ups(systems: Sequence[str], count: int, tell: Callable[[Fault], None]) -> list[Row]:
    total, own = rows = [Row(figure, {system: [] for system in systems}) for figure in (_TOTAL, _OWN)]
    # Installing a package compiles it, so torch is compiled. A source tree may have no bytecode yet.
    compileall.compile_dir(Path(__file__).parents[1], quiet=2)
    for turn in range(count):
        for name in _rotated(systems, turn):
            if name in total.notes:
                continue
            try:
                with System(name) as system:
                    start_up = system.start_up
            except SystemFailed as failure:
                _give_up(rows, Fault(name, START_UP, failure.brief, str(failure)), tell)
                continue
            total.rounds[name].append(start_up.seconds)
            own.rounds[name].append(start_up.seconds - start_up.import_seconds)
    return rows


def _rests(systems: Sequence[str], count: int, seconds: float, tell: Callable[[Fault], None]) -> tuple[Row, Row]:
    figures = (idle_figure(seconds), _MEMORY)
    idle, memory = rows = [Row(figure, {system: [] for system in systems}) for figure in figures]
    imported = _imported_bytes(tell)
    for turn in range(count):
        for name in _rotated(systems, turn):
            if name in idle.notes:
                continue
            try:
                with System(name, (SERVER, CLIENT, SECOND)) as system:
                    system.meet()
                    rest = system.rest(seconds)
            except SystemFailed as failure:
                _give_up(rows, Fault(name, IDLE, failure.brief, str(failure)), tell)
                continue
            idle.rounds[name].append(rest.cpu_seconds)
            if imported is not None:
                memory.rounds[name].append(sum(rest.bytes) / len(rest.bytes) - imported)
    return idle, memory


def _imported_bytes(tell: Callable[[Fault], None]) -> float | None:
    """The private memory of a process that has imported torch; None if not available."""
    try:
        with System(NO_SYSTEM, (CLIENT,)) as bare:
            (imported,) = bare.rest(0.0).bytes
            return imported
    except SystemFailed as failure:
        tell(Fault(NO_SYSTEM, MEMORY, failure.brief, str(failure)))
        return None


def _launches(launcher: str, count: int, seconds: float, tell: Callable[[Fault], None]) -> list[Row]:
    cpu, wake_ups = rows = [Row(figure, {BACKHAUL: []}) for figure in launched_figures(launcher, seconds)]
    for _ in range(count):
        try:
            rest = launched.rest_of(launcher, seconds)
        except launched.NotLaunched as failure:
            _give_up(rows, Fault(BACKHAUL, launcher, "does not rest", f"{BACKHAUL}: {launcher}: {failure}"), tell)
            break
        cpu.rounds[BACKHAUL].append(rest.cpu_seconds)
        wake_ups.rounds[BACKHAUL].append(rest.wake_ups)
    return rows


def _give_up(rows: Sequence[Row], fault: Fault, tell: Callable[[Fault], None]) -> None:
    tell(fault)
    for row in rows:
        row.give_up(fault.system, fault.brief)


def _rotated(systems: Sequence[str], turn: int) -> Sequence[str]:
    first = turn % len(systems)
    return (*systems[first:], *systems[:first])
