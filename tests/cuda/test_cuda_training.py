"""Training with modules on a GPU of another worker: every step equals that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

import backhaul.autograd as dist_autograd
from backhaul import checkpoint
from backhaul.nn import Pipeline, RemoteModule
from backhaul.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.worker import current

GPU = torch.device("cuda", 0)
MAPPED: dict[str, Any] = {"no maps": None, "maps": "same"}


@pytest.fixture(params=MAPPED)
def workers(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Three workers of this process, with and without device maps. Features that need no maps work without them."""
    options = RpcOptions(device_maps=MAPPED[request.param])
    with InProcessCluster(3, sockets=True, options=options) as cluster, cluster[0].as_current():
        yield cluster


class Checkpointed(nn.Sequential):
    """A layer whose activations are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = recompute(super().forward, x, use_reentrant=False)
        return y


class Twins:
    """A model of two layers on the GPUs of two workers, and the same model in this process."""

    def __init__(self, kind: type[nn.Module] = nn.Sequential) -> None:
        torch.manual_seed(0)
        self.alone = nn.Sequential(*(kind(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))).cuda()
        there = [RemoteModule(f"worker{i + 1}/cuda:0", kind, args=(nn.Linear(8, 8), nn.Tanh())) for i in range(2)]
        self.spread = nn.Sequential(*there)
        self.spread.load_state_dict(self.alone.state_dict())
        self.rrefs = [rref for each in there for rref in each.remote_parameters()]
        self.inputs = [torch.randn(16, 8).cuda() for _ in range(6)]

    @property
    def maps(self) -> bool:
        return current().agent.devices is not None

    def x(self, number: int) -> Tensor:
        """Without device maps the inputs are on the CPU."""
        return self.inputs[number].clone() if self.maps else self.inputs[number].cpu()

    def assert_same(self, tolerance: float = 1e-6) -> None:
        found = {name: value.cuda() for name, value in self.spread.state_dict().items()}
        torch.testing.assert_close(found, dict(self.alone.state_dict()), rtol=tolerance, atol=tolerance)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "fused sgd": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "capturable": (torch.optim.AdamW, {"lr": 0.01, "capturable": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(workers: InProcessCluster, name: str) -> None:
    kind, options = OPTIMIZERS[name]
    twins = Twins()
    theirs = DistributedOptimizer(kind, twins.rrefs, **options)
    ours = kind(twins.alone.parameters(), **options)
    for number in range(6):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [twins.spread(twins.x(number)).square().mean()])
            theirs.step(context)
        ours.zero_grad()
        twins.alone(twins.inputs[number]).square().mean().backward()
        ours.step()
        if number == 2:  # a saved state can be loaded, there and here
            state = theirs.state_dict()
            assert {each.device.type for each in _tensors(state)} <= {"cpu"}
            theirs.load_state_dict(ours.state_dict())
            ours.load_state_dict(state)
    twins.assert_same()


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for each in state["state"].values() for value in each.values() if isinstance(value, Tensor)]


def test_a_scaler_clipping_and_autocast(workers: InProcessCluster) -> None:
    twins = Twins()
    theirs = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    ours = torch.optim.SGD(twins.alone.parameters(), lr=0.1)
    mine: Any
    mine, its = (kind("cuda", init_scale=2.0**10, growth_interval=2) for kind in (GradScaler, torch.amp.GradScaler))
    for number in range(6):
        factor = math.inf if number == 3 else 1.0
        with torch.autocast("cuda", torch.float16):
            expected = twins.alone(twins.inputs[number]).float().square().mean() * factor
        with dist_autograd.context() as context:
            with torch.autocast("cuda", torch.float16):
                loss = twins.spread(twins.x(number)).float().square().mean() * factor
            dist_autograd.backward(context, [mine.scale(loss)])
            mine.unscale_(theirs, context)
            norm = clip_grad_norm_(context, theirs, max_norm=0.05)
            mine.step(theirs, context)
            mine.update()
        ours.zero_grad()
        its.scale(expected).backward()
        its.unscale_(ours)
        wanted = nn.utils.clip_grad_norm_(twins.alone.parameters(), max_norm=0.05)
        its.step(ours)
        its.update()
        torch.testing.assert_close(norm.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-6, equal_nan=True)
        assert mine.get_scale() == its.get_scale()
    twins.assert_same(1e-4)


def test_activations_that_are_computed_again(workers: InProcessCluster) -> None:
    """Checkpoints on the workers, and around calls."""
    twins = Twins(Checkpointed)
    x = twins.x(0).requires_grad_()
    with dist_autograd.context() as context:
        y = recompute(twins.spread, x, use_reentrant=False)
        dist_autograd.backward(context, [y.square().mean()])
        found = dist_autograd.get_gradients(context)[x]
    expected = twins.inputs[0].detach().clone().requires_grad_()
    twins.alone(expected).square().mean().backward()
    torch.testing.assert_close(found.cuda(), expected.grad)


def test_a_checkpoint(workers: InProcessCluster, tmp_path: Path) -> None:
    twins = Twins()
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs, lr=0.01)

    def train(number: int) -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [twins.spread(twins.x(number)).square().mean()])
            optimizer.step(context)

    train(0)
    checkpoint.save({"model": twins.spread, "optimizer": optimizer}, tmp_path / "saved")
    train(1)
    after = twins.spread.state_dict()
    train(2)
    checkpoint.load(tmp_path / "saved", {"model": twins.spread, "optimizer": optimizer})
    train(1)
    torch.testing.assert_close(twins.spread.state_dict(), after, rtol=0, atol=0)


def test_a_pipeline_keeps_tensors_on_the_gpu(workers: InProcessCluster) -> None:
    twins = Twins()
    pipeline = Pipeline(list(twins.spread), chunks=4)  # type: ignore[arg-type]
    for _ in range(2):  # the first messages go through host memory, until the peer has opened a segment on trial
        x = twins.x(0).requires_grad_()
        with dist_autograd.context() as context:
            y = pipeline(x)
            dist_autograd.backward(context, [y.square().mean()])
            found = dist_autograd.get_gradients(context)[x]
    expected = twins.inputs[0].detach().clone().requires_grad_()
    twins.alone(expected).square().mean().backward()
    torch.testing.assert_close(found.cuda(), expected.grad)
    assert y.is_cuda == twins.maps
    (between,) = [each for each in workers[1].inspection.snapshot()["peers"] if each["name"] == "worker2"]
    assert bool(between["bytes"].get("device", {}).get("sent")) == twins.maps
