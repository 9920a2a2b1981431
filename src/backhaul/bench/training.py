"""Training with a parameter server: the parameters live on the server, the data and the work on each client.

A step pulls the parameters of a small network, computes a loss from them, sends their gradients back by
a backward pass over both workers, and lets the optimizer on the server apply them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backhaul.bench.gradients import alike
from backhaul.bench.ports import SERVER, RpcPort

_RATE = 0.01
_TOLERANCE = 1e-2  # relative to a parameter's step, which is small beside the parameter and so partly lost in rounding
_WIDTHS = (64, 128, 128, 10)

with torch.random.fork_rng():
    torch.manual_seed(2)
    _NETWORK = nn.Sequential(*(nn.Linear(*widths) for widths in pairwise(_WIDTHS)))
    _DATA, _TARGET = torch.rand(32, _WIDTHS[0]), torch.rand(32, _WIDTHS[-1])


def pull() -> list[Tensor]:
    """The parameters; inside a context the graph continues through them.

    As views, because torch loses the gradient of a leaf that is itself the result of a call.
    """
    return [parameter.view_as(parameter) for parameter in _NETWORK.parameters()]


def look() -> list[Tensor]:
    """The values of the parameters."""
    return [parameter.detach().clone() for parameter in _NETWORK.parameters()]


def refer(module: str) -> list[Any]:
    """A reference to each parameter, of a system's ``rpc`` module."""
    return [sys.modules[module].RRef(parameter) for parameter in _NETWORK.parameters()]


def prepare(port: RpcPort) -> None:
    """Import what optimizers need. On the server torch imports much of that when it makes the first one."""
    port.optimizer()
    if port.role == SERVER:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=_RATE).step()


def step(port: RpcPort) -> None:
    """One step of training, in a new context."""
    optimizer = _optimizer(port)
    with port.autograd.context() as context:
        loss = _loss(port.rpc.rpc_sync(SERVER, pull))
        port.autograd.backward(context, [loss])
        optimizer.step(context)


def flaw(port: RpcPort) -> str | None:
    """How the parameters after a step differ from the same step in one process; None if they do not."""
    before = port.rpc.rpc_sync(SERVER, look)
    step(port)
    after = port.rpc.rpc_sync(SERVER, look)
    leaves = [value.requires_grad_() for value in before]
    changes = torch.autograd.grad(_loss(leaves), leaves)
    moves = [new - old.detach() for new, old in zip(after, before, strict=True)]
    if all(alike(move, -_RATE * change, _TOLERANCE) for move, change in zip(moves, changes, strict=True)):
        return None
    return "wrong parameters"


def _loss(parameters: Sequence[Tensor]) -> Tensor:
    value = _DATA
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    for weight, bias in layers[:-1]:
        value = functional.relu(functional.linear(value, weight, bias))
    return functional.mse_loss(functional.linear(value, *layers[-1]), _TARGET)


def _optimizer(port: RpcPort) -> Any:
    if "optimizer" not in port.kept:
        references = port.rpc.rpc_sync(SERVER, refer, args=(port.rpc.__name__,))
        port.kept["optimizer"] = port.optimizer()(torch.optim.SGD, references, lr=_RATE)
    return port.kept["optimizer"]
