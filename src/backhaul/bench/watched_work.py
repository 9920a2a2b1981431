"""watched_work: the work of the workers while `looking` measures the cost of being observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backhaul import autograd, rpc

_layers = [torch.nn.Linear(64, 64) for _ in range(4)]
_x = torch.rand(16, 64, requires_grad=True)


def nothing() -> None:
    pass


def layer(number: int, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _layers[number](x)
    return y


def _no_op(names: Sequence[str]) -> None:
    rpc.rpc_sync(names[0], nothing)


def _chain(names: Sequence[str]) -> None:
    with autograd.context() as context:
        x = _x
        for number in range(4):
            x = rpc.rpc_sync(names[number % 2], layer, args=(number, x))
        autograd.backward(context, [x.sum()])


WORKS: dict[str, Callable[[Sequence[str]], None]] = {"no-op": _no_op, "chain of 4 over 2, with gradients": _chain}
