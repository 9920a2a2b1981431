"""Gradients: models whose layers live on servers, differentiated through the calls to them.

A forward pass is a function of an ``rpc`` module. So one text runs on either system and, with `Here` as the module,
in one process, where local autograd computes the expected gradients for `flaw`. The client and all servers
build the same layers from the same seed.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from backhaul.bench.ports import SERVER, SERVERS, RpcPort

Forward = Callable[[Any], Tensor]
"""Computes a loss by calls through an ``rpc`` module."""

_WIDTH, _BATCH = 64, 16
_MICRO_BATCHES, _STAGES = 8, 3
_MODEL_WIDTH, _SEQUENCES, _TOKENS = 256, 8, 64
_TOLERANCE = 1e-4  # relative to a gradient's norm: another order of sums differs by less, a missing term by more

with torch.random.fork_rng():
    torch.manual_seed(1)
    REMOTE = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(32))
    _ENCODER = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
    _DECODER = nn.ModuleList(nn.Linear(2 * _WIDTH, _WIDTH) for _ in range(2))
    _LOCAL = nn.Sequential(*(part for _ in range(300) for part in (nn.Linear(32, 32), nn.Tanh())))
    for weight in list(_LOCAL.parameters())[::2]:
        nn.init.orthogonal_(weight)  # else the gradients would vanish on their way through 300 layers
    _HEAD, _TAIL = (
        nn.Sequential(
            *(nn.TransformerEncoderLayer(_MODEL_WIDTH, 4, 2 * _MODEL_WIDTH, 0.0, batch_first=True) for _ in range(2))
        )
        for _ in range(2)
    )
    _TEXT, _WEIGHTS = torch.rand(2, _SEQUENCES, _TOKENS, _MODEL_WIDTH)
    _INPUT = torch.rand(_BATCH, _WIDTH, requires_grad=True)
    _NARROW_INPUT = torch.rand(_BATCH, 32, requires_grad=True)
    _LONG_INPUT = torch.rand(_MICRO_BATCHES * _BATCH, _WIDTH, requires_grad=True)

_CLIENT_LEAVES = (
    _INPUT,
    _NARROW_INPUT,
    _LONG_INPUT,
    *(parameter for model in (_ENCODER, _DECODER, _HEAD, _LOCAL) for parameter in model.parameters()),
)
_SERVER_LEAVES = (*REMOTE.parameters(), *_TAIL.parameters())


def layer(index: int, value: Tensor) -> Tensor:
    output: Tensor = REMOTE[index](value)
    return output


def tail(value: Tensor) -> Tensor:
    output: Tensor = _TAIL(value)
    return output


def stage(module: str, index: int, value: Tensor) -> Tensor:
    """Two layers of a pipeline here, and the later stages on the next servers; returns the loss."""
    for part in REMOTE[2 * index : 2 * index + 2]:
        value = torch.tanh(part(value))
    if index + 1 == _STAGES:
        return value.square().sum()
    loss: Tensor = _rpc_called(module).rpc_sync(SERVERS[index + 1], stage, args=(module, index + 1, value))
    return loss


def layer_gradients(module: str, context: int) -> list[Tensor | None]:
    """The gradients of the server's leaves in a context of a system's ``autograd`` module."""
    found = sys.modules[module].get_gradients(context)
    return [found.get(leaf) for leaf in _SERVER_LEAVES]


def chain(hops: int, servers: int, rpc: Any) -> Tensor:
    """Layer after layer, each a call that takes the previous result; the servers alternate."""
    value: Tensor = _INPUT
    for hop in range(hops):
        value = rpc.rpc_sync(SERVERS[hop % servers], layer, args=(hop, value))
    return value.sum()


def fan_out(width: int, servers: int, unused: int, rpc: Any) -> Tensor:
    """One leaf sent ``width`` times at once; all results except the last ``unused`` are summed."""
    futures = [rpc.rpc_async(SERVERS[index % servers], layer, args=(index, _INPUT)) for index in range(width)]
    values = [future.wait() for future in futures]
    total: Tensor = reduce(operator.add, values[: width - unused])
    return total.sum()


def pipeline(rpc: Any) -> Tensor:
    """Micro-batches that all enter the first of several stages at once; each stage calls the next."""
    futures = [rpc.rpc_async(SERVER, stage, args=(rpc.__name__, 0, part)) for part in _LONG_INPUT.chunk(_MICRO_BATCHES)]
    total: Tensor = reduce(operator.add, [future.wait() for future in futures])
    return total


def u_shape(rpc: Any) -> Tensor:
    """Encoder and decoder here, the middle there, and skip connections around it."""
    outer = torch.tanh(_ENCODER[0](_INPUT))
    inner = torch.tanh(_ENCODER[1](outer))
    middle = rpc.rpc_sync(SERVER, layer, args=(0, inner))
    inner = torch.tanh(_DECODER[0](torch.cat((middle, inner), 1)))
    decoded: Tensor = _DECODER[1](torch.cat((inner, outer), 1))
    return decoded.sum()


def transformer(rpc: Any) -> Tensor:
    """Two of its layers here, two there: the computation takes far longer than the call."""
    output: Tensor = rpc.rpc_sync(SERVER, tail, args=(_HEAD(_TEXT),))
    # Weighted, because the plain sum of a normalization's output does not depend on its input.
    total: Tensor = (output * _WEIGHTS).sum()
    return total


def no_calls(rpc: Any) -> Tensor:
    """A graph of about 1,500 nodes that never leaves the client: shows the cost of a context for a local backward."""
    output: Tensor = _LOCAL(_NARROW_INPUT)
    return output.sum()


@dataclass(frozen=True)
class _Done:
    value: Tensor

    def wait(self) -> Tensor:
        return self.value


class Here:
    """Replaces an ``rpc`` module, and calls in this process."""

    @staticmethod
    def rpc_sync(to: str, function: Callable[..., Tensor], args: Sequence[Any]) -> Tensor:
        return function(*args)

    @staticmethod
    def rpc_async(to: str, function: Callable[..., Tensor], args: Sequence[Any]) -> _Done:
        return _Done(function(*args))


def _rpc_called(module: str) -> Any:
    return Here if module == Here.__name__ else sys.modules[module]


def step(forward: Forward, port: RpcPort) -> dict[Tensor, Tensor]:
    """Forward and backward in a new context, as in a training loop; returns the client's gradients."""
    with port.autograd.context() as context:
        port.autograd.backward(context, [forward(port.rpc)])
        gradients: dict[Tensor, Tensor] = port.autograd.get_gradients(context)
        return gradients


