"""The rounds: Backhaul, torch.distributed.rpc and .autograd, and the bare limits do the same work, side by side.

Each system is a few processes that live for the whole run. A round measures every
workload on every system, one right after the other, so that what slows the machine down for
a while slows all of them; the order rotates from round to round. The table shows the
median of the rounds and, in brackets, the quartiles; a ratio is that of the ratios in each round.
A repetition that hangs for seconds is listed below it, since medians would hide it.

Before the first round each system has to find the gradients of local autograd in every workload that has
gradients. Where torch does not, or hangs, the table says so in place of a time.

Systems wait frozen (SIGSTOP) for their turn, since torch's workers poll without rest. Is that fair
to them? Torch's no-op took 369 us (320..482) when frozen between rounds, 352 (310..542) in
fresh processes each round, 415 (329..599) when never frozen: no difference beyond the noise of six rounds
on a busy machine, and fresh processes take seconds to start, so there would be few rounds. But right after a
thaw there is one: with a warm-up of 50 calls torch was slower than when settled in 11 of 14 pairs, by
1.11x in the median. So each measurement first warms up for 0.1 s; with that, a thawed system and a settled
one are alike (torch 1.00x, slower in 12 of 24 pairs; Backhaul 1.01x, 13 of 24).

Read the figures with the load of the machine in mind, which is printed above them
(an average over a minute: right after another run it still counts that one). Other work can make
Backhaul look better, not worse: torch's threads have to be woken, Backhaul's are awake or are not needed. On 2 cores
with one kept busy ``--only "chain of 4"`` was once 3.2 times faster than torch's, and 2.0 times minutes before
without that load. The second is the honest figure: run this on a quiet machine. (With far more to do than there
are processors nobody stays awake, see `backhaul.transport.readable`.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Sequence

from backhaul.bench import footprint
from backhaul.bench.footprint import Times
from backhaul.bench.ports import (
    BACKHAUL,
    BACKHAUL_TLS,
    CLIENT,
    MEMCPY,
    PING_PONG,
    SECOND,
    SERVER,
    SSL,
    TCP,
    TORCH,
    torch_has_rpc,
)
from backhaul.bench.rows import STALL_SECONDS, Row, Stall
from backhaul.bench.systems import System, SystemFailed
from backhaul.bench.workloads import WORKLOADS, Workload

SYSTEMS = (BACKHAUL, TORCH, PING_PONG, MEMCPY, BACKHAUL_TLS, SSL, TCP)

NAMES = (*WORKLOADS, *footprint.NAMES)
"""All that can be measured."""

_FIGURES_OF = {
    **{name: [figure.name for figure in workload.figures] for name, workload in WORKLOADS.items()},
    **footprint.FIGURES,
}

FIGURES = tuple(figure for figures in _FIGURES_OF.values() for figure in figures)
"""The names of all rows but those of idle workers, which say for how long."""

Notes = dict[str, dict[str, str]]
"""Workload -> system -> why it cannot do that."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to measure: ``rounds``, or as many as fit into ``seconds``, but at least one."""

    rounds: int
    seconds: float
    times: Times
    share: float = 1.0  # of each workload's repetitions
    names: tuple[str, ...] = NAMES

    @property
    def workloads(self) -> list[Workload]:
        return [workload for workload in WORKLOADS.values() if workload.name in self.names]

    @property
    def footprints(self) -> list[str]:
        return [name for name in footprint.NAMES if name in self.names]

    def repetitions(self, workload: Workload) -> int:
        return max(1, round(workload.repetitions * self.share))

    def only(self, names: Sequence[str]) -> Plan:
        return dataclasses.replace(self, names=tuple(name for name in NAMES if name in names))

    def closer(self, names: Sequence[str]) -> Plan:
        """For a second look at a few of them: more rounds in the same time."""
        return dataclasses.replace(self.only(names), rounds=3 * self.rounds)


def workloads_of(figures: Collection[str]) -> list[str]:
    """What has to be measured for these rows."""
    return [name for name, own in _FIGURES_OF.items() if not set(own).isdisjoint(figures)]


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name not in names)


