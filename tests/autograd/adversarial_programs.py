"""Adversarial programs on Backhaul against one process, many at a time.

python tests/autograd/adversarial_programs.py FIRST LAST    # the programs of these seeds; those that fail are shown
python tests/autograd/adversarial_programs.py SEED          # one program; if it fails, the smallest one that fails too
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import adversarial_runs
import torch
from adversarial import Program, smaller
from adversarial_comparison import Mismatch, NotRefused, compare, refusal
from adversarial_generator import generate
from adversarial_local import run_locally
from adversarial_places import Outcome
from adversarial_runs import drive, forget_all, prepare, prepare_seed
from adversarial_words import without_notices
from programs import cluster_of, least_that_fails, left_on

from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker

_keys = itertools.count()


class Failed(AssertionError):
    """A program that failed; the message shows it."""

    def __init__(self, program: Program, error: BaseException) -> None:
        again = f"python tests/autograd/adversarial_programs.py {program.seed}"
        where = "" if isinstance(error, Mismatch) else "".join(traceback.format_exception(error)[-8:])
        super().__init__(f"seed {program.seed}: {type(error).__name__}: {error}\n{where}\n{program}\n# {again}")
        self.seed = program.seed


def run_in_process(program: Program, cluster: Sequence[Worker]) -> list[Outcome]:
    key = f"adversarial_case_{next(_keys)}"
    prepare(program, range(program.size), key)

    def at(rank: int, function: Callable[..., Any], *args: Any) -> Any:
        with cluster[rank].as_current():
            return function(*args)

    try:
        with cluster[0].as_current():
            return drive(program, key, at)
    finally:
        forget_all()


def run_twice(program: Program, run: Callable[[], list[Outcome]], tally: Counter[str]) -> None:
    """Compare the outcome of ``run`` with one process. If torch refuses the program there, ``run`` must too."""
    try:
        expected = run_locally(program)
    except Exception as refused:
        tally["refused by torch"] += 1
        tally[f"refused by torch: {str(refused)[:90]}"] += 1
        try:
            run()
        except Exception as error:
            if _same_error(error, refused) or refusal(program, error):
                return
            raise
        raise NotRefused(f"one process raises {refused!r}") from refused
    try:
        found = run()
    except Exception as error:
        reason = refusal(program, error)
        if reason is None:
            raise
        tally[reason] += 1
        return
    tally["tensors that are the same bit by bit"] += compare(program, expected, found)
    tally["programs that are equal"] += 1


def _same_error(error: BaseException, other: BaseException) -> bool:
    if "does not require grad" in str(other):
        return "requires_grad not set on root" in str(error)
    first = str(other).partition("\n")[0]
    return first in str(error) and (type(error) is type(other) or isinstance(error, PartialError))


def check(program: Program, cluster: Sequence[Worker], tally: Counter[str]) -> None:
    """Check one program. Raises `Failed`."""
    try:
        with without_notices():
            run_twice(program, lambda: run_in_process(program, cluster), tally)
        for worker in cluster:
            if left := left_on(worker):
                raise Mismatch(f"{worker} still has {left}")
    except Exception as error:
        raise Failed(program, error) from error
    finally:
        if any("compiled" in feature for feature in program.features):
            torch._dynamo.reset()


def check_many_here(seeds: Sequence[int]) -> tuple[list[str], Counter[str]]:
    """Check programs with processes as workers; this process is worker0. Returns what went wrong."""
    failures: list[str] = []
    tally: Counter[str] = Counter()
    for seed in seeds:
        program = generate(seed)
        tally["programs"] += 1
        try:
            with without_notices():
                run_twice(program, lambda program=program: _run_on_processes(program), tally)  # type: ignore[misc]
        except Exception as error:
            failures.append(str(Failed(program, error)))
    return failures, tally


def _run_on_processes(program: Program) -> list[Outcome]:
    def at(rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return rpc.rpc_sync(f"worker{rank}", function, args=args) if rank else function(*args)

    for rank in range(program.size):
        at(rank, prepare_seed, program.seed)
    try:
        return drive(program, f"adversarial_{program.seed}", at)
    finally:
        for rank in range(program.size):
            at(rank, forget_all)


def run(seeds: Iterable[int], failed: Callable[[BaseException], None] | None = None) -> Counter[str]:
    """Check the programs. Returns their features with counts. ``failed`` gets failures, which are raised otherwise."""
    tally: Counter[str] = Counter()
    groups: dict[tuple[int, bool], list[Program]] = {}
    for seed in seeds:
        program = generate(seed)
        groups.setdefault((program.size, program.scheduled), []).append(program)
    for (size, scheduled), programs in groups.items():
        while programs:
            with _cluster(size, scheduled, programs[0].seed) as cluster:
                while programs:
                    program = programs.pop(0)
                    tally["programs"] += 1
                    tally.update(program.features)
                    try:
                        check(program, cluster, tally)
                    except Failed as error:
                        if failed is None:
                            raise
                        tally["failed"] += 1
                        failed(error)
                        break
    return tally


def _cluster(size: int, scheduled: bool, seed: int) -> Any:
    return cluster_of(size, seed) if scheduled else InProcessCluster(size)


def fails(program: Program, attempts: int = 1) -> BaseException | None:
    """How a program fails."""
    for attempt in range(attempts):
        with _cluster(program.size, program.scheduled, program.seed + attempt) as cluster:
            try:
                check(program, cluster, Counter())
            except Failed as error:
                return error.__cause__
    return None


def shrink(program: Program, error: BaseException) -> Program:
    """The smallest part of a failing program that fails in the same way."""
    adversarial_runs.BACKWARD_SECONDS = 3.0
    return least_that_fails(program, smaller, fails, type(error))


def main(arguments: Sequence[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if len(arguments) == 1:
        program = generate(int(arguments[0]))
        error = fails(program, attempts=3)
        if error is None:
            print(f"{program}\npasses")
            return 0
        print(f"{program}\n{type(error).__name__}: {error}\n\nthe least of it:", flush=True)
        least = shrink(program, error)
        error = fails(least, attempts=10) or error
        print(f"{least}\n{type(error).__name__}: {error}")
        return 1
    first, last = map(int, arguments)
    start = time.monotonic()
    tally = Counter[str]()
    for begin in range(first, last, 50):
        tally.update(run(range(begin, min(last, begin + 50)), lambda error: print(error, flush=True)))
        print(
            f"{tally['programs']} programs, {tally['failed']} failed, {time.monotonic() - start:.0f} s", file=sys.stderr
        )
    for feature in sorted(tally):
        print(f"{tally[feature]:9}  {feature}")
    print(f"{tally['programs']} programs, {tally['failed']} failed; {time.monotonic() - start:.1f} s")
    return 1 if tally["failed"] else 0


if __name__ == "__main__":
    # Imported under its module name, so that workers find its functions.
    import adversarial_programs

    raise SystemExit(adversarial_programs.main(sys.argv[1:]))
