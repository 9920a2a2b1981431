"""Vertical federated learning: a bank and a shop know different things about the same people, and learn together.

    shop                             bank
    ┌───────────────────┐            ┌──────────────────────────────────────┐
    │ purchases         │            │ accounts ──► encoder ─┐              │
    │   └──► encoder ───┼─ activations ─────────────────────►├─► head, loss │
    │           ▲       │            │                       │     ▲        │
    │           └───────┼─ gradients ◄───────────────────────┘   labels     │
    └───────────────────┘            └──────────────────────────────────────┘

Neither trusts the other with code. They are two processes, in a *federation*: each has a certificate with its name, and
may call only what the other has marked with ``@rpc.expose``; nothing that they send is pickled. The bank asks the shop
for the activations of a batch, the shop asks the bank who is in it, and one backward pass goes over both. The rows of a
party never leave its process, nor do the bank's labels. Then the bank tries to get more than that.

Activations are not secret: they are made of the rows, and gradients of the labels. Parties that fear that have to add
noise or encryption.

At the end the trained parameters are compared with those of one process that has all the columns.
"""

from __future__ import annotations

import datetime
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import backhaul.autograd as dist_autograd
from backhaul import rpc

PEOPLE, BATCH, STEPS, WIDTH = 640, 32, 120, 4
Book = Counter[tuple[str, tuple[int, ...]]]  # how often what was given or got, and of which shape
MAY_CROSS = {(f"gave {what}", (BATCH, WIDTH)) for what in ("activations", "gradients")} | {("gave ids", (BATCH,))}

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


given: Book = Counter()  # by this process


def note(what: str, tensor: Tensor) -> None:
    given[what, tuple(tensor.shape)] += 1


def ids_of(step: int) -> Tensor:
    return torch.arange(step * BATCH, (step + 1) * BATCH) % PEOPLE


@rpc.expose(to="shop")
def batch(step: int) -> Tensor:
    """Who is in a batch; the bank decides."""
    note("gave ids", ids := ids_of(step))
    return ids


@rpc.expose(to="bank")
class Shop:
    """The bank may call the methods that are written here, but for those with an underscore in front."""

    def __init__(self) -> None:
        self.rows, self.model = make_rows()[1], make_models()[1]
        self.optimizer = make_optimizer(self.model)  # its own: nobody else needs to have the parameters

    def embed(self, step: int) -> Tensor:
        ids = rpc.rpc_sync("bank", batch, (step,))
        activations: Tensor = self._encode(ids)
        note("gave activations", activations)
        return activations

    def _encode(self, ids: Tensor) -> Tensor:
        encoded: Tensor = self.model["encoder"](self.rows[ids])
        return encoded

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self) -> tuple[dict[str, Tensor], dict[tuple[str, tuple[int, ...]], int]]:
        """The parameters, and what was given away: for the check at the end, which is the bank's."""
        return dict(self.model.state_dict()), dict(given)


class Bank:
    def __init__(self) -> None:
        self.accounts, _, self.labels = make_rows()
        self.model = make_models()[0]
        self.optimizer = make_optimizer(self.model)

    def loss(self, ids: Tensor, activations: Tensor) -> Tensor:
        activations.register_hook(lambda gradients: note("gave gradients", gradients))  # type: ignore[no-untyped-call]
        hidden = torch.cat([self.model["encoder"](self.accounts[ids]), activations], dim=1)
        return binary_cross_entropy_with_logits(self.model["head"](hidden), self.labels[ids])

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(bank: Bank, shop: rpc.RRef[Shop]) -> None:
    for step in range(STEPS):
        with dist_autograd.context() as context_id:
            activations = shop.rpc_sync().embed(step)
            loss = bank.loss(ids_of(step), activations)
            dist_autograd.backward(context_id, [loss], accumulate="grad")
        bank.step()
        shop.rpc_sync().step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3}   loss {loss.item():.4f}", flush=True)


