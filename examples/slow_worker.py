"""A model over three workers with one slow stage: docs/seeing.md shows how to find out which, and why.

    worker1  encoder  →  worker2  codebook  →  worker3  decoder

The codebook replaces each vector by a mixture of 32 codes, and sums the entropy of the mixtures, as a statistic. It
sums number by number in Python, and all other workers wait for it. ``--fixed`` uses torch instead.

``--profile DIR`` prints the summary of a profile, and leaves a trace and a drawing of the graph in that directory.
``--steps N`` makes it run longer, to look at it from outside.

The exit code is 1 if the gradients or the entropy differ from those of one process.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import RemoteModule
from backhaul.profiler import profile

VECTORS, WIDTH, CODES = 120_000, 8, 32
CLOSE = 1e-12

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


class Codebook(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CODES, WIDTH))
        self.entropy_of = entropy_by_torch if fixed else entropy_by_python
        self.entropy = 0.0

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ self.codes.T, dim=1)
        self.entropy += self.entropy_of(weights.detach())
        return weights @ self.codes


def entropy_by_python(weights: Tensor) -> float:
    entropy = 0.0
    for row in weights.tolist():
        entropy -= sum(weight * math.log(weight) for weight in row)
    return entropy


def entropy_by_torch(weights: Tensor) -> float:
    return float(torch.special.entr(weights).sum())


def make_ends(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # the same values, wherever it is made
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def make_codebook(fixed: bool) -> Codebook:
    torch.manual_seed(2)
    return Codebook(fixed)


def gradients(context_id: int, params: list[rpc.RRef[nn.Parameter]]) -> list[Tensor]:
    """Runs on the owner of the parameters."""
    found = dist_autograd.get_gradients(context_id)
    return [found[param.local_value()] for param in params]


def entropy_there(codebook: rpc.RRef[Codebook]) -> float:
    """Runs on the owner of the codebook."""
    return codebook.local_value().entropy


def step(context_id: int, stages: list[RemoteModule], x: Tensor) -> None:
    encoder, codebook, decoder = stages
    start = time.perf_counter()
    loss = mse_loss(decoder(codebook(encoder(x))), x)
    middle = time.perf_counter()
    dist_autograd.backward(context_id, [loss])
    end = time.perf_counter()
    print(f"forward {middle - start:.2f} s   backward {end - middle:.2f} s", flush=True)


def profile_steps(stages: list[RemoteModule], x: Tensor, steps: int, directory: Path) -> None:
    with profile() as prof:
        for _ in range(steps):
            with dist_autograd.context() as context_id:
                step(context_id, stages, x)
            prof.step()
    prof.export_chrome_trace(directory / "trace.json.gz")
    print(prof.summary())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="let torch compute the entropy")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="leave a trace and a drawing in DIR")
    parser.add_argument("--steps", type=int, default=3, metavar="N")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(VECTORS, WIDTH)
    with backhaul.cluster(3):
        stages = [
            RemoteModule("worker1", make_ends, args=(1,)),
            RemoteModule("worker2", make_codebook, args=(arguments.fixed,)),
            RemoteModule("worker3", make_ends, args=(3,)),
        ]
        if arguments.profile:
            arguments.profile.mkdir(parents=True, exist_ok=True)
            profile_steps(stages, x, arguments.steps - 1, arguments.profile)
        else:
            for _ in range(arguments.steps - 1):
                with dist_autograd.context() as context_id:
                    step(context_id, stages, x)
        with dist_autograd.context() as context_id:
            step(context_id, stages, x)
            if arguments.profile:
                context_id.draw(arguments.profile / "graph.svg", layout="own")
            found = [
                gradient
                for stage in stages
                for gradient in rpc.rpc_sync(stage.on, gradients, args=(context_id, stage.remote_parameters()))
            ]
        entropy = rpc.rpc_sync("worker2", entropy_there, args=(stages[1].get_module_rref(),))

    codebook = make_codebook(fixed=True)
    alone = nn.Sequential(make_ends(1), codebook, make_ends(3))
    mse_loss(alone(x), x).backward()  # type: ignore[no-untyped-call]
    expected = [param.grad for param in alone.parameters() if param.grad is not None]
    apart = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    mean, expected_mean = entropy / VECTORS / arguments.steps, codebook.entropy / VECTORS
    print(f"mean entropy of a mixture {mean:.4f}")
    if apart > CLOSE or abs(mean - expected_mean) > CLOSE:
        print("✗ the gradients or the entropy are not those of one process")
        return 1
    print("✓ the gradients and the entropy are those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
