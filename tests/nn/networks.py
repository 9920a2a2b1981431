"""Modules that the tests put on workers, and functions that run with them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.nn import RemoteModule
from backhaul.rpc import RRef

WITHIN = 10.0


class Net(nn.Module):
    """Has parameters of its own and of children, one of them shared, and buffers, one of them not persistent."""

    calls: Tensor

    def __init__(self, size: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size, dtype=dtype))
        self.first = nn.Linear(size, size, dtype=dtype)
        self.norm = nn.BatchNorm1d(size, dtype=dtype)
        self.second = nn.Linear(size, size, dtype=dtype)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        self.calls += 1
        return self.second(self.norm(torch.tanh(self.first(x * self.scale)))) + shift  # type: ignore[no-any-return]


class Two(nn.Module):
    """A module with two inputs and two outputs."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.left = nn.Linear(size, size, dtype=torch.float64)
        self.right = nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x) + y), torch.tanh(self.right(y) - x)


class Failing(nn.Module):
    def __init__(self, why: str = "no such luck") -> None:
        super().__init__()
        raise LookupError(why)


def linear(size: int = 4) -> nn.Linear:
    return nn.Linear(size, size, dtype=torch.float64)


def seeded(seed: int, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A module with the same weights on every worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args)


def no_module() -> str:
    return "no module"


def given(value: Any) -> Any:
    return value


def twins(seed: int, remote_device: str, make: Callable[..., nn.Module], *args: Any) -> tuple[RemoteModule, nn.Module]:
    """A module on a worker, and the same module in this process."""
    return RemoteModule(remote_device, seeded, (seed, make, *args)), seeded(seed, make, *args)


def batch(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def ask(m: RemoteModule, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(module, *args)`` on the module's worker."""
    return rpc.rpc_sync(m.on, _with_module, args=(m.module_rref, function, args))


def _with_module(rref: RRef[nn.Module], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(rref.local_value(), *args)


def gradients_in(module: nn.Module, context_id: int) -> list[Tensor | None]:
    found = dist_autograd.get_gradients(context_id)
    return [found.get(parameter) for parameter in module.parameters()]


def grads(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def set_grads(module: nn.Module) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1)


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def frozen(module: nn.Module) -> list[bool]:
    return [not parameter.requires_grad for parameter in module.parameters()]


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def strides(module: nn.Module) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in module.parameters()]


def identity_of(module: nn.Module) -> int:
    return id(module)


def run_there(m: nn.Module, *args: Any) -> Any:
    return m(*args)


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.fill_(0.5)
            module.bias.fill_(0.25)


def equal_lists(got: list[Any], expected: list[Any]) -> bool:
    return len(got) == len(expected) and all(
        mine is its is None or (mine.dtype == its.dtype and torch.equal(mine, its))
        for mine, its in zip(got, expected, strict=True)
    )


def await_that(condition: Callable[[], bool], what: str, within: float = WITHIN) -> None:
    """Return when the condition holds; fail if it does not within a short time."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        threading.Event().wait(0.002)
