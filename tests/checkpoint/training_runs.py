"""A training run that can live on any workers or in one process, and functions to compare two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

Placement = Sequence[str | None]
"""Where the blocks of a model are: on a worker; or None, for a part of the model itself."""

SPREAD: Placement = ("worker1", "worker2", None, "worker1")
ALONE: Placement = (None, None, None, None)
WIDTHS = (4, 6, 5, 6, 3)


def block(inputs: int, outputs: int, seed: int) -> nn.Module:
    """A layer with parameters and buffers. The seed is for a separate process, which has another generator."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.Tanh())


class Net(nn.Module):
    """Blocks on any workers, and its own parameter and buffer."""

    seen: Tensor

    def __init__(self, placement: Placement, seed: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTHS[0],), 1.0 + seed))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.blocks = nn.ModuleList()
        for number, worker in enumerate(placement):
            args = (WIDTHS[number], WIDTHS[number + 1], seed + number)
            self.blocks.append(block(*args) if worker is None else RemoteModule(worker, block, args))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = x * self.scale
        for each in self.blocks:
            x = each(x)
        return x


class Run:
    """A model, its optimizer with two groups, a scheduler, a generator of data, and the progress so far.

    With ``distributed`` False it is what a user has in one process; then all blocks are local.
    """

    def __init__(self, placement: Placement, *, seed: int = 0, distributed: bool = True) -> None:
        self.distributed = distributed
        self.model = Net(placement, seed)
        parameters = parameter_rrefs(self.model) if distributed else list(self.model.parameters())
        groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:], "weight_decay": 0.01}]
        self.optimizer: Any = (
            DistributedOptimizer(torch.optim.Adam, groups, lr=0.05)
            if distributed
            else torch.optim.Adam(groups, lr=0.05)
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch = 0

    def step(self, count: int = 1) -> Run:
        for _ in range(count):
            x = torch.randn(7, WIDTHS[0], generator=self.generator)
            if self.distributed:
                with dist_autograd.context() as context_id:
                    dist_autograd.backward(context_id, [self.model(x).square().mean()])
                    self.optimizer.step(context_id)
            else:
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
            self.scheduler.step()
            self.epoch += 1
        return self

    def objects(self) -> dict[str, Any]:
        """The objects for `backhaul.checkpoint.save` and `load`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "epoch": self.epoch,
            "generator": self.generator.get_state(),
        }

    def take(self, values: dict[str, Any]) -> Run:
        """Continue from the plain values of a checkpoint."""
        self.epoch = values["epoch"]
        self.generator.set_state(values["generator"])
        return self

    def state(self) -> dict[str, Any]:
        """The whole state, as one process would have it; copies."""
        return {
            "model": {key: value.clone() for key, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "generator": self.generator.get_state(),
        }


def uninterrupted(steps: int) -> dict[str, Any]:
    """The state of one process after this many steps."""
    return Run(ALONE, distributed=False).step(steps).state()


def assert_equal(found: Any, expected: Any, place: str = "") -> None:
    """Equal to the last bit."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), place
        assert found.dtype == expected.dtype, place
        assert torch.equal(found, expected), f"{place}: {found} is not {expected}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{place}: {found.keys()} are not {expected.keys()}"
        for key in expected:
            assert_equal(found[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{place}[{number}]")
    else:
        assert found == expected, f"{place}: {found!r} is not {expected!r}"
