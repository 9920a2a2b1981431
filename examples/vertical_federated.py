"""Vertical federated learning: a bank and a shop know different things about the same people, and learn together.

    shop                             bank
    ┌───────────────────┐            ┌──────────────────────────────────────┐
    │ purchases         │            │ accounts ──► encoder ─┐              │
    │   └──► encoder ───┼─ activations ─────────────────────►├─► head, loss │
    │           ▲       │            │                       │     ▲        │
    │           └───────┼─ gradients ◄───────────────────────┘   labels     │
    └───────────────────┘            └──────────────────────────────────────┘

Neither trusts the other with code. They are two processes, in a *federation*: each has a certificate with its name, and
may call only what the other has marked with ``@rpc.expose``; nothing is pickled. The shop makes a `Party` from its
encoder, its optimizer and its rows. The bank writes the same code as in a cluster: a `RemoteModule` for the shop's
encoder, and a `DistributedOptimizer`. The rows of a party never leave its process, nor do its parameters or the bank's
labels. Then the bank tries to get more than that.

Activations are not secret: they are computed from the rows, and gradients from the labels. So the parties train again
with edges: everything that leaves a party is clipped, rounded, thinned out, or hidden under noise. See
docs/federation.md.

At the end each party compares its trained parameters with those of one process that has all the columns.
"""

from __future__ import annotations

import datetime
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.federation import BFloat16, Clip, Edge, GaussianNoise, Int8, Party, TopK, epsilon
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

PEOPLE, BATCH, STEPS, WIDTH = 640, 32, 120, 4
Book = Counter[tuple[str, tuple[int, ...]]]  # how often each kind of tensor was sent or received, and its shape
MAY_CROSS = {(f"gave {what}", (BATCH, WIDTH)) for what in ("activations", "gradients")} | {("gave ids", (BATCH,))}


class Plan(NamedTuple):
    """The transforms of everything that leaves a party."""

    shop: Edge
    bank: Edge
    steps: int
    exact: bool = True  # whether one process can do the same


OPEN = Edge(on_send=[], on_gradient=[])


def both(*chain: Any) -> tuple[Edge, Edge]:
    """Activations leave the shop through these transforms, and gradients leave the bank through them."""
    return Edge(on_send=chain, on_gradient=[]), Edge(on_send=[], on_gradient=chain)


