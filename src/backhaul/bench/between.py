"""``backhaul bench --between``: calls and tensors between two hosts, with and without encryption, beside torch RPC.

The hosts are two network namespaces of this machine with a veth pair between them, or loopback if namespaces are not
available: the heading says which. Both ends share the machine's processors, so the work of both counts.

The systems take turns in rounds as in `compare`, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from backhaul.bench import workloads
from backhaul.bench.entrants import Entrant, Fault
from backhaul.bench.hosts import CONNECTIONS_VARIABLE, PLAIN, SSL, SYSTEMS, TCP, TLS, TORCH, Hosts
from backhaul.bench.ports import torch_has_rpc
from backhaul.bench.rows import Row
from backhaul.bench.systems import Limits
from backhaul.bench.table import host, ratio_text, text
from backhaul.bench.workloads import Figure, Workload
from backhaul.options import RpcOptions

_PLAIN_WIDTH = 300
_RATIOS = {
    "torch/TLS": (TORCH, TLS),
    "torch/plain": (TORCH, PLAIN),
    "torch/ssl": (TORCH, SSL),
    "ssl/TLS": (SSL, TLS),
    "TCP/plain": (TCP, PLAIN),
}
"""How many times longer the first takes than the second."""


class Floor(NamedTuple):
    """How many times faster than torch a call must be, over TLS and plain. None stands for no floor."""

    tls: float | None
    plain: float


FLOORS = {
    "no-op": Floor(3.0, 3.0),
    "echo 1 MiB": Floor(0.5, 1.0),
    "echo 16 MiB": Floor(None, 1.0),
    "echo 64 MiB": Floor(0.8, 1.0),
}

_LIMITS = Limits(start=600.0, run=300.0)
"""Generous, so that a busy machine does not end a run."""

_REPETITIONS = {"no-op": 300, "echo 64 KiB": 100, "echo 1 MiB": 30, "echo 16 MiB": 5, "echo 64 MiB": 3}
_SHORT = {"full": (15, 1.0), "quick": (5, 0.3), "smoke": (1, 0.05)}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # fail now, not after minutes of measuring
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the namespaces are removed
    if options.connections is not None:
        os.environ[CONNECTIONS_VARIABLE] = str(RpcOptions(connections=options.connections).connections)
    rounds, share = _SHORT[options.size]
    result = run(options.only or list(_REPETITIONS), options.rounds or rounds, share)
    write(result, sys.stdout)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(result), indent=1) + "\n")
    return 1 if any(fault.system in (TLS, PLAIN) for fault in result.faults) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backhaul bench --between",
        description="Measure calls between two hosts, which are network namespaces of this machine if you are root and "
        "loopback if not: Backhaul with TLS and with fabric='plain', torch RPC over TCP, Python's ssl, a bare socket. "
        "Takes some minutes. The exit code is 0 if Backhaul did all of its work.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="a minute")
    size.add_argument(
        "--smoke", dest="size", action="store_const", const="smoke", help="takes seconds; its figures mean nothing"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="the number of rounds")
    parser.add_argument("--only", action="append", choices=list(_REPETITIONS), help="only this work; may be repeated")
    parser.add_argument(
        "--connections", type=int, metavar="N", help="how many connections one large tensor may use; see RpcOptions"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.set_defaults(size="full")
    return parser


class Result(NamedTuple):
    """The result of a run."""

    rows: list[Row]
    faults: list[Fault]
    load: float
    """The load of the machine before the run."""
    where: str


def run(names: Sequence[str], rounds: int, share: float) -> Result:
    """Start the systems, measure in rounds, end them."""
    load = os.getloadavg()[0]
    faults: list[Fault] = []
    systems = [name for name in SYSTEMS if name != TORCH or torch_has_rpc()]
    works = [_workload(name, max(1, round(_REPETITIONS[name] * share))) for name in _REPETITIONS if name in names]
    rows = {work.name: Row(work.figures[0], {name: [] for name in systems}) for work in works}

    def tell(fault: Fault) -> None:
        print(fault.text, file=sys.stderr, flush=True)
        faults.append(fault)

    with Hosts() as hosts, contextlib.ExitStack() as stack:
        entrants = [stack.enter_context(Entrant(name, works, tell, _LIMITS)) for name in systems]
        for turn in range(rounds):
            for work in works:
                row = rows[work.name]
                first = turn % len(entrants)
                for entrant in (*entrants[first:], *entrants[:first]):
                    if entrant.name in row.notes:
                        continue
                    found = entrant.measure(work, work.repetitions)
                    if isinstance(found, Fault):
                        row.give_up(entrant.name, found.brief)
                    else:
                        row.rounds[entrant.name].append(row.figure.of(found[0].seconds))
        where = hosts.why_loopback and f"loopback TCP, since there are {hosts.why_loopback}"
    return Result(list(rows.values()), faults, load, where or "two network namespaces with a veth pair")


def _workload(name: str, repetitions: int) -> Workload:
    return Workload(name, _act(name), repetitions, (Figure(name, ours=TLS),), SYSTEMS)


def _act(name: str) -> Any:
    if name == "no-op":
        return workloads.noop
    _, number, unit = name.split()
    return partial(workloads.echo, int(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit])


def write(result: Result, file: TextIO) -> None:
    """Print the table."""
    terminal = file.isatty()
    console = Console(file=file, width=None if terminal else _PLAIN_WIDTH, highlight=False)
    rounds = max((len(each) for row in result.rows for each in row.rounds.values()), default=0)
    console.print(f"between {result.where}; rounds: {rounds}; load before: {result.load:.2f}; medians (quartiles)")
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    table.add_column("work", no_wrap=True)
    for heading in (*SYSTEMS, *_RATIOS):
        table.add_column(heading, justify="right", no_wrap=not terminal)
    table.add_column("wanted", no_wrap=True)
    for row in result.rows:
        times = (row.notes.get(system) or text(row.spread(system), row.figure) for system in SYSTEMS)
        ratios = (ratio_text(row.ratio(*pair)) for pair in _RATIOS.values())
        table.add_row(row.figure.name, *times, *ratios, _standing(row))
    console.print(table)


def _standing(row: Row) -> str:
    floor = FLOORS.get(row.figure.name)
    if floor is None:
        return ""
    said = []
    for name, system, least in (("TLS", TLS, floor.tls), ("plain", PLAIN, floor.plain)):
        found = row.ratio(TORCH, system)
        if least is None or found is None:
            continue
        if found.median >= least:
            said.append(f"{name} {least:g}x: met")
            continue
        limit = row.ratio(TORCH, SSL) if system == TLS else None
        said.append(f"{name} {least:g}x: missed" + (f" (bare ssl: {limit.median:.2g}x)" if limit else ""))
    return ", ".join(said)


def as_json(result: Result) -> dict[str, Any]:
    """The table as plain data, in seconds."""
    return {
        "host": host(result.load),
        "between": result.where,
        "rows": [
            {
                "work": row.figure.name,
                "systems": {
                    system: {**spread._asdict(), "rounds": list(rounds)}
                    for system, rounds in row.rounds.items()
                    if (spread := row.spread(system)) is not None
                },
                "notes": dict(row.notes),
                "ratios": {
                    name: ratio._asdict() for name, pair in _RATIOS.items() if (ratio := row.ratio(*pair)) is not None
                },
            }
            for row in result.rows
        ],
        "faults": [fault._asdict() for fault in result.faults],
    }
