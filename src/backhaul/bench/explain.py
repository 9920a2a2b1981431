"""``backhaul bench --explain``: where the microseconds of a call go, from the events of both processes.

Two processes over a unix socket repeat the same work, and the events in their workers are stamped
(`stages`). For each repetition the **way** of the work is followed backwards from its end, thread by thread::

    the client's thread has its reply  ◄── it waited for bytes (Read), which came because of
    a frame of the server (Sent)       ◄── whose thread had waited for bytes, which came because of
    a frame of the client              ◄── and there the work began

On the way, the time between two events of a thread belongs to the stage that the second one ends. The time from the end
of a write to the end of its read is time between the processes. The time from a thread's action for another thread
until that thread continues is time between threads. So all stages together make up the whole time, minus the cost of
the stamps themselves. A second pair of processes does the same without stamps, in turns with the first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backhaul import autograd, rpc
from backhaul.agent.observing import Came, Event, Queued, Read, Resumes, Sent, Starts, Waits
from backhaul.bench.pair import CLIENT, SERVER, two_pairs
from backhaul.bench.stages import IN_BETWEEN, KINDS, Cost, Stamped, cost, install, stage_between, take
from backhaul.bench.table import host
from backhaul.errors import BackhaulError
from backhaul.options import RpcOptions

BETWEEN_PROCESSES = "between processes (wake-up, kernel)"
BETWEEN_THREADS = "between threads (wake-up)"

_WIDTH, _BATCH = 64, 16
_KIB = 1024
_WARM_UP_SECONDS = 0.2
_MOST_LEGS = 40
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


# The way of one repetition.


class Stamp(NamedTuple):
    """An event. All times are in nanoseconds."""

    kind: type[Event]
    at: int


class Thread(NamedTuple):
    process: str
    id: int


class Piece(NamedTuple):
    """A stretch of the way. ``leg`` counts the changes from one thread to another."""

    leg: int
    where: str
    stage: str
    begin: int
    end: float  # on the clock minus the time that stamps took

    @property
    def nanoseconds(self) -> float:
        return self.end - self.begin


class Way(NamedTuple):
    """One repetition. It has no pieces if it could not be followed."""

    pieces: list[Piece]
    clocked: int

    @property
    def nanoseconds(self) -> float:
        """Its time without the cost of stamps."""
        return sum(piece.nanoseconds for piece in self.pieces)


class Strayed(Exception):
    """The way cannot be followed to its beginning: something else was involved."""


Stamps = Mapping[Thread, Sequence[Stamp]]
"""The stamps of each thread, in order of time."""


class History:
    """All stamps of a run."""

    def __init__(self, stamped: Mapping[str, Stamped]) -> None:
        self._stamps: dict[Thread, list[Stamp]] = {}
        for process, rows in stamped.items():
            for number, at, thread in rows.tolist():
                self._stamps.setdefault(Thread(process, thread), []).append(Stamp(KINDS[number], at))

    def during(self, begin: int, end: int) -> Stamps:
        """The stamps in that time, plus the last before it and the first after it of each thread."""
        found = {}
        for thread, stamps in self._stamps.items():
            first = bisect_left(stamps, begin, key=lambda stamp: stamp.at)
            last = bisect_left(stamps, end, key=lambda stamp: stamp.at)
            found[thread] = stamps[max(0, first - 1) : last + 1]
        return found

    def ways(self, main: Thread, windows: Iterable[tuple[int, int]], cost: Cost) -> list[Way]:
        """The way of each repetition."""
        found: list[Way] = []
        for begin, end in windows:
            try:
                pieces = follow(self.during(begin, end), main, begin, end, cost)
            except Strayed:
                pieces = []
            found.append(Way(pieces, end - begin))
        return found


def follow(stamps: Stamps, main: Thread, begin: int, end: int, cost: Cost) -> list[Piece]:
    """The way of thread ``main`` in that time, in order. Raises `Strayed`."""
    before, after = cost
    pieces: list[Piece] = []
    thread, leg = main, 0
    place = bisect_right(stamps.get(main, ()), end, key=lambda stamp: stamp.at) - 1
    stage, until, ending = IN_BETWEEN, end, 0.0  # of the current stretch, and the cost of the stamp at its end

    def add(where: str, since: int, taken: float) -> None:
        pieces.append(Piece(leg, where, stage, since, max(since, until - taken)))

    while True:
        stamp = stamps[thread][place] if place >= 0 else None
        if stamp is None or stamp.at <= begin:
            if thread != main:
                raise Strayed
            add(thread.process, begin, ending)
            return [piece._replace(leg=pieces[-1].leg - piece.leg) for piece in reversed(pieces)]
        add(thread.process, stamp.at, ending + after)
        cause = _cause(stamps, thread, place)
        if cause is None:  # the thread did not have to wait
            stage, until, ending = _stage(stamps[thread], place), stamp.at, before
            place -= 1
            continue
        other, number = cause
        event = stamps[other][number]
        stage, until = BETWEEN_THREADS if other.process == thread.process else BETWEEN_PROCESSES, stamp.at
        add("", min(event.at, stamp.at), before)
        stage, ending = _stage(stamps[other], number), before if event.at <= stamp.at else 0.0
        until = min(event.at, stamp.at)
        thread, place = other, number - 1
        leg += 1
        if leg == _MOST_LEGS:
            raise Strayed


def _stage(mine: Sequence[Stamp], place: int) -> str:
    """What a thread did between the previous stamp and this one."""
    return stage_between(mine[place - 1].kind if place > 0 else None, mine[place].kind)


def _cause(stamps: Stamps, thread: Thread, place: int) -> tuple[Thread, int] | None:
    """What a thread waited for before this stamp: another thread and the index of its stamp. None if it did not wait.

    A write, or the wake-up of a thread, takes effect at some time between two stamps of the acting thread. So
    its stamp may be a little later than its effect. A stamp from before the wait cannot have ended it.
    """
    mine = stamps[thread]
    wanted = _ended_by(mine, place)
    if wanted is None:
        return None
    until, since = mine[place].at, _wait_began(mine, place)
    best: tuple[tuple[bool, int], Thread, int] | None = None
    for other, theirs in stamps.items():
        if other == thread or (other.process == thread.process) == (wanted is Sent):
            continue
        for number, event in enumerate(theirs):
            if event.kind is not wanted or event.at <= since:
                continue
            in_time = event.at <= until
            if in_time or (number > 0 and theirs[number - 1].at < until and wanted is not Queued):
                # The last one in time; if there is none, the one that was about to be stamped.
                rank = in_time, event.at if in_time else -event.at
                if best is None or rank > best[0]:
                    best = rank, other, number
    return None if best is None else best[1:]


def _ended_by(mine: Sequence[Stamp], place: int) -> type[Event] | None:
    """The kind of event that ends the wait before this stamp; None if there was no wait."""
    kind = mine[place].kind
    if kind is Read:
        return Sent
    if kind is Starts:
        return Queued
    return Came if kind is Resumes and place > 0 and mine[place - 1].kind is Waits else None


def _wait_began(mine: Sequence[Stamp], place: int) -> float:
    """When a thread began to wait for what it has at this stamp.

    If it did nothing since it sent something, that is when it began to send: it may have lost its processor right
    after the write, and find the reply when it continues.
    """
    place -= 1
    sent = place
    while sent > 0 and mine[sent].kind is Waits:
        sent -= 1
    if sent > 0 and mine[sent].kind is Sent:
        place = sent - 1
    return mine[place].at if place >= 0 else -math.inf


# Many repetitions.


class Stage(NamedTuple):
    leg: int
    where: str  # a process; "" means between two
    name: str
    seconds: float


@dataclass(frozen=True)
class Explained:
    """A work in stages, in order, and how long it takes, in seconds.

    A stage is the mean over the **usual** repetitions: those with the most common way, and of these the middle half
    by time. Means add up, unlike medians, and disturbed repetitions are excluded.
    """

    work: str
    stages: list[Stage]
    total: float  # the median over the most common way, without the cost of stamps
    stamps: float  # their cost
    untouched: float  # the median in processes that have no stamps
    repetitions: int
    alike: int  # repetitions with that way

    @property
    def remainder(self) -> float:
        """The total minus all stages."""
        return self.total - sum(stage.seconds for stage in self.stages)

    @property
    def covered(self) -> float:
        """The share of the total that the stages cover."""
        return sum(stage.seconds for stage in self.stages if stage.name != IN_BETWEEN) / self.total


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


def summarise(work: str, ways: Sequence[Way], untouched: float) -> Explained:
    """The explanation of the usual repetitions. Raises `Strayed` if there are none."""
    followed = [way for way in ways if way.pieces]
    if not followed:
        raise Strayed(f"{work}: no repetition could be followed from its end back to its beginning")
    legs, _ = Counter(_legs(way.pieces) for way in followed).most_common(1)[0]
    alike = sorted((way for way in followed if _legs(way.pieces) == legs), key=lambda way: way.nanoseconds)
    quarter = len(alike) // 4
    usual = alike[quarter : len(alike) - quarter]
    times: dict[tuple[int, str, str], float] = {}
    begins: dict[tuple[int, str, str], list[int]] = {}
    for way in usual:
        first: dict[tuple[int, str, str], int] = {}
        for piece in way.pieces:
            key = piece.leg, piece.where, piece.stage
            times[key] = times.get(key, 0.0) + piece.nanoseconds / len(usual)
            first.setdefault(key, piece.begin - way.pieces[0].begin)
        for key, begin in first.items():
            begins.setdefault(key, []).append(begin)
    order = sorted(times, key=lambda key: (key[0], statistics.median(begins[key])))
    return Explained(
        work,
        [Stage(*key, times[key] / 1e9) for key in order if times[key] > 0],
        total=statistics.median(way.nanoseconds for way in alike) / 1e9,
        stamps=statistics.median(way.clocked - way.nanoseconds for way in alike) / 1e9,
        untouched=untouched,
        repetitions=len(ways),
        alike=len(alike),
    )


def _legs(way: Sequence[Piece]) -> tuple[tuple[int, str], ...]:
    """Which process has which leg."""
    return tuple(dict.fromkeys((piece.leg, piece.where) for piece in way if piece.where))


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
