"""``backhaul bench --explain``: where the microseconds of a call go, from stamps of both processes.

Two processes over a unix socket do the same work again and again, with stamps on the seams of the code (`stages`). For
each repetition the **way** of the work is followed backwards from its end, thread by thread::

    the client's thread has its reply  ◄── it waited in a read, which ended because of
    a write of the server              ◄── whose thread had waited in a read, which ended because of
    a write of the client              ◄── and there the work began

Each stretch of the way belongs to the innermost seam that the thread was in, or to none ("in between"); from the end of
a write to the end of the read of it is time between the processes. So all stages together are the whole time, without
what the stamps themselves cost. A second pair of processes does the same without stamps, in turns with the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from backhaul import autograd, rpc
from backhaul.bench.pair import CLIENT, SERVER, two_pairs
from backhaul.bench.stages import SEAMS, SeamGone, Stamped, cost, install, take, this_thread
from backhaul.bench.table import host
from backhaul.errors import BackhaulError

IN_BETWEEN = "in between"
BETWEEN_PROCESSES = "between processes (wake-up, kernel)"
BETWEEN_THREADS = "between threads (wake-up)"

_WIDTH, _BATCH = 64, 16
_KIB = 1024
_WARM_UP_SECONDS = 0.2
_MOST_LEGS = 40
_PLAIN_WIDTH = 120

Windows = dict[str, list[tuple[int, int]]]
"""Work -> begin and end of each repetition, in nanoseconds."""


# What is done, on the client.

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


Act = Callable[[Windows, str], None]
"""Does a work of that name once, and notes when."""


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


def _hop(server: str) -> Act:
    def hop(windows: Windows, name: str) -> None:
        with autograd.context() as context:
            begin = time.perf_counter_ns()
            value = rpc.rpc_sync(server, layer, args=(_INPUT,))
            windows[f"{name}, forward"].append((begin, time.perf_counter_ns()))
            loss = value.sum()
            begin = time.perf_counter_ns()
            autograd.backward(context, [loss])
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


class Done(NamedTuple):
    thread: str
    windows: Windows


def do(name: str, server: str) -> Done:
    """Do some work for a round, after a while of it that does not count."""
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
    return Done(this_thread(), windows)


# The way of one repetition.


class Event(NamedTuple):
    """One call of a seam. All times are in nanoseconds."""

    seam: int
    begin: int
    end: int

    @property
    def stage(self) -> str:
        return SEAMS[self.seam].stage

    @property
    def kind(self) -> str:
        return SEAMS[self.seam].kind


class Thread(NamedTuple):
    process: str
    name: str


class Piece(NamedTuple):
    """A stretch of the way. ``leg`` counts the changes from one thread to another."""

    leg: int
    where: str
    stage: str
    begin: int
    end: float  # less than on the clock by what stamps took

    @property
    def nanoseconds(self) -> float:
        return self.end - self.begin


class Way(NamedTuple):
    """One repetition. Without pieces if it could not be followed."""

    pieces: list[Piece]
    clocked: int

    @property
    def nanoseconds(self) -> float:
        """Without what stamps cost."""
        return sum(piece.nanoseconds for piece in self.pieces)


class Strayed(Exception):
    """The way cannot be followed to where it began: somebody else had a hand in it."""


Events = Mapping[Thread, Sequence[Event]]
Cost = tuple[float, float]


class History:
    """All that was stamped in a run."""

    def __init__(self, stamped: Mapping[str, Stamped]) -> None:
        self._events: dict[Thread, list[Event]] = {}
        self._begins: dict[Thread, list[int]] = {}
        for process, logs in stamped.items():
            for name, rows in logs.items():
                events = sorted((Event(*row) for row in rows.tolist()), key=lambda event: (event.begin, -event.end))
                thread = Thread(process, name)
                self._events[thread] = events
                self._begins[thread] = [event.begin for event in events]

    def during(self, begin: int, end: int) -> Events:
        """What began in that time; and the last before it of each thread, which may be the read that it waits in."""
        found = {}
        for thread, events in self._events.items():
            first = max(0, bisect_left(self._begins[thread], begin) - 1)
            found[thread] = events[first : bisect_left(self._begins[thread], end)]
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


def follow(events: Events, main: Thread, begin: int, end: int, cost: Cost) -> list[Piece]:
    """The way of what thread ``main`` did in that time, in order. Raises `Strayed`."""
    pieces: list[Piece] = []
    thread, now, leg = main, end, 0
    while leg < _MOST_LEGS:
        wait = _last_wait(events[thread], begin, now)
        since = begin if wait is None else wait.end
        pieces += reversed(_split(events[thread], thread.process, leg, since, now, cost))
        if wait is None:
            if thread != main:
                raise Strayed
            return [piece._replace(leg=pieces[-1].leg - piece.leg) for piece in reversed(pieces)]
        cause = _cause(events, thread, wait)
        if cause is None:  # it did not have to wait
            pieces.append(Piece(leg, thread.process, wait.stage, wait.begin, wait.end - cost[0]))
            now = max(begin, wait.begin)
            continue
        other, event = cause
        now = min(event.end, wait.end)
        stage = BETWEEN_PROCESSES if wait.kind == "read" else BETWEEN_THREADS
        pieces.append(Piece(leg, "", stage, now, max(now, wait.end - cost[0])))
        thread = other
        leg += 1
    raise Strayed


def _last_wait(events: Iterable[Event], begin: int, now: int) -> Event | None:
    waits = [event for event in events if event.kind in ("read", "sleep") and begin < event.end <= now]
    return max(waits, key=lambda event: event.end, default=None)


def _cause(events: Events, thread: Thread, wait: Event) -> tuple[Thread, Event] | None:
    """What ended a wait: the last write of the other process before its end, or the last wake of another thread."""
    kind = "write" if wait.kind == "read" else "wake"
    found = [
        (other, event)
        for other, theirs in events.items()
        if other != thread and (other.process == thread.process) == (kind == "wake")
        for event in theirs
        if event.kind == kind and event.begin < wait.end and event.end > wait.begin
    ]
    return max(found, key=lambda each: each[1].begin, default=None)


def _split(events: Sequence[Event], process: str, leg: int, since: int, until: int, cost: Cost) -> list[Piece]:
    """One thread's time, by the innermost seam. ``events`` are in order of their begin, outer ones first."""
    inside, outside = cost
    pieces: list[Piece] = []

    def add(stage: str, begin: int, end: int, stamps: float) -> None:
        if end > begin:
            pieces.append(Piece(leg, process, stage, begin, max(begin, end - stamps)))

    stack: list[Event] = []
    now, stamps = since, 0.0
    relevant = [event for event in events if event.end > since and event.begin < until and event.kind != "sleep"]
    for event in relevant:
        while stack and stack[-1].end <= event.begin:
            ended = stack.pop()
            add(ended.stage, now, ended.end, stamps)
            now, stamps = max(now, ended.end), outside
        start = max(event.begin, since)
        add(stack[-1].stage if stack else IN_BETWEEN, now, start, stamps)
        now, stamps = max(now, start), inside if event.begin >= since else 0.0
        stack.append(event)
    while stack:
        ended = stack.pop()
        end = min(ended.end, until)
        add(ended.stage, now, end, stamps)
        now, stamps = max(now, end), outside
    add(IN_BETWEEN, now, until, stamps)
    return pieces


