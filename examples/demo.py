"""One model in three processes, trained with one backward pass over all of them. Run by ``make demo``.

    worker1                       this process                     worker2
    ┌────────────┐                ┌──────────────┐                 ┌────────────┐
    │ first half │ ◄── points ─── │ points       │                 │ other half │
    │ of the     │ ─── hidden ──► │   hidden   ───── hidden ─────► │ of the     │
    │ encoder    │                │   features ◄──── features ──── │ encoder    │
    └────────────┘                │ head, loss   │                 └────────────┘
                                  └──────────────┘

At the end the program compares the gradients with those of the same model in one process. The exit code is 1 if any
differs by more than 1e-9.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.live import Live
from torch import Tensor, nn

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc

STEPS = 200
CLOSE = 1e-9

console = Console(highlight=False)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores


class Half(nn.Module):
    """Half of the encoder, with its own optimizer. Lives on a worker."""

    def __init__(self, seed: int, inputs: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(inputs, size), nn.Tanh(), nn.Linear(size, size), nn.Tanh())
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.004)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        return gradients(self)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def predict(first: Callable[..., Tensor], other: Callable[..., Tensor], head: nn.Module, points: Tensor) -> Tensor:
    """The whole model. The halves are modules of this process, or proxies of modules on workers."""
    hidden = first(points)
    features = other(hidden)
    scores: Tensor = head(torch.cat([hidden, features], dim=1))
    return scores


def two_spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points on two intertwined spirals, and the spiral of each point."""
    torch.manual_seed(0)
    which = torch.arange(count) % 2
    angle = 10 * torch.rand(count).sqrt()
    direction = angle + torch.pi * which
    points = torch.stack([direction.cos(), direction.sin()], dim=1) * angle[:, None] / 10
    return points + 0.04 * torch.randn(count, 2), which


def train(first: rpc.RRef[Half], other: rpc.RRef[Half], head: nn.Module, points: Tensor, which: Tensor) -> None:
    """Leaves the gradients of the last step in ``.grad``, on every worker."""
    optimizer = torch.optim.Adam(head.parameters(), lr=0.004)
    losses: list[float] = []
    with Live(console=console, auto_refresh=False) as live:
        for step in range(STEPS + 1):
            with dist_autograd.context() as context:
                scores = predict(first.rpc_sync(), other.rpc_sync(), head, points)
                loss = nn.functional.cross_entropy(scores, which)
                dist_autograd.backward(context, [loss], accumulate="grad")

            losses.append(loss.item())
            right = (scores.argmax(dim=1) == which).double().mean().item()
            line = f"step {step:3}   loss {loss.item():.4f}   {right:4.0%} right"
            if console.is_terminal:
                live.update(f"{line}   [cyan]{sparkline(losses)}", refresh=True)
            elif step % 25 == 0:
                print(line, flush=True)

            if step < STEPS:
                stepping = [first.rpc_async().step(), other.rpc_async().step()]
                optimizer.step()
                optimizer.zero_grad()
                torch.futures.wait_all(stepping)


def largest(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.abs().flatten() for tensor in tensors]).max().item()


def sparkline(values: list[float], width: int = 40) -> str:
    shown = values[:: max(1, -(-len(values) // width))]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value / max(values)))] for value in shown)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    points, which = two_spirals(400)
    console.print("starting worker1 and worker2 …")
    with backhaul.cluster(2):
        first = rpc.remote("worker1", Half, args=(3, 2, 48))
        other = rpc.remote("worker2", Half, args=(1, 48, 48))
        head = nn.Linear(96, 2)
        start = time.perf_counter()
        train(first, other, head, points, which)
        console.print(f"{STEPS} steps in {time.perf_counter() - start:.1f} s")
        found = [first.rpc_sync().gradients(), other.rpc_sync().gradients(), gradients(head)]

        # The same model in this process alone: copies of its three parts, and the same code.
        alone = first.to_here(), other.to_here(), copy.deepcopy(head)
        alone[2].zero_grad()
        nn.functional.cross_entropy(predict(*alone, points), which).backward()  # type: ignore[no-untyped-call]

    differences: list[Tensor] = []
    for place, there, module in zip(("worker1", "worker2", "here"), found, alone, strict=True):
        here = gradients(module)
        apart = [a - b for a, b in zip(there, here, strict=True)]
        console.print(f"{place:7}   {len(here)} gradients of up to {largest(here):.1g}, {largest(apart):.1g} apart")
        differences += apart
    passed = largest(differences) <= CLOSE
    verdict = "✓ the gradients are those of one process" if passed else "✗ the gradients are not those of one process"
    console.print(f"[{'green' if passed else 'bold red'}]{verdict}; largest difference {largest(differences):.1g}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
