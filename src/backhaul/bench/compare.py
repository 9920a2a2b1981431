"""The rounds: Backhaul, torch.distributed.rpc and .autograd, and the bare limits do the same work, side by side.

Each system consists of a few processes that live for the whole run. Work for several servers has its own processes, so
that other workers do not disturb what is measured between two workers. A round measures every
workload on every system, one right after the other, so that a slow phase of the
machine slows all of them. The order rotates from round to round. The table shows the
median of the rounds and, in brackets, the quartiles; a ratio is the median of the rounds' ratios.
Repetitions that hang for seconds are listed below the table, since medians would hide them.

Before the first round each system must find the gradients of local autograd in every workload with
gradients. If a system does not, or if it raises, dies or hangs then or in a later round, the table says so in
place of a time; that system is started afresh, and everything else continues (`entrants`).

Systems wait frozen (SIGSTOP) for their turn, since torch's workers poll all the time. Is that fair
to them? Torch's no-op took 369 us (320..482) when frozen between rounds, 352 (310..542) in
fresh processes each round, 415 (329..599) when never frozen: no difference beyond the noise of six rounds
on a busy machine, and fresh processes take seconds to start, so there would be few rounds. But right after a
thaw there is a difference: with a warm-up of 50 calls torch was slower than when settled in 11 of 14 pairs, by
1.11x in the median. So each measurement first warms up for 0.1 s; with that, a thawed system and a settled
one are alike (torch 1.00x, slower in 12 of 24 pairs; Backhaul 1.01x, 13 of 24).

Read the figures with the load of the machine in mind, which is printed above them
(an average over a minute: right after another run it still includes that one). Other work can make
Backhaul look better, not worse: torch's threads must be woken, Backhaul's are awake or not needed. On 2 cores
with one kept busy ``--only "chain of 4"`` was once 3.2 times faster than torch's, and 2.0 times minutes before
without that load. The second is the honest figure: run this on a quiet machine. (If there is far more to do than
the processors can handle, no thread polls, see `backhaul.transport.awake`.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from backhaul.bench import footprint
from backhaul.bench.entrants import NOT_THERE, Entrant, Fault, entrants_of
from backhaul.bench.footprint import Times
from backhaul.bench.ports import BACKHAUL, BACKHAUL_TLS, MEMCPY, PING_PONG, SSL, TCP, TORCH, torch_has_rpc
from backhaul.bench.rows import STALL_SECONDS, Row, Stall
from backhaul.bench.systems import Limits
from backhaul.bench.workloads import WORKLOADS, Workload

SYSTEMS = (BACKHAUL, TORCH, PING_PONG, MEMCPY, BACKHAUL_TLS, SSL, TCP)
OURS = (BACKHAUL, BACKHAUL_TLS)

NAMES = (*WORKLOADS, *footprint.NAMES)
"""Everything that can be measured."""

_FIGURES_OF = {
    **{name: [figure.name for figure in workload.figures] for name, workload in WORKLOADS.items()},
    **footprint.FIGURES,
}

FIGURES = tuple(figure for figures in _FIGURES_OF.values() for figure in figures)
"""The names of all rows except those of idle workers, whose names include a duration."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to measure: ``rounds``, or as many rounds as fit into ``seconds``, but at least one."""

    rounds: int
    seconds: float
    times: Times
    share: float = 1.0  # of each workload's repetitions
    names: tuple[str, ...] = NAMES
    limits: Limits = dataclasses.field(default_factory=Limits)

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
        """The plan for a second measurement of a few figures: more rounds in the same time."""
        return dataclasses.replace(self.only(names), rounds=3 * self.rounds)


def workloads_of(figures: Collection[str]) -> list[str]:
    """The workloads to measure for these rows."""
    return [name for name, own in _FIGURES_OF.items() if not set(own).isdisjoint(figures)]


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name not in names)


