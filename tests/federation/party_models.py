"""The parties of these tests, and the same models in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from backhaul import rpc
from backhaul.federation import Edge, Party
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

ROWS, WIDTH = 24, 4

rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def make_encoder(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def make_head(seed: int = 2) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, 1).double()


def make_layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).double()


def ids_of(step: int) -> Tensor:
    return torch.arange(8 * step, 8 * step + 8) % ROWS


@rpc.expose(to="worker0")
class Shop(Party):
    """A party whose caller chooses rows. The rows stay here."""

    def __init__(self, share_state: bool = False) -> None:
        encoder = make_encoder()
        optimizer = torch.optim.Adam(encoder.parameters(), lr=0.05)
        super().__init__(encoder, optimizer, lambda step: rows[ids_of(step)], share_state=share_state, max_rows=16)

    def raw(self) -> Tensor:
        """A method of the subclass that returns private rows."""
        return rows

    def raw_rref(self) -> rpc.RRef[Tensor]:
        return rpc.RRef(rows)

    def raw_in(self, what: str) -> Any:
        return {
            "list": lambda: rows.tolist(),
            "number": lambda: rows[0, 0].item(),
            "dict": lambda: {"a": [1, (2, {"b": 0.5})]},
            "complex": lambda: 1j,
            "bytes": lambda: rows.numpy().tobytes(),
            "bytearray": lambda: bytearray(rows.numpy().tobytes()),
            "array": lambda: rows.numpy(),
            "scalar": lambda: rows.numpy()[0, 0],
            "integers": lambda: rows.view(torch.int64),
            "sparse": lambda: rows.to_sparse(),
            "complex tensor": lambda: rows + 0j,
            "keys": lambda: {0.5: 1},
            "a set": lambda: {0.25},
            "deep": lambda: [[[[0.5]]]],
        }[what]()

    def fail(self) -> None:
        raise ValueError(f"a bad row: {rows[0].tolist()}")

    def fail_later(self) -> rpc.RRef[Any]:
        return rpc.remote("worker1", failing)


@rpc.expose
def failing() -> None:
    raise ValueError(f"a bad row: {rows[0].tolist()}")


@rpc.expose(to="worker0")
class Middle(Party):
    """A party that works on the caller's tensors."""

    instances = 2

    def __init__(self, seed: int) -> None:
        layer = make_layer(seed)
        super().__init__(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().sum()))
        return super().forward(x)  # type: ignore[no-any-return]

    def order(self) -> list[float]:
        return self.seen


class Hidden(Party):
    """Not exposed."""

    def __init__(self) -> None:
        super().__init__(make_encoder())


@rpc.expose
def plain_module() -> nn.Module:
    return make_encoder()


def transparent() -> Edge:
    return Edge(on_send=[], on_gradient=[])


@contextmanager
def federation(size: int = 2, edges: dict[str, Edge] | None = None, **options: Any) -> Iterator[InProcessCluster]:
    """Workers of a federation, all with these edges. This thread acts as worker0."""
    made = RpcOptions(trust="federation", edges=edges, **options)
    with InProcessCluster(size, options=made) as workers, workers[0].as_current():
        yield workers


def party_of(kind: type[Party]) -> Party:
    """The only party of that class, on any worker of this process."""
    (found,) = [each for each in Party._living if type(each) is kind]
    return found


@rpc.expose
def echo_number(number: int) -> int:
    return number
