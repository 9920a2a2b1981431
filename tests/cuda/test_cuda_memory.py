"""Training for 10,000 steps over processes leaks no memory of the host or of the GPU.

The test also measures the GPU memory of all processes, so no other program may use the GPU meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from crew import Crew

STEPS = 10_000
MIB = 1 << 20


def used() -> tuple[float, float]:
    """The MiB of host memory that this process uses, and of GPU memory that its tensors have."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    torch.cuda.synchronize()
    return pages * 4096 / MIB, torch.cuda.memory_allocated() / MIB


def used_of_device() -> float:
    """The MiB of GPU memory that all processes use, segments included."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def train(steps: int) -> list[tuple[float, ...]]:
    """The memory in use after each quarter: here, at the other worker, and on the GPU."""
    remote = RemoteModule("worker1/cuda:0", nn.Linear, args=(64, 64))
    near = nn.Linear(64, 64).cuda()
    params = [*remote.remote_parameters(), *(rpc.RRef(each) for each in near.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1e-4)
    found: list[tuple[float, ...]] = []
    for step in range(steps):
        x = torch.randn(16 + step % 7, 64, device="cuda")
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [near(remote(near(x))).square().mean()])
            optimizer.step(context)
        if (step + 1) % (steps // 4) == 0:
            found.append((*used(), *rpc.rpc_sync("worker1", used), used_of_device()))
    return found


@pytest.mark.timeout(600)
def test_10_000_steps() -> None:
    with Crew(2, device_maps="same") as crew:
        quarters = crew[0].run(train, STEPS, timeout=500)
    print(*quarters, sep="\n")
    names = "host here", "GPU here", "host there", "GPU there", "GPU of all"
    # Torch's allocator takes a block of 20 MiB when a stream is late with another one, and keeps it.
    spare = 8, 1, 8, 1, 64
    for name, first, last, more in zip(names, quarters[0], quarters[-1], spare, strict=True):
        assert last <= first * 1.02 + more, f"{name}: {first:.1f} MiB after a quarter, {last:.1f} MiB at the end"
