"""A model over workers on a Ray cluster, one of which dies during training: ``python examples/ray_cluster.py``.

Needs Ray (``pip install 'backhaul[ray]'``). It connects to the Ray cluster of ``RAY_ADDRESS``, or starts one here. It
saves a checkpoint every five steps. When the worker is lost, the program replaces it and continues from the checkpoint.
The losses equal those of an undisturbed run, bit by bit.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from typing import Any

import ray
import torch

import backhaul.autograd as dist_autograd
import backhaul.ray
from backhaul import checkpoint, rpc
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer

STEPS, LOST_AT = 20, 12
torch.set_num_threads(1)


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    halves = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
    first = RemoteModule("worker1", torch.nn.Linear, (8, 16))
    last = RemoteModule("worker2", torch.nn.Linear, (16, 1))
    first.load_state_dict(halves[0].state_dict())
    last.load_state_dict(halves[1].state_dict())
    parameters = [*first.remote_parameters(), *last.remote_parameters()]
    return {"first": first, "last": last, "optimizer": DistributedOptimizer(torch.optim.Adam, parameters, lr=0.02)}


def step(objects: dict[str, Any], number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(32, 8, generator=generator)
    with dist_autograd.context() as context:
        loss = (objects["last"](objects["first"](x).relu()) - x.sum(1, keepdim=True)).square().mean()
        dist_autograd.backward(context, [loss])
        objects["optimizer"].step(context)
    return loss.item()


def run(workers: backhaul.ray.RayCluster, directory: str, lost_at: int | None) -> list[float]:
    left = {lost_at}

    def disturbed(objects: dict[str, Any], number: int) -> float:
        if number in left:
            left.discard(number)
            workers[1].rpc_sync(os._exit, args=(1,))  # raises WorkerLostError
        return step(objects, number)

    resume = checkpoint.Resume(directory, build, every=5, replace=workers.restart)
    losses = resume.run(disturbed, STEPS)
    for error in resume.losses:
        print(f"lost {getattr(error, 'worker', '?')}, and went on")
    return losses


def main() -> None:
    logging.getLogger("backhaul").setLevel(logging.ERROR)
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as directory, backhaul.ray.cluster(2) as workers:
        print(f"{rpc.get_worker_info().name} on rank 0, and {', '.join(worker.name for worker in workers)} by Ray")
        undisturbed = run(workers, f"{directory}/undisturbed", None)
        losses = run(workers, f"{directory}/disturbed", LOST_AT)
    for number in (0, STEPS - 1):
        print(f"step {number:2}   loss {losses[number]:.4f}")
    if losses != undisturbed:
        print("✗ the losses are not those of the undisturbed run")
        sys.exit(1)
    print(f"✓ worker2 was lost and replaced, and all {STEPS} losses are, bit by bit, those of the undisturbed run")


if __name__ == "__main__":
    main()
