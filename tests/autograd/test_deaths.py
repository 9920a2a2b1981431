"""Passes and real deaths: SIGKILL and SIGSTOP of participating workers and of initiators."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
from acts import Latch, chain, work
from models import alone, call, leaf, new_weights
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.worker import current
from crew import Crew

NAMES = "abcdefgh"
SLOW = 60.0
GOOD_WITHIN = 10.0

_latches: dict[str, Latch] = {}
_open: list[Any] = []

Path_ = Sequence[tuple[str, str]]


def setup() -> None:
    new_weights(NAMES)


def hold(name: str) -> None:
    """Make the backward function of that name block on this worker."""
    _latches[name] = Latch(name, SLOW)


def await_held(name: str) -> None:
    """Return when that backward function blocks."""
    _latches[name].await_entered()


def let_go(name: str) -> None:
    _latches[name].released.set()


def through_gates(path: Path_, x: Tensor) -> Tensor:
    """Each worker calls the next one with a value that it also uses itself, so all wait in gates for the last one."""
    y = torch.sin(x)
    if not path:
        return y
    (to, name), *rest = path
    z: Tensor = call(to, _through, name, rest, y)
    return y + z


def _through(name: str, rest: Path_, x: Tensor) -> Tensor:
    return through_gates(rest, work(name, x))


def fork_there(to: str, ways: Sequence[Path_], x: Tensor) -> Tensor:
    """Runs on a worker: start along several paths with one value."""
    return call(to, _fork, ways, x)  # type: ignore[no-any-return]


def _fork(ways: Sequence[Path_], x: Tensor) -> Tensor:
    y = torch.sin(x)
    return torch.stack([through_gates(path, y) for path in ways]).sum(0)


def path(*ranks: int) -> Path_:
    """Each worker has the weight of its own letter."""
    return [(f"worker{rank}", NAMES[rank]) for rank in ranks]


class Loss(NamedTuple):
    """How a pass that lost a worker ended."""

    at: float
    left_at: float
    """The time at which the context's block ended."""
    kind: str
    worker: str
    again: str
    """The worker that a second pass over the same graph reports as lost."""


def pass_until_lost(program: Any, *args: Any) -> Loss:
    with dist_autograd.context() as ctx:
        loss = program(*args, leaf(2, 4)).sum()
        try:
            dist_autograd.backward(ctx, [loss], retain_graph=True)
        except rpc.WorkerLostError as error:
            at, kind, worker = time.time(), type(error).__name__, error.worker
            text = str(error)
        else:
            raise AssertionError("the pass was good")
        if worker not in text:
            raise AssertionError(f"{text!r} does not name {worker}")
        try:
            dist_autograd.backward(ctx, [loss], retain_graph=True)
        except rpc.WorkerLostError as error:
            again = error.worker
    return Loss(at, time.time(), kind, worker, again)


def pass_until_unresponsive(program: Any, *args: Any) -> Loss:
    with dist_autograd.context() as ctx:
        loss = program(*args, leaf(2, 4)).sum()
        try:
            dist_autograd.backward(ctx, [loss])
        except rpc.WorkerLostError as error:
            at, kind, worker = time.time(), type(error).__name__, error.worker
        else:
            raise AssertionError("the pass was good")
    return Loss(at, time.time(), kind, worker, "")


def good_pass(program: Any, *args: Any) -> None:
    """A pass that gets the gradient of one process."""
    x = leaf(2, 4)
    with dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [program(*args, x).sum()], timeout=GOOD_WITHIN)
        gradient = dist_autograd.get_gradients(ctx)[x]
    with alone():
        (expected,) = torch.autograd.grad(program(*args, x).sum(), [x])
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def leave_open(count: int, program: Any, *args: Any) -> None:
    """Open contexts with graphs, and do not leave them."""

    def run() -> None:
        context = dist_autograd.context()
        _open.append((context.__enter__(), context, program(*args, leaf(2, 4)).sum()))

    for _ in range(count):
        thread = threading.Thread(target=run)  # a thread is in one context at a time
        thread.start()
        thread.join()


def pass_of_open() -> None:
    ctx, _, loss = _open[-1]
    dist_autograd.backward(ctx, [loss], retain_graph=True)


