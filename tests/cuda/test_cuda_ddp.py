"""DistributedDataParallel over NCCL, around a model that continues on the GPU of another worker.

NCCL wants a GPU for each trainer. On a machine with one GPU there is one trainer, which still has NCCL's streams.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import backhaul.autograd as dist_autograd
from backhaul import rpc

sys.path.insert(0, str(Path(__file__).parent.parent))

from crew import Crew

BACKEND = "nccl"
SERVER = "worker0"
STEPS = 3
WIDTH = 32


def gpu(trainer: int) -> torch.device:
    return torch.device("cuda", trainer)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch(trainer: int, step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + trainer))


kept: dict[str, Any] = {}


def tail(x: Tensor) -> Tensor:
    if "tail" not in kept:
        kept["tail"] = make(1).to(x.device)
    y: Tensor = kept["tail"](x)
    return y


def join(trainer: int, trainers: int, store: str) -> None:
    here = gpu(trainer)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(BACKEND, init_method=f"file://{store}", rank=trainer, world_size=trainers)
    kept["head"] = DistributedDataParallel(make(0).to(here))


def train(trainer: int) -> list[list[Tensor]]:
    """The averaged gradients of each step."""
    head = kept["head"]
    found = []
    for step in range(STEPS):
        with dist_autograd.context() as context:
            hidden = head(batch(trainer, step).to(gpu(trainer)))
            dist_autograd.backward(context, [rpc.rpc_sync(SERVER, tail, args=(hidden,)).square().mean()])
            gradients = dist_autograd.get_gradients(context)
            found.append([gradients[each].cpu() for each in head.parameters()])
    return found


def leave() -> None:
    dist.destroy_process_group()


def alone(trainers: int) -> list[list[Tensor]]:
    """The same in this process."""
    found = []
    for step in range(STEPS):
        head, rest = make(0), make(1)
        losses = [rest(head(batch(trainer, step))).square().mean() for trainer in range(trainers)]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        found.append([each.grad / trainers for each in head.parameters() if each.grad is not None])
    return found


class Trainers(Crew):  # type: ignore[misc]
    def place(self, rank: int, world_size: int | None) -> dict[str, Any]:
        if rank and gpu(0).type == "cuda":
            self._options = {"device_maps": {SERVER: {gpu(rank - 1): gpu(0)}}}
        else:
            self._options = {}
        place: dict[str, Any] = super().place(rank, world_size)
        return place


@pytest.mark.parametrize("trainers", [1, 2])
def test_gradients_are_averaged_over_the_gpus(trainers: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < trainers:
        pytest.skip(f"NCCL wants a GPU for each of {trainers} trainers, and this machine has fewer")
    check(trainers, tmp_path)


def check(trainers: int, folder: Path) -> None:
    with Trainers(1 + trainers) as crew:
        team = list(crew)[1:]
        for ready in [hand.start(join, each, trainers, str(folder / "store")) for each, hand in enumerate(team)]:
            ready.result(100)
        found = [done.result(100) for done in [hand.start(train, each) for each, hand in enumerate(team)]]
        for done in [hand.start(leave) for hand in team]:
            done.result(60)
    for each in found:
        torch.testing.assert_close(each, alone(trainers), rtol=1e-4, atol=1e-5)
