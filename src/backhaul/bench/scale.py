"""``backhaul bench --scale``: groups of many workers on one machine, beside torch RPC.

Each worker is a process with one torch thread. All are forked from one process that has imported
everything, so the measurement covers the group and not the import of torch. All workers do each step at once; a step
takes as long as its slowest worker. The processor time of all workers shows how much of a step is work, and how much
is waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from backhaul.bench.life import die_with
from backhaul.bench.ports import BACKHAUL, TORCH, torch_has_rpc
from backhaul.bench.table import host

_PLAIN_WIDTH = 200
_MIB = 1 << 20

SIZES = {"full": ((16, 32, 64), (16, 32)), "quick": ((8, 16), (8,)), "smoke": ((3,), (3,))}
"""The sizes of the groups of Backhaul, and of torch RPC, which takes minutes and gigabytes for larger ones."""

STEPS = {
    "start": "start",
    "call": "all call all, the first time",
    "call again": "all call all, once more",
    "refer": "a reference from each to each, and its value",
    "backward": "one backward over all",
    "shutdown": "shutdown",
}


class Outcome(NamedTuple):
    """The result of a group. ``seconds`` by step; the private memory of one worker; ``failed``: the failed step."""

    system: str
    size: int
    seconds: dict[str, float]
    memory: float = 0.0
    connections: int | None = None
    """A worker's connections after the start, before any call; None if unknown."""
    failed: str = ""
    processor: Mapping[str, float] = MappingProxyType({})
    """The processor time of all workers together, in seconds, by step."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    ours, torchs = SIZES[options.size]
    load = os.getloadavg()[0]
    outcomes = []
    for size in filter(None, options.workers or ours):
        outcomes.append(_say(measure(BACKHAUL, size, options.seconds)))
    for size in filter(None, options.torch or torchs):
        if torch_has_rpc():
            outcomes.append(_say(measure(TORCH, size, options.seconds)))
    write(outcomes, load, sys.stdout)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = [{**outcome._asdict(), "processor": dict(outcome.processor)} for outcome in outcomes]
        data = {"host": host(load), "outcomes": found}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if any(outcome.failed for outcome in outcomes if outcome.system == BACKHAUL) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backhaul bench --scale",
        description="Start groups of many workers, have all call all, refer to each other, do one backward over all, "
        "and shut down: the time of each step, the processor time of all workers together, and the memory of a worker. "
        "Takes some minutes, most of them for torch RPC. The exit "
        "code is 0 if all groups of Backhaul finished.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller groups")
    size.add_argument("--smoke", dest="size", action="store_const", const="smoke", help="seconds; means nothing")
    parser.add_argument(
        "--workers", type=int, action="append", metavar="N", help="groups of this size of Backhaul; 0: none"
    )
    parser.add_argument(
        "--torch", type=int, action="append", metavar="N", help="groups of this size of torch RPC; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="that each step may take at most")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.set_defaults(size="full")
    return parser


def measure(system: str, size: int, most: float) -> Outcome:
    """Start a group, go through the steps, end it."""
    processor: dict[str, float] = {}
    outcome = Outcome(system, size, {}, processor=processor)
    seconds = outcome.seconds
    with _processes(system, size) as crew:
        try:
            for step in STEPS:
                began = time.monotonic()
                answers = crew.order(step, most)
                seconds[step] = time.monotonic() - began
                processor[step] = crew.used
                if step == "start":
                    outcome = outcome._replace(connections=answers[0])
                if step == "backward":
                    memory = crew.order("memory", most)
                    outcome = outcome._replace(memory=sum(memory) / size)
        except _Failed as error:
            return outcome._replace(failed=str(error))
    return outcome


class _Failed(Exception):
    """A step did not finish."""


class _Crew:
    """The processes of a group, which obey orders."""

    def __init__(self, processes: list[BaseProcess], lines: list[Connection]) -> None:
        self._processes = processes
        self._lines = lines
        self.used = 0.0
        """The processor time of all workers in the last step, in seconds."""

    def order(self, step: str, most: float) -> list[Any]:
        """Make all workers do a step at once; returns their answers. Raises `_Failed`."""
        deadline = time.monotonic() + most
        for line in self._lines:
            line.send(step)
        answers = []
        self.used = 0.0
        for rank, line in enumerate(self._lines):
            try:
                if not line.poll(max(0.0, deadline - time.monotonic())):
                    raise _Failed(f"{step}: worker {rank} did not finish in {most:g} s")
                answer, error, used = line.recv()
            except (EOFError, OSError):
                raise _Failed(f"{step}: worker {rank} died") from None
            if error:
                raise _Failed(f"{step}: worker {rank}: {error}")
            answers.append(answer)
            self.used += used
        return answers

    def end(self) -> None:
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _processes(system: str, size: int) -> Iterator[_Crew]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["backhaul.bench.scale_worker"])
    with tempfile.TemporaryDirectory(prefix="backhaul-scale-") as directory:
        processes: list[BaseProcess] = []
        lines: list[Connection] = []
        crew = _Crew(processes, lines)
        try:
            for rank in range(size):
                here, there = context.Pipe()
                process = context.Process(target=live, args=(system, rank, size, directory, there), daemon=True)
                process.start()
                there.close()
                processes.append(process)
                lines.append(here)
            crew.order("ready", 600.0)  # imports are done, so the clock may start
            yield crew
        finally:
            crew.end()


def live(system: str, rank: int, size: int, directory: str, line: Connection) -> None:
    """The life of a worker process: obey orders from the line."""
    die_with(os.getppid())
    from backhaul.bench.scale_worker import Member

    member = Member(system, rank, size, directory)
    acts: dict[str, Callable[[], Any]] = {
        "ready": lambda: None,
        "start": member.start,
        "call": member.call_all,
        "call again": member.call_all,
        "refer": member.refer_to_all,
        "backward": member.backward,
        "memory": member.memory,
        "shutdown": member.shutdown,
    }
    while (step := line.recv()) is not None:
        began = time.process_time()
        try:
            answer, failure = acts[step](), ""
        except Exception as error:
            answer, failure = None, f"{type(error).__name__}: {error}"
        line.send((answer, failure, time.process_time() - began))
    # Torch's threads may keep a process alive that has not shut down.
    os._exit(0)


def write(outcomes: Sequence[Outcome], load: float, file: TextIO) -> None:
    """Print the table."""
    terminal = file.isatty()
    console = Console(file=file, width=None if terminal else _PLAIN_WIDTH, highlight=False)
    console.print(f"{os.cpu_count()} processors; load before: {load:.2f}")
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(f"{outcome.system}, {outcome.size}", justify="right", no_wrap=True)
    for step, name in STEPS.items():
        table.add_row(name, *(_seconds(outcome.seconds, step) for outcome in outcomes))
    for step, name in STEPS.items():
        table.add_row(f"processor time: {name}", *(_seconds(outcome.processor, step) for outcome in outcomes))
    table.add_row("memory of a worker, its own", *(f"{each.memory / _MIB:.0f} MiB" for each in outcomes))
    known = ("-" if each.connections is None else str(each.connections) for each in outcomes)
    table.add_row("a worker's connections after the start", *known)
    console.print(table)
    for outcome in outcomes:
        if outcome.failed:
            console.print(f"failed: {outcome.system}, {outcome.size}: {outcome.failed}")


def _seconds(times: Mapping[str, float], step: str) -> str:
    found = times.get(step)
    return "-" if found is None else f"{found:.2f} s"


def _say(outcome: Outcome) -> Outcome:
    if sys.stderr.isatty():
        print(f"{outcome.system}, {outcome.size}: done", file=sys.stderr)
    return outcome
