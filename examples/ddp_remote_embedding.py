"""Data parallel and model parallel at once: dense layers under DDP on two trainers, their embeddings on a server.

    trainer0                        server (this process)                        trainer1
    ┌──────────────────┐            ┌─────────────────────┐            ┌──────────────────┐
    │ pairs ───────────┼──────────► │ a table: one row    │ ◄──────────┼─────────── pairs │
    │ DDP(dense) ◄─────┼─── rows ── │ for each user       │ ── rows ───┼─────► DDP(dense) │
    │  ▲       loss    │            │ and each film       │            │    loss       ▲  │
    └──┼───────────────┘            └─────────────────────┘            └───────────────┼──┘
       └────────────────── gradients of dense, averaged by DDP ────────────────────────┘

Users rate films. Each trainer has half of the ratings, and a copy of the dense layers. One backward pass averages the
gradients of these with the other trainer, and brings those of the rows to the server. The table of a real system does
not fit onto a trainer; this one does, so that at the end all can be compared with the same training in one process.
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
    """Ratings of (user, film) pairs. Its parts are modules of this process, or stand for modules elsewhere."""

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
    """For each trainer batches of pairs, and pairs that nobody trains with; the ratings of all users.

    Users and films are of some kinds, and how a film is liked is a matter of both.
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
    """Lives on a worker of its own."""

    def __init__(self, number: int, table: RemoteModule, meeting_point: str) -> None:
        dist.init_process_group("gloo", init_method=meeting_point, rank=number, world_size=len(TRAINERS))
        everything, self.unseen, self.ratings = make_ratings()
        self.batches = everything[number]
        self.model = Model(table, DistributedDataParallel(make_dense()))
        # DDP takes the mean of the trainers' gradients. The table is stepped by each trainer: the sum, at this rate.
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
                # Averaging has made the trainers meet: all have their rows, and the table may change.
                self.optimizer.step(context_id)
            dist.barrier()  # all have changed it: nobody reads rows that another trainer has yet to step
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def error(self) -> float:
        """The mean square error of ratings that nobody trains with."""
        return loss_of(self.model, self.unseen, self.ratings).item()

    def finish(self) -> dict[str, Tensor]:
        """What has become of the dense layers."""
        wrapper = self.model.dense
        assert isinstance(wrapper, DistributedDataParallel)
        state: dict[str, Tensor] = wrapper.module.state_dict()
        del wrapper, self.model  # a DDP module goes before its process group
        dist.destroy_process_group()
        return state


def train_alone() -> Model:
    """The same in one process: batches of both trainers are one batch."""
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
