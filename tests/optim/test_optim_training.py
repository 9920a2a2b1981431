"""Whole training loops with all parts together, over every transport, against one process."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from optim_models import assert_same, await_nothing_left, dense_inputs, dense_twins
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul.nn import Pipeline, RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from backhaul.testing import InProcessCluster


@pytest.fixture(params=["memory", "sockets", "seed 1", "seed 2", "seed 3"])
def group(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Workers with messages in their own order, over sockets, and in the order of a seed."""
    kind, _, seed = request.param.partition(" ")
    with InProcessCluster(3, sockets=kind == "sockets", seed=int(seed) if seed else None) as made:
        with made[0].as_current():
            yield made
        if not seed:
            await_nothing_left(made)


def test_accumulation_scaling_clipping_schedule_and_restart_together(group: InProcessCluster) -> None:
    """Gradients are accumulated, scaled and clipped; there is a schedule, and a restart in the middle."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.AdamW, twins.rrefs, lr=0.1)
    reference = torch.optim.AdamW(twins.parameters, lr=0.1)
    scaler, its_scaler = GradScaler(growth_interval=2), torch.amp.GradScaler("cpu", growth_interval=2)
    schedule, its_schedule = (torch.optim.lr_scheduler.CosineAnnealingLR(each, 6) for each in (optimizer, reference))
    for number in range(6):
        optimizer.zero_grad()
        reference.zero_grad()
        for x in dense_inputs(2, seed=number):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [scaler.scale(twins.loss(x) / 2)])
                optimizer.accumulate(context_id)
            torch.autograd.backward(its_scaler.scale(twins.loss_alone(x) / 2))
        scaler.unscale_(optimizer)
        its_scaler.unscale_(reference)
        assert_same(clip_grad_norm_(None, twins.rrefs, 0.05), torch.nn.utils.clip_grad_norm_(twins.parameters, 0.05))
        scaler.step(optimizer)
        its_scaler.step(reference)
        scaler.update()
        its_scaler.update()
        schedule.step()
        its_schedule.step()
        twins.assert_same_parameters()
        if number == 3:
            saved = optimizer.state_dict(), scaler.state_dict(), schedule.state_dict()
            del optimizer, scaler, schedule
            gc.collect()
            optimizer = DistributedOptimizer(torch.optim.AdamW, twins.rrefs)
            scaler, schedule = GradScaler(), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1)
            scaler.load_state_dict(saved[1])
            schedule.load_state_dict(saved[2])
            optimizer.load_state_dict(saved[0])
            scaler.scale(torch.ones(()))
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert_same(scaler.state_dict(), its_scaler.state_dict())


class Model(nn.Module):
    """A front and a head in this process, and a body on workers."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(4, 5)
        self.body = Pipeline([RemoteModule("worker1", nn.Linear, (5, 5)), RemoteModule("worker2", nn.Linear, (5, 3))])
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.body(torch.tanh(self.front(x)))))
        return found


def test_a_model_of_remote_modules(workers: InProcessCluster) -> None:
    model = Model()
    alone = copy.copy(model)
    alone._modules = {
        "front": copy.deepcopy(model.front),
        "body": nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)),
        "head": copy.deepcopy(model.head),
    }
    alone.load_state_dict(model.state_dict())
    rrefs = parameter_rrefs(model)
    assert [rref.owner_name() for rref in rrefs] == ["worker0"] * 2 + ["worker1"] * 2 + ["worker2"] * 2 + [
        "worker0"
    ] * 2
    optimizer = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.1)
    reference = torch.optim.Adam(alone.parameters(), lr=0.1)
    for x in dense_inputs(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model(x).square().mean()])
            optimizer.step(context_id)
        reference.zero_grad()
        torch.autograd.backward(alone(x).square().mean())
        reference.step()
    assert_same(dict(model.state_dict()), dict(alone.state_dict()))
    assert_same(optimizer.state_dict(), reference.state_dict())
