"""Runs of torch's engine: one at a time stores gradients, and a thread has a run only while the run lasts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd.contexts import Contexts
from backhaul.autograd.local_pass import LocalPass
from backhaul.errors import ContextError
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
