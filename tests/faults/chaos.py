"""Run programs of `chaos_program`, which are simulated training runs under faults::

    python tests/faults/chaos.py SEED               # replay one, and print all that happens in it
    python tests/faults/chaos.py FIRST COUNT        # run many, on all processors (--jobs N)

A program makes the same steps every time, on any machine: `--digests` prints a number for each program that shows this.
All failing programs are listed with the command that replays them. A program that takes longer than `--limit` seconds
counts as failed, and the stacks of all threads are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

_LIMIT = 120.0
_SMALLEST_CHUNK = 100
_ANY = -1
_CHUNKS_FOR_EACH_JOB = 3
_HASHES = "PYTHONHASHSEED"
_NO_RANDOM_HASHES = {**os.environ, _HASHES: "0"}  # the order of sets is part of a program


class Chunk(NamedTuple):
    first: int
    count: int


class Runs:
    """Runs programs in several processes, and collects their outcomes. A process that ends is replaced."""

    def __init__(self, first: int, count: int, jobs: int, limit: float) -> None:
        size = max(_SMALLEST_CHUNK, -(-count // (jobs * _CHUNKS_FOR_EACH_JOB)))
        self._limit = limit
        self._chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        for at in range(first, first + count, size):
            self._chunks.put(Chunk(at, min(size, first + count - at)))
        self._lock = threading.Lock()
        # Guarded by _lock:
        self.tally: Counter[str] = Counter()
        self.failed: dict[int, str] = {}
        self.digests: dict[int, str] = {}
        processors = sorted(os.sched_getaffinity(0))
        if jobs < len(processors):  # other programs may run here too, so a process must be free to move
            processors = [_ANY]
        threads = [
            threading.Thread(target=self._work, args=(processors[job % len(processors)],), name=f"job {job}")
            for job in range(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, processor: int) -> None:
        while True:
            try:
                chunk: Chunk | None = self._chunks.get_nowait()
            except queue.Empty:
                return
            while chunk is not None:
                chunk = self._run(chunk, processor)

    def _run(self, chunk: Chunk, processor: int) -> Chunk | None:
        """Run a chunk in a new process. Returns the rest of the chunk if that process ended early."""
        options = ["--processor", str(processor), "--limit", str(self._limit)]
        command = [sys.executable, __file__, str(chunk.first), str(chunk.count), *options]
        at = chunk.first
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_NO_RANDOM_HASHES)
            assert child.stdout is not None
            with child, child.stdout as lines:
                for line in lines:
                    at = json.loads(line)["seed"] + 1
                    self._note(json.loads(line))
            if child.returncode == 0:
                return None
            errors.seek(0)
            text = f"its process ended with code {child.returncode}:\n{errors.read()}"
        self._note({"seed": at, "error": f"seed {at}: {text}"})
        left = Chunk(at + 1, chunk.first + chunk.count - at - 1)
        return left if left.count else None

    def _note(self, outcome: dict[str, Any]) -> None:
        seed = outcome["seed"]
        with self._lock:
            self.tally.update(outcome.get("tally", {"programs": 1}))
            self.digests[seed] = outcome.get("digest", "failed")
            if "error" in outcome:
                self.failed[seed] = outcome["error"]
                print(f"{outcome['error']}\n  replay it with: {replay(seed)}", flush=True)


def replay(seed: int) -> str:
    return f"python tests/faults/chaos.py {seed}"


def prepare() -> None:
    """Prepare this process for programs."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("backhaul").setLevel(logging.ERROR)  # workers warn about every peer that they suspect
    import chaos_program

    chaos_program.warm_up()
    gc.collect()
    gc.freeze()  # each program collects garbage at its end: objects created at import are most of what it would look at


def run_here(chunk: Chunk, limit: float) -> None:
    """Run a chunk in this process, and print a line for each program."""
    prepare()
    from chaos_program import ChaosError, Outcome, simulation

    with simulation():
        for seed in range(chunk.first, chunk.first + chunk.count):
            faulthandler.dump_traceback_later(limit, exit=True)
            try:
                outcome = Outcome(seed)
                found: dict[str, Any] = {"seed": seed, "tally": outcome.tally, "digest": outcome.digest}
            except ChaosError as error:
                found = {"seed": seed, "error": str(error).split("\n")[0]}
            print(json.dumps(found), flush=True)
    faulthandler.cancel_dump_traceback_later()


def replay_here(seed: int, limit: float) -> None:
    if os.environ.get(_HASHES) != "0":
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=_NO_RANDOM_HASHES, check=False).returncode)
    prepare()
    from chaos_program import Outcome, simulation

    faulthandler.dump_traceback_later(limit, exit=True)
    with simulation():
        outcome = Outcome(seed, print)
    faulthandler.cancel_dump_traceback_later()
    print(dict(outcome.tally), "digest", outcome.digest)


def run_many(first: int, count: int, jobs: int, limit: float, *, digests: bool) -> None:
    start = time.monotonic()
    runs = Runs(first, count, jobs, limit)
    if digests:
        for seed, digest in sorted(runs.digests.items()):
            print(f"seed {seed} {digest}")
    tally = runs.tally
    programs = tally.pop("programs", 0)
    what = ", ".join(f"{count} {name}" for name, count in sorted(tally.items()))
    print(
        f"{programs} programs from seed {first} on, {len(runs.failed)} failed, "
        f"{time.monotonic() - start:.1f} s with {jobs} processes: {what}"
    )
    if runs.failed or programs != count:
        sys.exit(f"failed: {', '.join(map(replay, sorted(runs.failed)))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int, metavar="SEED")
    parser.add_argument("count", type=int, nargs="?")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; all processors")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds for each program")
    parser.add_argument("--digests", action="store_true", help="print a number for each program, of all its steps")
    parser.add_argument("--processor", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.count is None:
        replay_here(given.first, given.limit)
    elif given.processor is not None:
        # One thread of a program runs at a time. Switching to another is faster on the same processor.
        if given.processor != _ANY:
            os.sched_setaffinity(0, {given.processor})
        run_here(Chunk(given.first, given.count), given.limit)
    else:
        run_many(given.first, given.count, max(1, given.jobs), given.limit, digests=given.digests)


if __name__ == "__main__":
    main()
