"""Data parallel and model parallel at once: dense layers under DDP on two trainers, their embeddings on a server.

    trainer0                        server (this process)                        trainer1
    ┌──────────────────┐            ┌─────────────────────┐            ┌──────────────────┐
    │ pairs ───────────┼──────────► │ a table: one row    │ ◄──────────┼─────────── pairs │
    │ DDP(dense) ◄─────┼─── rows ── │ for each user       │ ── rows ───┼─────► DDP(dense) │
    │  ▲       loss    │            │ and each film       │            │    loss       ▲  │
    └──┼───────────────┘            └─────────────────────┘            └───────────────┼──┘
       └────────────────── gradients of dense, averaged by DDP ────────────────────────┘

Users rate films. Each trainer has half of the ratings, and a copy of the dense layers. One backward pass averages the
gradients of the dense layers between the trainers, and sends the gradients of the rows to the server. The table of a
real system does not fit on a trainer. This one does, so the program can compare everything with one process at the end.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

TRAINERS = ["trainer0", "trainer1"]
USERS, FILMS, KINDS, WIDTH = 60, 40, 3, 8
EPOCHS, BATCHES, BATCH = 10, 15, 64
RATE, MOMENTUM, CLOSE = 0.15, 0.9, 1e-9

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores


class Model(nn.Module):
    """Ratings of (user, film) pairs. Its parts are local modules, or stand for modules on other workers."""

    def __init__(self, table: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.dense = dense

    def forward(self, pairs: Tensor) -> Tensor:
        rows = self.table(pairs)
        return self.dense(rows.flatten(1)).squeeze(1)  # type: ignore[no-any-return]


def make_table() -> nn.Module:
    torch.manual_seed(1)
    return nn.Embedding(USERS + FILMS, WIDTH)


def make_dense() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def make_ratings() -> tuple[Tensor, Tensor, Tensor]:
    """Batches of pairs for each trainer, pairs that no trainer uses, and the ratings of all users.

    Users and films have kinds, and a rating depends on both.
    """
    torch.manual_seed(0)
    taste = torch.randn(KINDS, KINDS)
    ratings = taste[torch.arange(USERS) % KINDS][:, torch.arange(FILMS) % KINDS] + 0.1 * torch.randn(USERS, FILMS)
    pairs = torch.cartesian_prod(torch.arange(USERS), torch.arange(FILMS))[torch.randperm(USERS * FILMS)]
    used = len(TRAINERS) * BATCHES * BATCH
    return pairs[:used].view(len(TRAINERS), BATCHES, BATCH, 2), pairs[used:], ratings


def loss_of(model: nn.Module, pairs: Tensor, ratings: Tensor) -> Tensor:
    users, films = pairs.unbind(1)
    return mse_loss(model(torch.stack([users, USERS + films], dim=1)), ratings[users, films])


class Trainer:
    """Lives on its own worker."""

    def __init__(self, number: int, table: RemoteModule, meeting_point: str) -> None:
        dist.init_process_group("gloo", init_method=meeting_point, rank=number, world_size=len(TRAINERS))
        everything, self.unseen, self.ratings = make_ratings()
        self.batches = everything[number]
        self.model = Model(table, DistributedDataParallel(make_dense()))
        # DDP averages the trainers' gradients. Each trainer steps the table, so this rate turns their sum into a mean.
        groups = [
            {"params": table.remote_parameters(), "lr": RATE / len(TRAINERS)},
            {"params": parameter_rrefs(self.model.dense), "lr": RATE},
        ]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, groups, momentum=MOMENTUM)

    def run_epoch(self) -> float:
        """The mean loss of this trainer."""
        losses = []
        for pairs in self.batches:
            with dist_autograd.context() as context_id:
                loss = loss_of(self.model, pairs, self.ratings)
                dist_autograd.backward(context_id, [loss])
                # After averaging, all trainers have read their rows, so the table may change.
                self.optimizer.step(context_id)
            dist.barrier()  # all have stepped the table: no trainer reads rows that another one has yet to step
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def error(self) -> float:
        """The mean square error of ratings that no trainer uses."""
        return loss_of(self.model, self.unseen, self.ratings).item()

    def finish(self) -> dict[str, Tensor]:
        """The trained dense layers."""
        wrapper = self.model.dense
        assert isinstance(wrapper, DistributedDataParallel)
        state: dict[str, Tensor] = wrapper.module.state_dict()
        del wrapper, self.model  # drop a DDP module before its process group
        dist.destroy_process_group()
        return state


def train_alone() -> Model:
    """The same in one process: the batches of both trainers form one batch."""
    everything, _, ratings = make_ratings()
    model = Model(make_table(), make_dense())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for _ in range(EPOCHS):
        for pairs in everything.unbind(1):
            optimizer.zero_grad()
            loss_of(model, pairs.flatten(0, 1), ratings).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def train() -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[float]]:
    """The table, the dense layers of each trainer, and the loss of each epoch."""
    with (
        tempfile.TemporaryDirectory() as directory,
        backhaul.cluster(len(TRAINERS), name="server", names=TRAINERS),
    ):
        table = RemoteModule("server", make_table)
        trainers = [
            rpc.remote(name, Trainer, args=(number, table, f"file://{directory}/meeting-point"))
            for number, name in enumerate(TRAINERS)
        ]
        losses: list[float] = []
        for epoch in range(1, EPOCHS + 1):
            mine = torch.futures.wait_all([trainer.rpc_async().run_epoch() for trainer in trainers])
            losses.append(sum(mine) / len(mine))
            bar = "█" * max(1, round(30 * losses[-1] / losses[0]))
            unseen = trainers[0].rpc_sync().error()
            print(f"epoch {epoch:2}   loss {losses[-1]:.4f}   of unseen ratings {unseen:.4f}   {bar}", flush=True)
        dense = torch.futures.wait_all([trainer.rpc_async().finish() for trainer in trainers])
        return table.state_dict(), dense, losses


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    rows, dense, losses = train()
    if not losses[-1] < losses[0] / 5:
        print("✗ the loss has not fallen to a fifth")
        return 1
    alone = train_alone()
    pairs = [("the table on the server", rows, alone.table)]
    pairs += [(f"the dense layers on {name}", each, alone.dense) for name, each in zip(TRAINERS, dense, strict=True)]
    apart = []
    for place, found, module in pairs:
        expected = module.state_dict()
        apart.append(torch.cat([(found[name] - expected[name]).flatten() for name in expected]).abs().max().item())
        print(f"{place:28} {sum(each.numel() for each in found.values()):4} numbers, {apart[-1]:.1g} apart")
    if not all(each <= CLOSE for each in apart):
        print("✗ these are not the numbers of one process")
        return 1
    print(f"✓ after {EPOCHS * BATCHES} steps these are the numbers of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