# Many repetitions.


class Stage(NamedTuple):
    leg: int
    where: str  # a process; "" is between two
    name: str
    seconds: float


@dataclass(frozen=True)
class Explained:
    """A work in stages, in order, and how long it takes, in seconds.

    A stage is the mean of the **usual** repetitions: those that went the way that most went, and of these the half
    in the middle by their time. Means add up, as medians do not, and nothing that disturbed a repetition is in them.
    """

    work: str
    stages: list[Stage]
    total: float  # the median of all that went that way, without what stamps cost
    stamps: float  # what they cost
    untouched: float  # the median in processes that have no stamps
    repetitions: int
    alike: int  # that went that way

    @property
    def remainder(self) -> float:
        """By how much the total is more than all stages."""
        return self.total - sum(stage.seconds for stage in self.stages)

    @property
    def covered(self) -> float:
        """The share of the total that has a name."""
        return sum(stage.seconds for stage in self.stages if stage.name != IN_BETWEEN) / self.total


def explain(rounds: int = 4, only: Iterable[str] | None = None) -> list[Explained]:
    """Do all works in two pairs of processes, in turns: with stamps, and untouched. Raises `SeamGone`, `Strayed`."""
    names = [name for name in WORKS if only is None or name in only]
    parts = [part for name in names for part in WORKS[name].names(name)]
    ways: dict[str, list[Way]] = {part: [] for part in parts}
    untouched: dict[str, list[int]] = {part: [] for part in parts}
    with two_pairs() as (stamped, plain):
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
    """The usual one of these. Raises `Strayed` if there is none."""
    followed = [way for way in ways if way.pieces]
    if not followed:
        raise Strayed(f"{work}: no repetition could be followed from its end back to its begin")
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
        description="Show where the microseconds of a call go, from stamps of both processes. Takes half a minute.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="rounds", action="store_const", const=2, help="fewer rounds")
    size.add_argument("--smoke", dest="rounds", action="store_const", const=1, help="one round")
    parser.add_argument("--only", action="append", choices=list(WORKS), help="this work only; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.set_defaults(rounds=4)
    options = parser.parse_args(arguments)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    try:
        found = explain(options.rounds, options.only)
    except (BackhaulError, SeamGone, Strayed) as error:
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