def waiting() -> list[str]:
    """Threads that are in a gate, or wait for a pass."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        where: Any = frame
        while where is not None:
            if where.f_code.co_filename.endswith(("autograd/local_pass.py", "autograd/started_pass.py")):
                found.append(f"{names.get(ident)} in {where.f_code.co_name}")
            where = where.f_back
    return found


def await_clean(seconds: float) -> float:
    """Wait until this worker has no contexts, passes, gates and waiting threads. Returns the time that it took."""
    autograd = current().autograd
    start = time.monotonic()
    while any(autograd.counts().values()) or not autograd.engine.idle() or waiting():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"after {seconds} s: {autograd.counts()}, idle: {autograd.engine.idle()}, {waiting()}")
        threading.Event().wait(0.005)
    return time.monotonic() - start


def await_gates(count: int, seconds: float) -> float:
    """Return when ``count`` threads wait in gates here."""
    start = time.monotonic()
    while current().autograd.counts()["gates"] != count or (count == 0 and waiting()):
        if time.monotonic() - start > seconds:
            raise AssertionError(f"after {seconds} s: {current().autograd.counts()}, {waiting()}")
        threading.Event().wait(0.005)
    return time.monotonic() - start


def await_contexts(count: int, seconds: float) -> float:
    start = time.monotonic()
    while current().autograd.counts()["contexts"] != count:
        if time.monotonic() - start > seconds:
            raise AssertionError(f"after {seconds} s: {current().autograd.counts()}")
        threading.Event().wait(0.005)
    return time.monotonic() - start


def die_in_the_middle(
    crew: Crew, victim: int, program: Any, *args: Any, gates: Sequence[int] = (), busy: int | None = None
) -> None:
    """Kill a worker in its backward function. The initiator must get the error in time.

    ``gates`` are the workers that wait in gates. ``busy`` is the worker in its backward function, if it is another one.
    """
    busy = victim if busy is None else busy
    crew[busy].run(hold, NAMES[busy])
    running = crew[0].start(pass_until_lost, program, *args)
    crew[busy].run(await_held, NAMES[busy])
    for rank in gates:
        if rank != 0:  # its main thread is busy
            crew[rank].run(await_gates, 1, 10.0)
    killed = time.time()
    crew[victim].kill()
    loss = running.result(30)
    assert loss.at - killed < 2
    assert loss.left_at - killed < 3
    assert (loss.kind, loss.worker, loss.again) == ("WorkerLostError", f"worker{victim}", f"worker{victim}")
    if busy != victim:
        crew[busy].run(let_go, NAMES[busy])


def all_clean(crew: Crew, ranks: Sequence[int], seconds: float = 6.0) -> None:
    for future in [crew[rank].start(await_clean, seconds) for rank in ranks]:
        future.result(seconds + 20)


def warm_up(crew: Crew) -> None:
    """Run a first pass, because the first pass of a process is slow."""
    crew[0].run(good_pass, through_gates, path(*range(1, len(crew))))


def test_a_worker_killed_in_the_middle_of_a_pass() -> None:
    """First a worker in the middle that has sent its gradients on; then one three hops away, two, one."""
    with Crew(5, setup=setup) as crew:
        warm_up(crew)
        die_in_the_middle(crew, 2, chain, path(1, 2, 3, 4), busy=4)
        crew[0].run(good_pass, chain, path(1, 3, 4))
        all_clean(crew, (0, 1, 3, 4))
        ranks = [0, 1, 3, 4]
        while victim := ranks.pop():
            die_in_the_middle(crew, victim, chain, path(*ranks[1:], victim))
            crew[0].run(good_pass, chain, path(*ranks[1:], 0))
            all_clean(crew, ranks)


def test_a_worker_killed_while_others_wait_for_it_in_gates() -> None:
    """All workers on the way wait; or one waits for several, of which one dies; or the initiator waits for it."""
    with Crew(5, setup=setup) as crew:
        warm_up(crew)
        die_in_the_middle(crew, 4, through_gates, path(1, 2, 3, 4), gates=(0, 1, 2, 3))
        crew[0].run(good_pass, through_gates, path(1, 2, 3))
        all_clean(crew, range(4))
        # Worker 1 waits for both. Worker 2 is in the middle of its part, and goes on with it.
        crew[2].run(hold, "c")
        die_in_the_middle(crew, 3, fork_there, "worker1", [path(2), path(3)], gates=(1,))
        assert crew[1].run(await_gates, 0, 6.0) < 6
        crew[2].run(let_go, "c")
        crew[0].run(good_pass, fork_there, "worker1", [path(2), path(0)])
        all_clean(crew, range(3))
        die_in_the_middle(crew, 2, through_gates, path(2))
        crew[0].run(good_pass, through_gates, path(1, 0))
        all_clean(crew, range(2))


def test_contexts_of_a_killed_initiator_vanish() -> None:
    """First in the middle of a pass with waiting gates, then outside a pass. Contexts of other initiators stay."""
    with Crew(4, setup=setup) as crew:
        warm_up(crew)
        crew[1].run(leave_open, 1, through_gates, path(0, 2))
        crew[3].run(leave_open, 2, chain, path(0, 1, 2))
        crew[2].run(hold, "c")
        crew[3].start(good_pass, through_gates, path(0, 1, 2))
        crew[2].run(await_held, "c")
        for rank in (0, 1):
            crew[rank].run(await_gates, 1, 10.0)
        assert [crew[rank].run(await_contexts, 4, 5.0) < 5 for rank in range(3)]
        crew[3].kill()
        for rank in (0, 1):
            assert crew[rank].run(await_gates, 0, 6.0) < 6
        for rank in (0, 1, 2):
            assert crew[rank].run(await_contexts, 1, 6.0) < 6
        crew[2].run(let_go, "c")
        crew[1].run(pass_of_open)

        crew[2].run(leave_open, 3, chain, path(0, 1))
        crew[2].run(leave_open, 2, chain, path(0))
        assert crew[0].run(await_contexts, 6, 5.0) < 5
        assert crew[1].run(await_contexts, 4, 5.0) < 5
        crew[2].kill()
        for rank in (0, 1):
            assert crew[rank].run(await_contexts, 1, 6.0) < 6
        crew[1].run(close_open)
        all_clean(crew, (0, 1))
        crew[1].run(good_pass, through_gates, path(0, 1))
        all_clean(crew, (0, 1))


def close_open() -> None:
    for ctx, _, _ in _open:
        current().autograd.leave(ctx)
    _open.clear()


def stop(crew: Crew, victim: int, patience: float, program: Any, *args: Any, gates: Sequence[int] = ()) -> None:
    """Stop a worker in its backward function. The initiator must get the error in time, and leave its context."""
    crew[victim].run(hold, NAMES[victim])
    running = crew[0].start(pass_until_unresponsive, program, *args)
    crew[victim].run(await_held, NAMES[victim])
    for rank in gates:
        crew[rank].run(await_gates, 1, 10.0)
    stopped = time.time()
    crew[victim].signal(signal.SIGSTOP)
    loss = running.result(30)
    assert patience / 2 < loss.at - stopped < 3 * patience
    assert loss.left_at - loss.at < 1
    assert loss.worker == f"worker{victim}"
    for rank in gates:
        assert crew[rank].run(await_gates, 0, 3.0) < 3


@pytest.mark.slow
def test_a_stopped_worker_is_noticed_and_delays_no_other() -> None:
    """First while a worker that only a third one knows waits in a gate for another one; then two hops away."""
    patience = 2.0
    with Crew(5, setup=setup, unresponsive_after=patience) as crew:
        warm_up(crew)
        crew[4].run(hold, "e")
        stop(crew, 2, patience, fork_there, "worker1", [path(3, 4), path(2)], gates=(1, 3))
        crew[4].run(let_go, "e")
        all_clean(crew, (0, 1, 3, 4))
        crew[0].run(good_pass, through_gates, path(1, 3, 4))
        crew[2].signal(signal.SIGCONT)
        crew[2].kill()
        stop(crew, 3, patience, chain, path(1, 3))
        all_clean(crew, (0, 1, 4))
        crew[0].run(good_pass, through_gates, path(1, 4))
        crew[3].signal(signal.SIGCONT)
        crew[3].kill()
        all_clean(crew, (0, 1, 4))
