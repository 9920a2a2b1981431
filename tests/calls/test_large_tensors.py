"""Calls with tensors that go through segments, and what is left of the segments afterwards."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from callees import identity

from backhaul import rpc
from backhaul.rpc import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.transport import segments
from backhaul.transport.segments import Budget
from backhaul.worker import Worker
from crew import Crew

PATIENCE = 20.0


def budget_of(worker: Worker) -> Budget:
    return worker.agent.transport._budget  # type: ignore[attr-defined]


def exchange(worker: Worker, how: str = "rpc_async") -> None:
    for number in range(5):
        x = torch.full((1 << 18,), float(number))
        if how == "rpc_sync":
            assert torch.equal(worker.rpc_sync("worker1", identity, args=(x,)), x)
        else:
            assert torch.equal(worker.rpc_async("worker1", identity, args=(x,)).wait(), x)


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async"])
def test_an_idle_worker_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(segments, "_IDLE_SECONDS", 0.1)
    with InProcessCluster(2, sockets=True) as workers:
        freed = [threading.Event() for _ in workers]
        for worker, event in zip(workers, freed, strict=True):
            watch = worker.agent.watch
            monkeypatch.setattr(watch, "trim", trimming(watch.trim, budget_of(worker), event))
        for _ in range(2):
            exchange(workers[0], how)
            assert budget_of(workers[0]).warm > 0
            for event in freed:
                event.clear()
            for event in freed:
                assert event.wait(PATIENCE)


def trimming(trim: object, budget: Budget, event: threading.Event) -> object:
    """Trim, and set an event when nothing is left."""

    def run() -> float:
        again: float = trim()  # type: ignore[operator]
        if budget.warm == 0:
            event.set()
        return again

    return run


@pytest.mark.parametrize("size", [0, 1 << 20, 512 << 20])
def test_the_option_bounds_what_a_worker_keeps(size: int) -> None:
    with InProcessCluster(2, sockets=True, options=RpcOptions(segment_pool_bytes=size)) as workers:
        kept = []
        for number in range(6):
            x = torch.full((1 << 18,), float(number))
            kept.append(workers[0].rpc_sync("worker1", identity, args=(x,)))
            assert all(budget_of(worker).warm <= size for worker in workers)
        assert (budget_of(workers[1]).warm > 0) == (size > 0)
        for number, tensor in enumerate(kept):
            assert tensor.eq(number).all()


def test_shutdown_leaves_nothing() -> None:
    with InProcessCluster(2, sockets=True) as workers:
        exchange(workers[0])
        budgets = [budget_of(worker) for worker in workers]
        x = torch.ones(1 << 18)
        kept = [workers[0].rpc_sync("worker1", identity, args=(x,)) for _ in range(3)]
    assert [budget.warm for budget in budgets] == [0, 0]
    assert all(torch.equal(tensor, x) for tensor in kept)
    del kept
    gc.collect()
    assert not segments._living()


def keep_and_check(count: int) -> None:
    kept = [rpc.rpc_sync("worker1", identity, args=(torch.full((1 << 17,), float(i)),)) for i in range(count)]
    futures = [rpc.rpc_async("worker1", identity, args=(torch.full((1 << 17,), -float(i)),)) for i in range(count)]
    for i, future in enumerate(futures):
        assert future.wait().eq(-i).all()
    for i, tensor in enumerate(kept):
        assert tensor.eq(i).all()


def test_a_process_keeps_more_tensors_than_a_channel_has_segments() -> None:
    with Crew(2) as crew:
        crew[0].run(keep_and_check, segments._MAX_LIVING + 20)
