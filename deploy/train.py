"""One model over all workers of a group: each has a layer, and the first worker trains them all.

It runs unchanged on a laptop (`backhaul run -n 3 deploy/train.py`), with torchrun, srun, mpirun, and in the pods of
deploy/kubernetes: `init_rpc()` finds its place by itself. SIGTERM ends the training after the current step: Kubernetes
and Slurm send it some time before they end a process.
"""

from __future__ import annotations

import os
import signal
import threading

import torch
from torch import nn

import backhaul.autograd as dist_autograd
import backhaul.rpc as rpc
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer

STEPS = int(os.environ.get("TRAIN_STEPS", "40"))
WIDTH = 16
_ended = threading.Event()


def train(layers: list[str]) -> tuple[float, float]:
    """The loss before and after."""
    torch.manual_seed(0)
    remote = [RemoteModule(name, nn.Linear, (WIDTH, WIDTH)) for name in layers]
    head = nn.Linear(WIDTH, 1)
    parameters = [parameter for module in remote for parameter in module.remote_parameters()]
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [*parameters, *(rpc.RRef(parameter) for parameter in head.parameters())], lr=0.05
    )
    inputs = torch.randn(64, WIDTH)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for step in range(STEPS):
        with dist_autograd.context() as context:
            x = inputs
            for module in remote:
                x = torch.tanh(module(x)) + x
            loss = nn.functional.mse_loss(head(x), targets)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if _ended.is_set():
            break
    return losses[0], losses[-1]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: _ended.set())
    rpc.init_rpc()
    me = rpc.get_worker_info()
    others = [worker.name for worker in rpc.get_worker_infos() if worker != me]
    if me.id == 0:
        first, last = train(others)
        print(f"{1 + len(others)} workers, loss {first:.3f} -> {last:.3f}", flush=True)
        if not _ended.is_set() and not last < first / 2:
            raise SystemExit("the loss has not been halved")
    rpc.shutdown()
    print(f"{me.name} is done", flush=True)


if __name__ == "__main__":
    main()
