"""The rounds: Backhaul, torch.distributed.rpc and .autograd, and the bare limits do the same work, side by side.

Each system is a few processes that live for the whole run; work for several servers has processes of its own, so that
what is measured between two workers is not disturbed by others. A round measures every
workload on every system, one right after the other, so that what slows the machine down for
a while slows all of them; the order rotates from round to round. The table shows the
median of the rounds and, in brackets, the quartiles; a ratio is that of the ratios in each round.
A repetition that hangs for seconds is listed below it, since medians would hide it.

Before the first round each system has to find the gradients of local autograd in every workload that has
gradients. Where a system does not, or where it raises, dies or hangs then or in a later round, the table says so in
place of a time; that system is started afresh, and all else goes on (`entrants`).

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
"""All that can be measured."""

_FIGURES_OF = {
    **{name: [figure.name for figure in workload.figures] for name, workload in WORKLOADS.items()},
    **footprint.FIGURES,
}

FIGURES = tuple(figure for figures in _FIGURES_OF.values() for figure in figures)
"""The names of all rows but those of idle workers, which say for how long."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to measure: ``rounds``, or as many as fit into ``seconds``, but at least one."""

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
        """For a second look at a few of them: more rounds in the same time."""
        return dataclasses.replace(self.only(names), rounds=3 * self.rounds)


def workloads_of(figures: Collection[str]) -> list[str]:
    """What has to be measured for these rows."""
    return [name for name, own in _FIGURES_OF.items() if not set(own).isdisjoint(figures)]


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name not in names)


FULL = Plan(rounds=25, seconds=300.0, times=Times(start_ups=3, rests=2, launches=1, idle_seconds=10.0))
QUICK = Plan(
    rounds=5,
    seconds=40.0,
    times=Times(start_ups=2, rests=1, launches=1, idle_seconds=3.0),
    share=0.3,
    names=_without("echo 256 MiB"),
)
SMOKE = Plan(
    rounds=1,
    seconds=0.0,
    times=Times(start_ups=1, rests=1, launches=1, idle_seconds=0.2),
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
    faults: list[Fault] = dataclasses.field(default_factory=list)
    pinned: bool = False  # to one processor

    @property
    def rounds(self) -> int:
        return max((len(rounds) for row in self.rows for rounds in row.rounds.values()), default=0)

    @property
    def failed(self) -> list[Fault]:
        """What went wrong for Backhaul, with TLS or without."""
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
    """Run the rounds; what they find goes into the result: a row for each figure, and what stalled."""
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
    """Say in the rows of a workload what its system failed in, in place of numbers. It is not measured there again.

    Numbers from before a system failed elsewhere for good are kept.
    """
    for row in rows:
        if fault.brief != NOT_THERE or not row.rounds.get(fault.system):
            row.give_up(fault.system, fault.brief)


def _say(text: str) -> None:
    """Tell somebody who watches how far it is. No animation: it would take time from the measured."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
