"""Kinds of tensors: changed in place, views, of any dtype, with sparse gradients, parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    W,
    call,
    check,
    identity,
    leaf,
    multiply,
    new_weights,
    product,
)
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.testing import InProcessCluster


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


def change_in_place(x: Tensor) -> Tensor:
    x.mul_(W["a"])
    x[0].add_(1)
    x.exp_()
    return x


def test_arguments_changed_in_place(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        changed = call("worker1", change_in_place, h)
        return (changed * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_a_sent_leaf_is_changed_in_place_by_its_receiver(pair: InProcessCluster) -> None:
    """A received tensor is not a leaf, so this is allowed."""
    x = leaf(4, 4)
    check(pair, lambda: call("worker1", change_in_place, x).sum(), {0: [x], 1: [W["a"]]})


def test_results_changed_in_place(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        y = call("worker1", multiply, "a", x)
        y += x
        y[:, 1].mul_(3)
        y.relu_()
        return (y * x).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_one_of_several_results_changed_in_place(pair: InProcessCluster) -> None:
    x, y = leaf(4, 4), leaf(4, 4, seed=2)

    def program() -> Any:
        a, b = call("worker1", identity, (x, y))
        a.mul_(2)
        b.add_(a)
        return (a * b).sum()

    check(pair, program, {0: [x, y]})


def test_a_sent_tensor_changed_in_place_afterwards(pair: InProcessCluster) -> None:
    """The receiver has the value from the time of sending, and the gradient belongs to that value."""
    x = leaf(4, 4)

    def program() -> Any:
        h = x * 2
        y = call("worker1", multiply, "a", h)
        h.mul_(3)
        return (y * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_views(pair: InProcessCluster) -> None:
    """Views of a leaf, of a tensor in the graph, and of a received tensor; contiguous, not contiguous, and expanded."""
    x = leaf(4, 6)

    def program() -> Any:
        h = torch.sin(x)
        rows = call("worker1", product, x[1:3], h[1:3])
        turned = call("worker1", product, h.t(), x.t()[:, 0:1].expand(6, 4))
        return (rows[:, ::2].sum() + turned[1:, 2:].t().reshape(-1).sum()) * h.view(-1)[3:7].prod()

    check(pair, program, {0: [x]}, exact=False)


def first_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * W["a"]
    return y[:2], y.t()


def test_views_as_results(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        head, turned = call("worker1", first_rows, x)
        return (head.sum() * torch.sin(turned)).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def modulus_of_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.abs(x * y.conj()), torch.view_as_real(x + y)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(pair: InProcessCluster, dtype: torch.dtype) -> None:
    x, y = leaf(4, dtype=dtype), leaf(4, seed=2, dtype=dtype)
    check(pair, lambda: call("worker1", modulus_of_product, x, torch.exp(y))[0].prod(), {0: [x, y]})


def test_complex_as_pairs_of_reals(pair: InProcessCluster) -> None:
    x, y = leaf(4, dtype=torch.complex128), leaf(4, seed=2, dtype=torch.complex128)

    def program() -> Any:
        modulus, parts = call("worker1", modulus_of_product, x, torch.exp(y))
        return call("worker1", torch.view_as_complex, parts * 2).abs().sum() + modulus.prod()

    check(pair, program, {0: [x, y]}, exact=False)


def mixed_precision(x: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(torch.bfloat16) * half, x.to(torch.float32) * 2


def test_mixed_dtypes(pair: InProcessCluster) -> None:
    x, half = leaf(4), leaf(4, seed=2, dtype=torch.bfloat16)

    def program() -> Any:
        low, single = call("worker1", mixed_precision, x, half)
        assert (low.dtype, single.dtype) == (torch.bfloat16, torch.float32)
        return low.sum() + (single.to(torch.float64) * 3).sum()

    check(pair, program, {0: [x, half]})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_their_leaf(pair: InProcessCluster, dtype: torch.dtype) -> None:
    x = leaf(8, dtype=dtype)
    check(pair, lambda: call("worker1", torch.mul, x, 3).sum().to(torch.float64), {0: [x]})


_modules: dict[str, torch.nn.Module] = {}


def embed(name: str, indices: Tensor) -> Tensor:
    return _modules[name](indices)  # type: ignore[no-any-return]


def test_sparse_gradients(pair: InProcessCluster) -> None:
    torch.manual_seed(0)
    _modules["bag"] = torch.nn.EmbeddingBag(20, 4, mode="sum", sparse=True).double()
    _modules["rows"] = torch.nn.Embedding(20, 4, sparse=True).double()
    w = leaf(4)

    def program() -> Any:
        bags = call("worker1", embed, "bag", torch.tensor([[1, 2, 2], [5, 19, 1]]))
        rows = call("worker1", embed, "rows", torch.tensor([3, 3]))
        return (bags * w + torch.sin(rows)).sum()

    check(pair, program, {0: [w], 1: [_modules["bag"].weight, _modules["rows"].weight]})  # type: ignore[list-item]


def test_sparse_gradients_of_one_weight_from_several_calls(pair: InProcessCluster) -> None:
    torch.manual_seed(0)
    bag = _modules["bag"] = torch.nn.EmbeddingBag(20, 4, mode="sum", sparse=True).double()

    def program() -> Any:
        parts = [call("worker1", embed, "bag", torch.tensor([[1, 2 + i, 2]])) for i in range(3)]
        return torch.stack(parts).prod(0).sum()

    check(pair, program, {1: [bag.weight]}, exact=False)


def kind_and_product(parameter: Tensor, x: Tensor) -> tuple[bool, Tensor]:
    return parameter.is_leaf, parameter * x


def test_parameters_as_arguments(pair: InProcessCluster) -> None:
    """A leaf belongs to its worker. Other workers receive a tensor that is not a leaf."""
    model = torch.nn.Linear(4, 4).double()
    x = leaf(4, 4)

    def program() -> Any:
        is_leaf, y = call("worker1", kind_and_product, model.weight, x)
        assert not is_leaf
        return call("worker1", torch.nn.functional.linear, model(y), model.weight, model.bias).sum()

    check(pair, program, {0: [x, model.weight, model.bias]}, exact=False)


def give_parameter(name: str) -> Tensor:
    return _modules[name].weight  # type: ignore[return-value]


def test_parameters_as_results(pair: InProcessCluster) -> None:
    torch.manual_seed(1)
    weight = _modules["linear"] = torch.nn.Linear(4, 4).double()
    x = leaf(2, 4)

    def program() -> Any:
        fetched = call("worker1", give_parameter, "linear")
        return torch.sin(x @ fetched).sum() + call("worker1", embed, "linear", x).sum()

    check(pair, program, {0: [x], 1: [weight.weight, weight.bias]}, exact=False)


def give(name: str) -> Tensor:
    return W[name]


def test_sparse_gradients_that_travel(pair: InProcessCluster) -> None:
    """The lookup is here, and the table is on another worker. Its sparse gradient goes back unchanged."""
    indices = torch.tensor([1, 3, 1])

    def program() -> Any:
        return torch.sin(torch.nn.functional.embedding(indices, call("worker1", give, "a"), sparse=True)).sum()

    check(pair, program, {1: [W["a"]]})


def test_sparse_and_dense_gradients_of_one_tensor(pair: InProcessCluster) -> None:
    indices, x = torch.tensor([1, 3, 1]), leaf(4, 4)

    def program() -> Any:
        h = x * 2
        table = call("worker1", identity, h)
        rows = torch.nn.functional.embedding(indices, table, sparse=True)
        fetched = call("worker1", give, "a")
        return (
            (rows * 3).sum() + (fetched * h).sum() + torch.nn.functional.embedding(indices, fetched, sparse=True).sum()
        )

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_views_that_overlap_in_one_message(pair: InProcessCluster) -> None:
    x = leaf(6)

    def program() -> Any:
        h = torch.sin(x)
        whole, part, every_other = call("worker1", identity, [h, h[1:3], h[::2]])
        part.mul_(2)
        return call("worker1", product, h[:4], h[2:]).sum() + whole.sum() * part.sum() + every_other.sum()

    check(pair, program, {0: [x]}, exact=False)


def square_and_clear(x: Tensor, plain: Tensor) -> Tensor:
    result = x * x
    plain.zero_()
    return result


def test_a_tensor_beside_one_without_gradient_that_shares_its_memory(pair: InProcessCluster) -> None:
    """At the callee they have separate memory. Otherwise a change of one would silently change what the other saved."""
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        for arguments in ((x, x.detach()), (x[1:], x.detach()[:3])):
            y = rpc.rpc_sync("worker1", square_and_clear, arguments)
            dist_autograd.backward(ctx, [y.sum()])
        expected = 2 * x.detach()
        expected[1:] *= 2
        assert torch.equal(dist_autograd.get_gradients(ctx)[x], expected)


def convolve(x: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x, W["kernel"])


def test_gradients_have_the_layout_of_their_leaf(pair: InProcessCluster) -> None:
    W["kernel"] = leaf(3, 2, 2, 2).detach().to(memory_format=torch.channels_last).requires_grad_()
    x = leaf(1, 2, 5, 5, seed=2).detach().to(memory_format=torch.channels_last).requires_grad_()
    turned = leaf(3, 4, seed=3).detach().t().requires_grad_()

    def program() -> Any:
        return call("worker1", convolve, x).sum() + call("worker1", torch.sin, turned).sum()

    check(pair, program, {0: [x, turned], 1: [W["kernel"]]})


def apply_module(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


def test_a_module_as_argument(pair: InProcessCluster) -> None:
    """As with any other value, its gradients go to the sender."""
    model, x = torch.nn.Linear(4, 4).double(), leaf(2, 4)
    check(pair, lambda: call("worker1", apply_module, model, x).sum(), {0: [x, *model.parameters()]})
