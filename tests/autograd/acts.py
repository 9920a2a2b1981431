"""Models whose backward functions do what a test wants: raise, or block until the test releases them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import call, layer
from torch import Tensor

ACTS: dict[str, Callable[[], None]] = {}
"""What backward functions do, by name."""


class Broken(Exception):
    """The exception that acts raise."""


def break_on_purpose() -> None:
    raise Broken("on purpose")


class Latch:
    """An act that blocks until it is released, and signals that it blocks."""

    def __init__(self, name: str, within: float = 20.0) -> None:
        self._within = within
        self.entered = threading.Event()
        self.released = threading.Event()
        ACTS[name] = self._hold

    def _hold(self) -> None:
        self.entered.set()
        assert self.released.wait(self._within)

    def await_entered(self) -> None:
        assert self.entered.wait(self._within)

    def __enter__(self) -> Latch:
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()


class Act(torch.autograd.Function):
    """The identity. Its backward first does what `ACTS` has under its name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ACTS.get(ctx.name, lambda: None)()
        return gradient, None


def act(name: str, x: Tensor) -> Tensor:
    result: Tensor = Act.apply(x, name)  # type: ignore[no-untyped-call]
    return result


def work(name: str, x: Tensor) -> Tensor:
    return act(name, layer(name, x))


def chain(path: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    """Each worker of the path applies its act, and calls the next worker with the result. There are no gates."""
    if not path:
        return x
    (to, name), *rest = path
    return call(to, _link, name, rest, x)  # type: ignore[no-any-return]


def _link(name: str, rest: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    return chain(rest, work(name, x)) * 1.5


def fork(name: str, ways: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    """Calls several workers with one value. On this worker that is one component, with a gate for each call.

    The backward pass reaches ``name + "!"`` first, then the gates, the last call first, then ``name``.
    """
    y = act(name, torch.sin(x))
    results = [call(to, work, each, y) for to, each in ways]
    return act(name + "!", torch.stack([y, *results]).sum(0))


def behind_a_gate(name: str, to: str, path: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    """A fork at the end of a path."""
    if not path:
        return fork(name, [(to, name)], x)
    (next_to, next_name), *rest = path
    return call(next_to, _towards_a_gate, next_name, name, to, rest, x)  # type: ignore[no-any-return]


def _towards_a_gate(mine: str, name: str, to: str, rest: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    return behind_a_gate(name, to, rest, work(mine, x)) * 2
