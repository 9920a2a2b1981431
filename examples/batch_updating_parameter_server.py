"""A parameter server that waits for the gradients of all trainers, and updates the model once for all of them.

    server (this process)                              trainer1, trainer2, trainer3
    ┌──────────────────────────────┐                   ┌────────────────────┐
    │ update(gradients) ◄──────────┼──── gradients ─── │ a shard of data    │
    │   the last one of a round    │                   │ a copy of the model│
    │   steps the optimizer,       │                   │                    │
    │   and all three are answered ┼──── new model ──► │                    │
    └──────────────────────────────┘                   └────────────────────┘

Until a round is complete, its trainers wait for their answers. No thread waits on the server: `update` is marked with
``async_execution``, returns a future, and occupies no thread until the future is set. So the number of threads does not
limit the number of trainers.

At the end the program compares the model with synchronous data-parallel SGD in one process.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import backhaul
from backhaul import rpc

TRAINERS = ["trainer1", "trainer2", "trainer3"]
ROUNDS, BATCH = 150, 20

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores, and sums are made in the same order in each


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same values, wherever it is made
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_shard(trainer: str) -> tuple[Tensor, Tensor]:
    """The data of one trainer. No other trainer has it."""
    torch.manual_seed(1 + TRAINERS.index(trainer))
    inputs = torch.randn(200, 4)
    return inputs, torch.sin(inputs).sum(dim=1, keepdim=True)


def loss_of(model: nn.Module, shard: tuple[Tensor, Tensor], step: int) -> Tensor:
    inputs, targets = shard
    chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % len(inputs)
    return mse_loss(model(inputs[chosen]), targets[chosen])


class ParameterServer:
    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.rounds = 0
        self.lock = threading.Lock()  # trainers call concurrently, each on its own thread
        self.come: dict[str, tuple[float, list[Tensor]]] = {}  # in this round
        self.updated: torch.futures.Future[dict[str, Tensor]] = torch.futures.Future()

    @rpc.functions.async_execution
    def update(self, trainer: str, loss: float, gradients: list[Tensor]) -> torch.futures.Future[dict[str, Tensor]]:
        """Take the gradients of one trainer. The answer is the model after the update of this round."""
        with self.lock:
            self.come[trainer] = loss, gradients
            updated = self.updated
            complete = len(self.come) == len(TRAINERS)
            if complete:
                self.step(last=trainer)
                self.come, self.updated = {}, torch.futures.Future()
        if complete:
            # The tensors need no copy: they change in the next round, which needs new gradients of every trainer, and a
            # trainer sends those only after this answer.
            updated.set_result(self.model.state_dict())
        return updated

    def step(self, last: str) -> None:
        self.optimizer.zero_grad()
        for trainer in TRAINERS:  # not in the order of arrival: the last digit of a sum depends on the order
            for parameter, gradient in zip(self.model.parameters(), self.come[trainer][1], strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.optimizer.step()
        if self.rounds % 25 == 0 or self.rounds == ROUNDS - 1:
            losses = "   ".join(f"{self.come[trainer][0]:.4f}" for trainer in TRAINERS)
            print(f"round {self.rounds:3}   losses {losses}   last to come: {last}", flush=True)
        self.rounds += 1


def train(server: rpc.RRef[ParameterServer]) -> None:
    """Runs on each trainer."""
    name = rpc.get_worker_info().name
    shard, model = make_shard(name), make_model()
    for step in range(ROUNDS):
        model.zero_grad()
        loss = loss_of(model, shard, step)
        (loss / len(TRAINERS)).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters()]
        model.load_state_dict(server.rpc_sync().update(name, loss.item(), gradients))


def train_alone() -> nn.Module:
    """The same in one process: one step with the sum of the gradients of all shards."""
    model = make_model()
    optimizer, shards = make_optimizer(model), [make_shard(trainer) for trainer in TRAINERS]
    for step in range(ROUNDS):
        optimizer.zero_grad()
        for shard in shards:
            (loss_of(model, shard, step) / len(TRAINERS)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def main() -> int:
    server = ParameterServer()
    with backhaul.cluster(len(TRAINERS), name="server", names=TRAINERS) as trainers:
        reference = rpc.RRef(server)
        torch.futures.wait_all([trainer.rpc_async(train, args=(reference,)) for trainer in trainers])

    alone, trained = train_alone().state_dict(), server.model.state_dict()
    differ = [name for name, value in alone.items() if not torch.equal(trained[name], value)]
    if server.rounds != ROUNDS or differ:
        print(f"✗ {server.rounds} updates; not as in one process: {', '.join(differ)}")
        return 1
    print(f"✓ after {ROUNDS} updates the model is, bit by bit, that of data-parallel SGD in one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
