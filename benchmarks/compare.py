"""Compares Backhaul with torch.distributed.rpc and .autograd and with a bare socket, side by side.

    python benchmarks/compare.py [--quick] [--only NAME]... [--json PATH]

Each system is a pair of processes that lives for the whole run. A round measures every
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

The exit code is 0 if every system did all of its work and shut down well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import table
from ports import PORTS
from systems import Order, System, SystemFailed
from table import STALL_SECONDS, Row, Stall
from workloads import WORKLOADS, Workload

Notes = dict[str, dict[str, str]]
"""Workload -> system -> why it cannot do that."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to measure: ``rounds``, or as many as fit into ``seconds``, but at least one."""

    rounds: int
    seconds: float
    share: float = 1.0  # of each workload's repetitions
    without: tuple[str, ...] = ()  # workloads to leave out

    @property
    def workloads(self) -> list[Workload]:
        return [workload for workload in WORKLOADS.values() if workload.name not in self.without]

    def repetitions(self, workload: Workload) -> int:
        return max(1, round(workload.repetitions * self.share))


FULL = Plan(rounds=25, seconds=270.0)
QUICK = Plan(rounds=5, seconds=50.0)
SMOKE = Plan(rounds=1, seconds=0.0, share=0.05, without=("fan-out of 8, 1 unused",))  # torch hangs in it


def measure(systems: Sequence[System], plan: Plan) -> tuple[list[Row], list[Stall]]:
    """Run the plan; one row for each figure, and what stalled. Raises `SystemFailed`."""
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
            for system in (*systems[first:], *systems[:first]):
                if not _can(system, workload, notes):
                    continue
                samples = system.measure(Order(workload.name, plan.repetitions(workload)))
                for figure in workload.figures:
                    rows[figure].rounds[system.name].append(figure.of(samples.seconds))
                if samples.longest > STALL_SECONDS:
                    stalls.append(Stall(system.name, workload.name, samples.longest))
    return list(rows.values()), stalls


def _try_out(systems: Sequence[System], workloads: Sequence[Workload]) -> Notes:
    """What is wrong with the gradients of other systems. Raises `SystemFailed` if Backhaul's are."""
    _say("trials")
    notes: Notes = {workload.name: {} for workload in workloads}
    for system in systems:
        for workload in workloads:
            if workload.trial is None or system.name not in workload.systems:
                continue
            if (flaw := system.try_out(workload.name)) is None:
                continue
            if system.name == "backhaul":
                raise SystemFailed(f"backhaul: {workload.name}: {flaw}")
            notes[workload.name][system.name] = flaw
    return notes


def _can(system: System, workload: Workload, notes: Notes) -> bool:
    return system.name in workload.systems and system.name not in notes[workload.name]


def _say(text: str) -> None:
    """Tell somebody who watches how far it is. No animation: it would take time from the measured."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare Backhaul with torch.distributed.rpc and a bare socket.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="plan", action="store_const", const=QUICK, help="under two minutes")
    size.add_argument("--smoke", dest="plan", action="store_const", const=SMOKE, help="seconds; means nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--only", action="append", choices=list(WORKLOADS), metavar="NAME", help="this workload only")
    parser.set_defaults(plan=FULL)
    options = parser.parse_args(arguments)
    if options.only:
        others = tuple(name for name in WORKLOADS if name not in options.only)
        options.plan = dataclasses.replace(options.plan, without=others)
    load = os.getloadavg()[0]  # before our own
    try:
        with contextlib.ExitStack() as stack:
            systems = [stack.enter_context(System(name)) for name in PORTS]
            rows, stalls = measure(systems, options.plan)
            names = [system.name for system in systems]
            rounds = len(rows[0].rounds[names[0]])
            print(f"rounds: {rounds}; load before: {load:.2f}; medians (quartiles); less is better but for /s")
            table.write(rows, stalls, names, sys.stdout)
            if options.json is not None:
                options.json.write_text(json.dumps(table.as_json(rows, stalls, names, load), indent=1) + "\n")
    except SystemFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
