"""Gradients over workers with tensors on a GPU equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer
from backhaul.testing import InProcessCluster

GPU = torch.device("cuda", 0)
model: nn.Linear | None = None


def make(seed: int) -> None:
    global model
    torch.manual_seed(seed)
    model = nn.Linear(64, 64).cuda()


def use(x: torch.Tensor) -> torch.Tensor:
    assert model is not None
    return torch.relu(model(x))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


@pytest.mark.parametrize("seed", range(3))
def test_a_model_on_the_gpu_of_another_worker(pair: InProcessCluster, seed: int) -> None:
    pair[0].rpc_sync("worker1", make, args=(seed,))
    x = torch.randn(16, 64, device=GPU, requires_grad=True)
    w = torch.randn(64, 64, device=GPU, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        h = rpc.rpc_sync("worker1", use, args=(x @ w,))
        loss = rpc.rpc_sync("worker1", use, args=(h * 2,)).sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        found = gradients[x], gradients[w]
    expected = torch.autograd.grad(use(use(x @ w) * 2).sum(), [x, w])
    torch.testing.assert_close(found, tuple(expected))
    assert {each.device for each in found} == {GPU}


def test_cpu_and_gpu_in_one_graph_with_a_gate(pair: InProcessCluster) -> None:
    x = torch.randn(8, 64, device=GPU, requires_grad=True)
    c = torch.randn(8, 64, requires_grad=True)

    def compute(double: Any, add: Any) -> Any:
        u, v = double(x), double(c)
        w = add(u, v.cuda())
        y = u * w + v.cuda()
        return double(y).sum() + w.sum()

    with pair[0].as_current(), dist_autograd.context() as context:
        loss = compute(
            lambda t: rpc.rpc_sync("worker1", double, args=(t,)), lambda a, b: rpc.rpc_sync("worker1", add, args=(a, b))
        )
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        found = gradients[x], gradients[c]
    expected = torch.autograd.grad(compute(double, add), [x, c])
    torch.testing.assert_close(found, tuple(expected))
    assert [each.device.type for each in found] == ["cuda", "cpu"]


def test_training_a_remote_module_on_a_gpu(pair: InProcessCluster) -> None:
    x, y = torch.randn(16, 8, device=GPU), torch.randn(16, 4, device=GPU)
    local = nn.Linear(8, 4).cuda()
    with pair[0].as_current():
        remote = RemoteModule("worker1/cuda:0", nn.Linear, args=(8, 4))
        remote.load_state_dict({name: value.cpu() for name, value in local.state_dict().items()})
        theirs = DistributedOptimizer(torch.optim.Adam, remote.remote_parameters(), lr=0.1)
        ours = torch.optim.Adam(local.parameters(), lr=0.1)
        for _ in range(5):
            with dist_autograd.context() as context:
                loss = ((remote(x) - y) ** 2).mean()
                assert loss.device == GPU
                dist_autograd.backward(context, [loss])
                theirs.step(context)
            ours.zero_grad()
            ((local(x) - y) ** 2).mean().backward()
            ours.step()
        found = {name: value.cuda() for name, value in remote.state_dict().items()}
    torch.testing.assert_close(found, dict(local.state_dict()))


def test_hooks_on_a_tensor_that_is_sent_on(pair: InProcessCluster) -> None:
    x = torch.ones(3, device=GPU, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        v = rpc.rpc_sync("worker1", double, args=(x,))
        w = rpc.rpc_sync("worker1", double, args=(v,))
        v.register_hook(lambda gradient: gradient * 10)  # type: ignore[no-untyped-call]
        dist_autograd.backward(context, [w.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [40, 40, 40]
