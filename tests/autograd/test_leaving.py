"""Contexts that are left while their calls or passes are running: these end, and nothing of the context stays."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from acts import ACTS, Latch, act, chain, work
from endings import (
    GONE,
    await_gates,
    await_idle,
    backward_later,
    backward_via,
    chain_of_two,
    local_fork,
    remote_fork,
)
from models import WITHIN, await_no_leftovers, layer, leaf
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import ContextError
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Result

pytestmark = pytest.mark.usefixtures("quiet")


def test_leaving_while_a_pass_runs_on_another_thread(five: InProcessCluster) -> None:
    """The pass raises that the context is gone. It may wait for a worker, in a gate here, or in one elsewhere."""
    for program, held in ((chain_of_two, "b"), (local_fork, "c"), (remote_fork, "c"), (remote_fork, "b")):
        with Latch(held) as latch:
            with five[0].as_current(), dist_autograd.context() as ctx:
                running = backward_later(five, 0, int(ctx), program(leaf(2, 4)).sum())
                latch.await_entered()
            with pytest.raises(ContextError, match=GONE):
                running.result(WITHIN)
            for worker in five:
                await_gates(worker, 0)
            assert not latch.released.is_set()
        await_idle(five)
        await_no_leftovers(five)
        ACTS.clear()


def test_leaving_while_another_worker_runs_a_pass_of_the_context(five: InProcessCluster) -> None:
    with Latch("b") as latch:
        with five[0].as_current(), dist_autograd.context() as ctx:
            future = rpc.rpc_async("worker1", backward_via, args=(ctx, "worker2", leaf(2, 4)))
            latch.await_entered()
        with pytest.raises(ContextError, match=f"{GONE}: {ctx} on worker 'worker1'"):
            future.wait()
    await_idle(five)
    await_no_leftovers(five)


def test_a_recv_that_finds_its_context_gone_says_so(trio: InProcessCluster) -> None:
    """On the initiator, one thread is in a backward function while another thread leaves the context."""
    with Latch("d") as latch, trio[0].as_current(), dist_autograd.context() as ctx:
        loss = act("d", rpc.rpc_sync("worker1", layer, args=("a", leaf(2, 4)))).sum()
        running = backward_later(trio, 0, int(ctx), loss)
        latch.await_entered()
    with pytest.raises(ContextError, match=f"{GONE}: {ctx}") as caught:
        running.result(WITHIN)
    assert "has ended" in str(caught.value)
    await_idle(trio)
    await_no_leftovers(trio)


def test_work_under_way_in_a_left_context_ends_by_itself(five: InProcessCluster) -> None:
    """Worker 1 reaches its Recv after the context is gone; then it would send to worker 2, which knows no such pass."""
    with Latch("a") as latch:
        with five[0].as_current(), dist_autograd.context() as ctx:
            loss = rpc.rpc_sync("worker2", via_worker_1, args=(leaf(2, 4),)).sum()
            running = backward_later(five, 0, int(ctx), loss)
            latch.await_entered()
        with pytest.raises(ContextError, match=GONE):
            running.result(WITHIN)
        await_no_leftovers(five)
    await_idle(five)
    await_no_leftovers(five)


def via_worker_1(x: Tensor) -> Tensor:
    y: Tensor = rpc.rpc_sync("worker1", work, args=("a", x * 2))
    return y


def test_leaving_at_any_moment_of_a_pass(five: InProcessCluster) -> None:
    """Either the pass is finished, or it raises that its context is gone."""
    outcomes = set()
    for number in range(60):
        program = (remote_fork, local_fork, chain_of_two)[number % 3]
        with five[0].as_current(), dist_autograd.context() as ctx:
            running = backward_later(five, 0, int(ctx), program(leaf(2, 4)).sum())
            threading.Event().wait(number * 0.0001)
        error = running.exception(WITHIN)
        assert error is None or (isinstance(error, ContextError) and GONE in str(error))
        outcomes.add(error is None)
    assert False in outcomes
    await_idle(five)
    await_no_leftovers(five)


def test_leaving_at_any_moment_of_a_call(trio: InProcessCluster) -> None:
    """The function then calls a third worker in a context that may be over."""
    for number in range(80):
        with trio[0].as_current():
            with dist_autograd.context():
                future = rpc.rpc_async("worker1", chain, args=([("worker2", "b"), ("worker1", "a")], leaf(2, 4)))
                rref = rpc.remote("worker1", chain, args=([("worker2", "b")], leaf(2, 4)))
                threading.Event().wait(number * 0.00005)
            future.wait()
            rref.to_here()
            del rref
    await_no_leftovers(trio)


def test_a_context_that_is_gone_cannot_be_used(trio: InProcessCluster) -> None:
    with trio[0].as_current():
        with dist_autograd.context() as ctx:
            loss = chain_of_two(leaf(2, 4)).sum()
        for use in (
            lambda: dist_autograd.backward(ctx, [loss]),
            lambda: dist_autograd.get_gradients(ctx),
            lambda: ctx.backward(loss),
        ):
            with pytest.raises(ContextError, match=f"{GONE}: {ctx}"):
                use()
        with dist_autograd.context() as other:
            with pytest.raises(ContextError, match=f"received in autograd context {ctx}.*pass is of context {other}"):
                dist_autograd.backward(other, [loss])
            dist_autograd.backward(other, [chain_of_two(leaf(2, 4)).sum()])
    await_idle(trio)
    await_no_leftovers(trio)


def test_a_reply_that_comes_after_its_context_was_left() -> None:
    """The values of the reply are good. A backward pass through them raises an error that explains why."""
    faults = Faults(delay_seconds=None)
    x = leaf(2, 4)
    with InProcessCluster(2, faults=faults) as workers, workers[0].as_current():
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        with dist_autograd.context() as ctx:
            faults.next("delay", Result)
            future = rpc.rpc_async("worker1", layer, args=("a", x))
            deadline = time.monotonic() + WITHIN
            while not faults.counts["delay"]:
                assert time.monotonic() < deadline
                threading.Event().wait(0.001)
        await_no_leftovers(workers)
        faults.release()
        y: Any = future.wait()
        assert torch.equal(y, layer("a", x))
        assert y.grad_fn.name() == "RecvRpcBackward"
        with pytest.raises(ContextError, match=f"in autograd context {ctx}"):
            y.sum().backward()
        with pytest.raises(ContextError, match=GONE):
            dist_autograd.backward(ctx, [y.sum()])
        with dist_autograd.context() as other:
            with pytest.raises(ContextError, match=f"received in autograd context {ctx}"):
                dist_autograd.backward(other, [y.sum()])
            dist_autograd.backward(other, [rpc.rpc_sync("worker1", layer, args=("a", y.detach())).sum()])
        await_no_leftovers(workers)


_proceed = threading.Event()


_entered = threading.Event()


def slow_layer(name: str, x: Tensor) -> Tensor:
    _entered.set()
    assert _proceed.wait(WITHIN)
    return layer(name, x)


def slow_calls(to: str, x: Tensor) -> Tensor:
    """A function that makes calls when its caller may have left the context."""
    _entered.set()
    assert _proceed.wait(WITHIN)
    return chain([(to, "b")], layer("a", x))


@pytest.mark.parametrize("nested", [False, True])
def test_a_function_that_outlives_its_context(trio: InProcessCluster, nested: bool) -> None:
    _proceed.clear()
    _entered.clear()
    x = leaf(2, 4)
    with trio[0].as_current():
        with dist_autograd.context():
            if nested:
                future = rpc.rpc_async("worker1", slow_calls, args=("worker2", x))
            else:
                future = rpc.rpc_async("worker1", slow_layer, args=("a", x))
            assert _entered.wait(WITHIN)
        await_no_leftovers(trio)
        _proceed.set()
        y = future.wait()
        assert torch.equal(y, chain_of_two_alone(x) if nested else layer("a", x))
    await_no_leftovers(trio)


def chain_of_two_alone(x: Tensor) -> Tensor:
    return layer("b", layer("a", x)) * 1.5