def flaw(forward: Forward, servers: Sequence[str], port: RpcPort) -> str | None:
    """How the gradients of a system, on all ends, differ from local autograd; None if they do not."""
    with port.autograd.context() as context:
        port.autograd.backward(context, [forward(port.rpc)])
        here = port.autograd.get_gradients(context)
        question = (port.autograd.__name__, int(context))
        there = [port.rpc.rpc_sync(server, layer_gradients, args=question) for server in servers]
    found = (*map(here.get, _CLIENT_LEAVES), *map(_sum, *there))
    expected = torch.autograd.grad(forward(Here), (*_CLIENT_LEAVES, *_SERVER_LEAVES), allow_unused=True)
    if all(map(alike, found, expected)):
        return None
    return "wrong gradients"


def _sum(*parts: Tensor | None) -> Tensor | None:
    """The sum of the servers' gradients: each has its own leaves, which are one in a single process."""
    found = [part for part in parts if part is not None]
    return reduce(operator.add, found) if found else None


def plan_share(port: RpcPort) -> float:
    """The share of planning in Backhaul's backward, for the graph of `no_calls`."""
    from backhaul.autograd.functions import ROOT
    from backhaul.autograd.graph import plan

    clock = time.perf_counter
    with port.autograd.context() as context:
        loss = no_calls(port.rpc)
        start = clock()
        plan({ROOT: loss.grad_fn})
        planned = clock()
        port.autograd.backward(context, [loss])
        return (planned - start) / (clock() - planned)


def alike(found: Tensor | None, expected: Tensor | None, tolerance: float = _TOLERANCE) -> bool:
    """Whether they are equal up to rounding; None means no gradient."""
    if found is None or expected is None:
        return found is expected
    return bool((found - expected).norm() <= tolerance * expected.norm())


FORWARDS: dict[str, Forward] = {
    "chain of 1": partial(chain, 1, 1),
    "chain of 4": partial(chain, 4, 1),
    "chain of 16": partial(chain, 16, 1),
    "fan-out of 2": partial(fan_out, 2, 1, 0),
    "fan-out of 8": partial(fan_out, 8, 1, 0),
    "fan-out of 32": partial(fan_out, 32, 1, 0),
    "fan-out of 8, 1 unused": partial(fan_out, 8, 1, 1),
    "U-shape": u_shape,
    "transformer in two": transformer,
    "1,500 nodes, no calls": no_calls,
    "chain of 4 over 2": partial(chain, 4, 2),
    "chain of 4 over 3": partial(chain, 4, 3),
    "chain of 16 over 2": partial(chain, 16, 2),
    "chain of 16 over 3": partial(chain, 16, 3),
    "fan-out of 8 over 2": partial(fan_out, 8, 2, 0),
    "fan-out of 8 over 4": partial(fan_out, 8, 4, 0),
    "pipeline of 3": pipeline,
}
