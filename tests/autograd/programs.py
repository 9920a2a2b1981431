"""Random programs on Backhaul against one process, many at a time.

python tests/autograd/programs.py FIRST LAST              # the programs of these seeds; those that fail are shown
python tests/autograd/programs.py --processes FIRST LAST  # the same with workers that are processes
python tests/autograd/programs.py SEED                    # one program; if it fails, the smallest one that fails too
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import program_runs
import torch
from program import Block, Call, Keep, Leaf, Load, Program, made_by, needed_by
from program_generator import generate
from program_ops import ON, device_of
from program_runs import Mismatch, Outcome, collect, compare, drive, forget_all, install, run_locally
from torch.utils._pytree import tree_map_only

from backhaul import rpc
from backhaul.autograd.graph import Component
from backhaul.autograd.schedule import Schedule
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster, scheduler
from backhaul.worker import Worker, current
from crew import Crew

BATCH = 20
WORKERS = 5
"""The number of workers of the largest programs."""
QUIET_SECONDS = 10.0
PATIENCE = 0.005
"""The scheduler's patience with a worker that waits for gradients. They come with another message, which it holds
back."""

_keys = itertools.count()


class Failed(AssertionError):
    """A program that failed; the message shows it."""

    def __init__(self, program: Program, error: BaseException) -> None:
        super().__init__(f"seed {program.seed}: {type(error).__name__}: {error}\n{program}")
        self.seed = program.seed


def options_of(worker: int, size: int) -> dict[str, Any]:
    """The options of a worker. With GPUs, its device maps send tensors to the receiver's device."""
    if ON == "cpu":
        return {}
    if ON == "cuda":
        return {"device_maps": "same"}
    here = device_of(worker)
    others = {f"worker{other}": device_of(other) for other in range(size)}
    return {"device_maps": {name: {here: there} for name, there in others.items() if "cuda" in (here.type, there.type)}}


@contextmanager
def cluster_of(size: int, seed: int) -> Iterator[InProcessCluster]:
    """A cluster whose messages arrive in random order. With a GPU, every other one has real sockets."""
    options = [RpcOptions(**options_of(worker, size)) for worker in range(size)]
    if ON != "cpu" and seed % 2:
        with InProcessCluster(size, sockets=True, options=options) as cluster:
            yield cluster
        return
    before, scheduler.PATIENCE = scheduler.PATIENCE, PATIENCE
    try:
        with InProcessCluster(size, seed=seed, options=options) as cluster:
            yield cluster
    finally:
        scheduler.PATIENCE = before


@contextmanager
def counting_components(tally: Counter[str]) -> Iterator[None]:
    """Count what torch's engine runs on all workers of this process, and what of it has gates that wait."""
    merged, resolve, lock = Schedule._merged, Schedule.resolve, threading.Lock()

    def count(schedule: Schedule, started: list[Component]) -> list[Component]:
        with lock:
            tally["components"] += len(started)
            tally["components of several sources"] += sum(len(each.sources) > 1 for each in started)
            tally["components with gates that wait"] += sum(map(schedule.waits, started))
        return started

    def counted(self: Schedule, components: list[Component]) -> list[Component]:
        return merged(self, count(self, components))

    Schedule._merged = counted  # type: ignore[method-assign]
    Schedule.resolve = lambda self: count(self, resolve(self))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Schedule._merged, Schedule.resolve = merged, resolve  # type: ignore[method-assign]


def run_in_process(program: Program, cluster: Sequence[Worker]) -> list[Outcome]:
    """Run a program on a cluster in this process."""
    key = next(_keys)
    install(key, program)

    def collect_from(worker: int, key: int, context: int) -> Outcome:
        with cluster[worker].as_current():
            if ON != "cpu" and worker != program.driver:
                torch.cuda.synchronize()  # this thread reads tensors of another worker
            return collect(key, context)

    with cluster[program.driver].as_current():
        return drive(key, collect_from)


def check(program: Program, cluster: Sequence[Worker]) -> list[Outcome]:
    """Run a program on the cluster and in one process. Raises `Failed` if the outcomes differ."""
    try:
        return run_twice(program, lambda: run_in_process(program, cluster))
    except Exception as error:
        raise Failed(program, error) from error


def run_twice(program: Program, run: Callable[[], list[Outcome]]) -> list[Outcome]:
    """Compare the outcome of ``run`` with one process. If torch refuses the program there, ``run`` must too."""
    try:
        expected = run_locally(program)
    except RuntimeError as refused:  # such as a retain_grad that would add a dense gradient to a sparse one
        try:
            run()
        except RuntimeError as error:
            if str(error) == str(refused):
                return []
            raise
        raise Mismatch(f"one process raises {refused!r}") from refused
    found = run()
    compare(program, expected, found)
    return found


def left_on(worker: Worker) -> dict[str, int]:
    """What is left of contexts, after some time for cleaning up."""
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        left = {what: count for what, count in worker.autograd.counts().items() if count}
        if (not left and worker.agent.idle()) or time.monotonic() > deadline:
            return left
        worker.agent.closed.wait(0.002)


