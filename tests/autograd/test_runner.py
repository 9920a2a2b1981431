"""Runs of torch's engine: one at a time stores gradients, and a thread has a run only while the run lasts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent.observing import Event, GradientsSent, Stored, TorchEnded
from backhaul.autograd.contexts import Contexts
from backhaul.autograd.local_pass import LocalPass
from backhaul.autograd.runner import Runner
from backhaul.errors import ContextError
from backhaul.ids import WorkerInfo
from backhaul.testing import InProcessCluster
from backhaul.wire.messages import Pass

PATIENCE = 20.0


def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def test_a_local_backward_after_a_distributed_one_is_still_a_mistake() -> None:
    """The thread has no run any more: the gradients would go nowhere."""
    with InProcessCluster(2) as workers, workers[0].as_current(), dist_autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()])
        later = rpc.rpc_sync("worker1", double, (x,)).sum()
        with pytest.raises(ContextError, match="a local backward\\(\\) ends there"):
            later.backward()


def test_a_run_waits_for_another_that_stores_its_gradients() -> None:
    with InProcessCluster(2) as workers, ThreadPoolExecutor(1) as pool:
        runner = workers[0].autograd.engine._runner
        contexts = Contexts(workers[0].info)
        record = contexts.new()
        local = LocalPass(Pass(contexts.new_id(), record.id, 0, False, False), record)
        leaf = torch.zeros(2, requires_grad=True)
        with record.lock:
            storing = pool.submit(runner._store, local, [leaf], [torch.ones(2)])
            assert not wait([storing], 0.2).done
            assert record.gradients == {}
        storing.result(PATIENCE)
        assert record.gradients[leaf].tolist() == [1.0, 1.0]


WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)


def weigh(value: torch.Tensor) -> torch.Tensor:
    return WEIGHT * value


def weigh_there(value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("worker2", weigh, (value,))
    return -result


def gradient_here(context_id: int) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[WEIGHT]


def test_gradients_for_other_workers_leave_before_those_of_leaves_are_stored() -> None:
    kinds: list[type[Event]] = []
    with InProcessCluster(3) as workers, workers[0].as_current(), dist_autograd.context() as context_id:
        workers[2].agent.observers.add(lambda event: kinds.append(type(event)))
        x = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh_there, (x,)).sum()])
        assert rpc.rpc_sync("worker2", gradient_here, (context_id,)).tolist() == [-1, -1]
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [-2, -3]
    assert kinds.index(TorchEnded) < kinds.index(GradientsSent) < kinds.index(Stored)


def test_a_reader_stores_the_gradients_that_a_run_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that reads them has the report. The thread of the run may not have come to store them."""
    monkeypatch.setattr(Runner, "store_left", lambda self, local: None)
    with InProcessCluster(2) as workers, workers[0].as_current(), dist_autograd.context() as context_id:
        for total in (1, 2, 3):
            x = torch.ones(2, requires_grad=True)
            later = rpc.rpc_sync("worker1", weigh, (rpc.rpc_sync("worker1", torch.neg, (x,)),))
            dist_autograd.backward(context_id, [later.sum()])
            if total != 2:
                assert rpc.rpc_sync("worker1", gradient_here, (context_id,)).tolist() == [-total, -total]


def test_a_gradient_that_was_left_is_stored_without_a_copy() -> None:
    record = Contexts(WorkerInfo(0, "worker0")).new()
    leaf = torch.zeros(2, requires_grad=True)
    captured = (torch.ones(2), None)
    assert captured[0] is not None
    memory = captured[0].data_ptr()
    record.leave([leaf], captured)
    del captured
    with record.lock:
        assert record.gradients[leaf].data_ptr() == memory
    assert not record.has_left