FULL = Plan(rounds=25, seconds=330.0, times=Times(start_ups=3, rests=2, idle_seconds=10.0))
QUICK = Plan(
    rounds=5,
    seconds=40.0,
    times=Times(start_ups=2, rests=1, idle_seconds=3.0),
    share=0.3,
    names=_without("echo 256 MiB"),
)
SMOKE = Plan(
    rounds=1,
    seconds=0.0,
    times=Times(start_ups=1, rests=1, idle_seconds=0.2),
    share=0.05,
    names=_without("echo 256 MiB", "fan-out of 8, 1 unused"),  # torch hangs in that one, which takes seconds to see
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run found. ``left_out`` says why, system by system."""

    systems: list[str]
    rows: list[Row]
    stalls: list[Stall]
    load: float  # of the machine, before
    left_out: dict[str, str]

    @property
    def rounds(self) -> int:
        return max(len(rounds) for row in self.rows for rounds in row.rounds.values())


def run(plan: Plan) -> Result:
    """Start the systems, run the plan, end them. Raises `SystemFailed`."""
    load = os.getloadavg()[0]
    left_out = {} if torch_has_rpc() else {TORCH: "this build of torch has no torch.distributed.rpc"}
    names = [name for name in SYSTEMS if name not in left_out]
    rows: list[Row] = []
    stalls: list[Stall] = []
    if plan.workloads:
        with contextlib.ExitStack() as stack:
            needed = [name for name in names if any(name in workload.systems for workload in plan.workloads)]
            _say(f"starting {', '.join(needed)}")
            systems = [stack.enter_context(System(name, _roles(name, plan.workloads))) for name in needed]
            rows, stalls = measure(systems, plan)
    rows += footprint.measure(plan.footprints, names, plan.times, _say)
    return Result(names, rows, stalls, load, left_out)


def measure(systems: Sequence[System], plan: Plan) -> tuple[list[Row], list[Stall]]:
    """Run the rounds; one row for each figure, and what stalled. Raises `SystemFailed`."""
    notes = _try_out(systems, plan.workloads)
    rows = {
        figure: Row(
            figure,
            {system.name: [] for system in systems if _can(system, workload, notes)},
            notes[workload.name],
        )
        for workload in plan.workloads
        for figure in workload.figures
    }
    stalls = []
    start = time.monotonic()
    for turn in range(plan.rounds):
        spent = time.monotonic() - start
        if turn and spent + spent / turn > plan.seconds:
            break
        _say(f"round {turn + 1} of {plan.rounds}")
        first = turn % len(systems)
        for workload in plan.workloads:
            if turn % workload.every:
                continue
            for system in (*systems[first:], *systems[:first]):
                if not _can(system, workload, notes):
                    continue
                samples = system.measure(workload, plan.repetitions(workload))
                for figure in workload.figures:
                    seconds = figure.of([second for each in samples for second in each.seconds])
                    rows[figure].rounds[system.name].append(seconds)
                longest = max(each.longest for each in samples)
                if longest > STALL_SECONDS:
                    stalls.append(Stall(system.name, workload.name, longest))
    return list(rows.values()), stalls


def _roles(system: str, workloads: Sequence[Workload]) -> tuple[str, ...]:
    if system == MEMCPY:
        return (CLIENT,)
    both = any(SECOND in workload.clients for workload in workloads if system in workload.systems)
    return (SERVER, CLIENT, SECOND) if both else (SERVER, CLIENT)


def _try_out(systems: Sequence[System], workloads: Sequence[Workload]) -> Notes:
    """What is wrong with the results of other systems. Raises `SystemFailed` if Backhaul's are wrong."""
    _say("trials")
    notes: Notes = {workload.name: {} for workload in workloads}
    for system in systems:
        for workload in workloads:
            if workload.trial is None or system.name not in workload.systems:
                continue
            if (flaw := system.try_out(workload.name)) is None:
                continue
            if system.name == BACKHAUL:  # the only one of ours that has trials
                raise SystemFailed(f"{BACKHAUL}: {workload.name}: {flaw}")
            notes[workload.name][system.name] = flaw
    return notes


def _can(system: System, workload: Workload, notes: Notes) -> bool:
    return system.name in workload.systems and system.name not in notes[workload.name]


def _say(text: str) -> None:
    """Tell somebody who watches how far it is. No animation: it would take time from the measured."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
