"""Compressed sparse tensors between workers have the gradients of one process, as far as torch supports them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import W, call
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker

pytestmark = pytest.mark.usefixtures("quiet")

LAYOUTS = ["csr", "csc", "bsr", "bsc"]


@pytest.fixture(autouse=True)
def _no_word_of_beta() -> Iterator[None]:
    """Torch warns once in a process that such tensors are in beta state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state", UserWarning)
        yield


def compressed(layout: str, seed: int = 0) -> Tensor:
    dense = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    dense = dense * torch.kron(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)).double()
    made: Tensor = getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout.startswith("b") else []))
    return made.requires_grad_()


def to_dense(a: Tensor) -> Tensor:
    assert a.layout is not torch.strided
    return a.to_dense() * W["a"]


def times(a: Tensor) -> Tensor:
    return a @ W["a"]


def doubled(a: Tensor) -> Tensor:
    """The result is sparse, and so is its gradient."""
    return a * 2


def gradients_of(worker: Worker, context_id: Any) -> dict[Tensor, Tensor]:
    with worker.as_current():
        return dict(dist_autograd.get_gradients(context_id))


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.layout is expected.layout
    assert torch.equal(got.to_dense(), expected.to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [to_dense, times], ids=lambda each: each.__name__)
def test_sparse_compressed_arguments(pair: InProcessCluster, layout: str, function: Any) -> None:
    if function is times and layout in ("bsr", "bsc"):
        pytest.skip("torch has no gradient of that product")
    a = compressed(layout)
    mine, its = torch.autograd.grad(function(a).sum(), [a, W["a"]])
    with pair[0].as_current(), dist_autograd.context() as context_id:
        context_id.backward(call("worker1", function, a).sum())
        assert_same(context_id.gradients()[a], mine)
        assert_same(gradients_of(pair[1], context_id)[W["a"]], its)
        if layout == "csr" or function is times:  # torch does not add others
            context_id.backward(call("worker1", function, a).sum())
            assert_same(context_id.gradients()[a], mine + mine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_compressed_results_and_computed_arguments(pair: InProcessCluster, layout: str) -> None:
    def program(a: Tensor) -> Tensor:
        return (call("worker1", doubled, a * 3).to_dense() * W["b"]).sum()

    a = compressed(layout)
    expected = torch.autograd.grad((doubled(a * 3).to_dense() * W["b"]).sum(), a)[0]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        context_id.backward(program(a))
        assert_same(context_id.gradients()[a], expected)


def test_sparse_compressed_gradients_into_grad(pair: InProcessCluster) -> None:
    """Only CSR: torch itself does not put gradients of the other layouts into .grad."""
    a = compressed("csr")
    expected = torch.autograd.grad(to_dense(a).sum(), a)[0]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        context_id.backward(call("worker1", to_dense, a).sum(), accumulate="grad")
    assert a.grad is not None
    assert_same(a.grad, expected)