FULL = Plan(rounds=25, seconds=300.0, times=Times(start_ups=3, rests=2, launches=1, idle_seconds=10.0))
QUICK = Plan(
    rounds=5,
    seconds=100.0,  # a round takes some 15 s; the medians of one or two rounds would say little
    times=Times(start_ups=2, rests=1, launches=1, idle_seconds=3.0),
    share=0.3,
    names=_without("echo 256 MiB"),
)
SMOKE = Plan(
    rounds=1,
    seconds=0.0,
    times=Times(start_ups=1, rests=1, launches=1, idle_seconds=0.2),
    share=0.05,
    names=_without("echo 256 MiB", "fan-out of 8, 1 unused"),  # torch hangs in that one, which takes seconds to detect
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run. ``left_out`` gives the reasons, system by system."""

    systems: list[str]
    rows: list[Row]
    stalls: list[Stall]
    load: float  # of the machine, before the run
    left_out: dict[str, str]
    faults: list[Fault] = dataclasses.field(default_factory=list)
    pinned: bool = False  # to one processor

    @property
    def rounds(self) -> int:
        return max((len(rounds) for row in self.rows for rounds in row.rounds.values()), default=0)

    @property
    def failed(self) -> list[Fault]:
        """The faults of Backhaul, with TLS or without."""
        return [fault for fault in self.faults if fault.system in OURS]


def run(plan: Plan) -> Result:
    """Start the systems, run the plan, end them."""
    load = os.getloadavg()[0]
    left_out = {} if torch_has_rpc() else {TORCH: "this build of torch has no torch.distributed.rpc"}
    names = [name for name in SYSTEMS if name not in left_out]
    result = Result(names, [], [], load, left_out, pinned=len(os.sched_getaffinity(0)) == 1)

    def tell(fault: Fault) -> None:
        print(fault.text, file=sys.stderr, flush=True)
        result.faults.append(fault)

    if plan.workloads:
        _measure(names, plan, result, tell)
    result.rows.extend(footprint.measure(plan.footprints, names, plan.times, _say, tell))
    return result


def _measure(names: Sequence[str], plan: Plan, result: Result, tell: Callable[[Fault], None]) -> None:
    """Run the rounds, and fill the result: a row for each figure, and the stalls."""
    with contextlib.ExitStack() as stack:
        entrants = []
        for entrant in entrants_of(names, plan.workloads, tell, plan.limits):
            _say(f"starting {entrant.name}")
            entrants.append(stack.enter_context(entrant))
        rows = {
            workload.name: [
                Row(figure, {name: [] for name in names if name in workload.systems}) for figure in workload.figures
            ]
            for workload in plan.workloads
        }
        result.rows.extend(row for own in rows.values() for row in own)
        _say("trials")
        for entrant in entrants:
            for workload in plan.workloads:
                if workload.trial is None or not entrant.does(workload):
                    continue
                if (fault := entrant.try_out(workload)) is not None:
                    _give_up(rows[workload.name], fault)
        _measure_in_rounds(entrants, rows, plan, result)


def _measure_in_rounds(
    entrants: Sequence[Entrant], rows: Mapping[str, Sequence[Row]], plan: Plan, result: Result
) -> None:
    start = time.monotonic()
    for turn in range(plan.rounds):
        spent = time.monotonic() - start
        if turn and spent + spent / turn > plan.seconds:
            break
        _say(f"round {turn + 1} of {plan.rounds}")
        for workload in plan.workloads:
            if turn % workload.every:
                continue
            own = rows[workload.name]
            able = [entrant for entrant in entrants if entrant.does(workload)]
            first = turn % len(able)
            for entrant in (*able[first:], *able[:first]):
                if entrant.name in own[0].notes:
                    continue
                samples = entrant.measure(workload, plan.repetitions(workload))
                if isinstance(samples, Fault):
                    _give_up(own, samples)
                    continue
                for row in own:
                    seconds = [second for each in samples for second in each.seconds]
                    row.rounds[entrant.name].append(row.figure.of(seconds))
                longest = max(each.longest for each in samples)
                if longest > STALL_SECONDS:
                    result.stalls.append(Stall(entrant.name, workload.name, longest))


def _give_up(rows: Sequence[Row], fault: Fault) -> None:
    """Put a note about a system's fault in place of its numbers in a workload's rows. It is not measured there again.

    Numbers from before a system failed elsewhere for good are kept.
    """
    for row in rows:
        if fault.brief != NOT_THERE or not row.rounds.get(fault.system):
            row.give_up(fault.system, fault.brief)


def _say(text: str) -> None:
    """Report progress to a user who watches. No animation: it would take time from the measured processes."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
