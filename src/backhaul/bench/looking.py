"""``backhaul bench --looking``: the cost of being observed, as a share of the unobserved work's time.

A driver and two workers, each a process, repeat the same work: with nothing switched on, with the
meter of every worker counting (as for metrics), with a dashboard that polls all of them from another process,
under a profile of the cluster, and under torch's own profiler at the caller. All variants take turns in every round.

``--off`` measures what it costs to be ready for all that, with nothing switched on: see `off`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from backhaul import rpc
from backhaul.bench import bare, off
from backhaul.bench.watched_work import WORKS
from backhaul.cluster import cluster
from backhaul.worker import current

_WARM_UP_SECONDS = 0.15
_NOTHING = "nothing"
_holds: list[Callable[[], None]] = []


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="backhaul bench --looking", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each work in each round")
    parser.add_argument("--off", action="store_true", help="only: with nothing switched on, beside no code for it")
    parser.add_argument("--off-pairs", type=int, default=18, help="pairs of groups that are started for that")
    parser.add_argument("--off-rounds", type=int, default=14, help="rounds for each pair, of 0.2 s for each work")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not given.off:
        _measure_lookers(given)
    off.measure(given.off_pairs, given.off_rounds)
    return 0


def _measure_lookers(given: argparse.Namespace) -> None:
    found: dict[tuple[str, str], list[float]] = {}
    with cluster(2) as workers:
        names = [worker.name for worker in workers]
        for name in names:
            rpc.rpc_sync(name, torch.set_num_threads, args=(1,))
        for number in range(given.rounds):
            for looker, look in _LOOKERS.items():
                with look(names):
                    for work, do in WORKS.items():
                        warm_up = min(_WARM_UP_SECONDS, given.seconds)
                        seconds = bare.measure(partial(do, names), given.seconds, warm_up)
                        found.setdefault((work, looker), []).append(seconds)
            print(f"round {number + 1} of {given.rounds}", end="\r", file=sys.stderr, flush=True)
    _show(found)


def _show(found: dict[tuple[str, str], list[float]]) -> None:
    table = Table("work", *_LOOKERS, title="the cost of being observed: microseconds, and relative to none")
    for work in WORKS:
        plain = found[work, _NOTHING]
        cells = []
        for looker in _LOOKERS:
            mine = found[work, looker]
            more = statistics.median(a / b for a, b in zip(mine, plain, strict=True)) - 1
            text = f"{statistics.median(mine) * 1e6:.0f}"
            cells.append(text if looker == _NOTHING else f"{text} ({more:+.1%})")
        table.add_row(work, *cells)
    Console().print(table)


# The observers.


@contextlib.contextmanager
def _nobody(names: Sequence[str]) -> Iterator[None]:
    yield


def hold_meter() -> None:
    _holds.append(current().inspection.meter.hold())


def release_meter() -> None:
    _holds.pop()()


@contextlib.contextmanager
def _metered(names: Sequence[str]) -> Iterator[None]:
    hold_meter()
    for name in names:
        rpc.rpc_sync(name, hold_meter)
    try:
        yield
    finally:
        for name in names:
            rpc.rpc_sync(name, release_meter)
        release_meter()


@contextlib.contextmanager
def _watched(names: Sequence[str]) -> Iterator[None]:
    """Poll like a dashboard: the figures and the meter of every worker, once a second, from another process."""
    worker = current()
    socket = worker.agent.membership.find(worker.info).addresses.unix
    assert socket is not None
    command = [sys.executable, "-m", "backhaul.bench.looking", os.path.dirname(socket)]
    looker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert looker.stdin is not None
    assert looker.stdout is not None
    try:
        if looker.stdout.readline() != b"looking\n":
            raise RuntimeError("the process that should poll the workers found none")
        yield
    finally:
        looker.stdin.close()
        looker.stdout.close()
        looker.wait()


def look_until_the_end(where: str) -> None:
    from backhaul.seeing.guest import find_cluster, transport_for
    from backhaul.seeing.lookout import Lookout

    transport = transport_for()
    with Lookout(find_cluster(where), transport, metered=True):
        print("looking", flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def _profiled(names: Sequence[str]) -> Iterator[None]:
    from backhaul import profiler

    with profiler.profile():
        yield


@contextlib.contextmanager
def _torch_profiled(names: Sequence[str]) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


_LOOKERS: dict[str, Callable[[Sequence[str]], Any]] = {
    _NOTHING: _nobody,
    "the meter": _metered,
    "a dashboard": _watched,
    "a profile of the cluster": _profiled,
    "torch's profiler": _torch_profiled,
}


if __name__ == "__main__":
    look_until_the_end(sys.argv[1])
