"""Asynchronous SGD: trainers with their own data step one model on a parameter server, each at its own pace.

    server                                 trainer1, trainer2
    ┌────────────────┐                     ┌───────────────────────┐
    │ body: the      │ ◄───── inputs ───── │ a shard of data       │
    │ larger part    │ ───── features ───► │ a head of its own     │
    │ of the model   │ ◄──── gradients ─── │ loss                  │
    │                │ ◄────── step ────── │ DistributedOptimizer  │
    └────────────────┘                     └───────────────────────┘

The trainers do not wait for each other: between a trainer's forward pass and its step, others may step the body. So the
result of the first phase differs each time, and the program only checks that the loss falls. In the second phase the
trainers take turns, and the program compares the model with the same steps in one process.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

TRAINERS = ["trainer1", "trainer2"]
STEPS, TURNS, BATCH, RATE = 90, 10, 32, 0.15

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores, and sums are made in the same order in each


class SharedLinear(nn.Linear):
    """A layer that others may step between a forward pass and its backward pass.

    The backward pass needs the weights of its forward pass, and autograd raises an error if they have changed. So each
    forward pass uses a copy, and its gradient goes through the copy to the parameter.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight.clone(), self.bias)


def make_body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(SharedLinear(4, 128), nn.Tanh(), SharedLinear(128, 64), nn.Tanh())


def make_head() -> nn.Linear:
    return nn.Linear(64, 1)


def make_shard(trainer: str) -> tuple[Tensor, Tensor]:
    """The data of one trainer. All trainers have the same waves, but mix them differently, so each has its own head."""
    torch.manual_seed(1 + TRAINERS.index(trainer))
    inputs, mixture = torch.randn(320, 4), torch.randn(4, 1)
    return inputs, torch.sin(inputs) @ mixture


def loss_of(body: nn.Module, head: nn.Module, shard: tuple[Tensor, Tensor], step: int) -> Tensor:
    inputs, targets = shard
    chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % len(inputs)
    return mse_loss(head(body(inputs[chosen])), targets[chosen])


class Trainer:
    """Lives on the worker of its name."""

    def __init__(self, body: RemoteModule) -> None:
        self.name = rpc.get_worker_info().name
        self.shard = make_shard(self.name)
        self.body = body  # a reference arrives, not the module
        self.head = make_head()
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(body, self.head), lr=RATE)

    def step(self, step: int) -> float:
        with dist_autograd.context() as context_id:
            loss = loss_of(self.body, self.head, self.shard, step)
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)  # the head here, the body on the server
        return loss.item()

    def run(self) -> list[float]:
        losses = []
        for step in range(STEPS):
            losses.append(self.step(step))
            if step % 30 == 0 or step == STEPS - 1:
                print(f"step {step:3}   loss {losses[-1]:.4f}", flush=True)
        return losses

    def head_state(self) -> dict[str, Tensor]:
        return self.head.state_dict()


def state_of(body: nn.Module, trainers: list[rpc.RRef[Trainer]]) -> list[dict[str, Tensor]]:
    """All current parameters."""
    return [body.state_dict(), *(trainer.rpc_sync().head_state() for trainer in trainers)]


def take_turns_alone(state: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The second phase in one process, from the same initial state."""
    body, *heads = make_body(), *(make_head() for _ in TRAINERS)
    for module, values in zip([body, *heads], state, strict=True):
        module.load_state_dict(values)
    shards = [make_shard(trainer) for trainer in TRAINERS]
    optimizers = [torch.optim.SGD([*body.parameters(), *head.parameters()], lr=RATE) for head in heads]
    for step in range(TURNS):
        for head, shard, optimizer in zip(heads, shards, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(body, head, shard, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [module.state_dict() for module in [body, *heads]]


def main() -> int:
    with backhaul.cluster(1 + len(TRAINERS), names=["server", *TRAINERS]):
        body = RemoteModule("server", make_body)
        trainers = [rpc.remote(name, Trainer, args=(body,)) for name in TRAINERS]
        sizes = [sum(value.numel() for value in state.values()) for state in state_of(body, trainers)]
        print(f"numbers on the server: {sizes[0]}; on each trainer: {sizes[1]}", flush=True)
        losses = torch.futures.wait_all([trainer.rpc_async().run() for trainer in trainers])

        began = state_of(body, trainers)
        for step in range(TURNS):
            for trainer in trainers:
                trainer.rpc_sync().step(step)
        ended = state_of(body, trainers)

    for name, values in zip(TRAINERS, losses, strict=True):
        first, last = (sum(part) / len(part) for part in (values[:10], values[-10:]))
        print(f"{name}   mean loss of its first ten steps {first:.4f}, of its last ten {last:.4f}")
        if last > first / 3:
            print(f"✗ the loss of {name} has not fallen to a third")
            return 1
    alone = take_turns_alone(began)
    pairs = [(found[name], state[name]) for found, state in zip(ended, alone, strict=True) for name in state]
    if not all(torch.equal(found, expected) for found, expected in pairs):
        print("✗ trainers that take turns do not step as one process does")
        return 1
    print(f"✓ after {TURNS} turns of each trainer all {len(pairs)} tensors are, bit by bit, those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
