"""Models whose layers live on workers, each with a twin in one process, and functions that compare the two."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.optim.claims import claims
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster

WITHIN = 10.0

Place = tuple[str, Callable[..., nn.Module], tuple[Any, ...]]
"""A worker, and how a layer is made there."""


def sparse_embedding(rows: int, columns: int) -> nn.Module:
    return nn.Embedding(rows, columns, sparse=True)


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


def matrix(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.Tanh())


def parameters_of(layer: RRef[nn.Module]) -> list[RRef[Tensor]]:
    """The parameters of a layer. Runs on its owner."""
    return [RRef(parameter) for parameter in layer.local_value().parameters()]


def forward(layer: RRef[nn.Module], x: Tensor) -> Tensor:
    found: Tensor = layer.local_value()(x)
    return found


def run(rref: RRef[Any], function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(value, *args)`` on the owner of a value."""
    return rpc.rpc_sync(rref.owner(), run_here, args=(rref, function, *args))


def run_here(rref: RRef[Any], function: Callable[..., Any], *args: Any) -> Any:
    return function(rref.local_value(), *args)


def get_grad(parameter: Tensor) -> Tensor | None:
    return parameter.grad


def set_grad(parameter: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = gradient


def get_data(parameter: Tensor) -> Tensor:
    return parameter.detach().clone()


def set_data(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


class Twins:
    """Layers on workers, and in ``alone`` the same layers in this process."""

    def __init__(self, places: Sequence[Place], *, side_by_side: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.layers = []
        for worker, make, args in places:
            layer = rpc.remote(worker, make, args=args)
            layer.to_here()  # in turn, because workers of one process share the random generator
            self.layers.append(layer)
        self.alone = nn.ModuleList([copy.deepcopy(layer.to_here()) for layer in self.layers])
        self.side_by_side = side_by_side
        self.rrefs = [
            rref for layer in self.layers for rref in rpc.rpc_sync(layer.owner(), parameters_of, args=(layer,))
        ]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the twin, in the order of ``rrefs``."""
        return list(self.alone.parameters())

    def loss(self, x: Tensor) -> Tensor:
        if self.side_by_side:
            parts = [rpc.rpc_sync(layer.owner(), forward, args=(layer, x)) for layer in self.layers]
            return torch.stack(parts).square().mean()
        for layer in self.layers:
            x = rpc.rpc_sync(layer.owner(), forward, args=(layer, x))
        return x.square().mean()

    def loss_alone(self, x: Tensor) -> Tensor:
        if self.side_by_side:
            return torch.stack([layer(x) for layer in self.alone]).square().mean()
        for layer in self.alone:
            x = layer(x)
        return x.square().mean()

    def backward_alone(self, x: Tensor) -> None:
        torch.autograd.backward(self.loss_alone(x))

    def train(self, optimizer: Any, reference: Any, inputs: Sequence[Tensor], check: bool = True) -> None:
        """Make a step of both for each input. The parameters must be the same after each."""
        for x in inputs:
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [self.loss(x)])
                optimizer.step(context_id)
            reference.zero_grad()
            self.backward_alone(x)
            reference.step()
            if check:
                self.assert_same_parameters()

    def assert_same_parameters(self) -> None:
        for rref, parameter in zip(self.rrefs, self.parameters, strict=True):
            assert_same(run(rref, get_data), parameter.detach())

    def load_alone(self) -> None:
        """Give the layers on workers the parameters of the twin."""
        for rref, parameter in zip(self.rrefs, self.parameters, strict=True):
            run(rref, set_data, parameter.detach())

    def gradients(self) -> list[Tensor | None]:
        """``.grad`` of the parameters on workers."""
        return [run(rref, get_grad) for rref in self.rrefs]


def dense_twins(seed: int = 0) -> Twins:
    """A chain over all three workers, with two layers on worker1."""
    return Twins(
        [
            ("worker0", linear, (4, 6)),
            ("worker1", linear, (6, 5)),
            ("worker2", linear, (5, 6)),
            ("worker1", linear, (6, 3)),
        ],
        seed=seed,
    )


def matrix_twins() -> Twins:
    return Twins([(f"worker{rank}", matrix, (4, 4)) for rank in range(3)])


def sparse_twins() -> Twins:
    return Twins([(f"worker{rank}", sparse_embedding, (10, 4)) for rank in range(3)], side_by_side=True)


def dense_inputs(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, 4, generator=generator) for _ in range(count)]


def sparse_inputs(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 10, (7,), generator=generator) for _ in range(count)]


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Equal to the last bit, and of the same types."""
    assert type(found) is type(expected), f"{path}: {type(found)} is not {type(expected)}"
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, path
        assert found.layout == expected.layout, path
        assert found.shape == expected.shape, path
        if expected.is_sparse:
            found, expected = found.to_dense(), expected.to_dense()
        assert torch.equal(found.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0)), (
            f"{path}: {found} is not {expected}"
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{path}: {found.keys()} are not {expected.keys()}"
        for key in expected:
            assert_same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{place}]")
    else:
        assert found == expected, f"{path}: {found} is not {expected}"


def await_nothing_left(workers: InProcessCluster) -> None:
    deadline = time.monotonic() + WITHIN
    for look in itertools.count():
        if look % 100 == 10:  # not at first, because it takes longer than most tests, and few tests leave cycles
            gc.collect()
        left = {worker.info.name: worker.references.counts() | worker.autograd.counts() for worker in workers}
        if not len(claims) and not any(any(counts.values()) for counts in left.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {left}, and {len(claims)} claims"
        threading.Event().wait(0.002)