def left_here() -> dict[str, int]:
    """`left_on` for the worker of this process. Also forgets the programs."""
    left = left_on(current())
    forget_all()
    return left


def check_many_here(seeds: Sequence[int]) -> list[str]:
    """Check programs that this process drives, with processes as workers. Returns what went wrong."""
    failures = []
    for seed in seeds:
        program = generate(seed)
        try:
            install(seed, program)
            run_twice(program, lambda seed=seed: drive(seed, _collect_from))  # type: ignore[misc]
        except Exception as error:
            failures.append(str(Failed(program, error)))
    return failures


def _collect_from(worker: int, key: int, context: int) -> Outcome:
    # A dict needs no pickle.
    fields = rpc.rpc_sync(f"worker{worker}", _collected, args=(key, context), timeout=program_runs.CALL_SECONDS)
    there = device_of(worker)  # the maps have moved them to this worker's device
    return Outcome(**tree_map_only(torch.Tensor, lambda tensor: tensor.to(there), fields))


def _collected(key: int, context: int) -> dict[str, Any]:
    return vars(collect(key, context))


def batches(seeds: Iterable[int]) -> Iterator[list[int]]:
    """The seeds in groups whose programs have the same number of workers."""
    groups: dict[int, list[int]] = {}
    for seed in seeds:
        group = groups.setdefault(seed % 4, [])
        group.append(seed)
        if len(group) == BATCH:
            yield groups.pop(seed % 4)
    yield from groups.values()


def run_batch(seeds: Sequence[int], tally: Counter[str]) -> None:
    """Programs with the same number of workers on one cluster, whose messages arrive in random order."""
    programs = [generate(seed) for seed in seeds]
    with cluster_of(programs[0].size, seeds[0]) as cluster, counting_components(tally):
        for program in programs:
            outcomes = check(program, cluster)
            tally.update(program.features)
            tally["programs"] += 1
            tally["messages"] += sum(outcome.messages for outcome in outcomes)
            tally["leaves with gradients"] += sum(len(outcome.gradients) for outcome in outcomes)
        for worker in cluster:
            left = left_on(worker)
            if left:
                raise AssertionError(f"after the programs {list(seeds)} {worker} still has {left}")
        forget_all()


def run(seeds: Iterable[int], failed: Callable[[BaseException], None] | None = None) -> Counter[str]:
    """Check all programs. Returns their features with counts. ``failed`` gets failures, which are raised otherwise."""
    tally: Counter[str] = Counter()
    todo = list(batches(seeds))
    while todo:
        batch = todo.pop(0)
        try:
            run_batch(batch, tally)
        except AssertionError as error:
            if failed is None:
                raise
            failed(error)
            tally["failed"] += 1
            if isinstance(error, Failed) and batch[-1] != error.seed:
                todo.insert(0, batch[batch.index(error.seed) + 1 :])
    return tally


# Making a failing program smaller.


def smaller(program: Program) -> Iterator[Program]:
    """Smaller programs, each without one item and without what depends on it."""
    passes, leaves = program.passes, program.leaves
    for place, each in enumerate(passes):
        if len(passes) > 1:
            yield replace(program, passes=_without(passes, place))
        if len(each.roots) > 1:
            for root in range(len(each.roots)):
                yield replace(program, passes=_with(passes, place, each._replace(roots=_without(each.roots, root))))
    for place, block in enumerate(program.blocks):
        for at in range(len(block.code) - 1, -1, -1):
            yield repaired(_with_block(program, place, block._replace(code=_without(block.code, at))))
        for at, instruction in enumerate(block.code):
            if isinstance(instruction, Call) and instruction.block > 0:
                for name in {*instruction.args}:
                    changed = instruction._replace(args=tuple("" if arg == name else arg for arg in instruction.args))
                    yield repaired(_with_block(program, place, block._replace(code=_with(block.code, at, changed))))
    for place, leaf in enumerate(leaves):
        for flag in ("hook", "post_accumulate_hook", "has_grad_before", "parameter"):
            if getattr(leaf, flag):
                plain: Leaf = leaf._replace(**{flag: False})  # type: ignore[arg-type]
                yield replace(program, leaves=_with(leaves, place, plain))


