"""A model over three workers that trains too slowly: the program that docs/seeing.md looks into.

    worker1  encoder  →  worker2  codebook  →  worker3  decoder

The codebook replaces each vector by a mixture of 32 codes, and counts how often each code is chosen. It counts one by
one in Python, and the whole pipeline waits for that. ``--fixed`` counts with one call of ``torch.bincount``.

``--profile DIR`` leaves a trace, a summary and a drawing of the graph in that directory.

The exit code is 1 if the trained model or the counts differ from those of one process.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import Pipeline, RemoteModule
from backhaul.optim import DistributedOptimizer
from backhaul.profiler import profile

VECTORS, WIDTH, CODES, CHUNKS, STEPS, RATE = 100_000, 8, 32, 4, 5, 0.5
CLOSE = 1e-9

torch.set_default_dtype(torch.float64)  # micro-batches sum up in another order: let it show only far behind the point
torch.set_num_threads(1)


class Codebook(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CODES, WIDTH))
        self.used = torch.zeros(CODES, dtype=torch.int64)
        self.count = self.count_at_once if fixed else self.count_one_by_one

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ self.codes.T, dim=1)
        self.count(weights.argmax(dim=1))
        return weights @ self.codes

    def count_one_by_one(self, chosen: Tensor) -> None:
        for code in chosen:
            self.used[code] += 1

    def count_at_once(self, chosen: Tensor) -> None:
        self.used += torch.bincount(chosen, minlength=CODES)


def make_encoder() -> nn.Module:
    torch.manual_seed(1)  # the same values, wherever it is made
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def make_codebook(fixed: bool) -> nn.Module:
    torch.manual_seed(2)
    return Codebook(fixed)


def make_decoder() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def used(codebook: rpc.RRef[Codebook]) -> Tensor:
    """Runs on the owner of the codebook."""
    return codebook.local_value().used


def train(stages: list[RemoteModule], x: Tensor, directory: Path | None) -> None:
    pipeline = Pipeline(stages, chunks=CHUNKS)
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.remote_parameters(), lr=RATE)
    with profile() if directory else nullcontext() as prof:
        for step in range(STEPS):
            start = time.perf_counter()
            with dist_autograd.context() as context_id:
                loss = mse_loss(pipeline(x), x)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                if directory and step == STEPS - 1:
                    context_id.draw(directory / "graph.svg", layout="own")
            print(f"step {step}   loss {loss.item():.4f}   {time.perf_counter() - start:.2f} s", flush=True)
            if prof:
                prof.step()
    if directory and prof:
        prof.export_chrome_trace(directory / "trace.json.gz")
        (directory / "summary.txt").write_text(f"{prof.summary()}\n")


def train_alone(x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The parameters and the counts of one process."""
    model = nn.Sequential(make_encoder(), make_codebook(fixed=True), make_decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return list(model.parameters()), model[1].used


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="count all codes at once")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="leave a trace, a summary and a drawing in DIR")
    arguments = parser.parse_args()
    if arguments.profile:
        arguments.profile.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    x = torch.randn(VECTORS, WIDTH)
    with backhaul.cluster(3):
        stages = [
            RemoteModule("worker1", make_encoder),
            RemoteModule("worker2", make_codebook, args=(arguments.fixed,)),
            RemoteModule("worker3", make_decoder),
        ]
        train(stages, x, arguments.profile)
        params = [param.to_here() for stage in stages for param in stage.remote_parameters()]
        counts = rpc.rpc_sync("worker2", used, args=(stages[1].get_module_rref(),))

    expected, expected_counts = train_alone(x)
    apart = max((a - b).abs().max().item() for a, b in zip(params, expected, strict=True))
    if apart > CLOSE or not torch.equal(counts, expected_counts):
        print(f"✗ not as in one process: the parameters are {apart:.0e} apart, the counts {counts.tolist()}")
        return 1
    print(f"✓ {counts.sum()} codes counted, and the parameters are those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
