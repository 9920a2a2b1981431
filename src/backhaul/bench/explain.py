"""``backhaul bench --explain``: where the microseconds of a call go, from the events of both processes.

Two processes over a unix socket repeat the same work, and the events in their workers are stamped (`stages`). `ways`
follows each repetition backwards from its end. A second pair of processes does the same without stamps, in turns with
the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backhaul import autograd, rpc
from backhaul.bench.pair import CLIENT, SERVER, two_pairs
from backhaul.bench.stages import cost, install, take
from backhaul.bench.table import host
from backhaul.bench.ways import Explained, History, Strayed, Thread, Way, summarise
from backhaul.errors import BackhaulError
from backhaul.options import RpcOptions

_WIDTH, _BATCH = 64, 16
_KIB = 1024
_WARM_UP_SECONDS = 0.2
_PLAIN_WIDTH = 120

Windows = dict[str, list[tuple[int, int]]]
"""Work -> beginning and end of each repetition, in nanoseconds."""


# Work for the client.

with torch.random.fork_rng():
    torch.manual_seed(1)
    _LAYER = nn.Linear(_WIDTH, _WIDTH)
    _INPUT = torch.rand(_BATCH, _WIDTH, requires_grad=True)


def nothing() -> None: ...


def same(value: Tensor) -> Tensor:
    return value


def layer(value: Tensor) -> Tensor:
    output: Tensor = _LAYER(value)
    return output


@lru_cache(maxsize=1)
def _layer_on_gpu() -> nn.Linear:
    return deepcopy(_LAYER).cuda()


def layer_on_gpu(value: Tensor) -> Tensor:
    output: Tensor = _layer_on_gpu()(value)
    return output


Act = Callable[[Windows, str], None]
"""Does a work of that name once, and notes its time."""


def _noop(server: str) -> Act:
    def noop(windows: Windows, name: str) -> None:
        begin = time.perf_counter_ns()
        rpc.rpc_sync(server, nothing)
        windows[name].append((begin, time.perf_counter_ns()))

    return noop


def _echo(size: int, server: str) -> Act:
    tensor = torch.rand(size // torch.float32.itemsize)

    def echo(windows: Windows, name: str) -> None:
        begin = time.perf_counter_ns()
        rpc.rpc_sync(server, same, args=(tensor,))
        windows[name].append((begin, time.perf_counter_ns()))

    return echo


def _hop(server: str, on_gpu: bool = False) -> Act:
    module, x = (layer_on_gpu, _INPUT.detach().cuda().requires_grad_()) if on_gpu else (layer, _INPUT)

    def hop(windows: Windows, name: str) -> None:
        with autograd.context() as context:
            begin = time.perf_counter_ns()
            value = rpc.rpc_sync(server, module, args=(x,))
            windows[f"{name}, forward"].append((begin, time.perf_counter_ns()))
            loss = value.sum()
            begin = time.perf_counter_ns()
            autograd.backward(context, [loss])
            if on_gpu:
                torch.cuda.synchronize()
            windows[f"{name}, backward"].append((begin, time.perf_counter_ns()))

    return hop


class Work(NamedTuple):
    make: Callable[[str], Act]
    repetitions: int  # in each round
    parts: tuple[str, ...] = ()

    def names(self, name: str) -> list[str]:
        return [f"{name}, {part}" for part in self.parts] or [name]


WORKS = {
    "no-op": Work(_noop, 250),
    "echo 1 KiB": Work(partial(_echo, _KIB), 150),
    "echo 16 MiB": Work(partial(_echo, 16 * _KIB**2), 10),
    "hop": Work(_hop, 100, ("forward", "backward")),
}
if torch.cuda.is_available():
    WORKS["hop on a GPU"] = Work(partial(_hop, on_gpu=True), 100, ("forward", "backward"))


class Done(NamedTuple):
    thread: int
    windows: Windows


def do(name: str, server: str) -> Done:
    """Do some work for a round, after a warm-up that does not count."""
    work = WORKS[name]
    act = work.make(server)
    windows: Windows = {each: [] for each in work.names(name)}
    end = time.monotonic() + _WARM_UP_SECONDS
    while time.monotonic() < end:
        act(windows, name)
    take()
    for each in windows.values():
        each.clear()
    for _ in range(work.repetitions):
        act(windows, name)
    return Done(threading.get_ident(), windows)


def explain(rounds: int = 4, only: Iterable[str] | None = None) -> list[Explained]:
    """Do all works in two pairs of processes, in turns: with stamps, and untouched. Raises `Strayed`."""
    names = [name for name in WORKS if only is None or name in only]
    parts = [part for name in names for part in WORKS[name].names(name)]
    ways: dict[str, list[Way]] = {part: [] for part in parts}
    untouched: dict[str, list[int]] = {part: [] for part in parts}
    with two_pairs(RpcOptions(device_maps="same") if torch.cuda.is_available() else None) as (stamped, plain):
        stamped.on_server(install)
        stamped.on_client(install)
        price = stamped.on_client(cost)
        for name in [*names] * rounds:
            for part, windows in plain.on_client(do, name, plain.server).windows.items():
                untouched[part] += [end - begin for begin, end in windows]
            stamped.on_server(take)
            done = stamped.on_client(do, name, stamped.server)
            history = History({CLIENT: stamped.on_client(take), SERVER: stamped.on_server(take)})
            for part, windows in done.windows.items():
                ways[part] += history.ways(Thread(CLIENT, done.thread), windows, price)
    return [summarise(part, ways[part], statistics.median(untouched[part]) / 1e9) for part in parts]


# What is shown.


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="backhaul bench --explain",
        description="Show where the microseconds of a call go, from the events of both processes. Takes half a minute.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="rounds", action="store_const", const=2, help="fewer rounds")
    size.add_argument("--smoke", dest="rounds", action="store_const", const=1, help="one round")
    parser.add_argument("--only", action="append", choices=list(WORKS), help="only this work; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures to PATH")
    parser.set_defaults(rounds=4)
    options = parser.parse_args(arguments)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    try:
        found = explain(options.rounds, options.only)
    except (BackhaulError, Strayed) as error:
        print(error, file=sys.stderr)
        return 1
    write(found, load, sys.stdout)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(found, load), indent=1) + "\n")
    return 0


def write(found: Sequence[Explained], load: float, file: TextIO) -> None:
    terminal = file.isatty()
    console = Console(file=file, width=None if terminal else _PLAIN_WIDTH, highlight=False)
    console.print(f"means of the middle half of all repetitions that went the usual way; load before: {load:.2f}")
    for each in found:
        table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
        table.add_column(each.work, no_wrap=True, min_width=10)
        table.add_column("", no_wrap=True, min_width=38)
        table.add_column("us", justify="right", no_wrap=True, min_width=9)
        table.add_column("share", justify="right", no_wrap=True, min_width=6)
        before = None
        for stage in each.stages:
            where = stage.where if stage.where != before else ""
            before = stage.where or before
            table.add_row(where, stage.name, _micro(stage.seconds), f"{stage.seconds / each.total:.1%}")
        table.add_row("", "remainder", _micro(each.remainder), f"{each.remainder / each.total:.1%}")
        table.add_row("total", "(median)", _micro(each.total), "100.0%", end_section=True)
        console.print()
        console.print(table)
        console.print(
            f"{each.alike} of {each.repetitions} repetitions went this way; stamps took {_micro(each.stamps)} us more; "
            f"untouched, it takes {_micro(each.untouched)} us",
            soft_wrap=True,
        )


def as_json(found: Sequence[Explained], load: float) -> dict[str, Any]:
    """The same as plain data, in seconds."""
    return {
        "host": host(load),
        "works": [
            {
                "work": each.work,
                "stages": [stage._asdict() for stage in each.stages],
                "total": each.total,
                "remainder": each.remainder,
                "covered": each.covered,
                "untouched": each.untouched,
                "stamps": each.stamps,
                "repetitions": each.repetitions,
                "alike": each.alike,
            }
            for each in found
        ],
    }


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"
