"""Training continues while workers are killed: four workers, random kills, and the losses of an undisturbed run.

    worker1       worker2       worker3       worker4           killed, with SIGKILL, in the middle of a step:
    ┌───────┐     ┌───────┐     ┌───────┐     ┌───────┐         - `workers.restart` starts another process,
    │ stage │ ──► │ stage │ ──► │ stage │ ──► │ stage │         - `checkpoint.Resume` rebuilds the model, loads
    └───────┘     └───────┘     └───────┘     └───────┘           the last checkpoint, and repeats the steps since

Each stage has dropout, so its random numbers matter as well. The program draws the losses of two runs from the same
start, one of them disturbed. The exit code is 1 if their losses are not equal, bit by bit. ``--plot FILE`` also draws
both into a picture (.svg or .png), which needs matplotlib.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import threading
from typing import Any

import torch
from torch import nn

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import checkpoint, rpc
from backhaul.cluster import Cluster
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

WORKERS, STEPS, EVERY, KILLS = 4, 40, 5, 2
WIDTH, ROWS = 16, 8

torch.set_num_threads(1)  # one core for each worker
logging.getLogger("backhaul.launch").setLevel(logging.ERROR)  # killed workers are expected here


def stage(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.02))


def build() -> dict[str, Any]:
    """The model, newly made on the workers: at the start and after each loss."""
    model = nn.Sequential(*[RemoteModule(f"worker{number}", stage, (number,)) for number in range(1, WORKERS + 1)])
    return {"model": model, "optimizer": DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), lr=0.005)}


def step(objects: dict[str, Any], number: int) -> float:
    x = torch.randn(32, WIDTH)
    with dist_autograd.context() as context_id:
        loss = (objects["model"](x) - x.flip(1).tanh() / 2).square().mean()
        dist_autograd.backward(context_id, [loss])
        objects["optimizer"].step(context_id)
    return loss.item()  # type: ignore[no-any-return]


class Disturbed:
    """The same step; in the middle of some steps it kills a worker, once per step."""

    def __init__(self, workers: Cluster) -> None:
        self.chance = random.Random(0)
        self.workers = workers
        self.at = set(self.chance.sample(range(1, STEPS), KILLS))

    def __call__(self, objects: dict[str, Any], number: int) -> float:
        if number in self.at:
            self.at.remove(number)
            victim = self.chance.choice(self.workers)
            print(f"step {number:3}   kill -9 {victim.name}")
            threading.Timer(self.chance.uniform(0, 0.01), os.kill, (victim.pid, signal.SIGKILL)).start()
            while victim.alive:  # so that the kill happens in this step and not later
                step(objects, number)
        return step(objects, number)


def run(name: str, workers: Cluster, disturbed: bool) -> list[float]:
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as directory:
        resume = checkpoint.Resume(directory, build, every=EVERY, replace=workers.restart, restore="all")
        losses = resume.run(Disturbed(workers) if disturbed else step, STEPS)
    print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {len(resume.losses)} recoveries\n{curve(losses)}\n")
    return losses


def curve(losses: list[float]) -> str:
    """A text curve, with a column for each step."""
    low, high = min(losses), max(losses)
    heights = [round((loss - low) / (high - low or 1) * (ROWS - 1)) for loss in losses]
    rows = ["".join("█" if height >= row else " " for height in heights) for row in reversed(range(ROWS))]
    return "\n".join(f"  │{row}" for row in rows) + f"\n  └{'─' * len(losses)}"


def plot(file: str, losses: dict[str, list[float]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    first = None
    for number, (name, values) in enumerate(losses.items(), 1):
        first = figure.add_subplot(1, 2, number, sharey=first)
        first.plot(values)
        first.set(title=name, xlabel="step", ylabel="loss" if number == 1 else None)
    figure.savefig(file)


def main() -> int:
    with backhaul.cluster(WORKERS) as workers:
        rpc.on_lost(lambda worker, cause: print(f"           {cause}"))
        losses = {name: run(name, workers, name == "disturbed") for name in ("undisturbed", "disturbed")}
    if "--plot" in sys.argv:
        plot(sys.argv[sys.argv.index("--plot") + 1], losses)
    if losses["disturbed"] != losses["undisturbed"]:
        print("✗ the losses of the disturbed run are not those of the undisturbed one")
        return 1
    print(f"✓ {KILLS} workers were killed, and all {STEPS} losses are, bit by bit, those of the undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