def is_refused(what: str, attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except (rpc.RefusedError, rpc.UnsendableError) as error:
        print(f"{what}: {type(error).__name__}", flush=True)
        return True
    print(f"{what}: ✗ the shop has given it", flush=True)
    return False


def try_to_get_more(shop: rpc.RRef[Shop]) -> bool:
    """Whether the bank gets nothing of the shop that it is not meant to have."""
    people = torch.arange(PEOPLE)
    attempts: dict[str, Callable[[], Any]] = {
        "the shop itself, and its rows with it": shop.to_here,
        "a method that is not for others": lambda: shop.rpc_sync()._encode(people),
        "a function that is not exposed": lambda: rpc.rpc_sync("shop", make_rows),
        "a command": lambda: rpc.rpc_sync("shop", os.system, ("true",)),
        "a file": lambda: rpc.rpc_sync("shop", torch.load, ("/etc/passwd",)),
    }
    return False not in [is_refused(what, attempt) for what, attempt in attempts.items()]


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


def certify(directory: Path, *names: str) -> None:
    """A certificate for each of these, from an authority that all of them trust.

    In earnest each makes its own key, which nobody else gets to see, and has the authority sign it.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loans and purchases")])
    authority_key = ec.generate_private_key(ec.SECP256R1())
    for name in ("ca", *names):
        is_authority = name == "ca"
        key = authority_key if is_authority else ec.generate_private_key(ec.SECP256R1())
        subject = authority if is_authority else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = x509.CertificateBuilder(
            authority, subject, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1)
        ).add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        if not is_authority:
            names_of_it = x509.SubjectAlternativeName([x509.DNSName(name)])  # what peers know this worker by
            certificate = certificate.add_extension(names_of_it, critical=False)
            (directory / f"{name}.key").touch(mode=0o600)
            (directory / f"{name}.key").write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
        signed = certificate.sign(authority_key, hashes.SHA256())
        (directory / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def join(name: str, directory: Path) -> None:
    """Make this process the party of that name."""
    tls = rpc.TLS(ca=f"{directory}/ca.pem", cert=f"{directory}/{name}.pem", key=f"{directory}/{name}.key")
    options = rpc.RpcOptions(trust="federation", tls=tls, init_method=f"file://{directory}/meeting")
    rpc.init_rpc(name, rank=["bank", "shop"].index(name), world_size=2, rpc_backend_options=options)


def be_the_shop(directory: Path) -> int:
    logging.basicConfig(stream=sys.stdout, format="shop's log: %(message).120s")  # it says what is refused, and why
    join("shop", directory)
    rpc.shutdown()  # when the bank is done
    return 0


def be_the_bank(directory: Path) -> int:
    join("bank", directory)
    bank, shop = Bank(), rpc.remote("shop", Shop)
    train(bank, shop)
    refused = try_to_get_more(shop)
    state, theirs = shop.rpc_sync().report()
    rpc.shutdown()

    for name, book in (("bank", given), ("shop", theirs)):
        for (what, shape), times in book.items():
            print(f"{name} {what:16}   {times} times, of shape {shape}")
    alone = train_alone()
    trained = {"bank": bank.model.state_dict(), "shop": state}
    if not all(torch.equal(trained[name][key], value) for name in alone for key, value in alone[name].items()):
        print("✗ the parameters are not those of one process")
        return 1
    if {*given, *theirs} != MAY_CROSS or not refused:
        print("✗ something left a party that should not have")
        return 1
    print("✓ the parameters are, bit by bit, those of one process; rows and labels stayed where they were")
    return 0


def main() -> int:
    if sys.argv[1:2] == ["shop"]:
        return be_the_shop(Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        certify(directory, "bank", "shop")
        with subprocess.Popen([sys.executable, __file__, "shop", name]) as shop:
            try:
                return be_the_bank(directory)
            except BaseException:
                shop.terminate()
                raise


if __name__ == "__main__":
    sys.exit(main())
