"""Vertical federated learning: a bank and a shop know different things about the same people, and learn together.

    shop                             bank
    ┌───────────────────┐            ┌──────────────────────────────────────┐
    │ purchases         │            │ accounts ──► encoder ─┐              │
    │   └──► encoder ───┼─ activations ─────────────────────►├─► head, loss │
    │           ▲       │            │                       │     ▲        │
    │           └───────┼─ gradients ◄───────────────────────┘   labels     │
    └───────────────────┘            └──────────────────────────────────────┘

The rows of a party never leave its process, nor do the bank's labels. A coordinator, which is this process, says whose
turn it is, and learns the loss. Activations go from the shop to the bank, and their gradients back: one backward pass
over both. Each party keeps a book of what it gives and gets, and refuses to be copied.

The books show what this program does. They do not stop another one: who is in the group can call any function on a
party's worker. Nor are activations secret, which are made of the rows; parties that do not trust each other have to add
noise or encryption.

At the end the trained parameters are compared with those of one process that has all the columns.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc

PEOPLE, BATCH, STEPS, WIDTH = 640, 32, 120, 4
Book = Counter[tuple[str, tuple[int, ...]]]  # how often what was given or got, and of which shape
BETWEEN = ("gave activations", "got activations", "gave gradients", "got gradients")
MAY_CROSS = {("gave the loss", ()), *((what, (BATCH, WIDTH)) for what in BETWEEN)}

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores, and sums are made in the same order in each


def make_rows() -> tuple[Tensor, Tensor, Tensor]:
    """What the bank knows about each person, what the shop knows, and the bank's labels: who has paid a loan back.

    It stands for files that each party has: each makes all of it, and keeps its own.
    """
    torch.manual_seed(0)
    traits = torch.randn(PEOPLE, 4)
    accounts = traits[:, :2] @ torch.randn(2, 6) + 0.1 * torch.randn(PEOPLE, 6)
    purchases = traits[:, 2:] @ torch.randn(2, 9) + 0.1 * torch.randn(PEOPLE, 9)
    return accounts, purchases, (traits.sum(dim=1) > 0).double()


def make_models() -> tuple[nn.ModuleDict, nn.ModuleDict]:
    """The bank's, whose head takes what both encoders give, and the shop's."""
    torch.manual_seed(1)
    bank, shop = (nn.Sequential(nn.Linear(columns, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for columns in (6, 9))
    head = nn.Sequential(nn.Tanh(), nn.Linear(2 * WIDTH, 1), nn.Flatten(0))
    return nn.ModuleDict({"encoder": bank, "head": head}), nn.ModuleDict({"encoder": shop})


def make_optimizer(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for model in models for parameter in model.parameters()], lr=0.01)


def ids_of(step: int) -> Tensor:
    return torch.arange(step * BATCH, (step + 1) * BATCH) % PEOPLE


class Party:
    """Rows about people, and a model. Others call `step`, what a subclass adds, and for the check `report`."""

    def __init__(self, rows: Tensor, model: nn.ModuleDict) -> None:
        self.rows, self.model = rows, model
        self.optimizer = make_optimizer(model)  # its own: nobody else needs to have the parameters
        self.book: Book = Counter()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a party stays where it is")  # or else who has a reference could fetch the rows with it

    def note(self, what: str, tensor: Tensor) -> None:
        self.book[what, tuple(tensor.shape)] += 1

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self) -> tuple[dict[str, Tensor], Book]:
        return self.model.state_dict(), self.book


class Shop(Party):
    def __init__(self) -> None:
        super().__init__(make_rows()[1], make_models()[1])

    def embed(self, ids: Tensor) -> Tensor:
        activations: Tensor = self.model["encoder"](self.rows[ids])
        self.note("gave activations", activations)
        activations.register_hook(lambda gradients: self.note("got gradients", gradients))  # type: ignore[no-untyped-call]
        return activations


class Bank(Party):
    def __init__(self) -> None:
        accounts, _, self.labels = make_rows()
        super().__init__(accounts, make_models()[0])

    def loss(self, ids: Tensor, theirs: rpc.RRef[Tensor]) -> Tensor:
        activations = theirs.to_here()  # straight from the shop
        self.note("got activations", activations)
        activations.register_hook(lambda gradients: self.note("gave gradients", gradients))  # type: ignore[no-untyped-call]
        hidden = torch.cat([self.model["encoder"](self.rows[ids]), activations], dim=1)
        loss = binary_cross_entropy_with_logits(self.model["head"](hidden), self.labels[ids])
        self.note("gave the loss", loss)
        return loss


def is_refused(party: rpc.RRef[Bank] | rpc.RRef[Shop]) -> bool:
    try:
        party.to_here()
    except rpc.UnsendableError:
        return True
    return False


def train_alone() -> dict[str, dict[str, Tensor]]:
    """The same in one process that has everything."""
    accounts, purchases, labels = make_rows()
    bank, shop = make_models()
    optimizer = make_optimizer(bank, shop)
    for step in range(STEPS):
        ids = ids_of(step)
        hidden = torch.cat([bank["encoder"](accounts[ids]), shop["encoder"](purchases[ids])], dim=1)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(bank["head"](hidden), labels[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"bank": bank.state_dict(), "shop": shop.state_dict()}


def main() -> int:
    with backhaul.cluster(2, name="coordinator", names=["bank", "shop"]):
        bank, shop = rpc.remote("bank", Bank), rpc.remote("shop", Shop)  # each reads its own rows, where it is
        for step in range(STEPS):
            with dist_autograd.context() as context_id:
                activations = shop.remote().embed(ids_of(step))  # a reference: they are not sent here
                loss = bank.rpc_sync().loss(ids_of(step), activations)
                dist_autograd.backward(context_id, [loss], accumulate="grad")
            torch.futures.wait_all([bank.rpc_async().step(), shop.rpc_async().step()])
            if step % 20 == 0 or step == STEPS - 1:
                print(f"step {step:3}   loss {loss.item():.4f}", flush=True)
        refused = is_refused(bank) and is_refused(shop)
        reports = {"bank": bank.rpc_sync().report(), "shop": shop.rpc_sync().report()}

    for name, (_, book) in reports.items():
        for (what, shape), times in book.items():
            print(f"{name} {what:16}   {times} times, of shape {shape}")
    alone = train_alone()
    equal = all(
        torch.equal(state[key], value) for name, (state, _) in reports.items() for key, value in alone[name].items()
    )
    if not equal:
        print("✗ the parameters are not those of one process")
        return 1
    crossed = {entry for _, book in reports.values() for entry in book}
    if crossed != MAY_CROSS or not refused:
        print("✗ something left a party that should not have")
        return 1
    print("✓ the parameters are, bit by bit, those of one process; rows and labels stayed where they were")
    return 0


if __name__ == "__main__":
    sys.exit(main())