def make_plans() -> dict[str, Plan]:
    releases = max(1, STEPS // 4)  # of noise; one more would reveal more than the parties have agreed on
    return {
        "as it is": Plan(OPEN, OPEN, STEPS),
        "clipped": Plan(
            Edge(on_send=[Clip(1.0)], on_gradient=[]), Edge(on_send=[], on_gradient=[Clip(0.01)]), STEPS // 8
        ),
        "in bfloat16": Plan(*both(BFloat16()), STEPS // 8),
        "in int8, with feedback": Plan(*both(Int8(feedback=True)), STEPS // 8),
        "as its largest third, with feedback": Plan(*both(TopK(0.3, feedback=True)), STEPS // 8),
        "with noise": Plan(
            Edge(on_send=[Clip(1.0), GaussianNoise(0.5, releases=releases)], on_gradient=[]),
            Edge(on_send=[], on_gradient=[Clip(0.01), GaussianNoise(0.5)]),
            releases,
            exact=False,
        ),
    }


torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the processes share the cores, and sums are made in the same order in each


def make_rows() -> tuple[Tensor, Tensor, Tensor]:
    """What the bank knows about each person, what the shop knows, and the bank's labels: who has paid a loan back.

    It stands for the files of each party: each party makes all of it, and keeps its own part.
    """
    torch.manual_seed(0)
    traits = torch.randn(PEOPLE, 4)
    accounts = traits[:, :2] @ torch.randn(2, 6) + 0.1 * torch.randn(PEOPLE, 6)
    purchases = traits[:, 2:] @ torch.randn(2, 9) + 0.1 * torch.randn(PEOPLE, 9)
    return accounts, purchases, (traits.sum(dim=1) > 0).double()


def make_encoder(columns: int) -> nn.Sequential:
    torch.manual_seed(columns)
    return nn.Sequential(nn.Linear(columns, 32), nn.Tanh(), nn.Linear(32, WIDTH))


given: Book = Counter()  # by this process


def note(what: str, tensor: Tensor) -> None:
    given[what, tuple(tensor.shape)] += 1


def ids_of(step: int) -> Tensor:
    return torch.arange(step * BATCH, (step + 1) * BATCH) % PEOPLE


@rpc.expose(to="shop")
def batch(step: int) -> Tensor:
    """The people in a batch; the bank decides."""
    note("gave ids", ids := ids_of(step))
    return ids


@rpc.expose(to="bank")
class Shop(Party):
    """The bank may call the methods of a Party, and the public methods defined here."""

    def __init__(self) -> None:
        self._rows = make_rows()[1]
        encoder = make_encoder(9)
        super().__init__(encoder, torch.optim.Adam(encoder.parameters(), lr=0.01), loader=self._batch_of)
        latest.append(encoder)

    def _batch_of(self, step: int) -> Tensor:
        return self._rows[rpc.rpc_sync("bank", batch, (step,))]

    def forward(self, step: int) -> Tensor:
        activations: Tensor = super().forward(step)
        note("gave activations", activations)
        return activations


latest: list[nn.Module] = []  # the shop's encoder


class Model(nn.Module):
    """The bank's part. ``shop`` computes the shop's activations of a step: a `RemoteModule`, or a local module."""

    def __init__(self, shop: nn.Module) -> None:
        super().__init__()
        self.accounts, _, self.labels = make_rows()
        self.encoder = make_encoder(6)
        self.shop = shop
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(2 * WIDTH, 1), nn.Flatten(0))

    def forward(self, step: int) -> Tensor:
        """The loss."""
        ids = ids_of(step)
        activations = self.shop(step)
        activations.register_hook(lambda gradients: note("gave gradients", gradients))
        hidden = torch.cat([self.encoder(self.accounts[ids]), activations], dim=1)
        return binary_cross_entropy_with_logits(self.head(hidden), self.labels[ids])


def train(model: Model, steps: int) -> None:
    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), lr=0.01)  # the shop has its own
    for step in range(steps):
        with dist_autograd.context() as context_id:
            loss = model(step)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3}   loss {loss.item():.4f}", flush=True)


