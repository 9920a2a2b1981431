"""Functions and classes of the workers in the federation tests. Some are exposed, and some are not."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from backhaul import rpc

called: list[str] = []
"""Functions that ran although they must not."""

gates: dict[str, threading.Event] = {}


@rpc.expose
def double(x: Any) -> Any:
    return 2 * x


@rpc.expose(to=["bank-*", "worker1"])
def for_some(x: int) -> int:
    return x + 1


def hidden(*args: Any) -> Any:
    called.append("hidden")
    return args


@rpc.expose
def fail(text: str) -> None:
    raise ValueError(text)


@rpc.expose
def fail_oddly(text: str) -> None:
    raise Unknown(text)


@rpc.expose
def fail_in_our_way(text: str) -> None:
    raise Declined(text)


class Unknown(Exception):
    """Not exposed."""


@rpc.expose
class Declined(Exception):
    """Exposed."""


@rpc.expose(to="bank-*")
class Overdrawn(Exception):
    """Exposed to some."""


@rpc.expose
@dataclass
class Point:
    x: int
    y: torch.Tensor


@dataclass
class Secret:
    x: int


@rpc.expose
class Colour(enum.Enum):
    RED = 1


@rpc.expose
class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


class Weather(enum.Enum):
    RAIN = 1


@rpc.expose
class Pair(NamedTuple):
    left: Any
    right: Any


class Couple(NamedTuple):
    left: Any
    right: Any


@rpc.expose
def echo(value: Any) -> Any:
    return value


@rpc.expose
def add_up(x: torch.Tensor) -> int:
    """A typical user function: it takes as much memory as the shape of its argument says."""
    return x.sum(0).numel()


@rpc.expose
async def echo_later(value: Any) -> Any:
    return value


@rpc.expose
def much(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@rpc.expose
async def much_later(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@rpc.expose
def unsendable() -> Any:
    return threading.Lock()


@rpc.expose
def secret() -> Secret:
    return Secret(7)


@rpc.expose
def wait(name: str, *_: Any) -> str:
    gates[name].wait(30)
    return name


@rpc.expose
def give(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


@rpc.expose
def value_of(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


@rpc.expose
def call_back(to: str, x: Any) -> Any:
    return rpc.rpc_sync(to, double, (x,))


@rpc.expose
def call_back_with_a_reference(to: str) -> Any:
    return rpc.rpc_sync(to, give, (1,))


class Base:
    def inherited(self) -> str:
        called.append("inherited")
        return "inherited"


@rpc.expose
class Account(Base):
    """An exposed class. Only its own methods are exposed."""

    kind = "account"

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance
        self.hook = lambda: called.append("hook")

    def deposit(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    def _audit(self) -> None:
        called.append("_audit")

    def __call__(self, x: int) -> int:
        return self.balance + x

    @property
    def owner(self) -> str:
        called.append("owner")
        return "somebody"

    @staticmethod
    def rate() -> float:
        return 0.5

    @classmethod
    def title(cls) -> str:
        return cls.__name__

    async def later(self) -> int:
        return self.balance

    def me(self) -> rpc.RRef[Account]:
        return rpc.RRef(self)

    def __getattr__(self, name: str) -> Any:
        called.append(f"__getattr__ {name}")
        raise AttributeError(name)


class Savings(Account):
    """A subclass, which is not exposed just because its base is."""

    def withdraw(self) -> None:
        called.append("withdraw")


@rpc.expose
class Current(Account):
    def limit(self) -> int:
        return 100


@rpc.expose(to="bank-*")
class Vault:
    def open(self) -> None:
        called.append("open")


@rpc.expose
def savings() -> rpc.RRef[Any]:
    return rpc.RRef(Savings(5))


@rpc.expose
def vault() -> rpc.RRef[Any]:
    return rpc.RRef(Vault())


for operator in (torch.add, torch.exp, torch.matmul, torch.mm, torch.neg, torch.sum):
    rpc.expose(operator)

weight = torch.ones(3, dtype=torch.float64, requires_grad=True)


@rpc.expose
def weigh(x: torch.Tensor) -> torch.Tensor:
    return x * weight
