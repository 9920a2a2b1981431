"""Workers and connections that are lost during a pass, in one process: the pass ends, and the others go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from acts import ACTS, Broken, Latch, behind_a_gate, break_on_purpose, chain, fork
from endings import (
    await_gates,
    await_idle,
    backward_later,
    chain_of_two,
    local_fork,
    nothing_is_left,
    remote_fork,
    times_out,
)
from models import WITHIN, W, await_no_leftovers, gradients, layer, leaf
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Check, Failed, Gradients, Inquire, Leave, Report, Resolve, Resolved, TakePart

pytestmark = pytest.mark.usefixtures("quiet")


def die(worker: Any) -> None:
    """End a worker's connections, without goodbyes of its upper layers."""
    worker.agent.close(0.0)
    worker.autograd.close()


def is_lost(running: Future[Any], name: str) -> None:
    error = running.exception(WITHIN)
    assert isinstance(error, rpc.WorkerLostError)
    assert error.worker == name
    assert name in str(error)


@pytest.mark.parametrize(
    ("program", "held", "leaves"),
    [
        ("chain_of_two", "a", 1),
        ("chain_of_two", "b", 2),
        ("chain_of_two", "b", 1),
        ("local_fork", "c", 2),
        ("local_fork", "c", 1),
        ("remote_fork", "c", 1),
        ("remote_fork", "c", 2),
        ("remote_fork", "c", 3),
    ],
)
def test_a_worker_that_leaves_the_group_in_the_middle_of_a_pass(
    five: InProcessCluster, program: str, held: str, leaves: int
) -> None:
    """The worker that leaves works, or others wait for it, or it has only sent gradients on."""
    rest = [rank for rank in range(5) if rank != leaves]
    with Latch(held) as latch, five[0].as_current():
        with dist_autograd.context() as ctx:
            running = backward_later(five, 0, ctx, globals()[program](leaf(2, 4)).sum())
            latch.await_entered()
            die(five[leaves])
            is_lost(running, f"worker{leaves}")
        for rank in rest:
            await_gates(five[rank], 0)
    nothing_is_left(five, *rest)
    with five[0].as_current(), dist_autograd.context() as ctx:
        path = [(f"worker{rank}", "abcde"[rank]) for rank in rest[1:]]
        dist_autograd.backward(ctx, [chain(path, leaf(2, 4)).sum()], timeout=WITHIN)
    nothing_is_left(five, *rest)


def tell_inquiries(worker: Any) -> threading.Semaphore:
    """A semaphore that is released each time that worker has been asked which of its contexts are over."""
    asked = threading.Semaphore(0)
    answer = worker.autograd._on_inquire

    def on_inquire(inbound: Any, envelope: Any) -> Any:
        frame = answer(inbound, envelope)
        asked.release()
        return frame

    worker.agent.register(Inquire, on_inquire)
    return asked


def test_contexts_vanish_behind_a_dead_worker(five: InProcessCluster) -> None:
    """Worker 3 knows the context only from worker 2, which knows it from worker 1."""
    asked = tell_inquiries(five[0])
    with five[0].as_current(), dist_autograd.context() as ctx:
        loss = chain([("worker1", "a"), ("worker2", "b"), ("worker3", "c")], leaf(2, 4)).sum()
        die(five[1])
        assert asked.acquire(timeout=WITHIN)
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            dist_autograd.backward(ctx, [loss], timeout=WITHIN)
        # The context is not over yet, and the remaining workers can still be used.
        assert [worker.autograd.counts()["contexts"] for worker in five[2:]] == [1, 1, 0]
        dist_autograd.backward(ctx, [chain([("worker3", "c"), ("worker2", "b")], leaf(2, 4)).sum()], timeout=WITHIN)
        assert W["b"] in gradients(five[2:], ctx)[0]
    nothing_is_left(five, 0, 2, 3, 4)


def test_contexts_vanish_behind_a_dead_worker_in_the_middle_of_a_chain(five: InProcessCluster) -> None:
    """Between the death and the end of the context nothing else happens."""
    asked = tell_inquiries(five[0])
    with five[0].as_current(), dist_autograd.context():
        chain([("worker1", "a"), ("worker2", "b"), ("worker3", "c")], leaf(2, 4))
        die(five[2])
        assert asked.acquire(timeout=WITHIN)
    nothing_is_left(five, 0, 1, 3, 4)


def own_fork() -> Tensor:
    """A model of one worker. Nothing of it goes back to the caller."""
    return fork("y", [("worker3", "c")], W["b"] * 2)


def with_own_fork(x: Tensor) -> Tensor:
    return layer("a", x) + rpc.rpc_sync("worker2", own_fork).sum()


