"""Torch's schedulers drive an optimizer over several workers as they drive one in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_models import assert_same, dense_inputs, dense_twins
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from backhaul.optim import DistributedOptimizer
from backhaul.testing import InProcessCluster

# SequentialLR of torch 2.8 and older warns itself.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in")

Make = Callable[[torch.optim.Optimizer], Any]

STEPS = 7


def doubled(epoch: int) -> float:
    return 1.0 / (1 + epoch)


def halved(epoch: int) -> float:
    return 0.5**epoch


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[3])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    )


SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 4], 0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [doubled, halved]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, doubled),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=4),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 5, 2.0),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 0.2], total_steps=STEPS + 1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=2, cycle_momentum=True),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=3),
}

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1}),
]


def both(optimizer_class: Any, options: dict[str, Any]) -> tuple[Any, DistributedOptimizer, Any]:
    """Two groups, each over several workers."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(
        optimizer_class, [{"params": twins.rrefs[::2]}, {"params": twins.rrefs[1::2], "weight_decay": 0.1}], **options
    )
    reference = optimizer_class(
        [{"params": twins.parameters[::2]}, {"params": twins.parameters[1::2], "weight_decay": 0.1}], **options
    )
    return twins, optimizer, reference


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(workers: InProcessCluster, name: str, optimizer_class: Any, options: dict[str, Any]) -> None:
    twins, optimizer, reference = both(optimizer_class, options)
    mine, its = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    rates = []
    for x in dense_inputs(STEPS):
        twins.train(optimizer, reference, [x])
        mine.step()
        its.step()
        assert_same(mine.get_last_lr(), its.get_last_lr())
        rates.append(mine.get_last_lr())
    assert any(rate != rates[0] for rate in rates), "a schedule that does nothing"
    assert_same(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "LinearLR", "LambdaLR"])
def test_schedulers_of_a_tensor(workers: InProcessCluster, name: str) -> None:
    """Schedulers fill a tensor-valued option in place."""
    make = SCHEDULERS[name] if name != "LambdaLR" else lambda optimizer: lr_scheduler.LambdaLR(optimizer, halved)
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=torch.tensor(0.1))
    reference = torch.optim.SGD(twins.parameters, lr=torch.tensor(0.1))
    mine, its = make(optimizer), make(reference)
    for x in dense_inputs(5):
        twins.train(optimizer, reference, [x])
        mine.step()
        its.step()
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_reduce_on_plateau(workers: InProcessCluster) -> None:
    twins, optimizer, reference = both(*OPTIMIZERS[0])
    mine, its = (lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=1) for each in (optimizer, reference))
    for x, loss in zip(dense_inputs(STEPS), [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0], strict=True):
        twins.train(optimizer, reference, [x])
        mine.step(loss)
        its.step(loss)
    assert mine.get_last_lr() == its.get_last_lr() != [0.1, 0.1]
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_a_scheduler_is_resumed(workers: InProcessCluster) -> None:
    """Scheduler and optimizer resume from state dicts of one process."""
    twins, optimizer, reference = both(*OPTIMIZERS[1])
    its = SCHEDULERS["OneCycleLR"](reference)
    for x in dense_inputs(3):
        reference.zero_grad()
        twins.backward_alone(x)
        reference.step()
        its.step()
    saved = {"model": twins.alone.state_dict(), "optimizer": reference.state_dict(), "scheduler": its.state_dict()}
    mine = SCHEDULERS["OneCycleLR"](optimizer)
    mine.load_state_dict(saved["scheduler"])
    optimizer.load_state_dict(saved["optimizer"])
    twins.load_alone()
    for x in dense_inputs(4, seed=2):
        twins.train(optimizer, reference, [x])
        mine.step()
        its.step()
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_a_scheduler_that_is_stepped_first_warns_as_in_torch(workers: InProcessCluster) -> None:
    _, optimizer, _ = both(*OPTIMIZERS[0])
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()
    optimizer.step()
    scheduler.step()
