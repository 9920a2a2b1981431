"""A model in two stages on two workers. Micro-batches let both stages work at the same time.

    1 chunk     worker1  ████████                        4 chunks    worker1  ██ ██ ██ ██
                worker2          ████████                            worker2     ██ ██ ██ ██

Prints how long a step takes with 1, 2, 4 and 8 chunks, and how far its gradients are from those of the same model in
one process. More chunks overlap more, but each costs a call, so there is a best number, which depends on the model and
the machine. Workers that share a core gain nothing, so expect little on a busy machine.

The exit code is 1 if a gradient differs by more than 1e-9 of the largest.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import Pipeline, RemoteModule

BATCH, WIDTH, LAYERS, REPEATS = 512, 256, 4, 3
CLOSE = 1e-9

torch.set_default_dtype(torch.float64)  # micro-batches sum in another order; this keeps the difference small
torch.set_num_threads(1)  # one core for each worker


def make_stage(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # the same values, wherever it is made
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def gradients(context_id: int, params: list[rpc.RRef[nn.Parameter]]) -> list[Tensor]:
    """Runs on the owner of the parameters."""
    found = dist_autograd.get_gradients(context_id)
    return [found[param.local_value()] for param in params]


def step(pipeline: Pipeline, x: Tensor, target: Tensor) -> tuple[float, float, list[Tensor]]:
    """Milliseconds of forward and of backward, and the gradients of all stages."""
    with dist_autograd.context() as context_id:
        start = time.perf_counter()
        loss = mse_loss(pipeline(x), target)
        middle = time.perf_counter()
        dist_autograd.backward(context_id, [loss])
        end = time.perf_counter()
        found = [
            gradient
            for stage in pipeline
            for gradient in rpc.rpc_sync(stage.on, gradients, args=(context_id, stage.remote_parameters()))
        ]
    return 1000 * (middle - start), 1000 * (end - middle), found


def main() -> int:
    torch.manual_seed(0)
    x, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    alone = nn.Sequential(make_stage(1), make_stage(2))
    times = []
    for _ in range(REPEATS):
        alone.zero_grad()
        start = time.perf_counter()
        mse_loss(alone(x), target).backward()  # type: ignore[no-untyped-call]
        times.append(1000 * (time.perf_counter() - start))
    expected = [param.grad for param in alone.parameters() if param.grad is not None]

    largest = max(gradient.abs().max() for gradient in expected)

    apart: list[float] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; best of {REPEATS} steps each")
    print(f"one process   {min(times):4.0f} ms")
    with backhaul.cluster(2):
        stages = [RemoteModule("worker1", make_stage, args=(1,)), RemoteModule("worker2", make_stage, args=(2,))]
        for chunks in (1, 2, 4, 8):
            pipeline = Pipeline(stages, chunks=chunks)
            steps = [step(pipeline, x, target) for _ in range(REPEATS)]
            forward, backward, found = min(steps, key=lambda each: each[0] + each[1])
            differences = [(a - b).abs().max() / largest for a, b in zip(found, expected, strict=True)]
            apart.append(max(differences).item())
            print(
                f"{chunks} chunk{'s' if chunks > 1 else ' '}      {forward + backward:4.0f} ms"
                f" = forward {forward:3.0f} + backward {backward:3.0f}"
                f"   {len(found)} gradients, apart by {apart[-1]:.0e} of the largest",
                flush=True,
            )
    if max(apart) > CLOSE:
        print("✗ the gradients are not those of one process")
        return 1
    print("✓ the gradients are those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