@pytest.mark.parametrize("own", [False, True])
def test_gates_behind_a_dead_worker_are_freed(five: InProcessCluster, own: bool) -> None:
    """Worker 2 waits in a gate for worker 3, which works. Worker 1, between worker 2 and the initiator, leaves."""
    with Latch("c") as latch, five[0].as_current(), dist_autograd.context() as ctx:
        x = leaf(2, 4)
        if own:
            loss = rpc.rpc_sync("worker1", with_own_fork, args=(x,)).sum()
        else:
            loss = behind_a_gate("c", "worker3", [("worker1", "a"), ("worker2", "b")], x).sum()
        running = backward_later(five, 0, ctx, loss)
        latch.await_entered()
        await_gates(five[2], 1)
        die(five[1])
        is_lost(running, "worker1")
        await_gates(five[2], 0)
        assert not latch.released.is_set()
    nothing_is_left(five, 0, 2, 3, 4)


def test_an_initiator_that_leaves_the_group_in_the_middle_of_a_pass(five: InProcessCluster) -> None:
    with Latch("c") as latch, five[0].as_current(), dist_autograd.context() as ctx:
        running = backward_later(five, 0, ctx, remote_fork(leaf(2, 4)).sum())
        latch.await_entered()
        await_gates(five[1], 1)
        die(five[0])
        assert isinstance(running.exception(WITHIN), rpc.BackhaulError)
        await_gates(five[1], 0)
    nothing_is_left(five, 1, 2, 3, 4)


def test_a_starter_that_is_not_the_initiator_leaves_the_group(five: InProcessCluster) -> None:
    """The context stays, the pass does not."""
    with Latch("c") as latch, five[0].as_current(), dist_autograd.context() as ctx:
        future = rpc.rpc_async("worker4", backward_of_fork, args=(ctx, leaf(2, 4)))
        latch.await_entered()
        await_gates(five[1], 1)
        die(five[4])
        with pytest.raises(rpc.WorkerLostError, match="worker4"):
            future.wait()
        await_gates(five[1], 0)
        ACTS.clear()
        dist_autograd.backward(ctx, [remote_fork(leaf(2, 4)).sum()], timeout=WITHIN)
    nothing_is_left(five, 0, 1, 2, 3)


def backward_of_fork(ctx: int, x: Tensor) -> None:
    dist_autograd.backward(ctx, [remote_fork(x).sum()])


PASS_MESSAGES = (Gradients, Report, TakePart, Resolve, Resolved)


SECONDS = 8.0


def ends_soon(ctx: int, loss: Tensor, **options: Any) -> bool:
    """Whether the pass succeeded. Otherwise it must have reported a lost worker in time."""
    start = time.monotonic()
    try:
        dist_autograd.backward(ctx, [loss], timeout=SECONDS, **options)
    except rpc.WorkerLostError as error:
        lost = error
    else:
        return True
    finally:
        assert time.monotonic() - start < SECONDS / 2
    assert lost.worker.startswith("worker")
    assert lost.worker in str(lost)
    return False


def is_good_soon(ctx: int, loss: Tensor) -> None:
    """Check that the context still works. The other end of a cut connection may notice late, and fail one more pass."""
    assert any(ends_soon(ctx, loss, retain_graph=True) for _ in range(4))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", PASS_MESSAGES)
def test_a_cut_connection_fails_the_pass_and_no_other(kind: type[Any], number: int) -> None:
    """The connection is cut instead of sending one of the first few messages of each kind."""
    faults = Faults()
    x = leaf(2, 4)
    with InProcessCluster(4, faults=faults) as workers, workers[0].as_current():
        for program in (remote_fork, local_fork, chain_of_two):
            with dist_autograd.context() as ctx:
                loss = program(x).sum()
                for _ in range(number):
                    faults.next("pass", kind)
                faults.next("cut", kind)
                ends_soon(ctx, loss, retain_graph=True)
                faults._next.clear()
                await_idle(workers)
                is_good_soon(ctx, loss)
            await_no_leftovers(workers)


@pytest.mark.parametrize("number", range(3))
def test_a_cut_connection_while_a_pass_fails(number: int) -> None:
    """The initiator gets the original error, or the loss of a worker."""
    faults = Faults()
    with InProcessCluster(4, faults=faults) as workers, workers[0].as_current():
        for program, breaks in ((remote_fork, "b"), (local_fork, "c"), (chain_of_two, "b")):
            with dist_autograd.context() as ctx:
                loss = program(leaf(2, 4)).sum()
                ACTS[breaks] = break_on_purpose
                for _ in range(number):
                    faults.next("pass", Failed)
                faults.next("cut", Failed)
                with pytest.raises((rpc.WorkerLostError, Broken)):
                    dist_autograd.backward(ctx, [loss], timeout=SECONDS, retain_graph=True)
                await_idle(workers)
                faults._next.clear()
                ACTS.clear()
                is_good_soon(ctx, loss)
            await_no_leftovers(workers)