def _without(items: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return items[:place] + items[place + 1 :]


def _with(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def _with_block(program: Program, place: int, block: Block) -> Program:
    return replace(program, blocks=_with(program.blocks, place, block))


def repaired(program: Program) -> Program:
    """The program without items that refer to removed names."""
    while True:
        blocks = list(program.blocks)
        kept = {leaf.name for leaf in program.leaves}
        kept |= {each.key for block in blocks for each in block.code if isinstance(each, Keep)}
        called = {each.block for block in blocks for each in block.code if isinstance(each, Call)}
        for place in range(len(blocks)):
            if place and place not in called:
                blocks[place] = blocks[place]._replace(params=(), code=(), results=())
                continue
            known, code = {*blocks[place].params}, []
            for each in blocks[place].code:
                if isinstance(each, Call) and each.block > 0:
                    good = [at for at, arg in enumerate(each.args) if arg in known]
                    if len(good) < len(each.args):
                        callee = blocks[each.block]
                        blocks[each.block] = callee._replace(params=tuple(callee.params[at] for at in good))
                        each = each._replace(args=tuple(each.args[at] for at in good))
                needs = {each.key} if isinstance(each, Load) else {*needed_by(each)}
                if needs <= (kept if isinstance(each, Load) else known):
                    code.append(each)
                    known |= {*made_by(each)}
            results = tuple(name for name in blocks[place].results if name in known)
            blocks[place] = blocks[place]._replace(code=tuple(code), results=results)
        known = {*blocks[0].params, *(name for each in blocks[0].code for name in made_by(each))} | kept
        passes = [
            each._replace(roots=tuple(root for root in each.roots if root.name in known)) for each in program.passes
        ]
        after = replace(program, blocks=tuple(blocks), passes=tuple(each for each in passes if each.roots))
        if after == program:
            return program
        program = after


def fails(program: Program, attempts: int = 3) -> BaseException | None:
    """How a program fails, under one of several orders of messages."""
    try:
        expected = run_locally(program)
    except Exception:
        return None  # the program is not valid
    for attempt in range(attempts):
        with cluster_of(program.size, program.seed + attempt) as cluster:
            try:
                compare(program, expected, run_in_process(program, cluster))
                for worker in cluster:
                    if left_on(worker):
                        return Mismatch(f"{worker} still has {left_on(worker)}")
            except Exception as error:
                return error
            finally:
                forget_all()
    return None


P = TypeVar("P", bound=Any)


def least_that_fails(
    program: P, smaller: Callable[[P], Iterable[P]], fails: Callable[[P], BaseException | None], kind: type
) -> P:
    """Remove one item after another from a failing program, as long as it fails with this kind of error."""
    progress = True
    while progress:
        progress = False
        tried = 0
        while True:
            candidate = next(itertools.islice(smaller(program), tried, None), None)
            if candidate is None:
                break
            if candidate != program and candidate.passes and type(fails(candidate)) is kind:
                program = candidate
                progress = True
            else:
                tried += 1
    return program


def shrink(program: Program) -> Program:
    """The smallest part of a failing program that fails in the same way."""
    program_runs.BACKWARD_SECONDS = 2.0
    return least_that_fails(program, smaller, fails, type(fails(program)))


def run_on_processes(seeds: Iterable[int], seconds: float) -> list[str]:
    """Check programs with five processes, each of which drives some at the same time. Returns what went wrong."""
    by_driver: dict[int, list[int]] = {}
    for seed in seeds:
        by_driver.setdefault(generate(seed).driver, []).append(seed)
    with _Crew(WORKERS) as crew:
        end = time.monotonic() + seconds
        running = [crew[driver].start(check_many_here, seeds) for driver, seeds in by_driver.items()]
        failures = [failure for each in running for failure in each.result(max(0.0, end - time.monotonic()))]
        left = {rank: left for rank, hand in enumerate(crew) if (left := hand.run(left_here))}
    return [*failures, *([f"after the programs there is still {left}"] if left else [])]


class _Crew(Crew):
    def place(self, rank: int, world_size: int | None) -> dict[str, Any]:
        self._options = options_of(rank, WORKERS)
        return super().place(rank, world_size)


def main(arguments: Sequence[str]) -> int:
    torch.set_num_threads(1)
    if arguments and arguments[0] == "--processes":
        first, last = map(int, arguments[1:])
        start = time.monotonic()
        failures = run_on_processes(range(first, last), 30 + (last - first))
        print(*failures, f"{last - first} programs on processes, {len(failures)} failed", sep="\n", end="; ")
        print(f"{time.monotonic() - start:.1f} s")
        return 1 if failures else 0
    if len(arguments) == 1:
        program = generate(int(arguments[0]))
        error = fails(program)
        if error is None:
            print(f"{program}\npasses")
            return 0
        least = shrink(program)
        error = fails(least, attempts=10)
        print(f"{least}\n{type(error).__name__}: {error}")
        return 1
    first, last = map(int, arguments)
    start = time.monotonic()

    def show(error: BaseException) -> None:
        print(error, flush=True)

    tally = Counter[str]()
    step = max(4 * BATCH, math.ceil((last - first) / 20))
    for begin in range(first, last, step):
        tally.update(run(range(begin, min(last, begin + step)), show))
        print(
            f"{tally['programs']} programs, {tally['failed']} failed, {time.monotonic() - start:.0f} s", file=sys.stderr
        )
    for feature in sorted(tally):
        print(f"{tally[feature]:9}  {feature}")
    print(
        f"{tally['programs']} programs equal to one process, {tally['failed']} failed; "
        f"{tally['messages']} messages recorded; {tally['components']} components, "
        f"{tally['components of several sources']} of several sources, {tally['components with gates that wait']} with "
        f"gates that wait; {time.monotonic() - start:.1f} s"
    )
    return 1 if tally["failed"] else 0


if __name__ == "__main__":
    # Imported under its module name, so that workers find its functions.
    import programs

    raise SystemExit(programs.main(sys.argv[1:]))