class Through:
    """An edge in one process: feedback adds what compression removed to the next tensor."""

    def __init__(self, chain: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.chain, self.rest = chain, torch.zeros(())

    def __call__(self, tensor: Tensor) -> Tensor:
        for transform in self.chain:
            wanted = tensor + self.rest if getattr(transform, "feedback", False) else tensor
            tensor = transform(wanted)
            if getattr(transform, "feedback", False):
                self.rest = (wanted - tensor).detach()
        return tensor


class ShopHere(nn.Module):
    """The shop's part, for one process that has everything."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.rows, self.encoder = make_rows()[1], make_encoder(9)
        self.on_send, self.on_gradient = Through(plan.shop.on_send), Through(plan.bank.on_gradient)

    def forward(self, step: int) -> Tensor:
        activations = self.on_send(self.encoder(self.rows[ids_of(step)]))
        activations.register_hook(self.on_gradient)  # type: ignore[no-untyped-call]
        return activations


def train_alone(plan: Plan) -> Model:
    model = Model(ShopHere(plan))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(plan.steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    return model


def is_as_alone(name: str, plan: Plan, mine: dict[str, Tensor]) -> bool:
    """Whether these parameters equal those of one process; with noise they differ each time."""
    if not plan.exact:
        return True
    alone = train_alone(plan).state_dict()
    if all(torch.equal(value, alone[key]) for key, value in mine.items()):
        return True
    print(f"✗ {name}: the parameters are not those of one process", flush=True)
    return False


def is_refused(what: str, attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except (rpc.RefusedError, rpc.UnsendableError) as error:
        print(f"{what}: {type(error).__name__}", flush=True)
        return True
    print(f"{what}: ✗ the shop has given it", flush=True)
    return False


def try_to_get_more(shop: RemoteModule) -> bool:
    """Whether the bank gets nothing from the shop that it should not have."""
    party = shop.get_module_rref()
    attempts: dict[str, Callable[[], Any]] = {
        "the shop itself, and its rows with it": party.to_here,
        "its parameters": shop.state_dict,
        "a method that is not for others": lambda: party.rpc_sync()._batch_of(0),
        "a function that is not exposed": lambda: rpc.rpc_sync("shop", make_rows),
        "a command": lambda: rpc.rpc_sync("shop", os.system, ("true",)),
        "a file": lambda: rpc.rpc_sync("shop", torch.load, ("/etc/passwd",)),
    }
    return False not in [is_refused(what, attempt) for what, attempt in attempts.items()]


def worth_of_noise(to: str) -> str:
    """What the other party may have learnt about a person's row, computed by a library for differential privacy."""
    try:
        return f"epsilon {epsilon(to, 1e-5, releases=STEPS * BATCH // PEOPLE // 4):.1f} for each row, for delta 1e-5"
    except rpc.MisuseError as error:
        return str(error)


def certify(directory: Path, *names: str) -> None:
    """A certificate for each of these, from an authority that all of them trust.

    In production each party makes its own private key, and has the authority sign it.
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
            names_of_it = x509.SubjectAlternativeName([x509.DNSName(name)])  # the name by which peers know this worker
            certificate = certificate.add_extension(names_of_it, critical=False)
            (directory / f"{name}.key").touch(mode=0o600)
            (directory / f"{name}.key").write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
        signed = certificate.sign(authority_key, hashes.SHA256())
        (directory / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def join(name: str, directory: Path, number: int, peer: str, edge: Edge) -> None:
    """Make this process the party of that name. Everything that it sends to its peer goes through that edge."""
    tls = rpc.TLS(ca=f"{directory}/ca.pem", cert=f"{directory}/{name}.pem", key=f"{directory}/{name}.key")
    meeting = f"file://{directory}/meeting{number}"
    options = rpc.RpcOptions(trust="federation", tls=tls, init_method=meeting, edges={peer: edge})
    rpc.init_rpc(name, rank=["bank", "shop"].index(name), world_size=2, rpc_backend_options=options)


SAME, OTHER_PARAMETERS, LEAK = range(3)  # how a party's process ends


def be_the_shop(directory: Path) -> int:
    logging.basicConfig(stream=sys.stdout, format="shop's log: %(message).120s")  # it logs what is refused, and why
    same = True
    for number, (name, plan) in enumerate(make_plans().items()):
        join("shop", directory, number, "bank", plan.shop)
        rpc.shutdown()  # when the bank is done
        if number == 0:
            show("shop")
        mine = {f"shop.encoder.{key}": value for key, value in latest[-1].state_dict().items()}
        same = is_as_alone(f"shop, {name}", plan, mine) and same
    return outcome(same, refused=True)


def be_the_bank(directory: Path) -> int:
    same = refused = True
    for number, (name, plan) in enumerate(make_plans().items()):
        print(f"What leaves a party leaves it {name}.", flush=True)
        join("bank", directory, number, "shop", plan.bank)
        shop = RemoteModule("shop", Shop)
        model = Model(shop)
        train(model, plan.steps)
        if number == 0:
            refused = try_to_get_more(shop)
        if not plan.exact:
            print(f"the noise of the bank's gradients: {worth_of_noise('shop')}", flush=True)
            refused = is_refused("activations once more, to average out their noise", partial(shop, 0)) and refused
        rpc.shutdown()
        if number == 0:
            show("bank")
        mine = {f"encoder.{key}": value for key, value in model.encoder.state_dict().items()}
        mine |= {f"head.{key}": value for key, value in model.head.state_dict().items()}
        same = is_as_alone(f"bank, {name}", plan, mine) and same
    return outcome(same, refused)


def show(name: str) -> None:
    for (what, shape), times in given.items():
        print(f"{name} {what:16}   {times} times, of shape {shape}", flush=True)


def outcome(same: bool, refused: bool) -> int:
    if not same:
        return OTHER_PARAMETERS
    return SAME if refused and set(given) <= MAY_CROSS else LEAK


def main() -> int:
    if sys.argv[1:2] == ["shop"]:
        return be_the_shop(Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        certify(directory, "bank", "shop")
        with subprocess.Popen([sys.executable, __file__, "shop", name]) as shop:
            try:
                outcomes = {be_the_bank(directory), shop.wait()}
            except BaseException:
                shop.terminate()
                raise
    if OTHER_PARAMETERS in outcomes:
        print("✗ the parameters are not those of one process")
        return 1
    if outcomes != {SAME}:
        print("✗ something left a party that should not have")
        return 1
    print("✓ the parameters are, bit by bit, those of one process; rows and labels stayed where they were")
    return 0


if __name__ == "__main__":
    sys.exit(main())