@pytest.mark.parametrize("number", range(4))
def test_contexts_vanish_though_the_message_was_lost(number: int) -> None:
    faults = Faults()
    with InProcessCluster(4, faults=faults) as workers, workers[0].as_current():
        for program in (remote_fork, local_fork, chain_of_two):
            with dist_autograd.context() as ctx:
                dist_autograd.backward(ctx, [program(leaf(2, 4)).sum()])
                for _ in range(number):
                    faults.next("pass", Leave)
                faults.next("cut", Leave)
            await_no_leftovers(workers)
            faults._next.clear()


def test_contexts_vanish_though_their_end_was_told_on_a_connection_that_the_other_worker_had_lost() -> None:
    """A worker notices the end of a connection, and asks: the context is open. Its initiator then ends the context,
    and notices the end of the connection last."""
    with InProcessCluster(2) as workers, workers[0].as_current():
        first, second = workers
        with dist_autograd.context():
            rpc.rpc_sync("worker1", layer, args=("a", leaf(2, 4)))
            line = first.agent.link(second.info).open
            token = 0
            while not token:  # the thread that reads does not notice the end of the line before it reads
                token = line.begin_reading()
            asked = tell_inquiries(first)
            second.agent.serving.lines_of(0)[0].shutdown()
            for _ in range(2):  # at the end of the connection, and when it has reached the initiator over another one
                assert asked.acquire(timeout=WITHIN)
            assert second.autograd.counts()["contexts"] == 1
        assert line.lost is None
        line.stop_reading(token)
        await_no_leftovers(workers)


def test_a_cut_connection_does_not_end_the_context() -> None:
    """A worker that loses its connection asks whether the context is over. If that fails too, it asks again."""
    faults = Faults()
    with InProcessCluster(3, faults=faults) as workers, workers[0].as_current():
        with dist_autograd.context() as ctx:
            loss = chain_of_two(leaf(2, 4)).sum()
            faults.next("cut", Inquire)
            faults.next("cut", Gradients)
            assert not ends_soon(ctx, loss, retain_graph=True)
            deadline = time.monotonic() + WITHIN
            while faults._next:
                assert time.monotonic() < deadline
                threading.Event().wait(0.001)
            is_good_soon(ctx, loss)
        await_no_leftovers(workers)


@pytest.mark.parametrize("seed", range(4))
def test_random_cuts(seed: int) -> None:
    """Every pass, each in its own context, ends."""
    kinds = (*PASS_MESSAGES, Failed, Leave, Check)
    faults = Faults(seed, cut=0.04, kinds=kinds)
    outcomes = []
    with InProcessCluster(4, faults=faults) as workers, workers[0].as_current():
        for number in range(24):
            with dist_autograd.context() as ctx:
                try:
                    loss = (remote_fork, local_fork, chain_of_two)[number % 3](leaf(2, 4)).sum()
                except rpc.WorkerLostError:  # the connection has just been cut
                    continue
                outcomes.append(ends_soon(ctx, loss))
        await_idle(workers)
        await_no_leftovers(workers)
    assert set(outcomes) == {True, False}


@pytest.mark.parametrize("kind", PASS_MESSAGES)
def test_a_pass_whose_message_vanishes_ends_at_its_timeout(kind: type[Any]) -> None:
    """No connection ends, so no worker notices the loss, but the pass still ends."""
    faults = Faults()
    with InProcessCluster(4, faults=faults) as workers, workers[0].as_current():
        with dist_autograd.context() as ctx:
            loss = remote_fork(leaf(2, 4)).sum()
            faults.next("drop", kind)
            times_out(ctx, loss, 0.2, retain_graph=True)
            await_idle(workers)
            dist_autograd.backward(ctx, [loss], timeout=SECONDS)
        await_no_leftovers(workers)


def test_a_slow_pass_is_not_mistaken_for_a_dead_worker() -> None:
    """With short timeouts, a slow backward function one or two hops away is not mistaken for a dead worker."""
    options = rpc.RpcOptions(unresponsive_after=1.0)
    with InProcessCluster(4, options=options) as workers, workers[0].as_current(), dist_autograd.context() as ctx:
        latches = [Latch("b"), Latch("c")]
        programs = (remote_fork, local_fork, chain_of_two)
        passes = [backward_later(workers, 0, ctx, program(leaf(2, 4)).sum()) for program in programs]
        for latch in latches:
            latch.await_entered()
        with pytest.raises(TimeoutError):
            passes[0].result(2.5)
        for latch in latches:
            latch.released.set()
        for running in passes:
            running.result(WITHIN)
