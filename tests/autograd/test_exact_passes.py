"""Backward passes: their roots, repetition, accumulation and steps; calls that coroutines and callbacks make."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from models import (
    WITHIN,
    Accumulate,
    W,
    alone,
    assert_same,
    await_no_leftovers,
    call,
    check,
    gradients,
    identity,
    layer,
    leaf,
    make,
    multiply,
    new_weights,
    product,
    start,
)
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.testing import InProcessCluster


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


def skip(name: str, x: Tensor) -> Tensor:
    """A call to worker1 whose argument is also used on this worker."""
    h = torch.sin(x)
    return call("worker1", layer, name, h) * h  # type: ignore[no-any-return]


def local_grads(root: Any, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(root, leaves))


def test_several_roots(trio: InProcessCluster) -> None:
    x, y = leaf(4, 4), leaf(4, 4, seed=2)

    def program() -> list[Tensor]:
        h = call("worker1", layer, "a", x)
        return [h.sum(), (h * y).sum(), call("worker2", multiply, "b", h).sum(), (y * 2).sum()]

    check(trio, program, {0: [x, y], 1: [W["a"]], 2: [W["b"]]}, exact=False)


def test_some_roots_need_no_grad(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    expected = local_grads(layer("a", x).sum(), [x, W["a"]])
    with pair[0].as_current(), dist_autograd.context() as ctx:
        constant = call("worker1", torch.sum, torch.ones(3))
        dist_autograd.backward(ctx, [constant, call("worker1", layer, "a", x).sum(), torch.tensor(3.0)])
        found = gradients(pair, ctx)
    assert torch.equal(found[0][x], expected[0])
    assert torch.equal(found[1][W["a"]], expected[1])


def test_one_root_without_a_list(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    check(pair, lambda: call("worker1", multiply, "a", x).sum(), {0: [x], 1: [W["a"]]})


def test_a_result_as_root(pair: InProcessCluster) -> None:
    """The root's own grad_fn is a Recv."""
    x = leaf(4, 4)
    check(pair, lambda: call("worker1", torch.sum, x), {0: [x]})


def test_one_root_twice(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> list[Tensor]:
        loss = skip("a", x).sum()
        return [loss, loss]

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_one_root_depends_on_another(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> list[Tensor]:
        first = skip("a", x).sum()
        return [first, (first * call("worker1", multiply, "b", x)).sum()]

    check(pair, program, {0: [x], 1: [W["a"], W["b"]]}, exact=False)


def test_roots_that_are_not_scalars(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    weights = leaf(4, 4, seed=5).detach()

    def program() -> list[Tensor]:
        h = skip("a", x)
        return [h, h.sum()]

    check(pair, program, {0: [x], 1: [W["a"]]}, grad_tensors=[weights, None], exact=False)
    check(pair, lambda: skip("a", x), {0: [x], 1: [W["a"]]}, grad_tensors=weights, exact=False)


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_repeated_passes_accumulate(pair: InProcessCluster, accumulate: Accumulate) -> None:
    x = leaf(4, 4)
    with alone():
        expected = local_grads(skip("a", x).sum(), [x, W["a"]])
    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = skip("a", x).sum()
        for i in range(1, 4):
            dist_autograd.backward(ctx, [loss], retain_graph=i < 3, accumulate=accumulate)
            found = gradients(pair, ctx)
            for rank, tensor, grad in ((0, x, expected[0]), (1, W["a"], expected[1])):
                got = tensor.grad if accumulate == "grad" else found[rank][tensor]
                assert got is not None
                assert_same(got, grad * i, exact=i < 3)
        del loss
    await_no_leftovers(pair)


def test_passes_over_different_roots_of_one_context(trio: InProcessCluster) -> None:
    x = leaf(4, 4)
    leaves = [x, W["a"], W["b"]]

    def roots() -> list[Tensor]:
        h = call("worker1", layer, "a", torch.sin(x))
        return [h.sum(), (call("worker2", layer, "b", h) * h).sum()]

    with alone():
        first, second = roots()
        one = torch.autograd.grad(first, [x, W["a"]], retain_graph=True)
        two = torch.autograd.grad(second, leaves)
    with trio[0].as_current(), dist_autograd.context() as ctx:
        first, second = roots()
        dist_autograd.backward(ctx, [first], retain_graph=True)
        after_one = gradients(trio, ctx)
        assert_same(after_one[0][x], one[0])
        assert_same(after_one[1][W["a"]], one[1])
        assert not after_one[2]
        dist_autograd.backward(ctx, [second])
        after_two = gradients(trio, ctx)
        assert_same(after_two[0][x], one[0] + two[0], exact=False)
        assert_same(after_two[1][W["a"]], one[1] + two[1], exact=False)
        assert_same(after_two[2][W["b"]], two[2], exact=False)
    await_no_leftovers(trio)


def test_separate_graphs_of_one_context(pair: InProcessCluster) -> None:
    """Gradient accumulation, in which each pass frees its graph."""
    batches = [leaf(4, 4, seed=i) for i in range(5)]
    with alone():
        expected = [local_grads(skip("a", x).sum(), [W["a"]])[0] for x in batches]
    with pair[0].as_current(), dist_autograd.context() as ctx:
        for x in batches:
            ctx.backward([skip("a", x).sum()])
        found = gradients(pair, ctx)
        assert ctx.gradients().keys() == found[0].keys()
    assert_same(found[1][W["a"]], torch.stack(expected).sum(0), exact=False)


def test_a_second_pass_over_a_freed_graph(pair: InProcessCluster) -> None:
    """The pass raises torch's error, and names the worker."""
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = call("worker1", multiply, "a", x).sum()
        dist_autograd.backward(ctx, [loss])
        found = gradients(pair, ctx)
        with pytest.raises(RuntimeError, match="backward through the graph a second time") as caught:
            dist_autograd.backward(ctx, [loss])
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.worker == "worker1"  # type: ignore[attr-defined]
        assert_same(gradients(pair, ctx)[1][W["a"]], found[1][W["a"]])
        x2 = leaf(4, 4, seed=2)
        dist_autograd.backward(ctx, [call("worker1", multiply, "b", x2).sum()])
        assert_same(gradients(pair, ctx)[1][W["b"]], x2.detach())
        del loss
    await_no_leftovers(pair)


def test_a_second_pass_over_a_freed_local_graph(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = skip("a", x).exp().sum()
        dist_autograd.backward(ctx, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            dist_autograd.backward(ctx, [loss])
        del loss
    await_no_leftovers(pair)


def raise_in_backward(x: Tensor) -> Tensor:
    y = x * 2

    def refuse(_: Tensor) -> None:
        raise ValueError("this gradient is refused")

    y.register_hook(refuse)  # type: ignore[no-untyped-call]
    return y


def test_an_error_in_a_hook_on_another_worker(trio: InProcessCluster) -> None:
    """The error has its type and names its worker. Gates that wait for a gradient from there are freed."""
    x = leaf(4, 4)
    with trio[0].as_current(), dist_autograd.context() as ctx:
        h = torch.sin(x)
        y = call("worker2", layer, "b", call("worker1", raise_in_backward, call("worker2", layer, "a", h)))
        with pytest.raises(ValueError, match="this gradient is refused") as caught:
            dist_autograd.backward(ctx, [(y * h).sum()])
        assert caught.value.__cause__.worker == "worker1"  # type: ignore[union-attr]
        del h, y
    await_no_leftovers(trio)


def test_an_error_in_a_local_hook(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        h = raise_in_backward(x)
        with pytest.raises(ValueError, match="this gradient is refused"):
            dist_autograd.backward(ctx, [(call("worker1", layer, "a", h) * h).sum()])
        del h
    await_no_leftovers(pair)


def make_sgd(names: str) -> torch.optim.SGD:
    return torch.optim.SGD([W[name] for name in names], lr=0.1, momentum=0.9)


def clip_and_step(optimizer: torch.optim.SGD) -> float:
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def step_on_owner(optimizer: Any) -> float:
    return clip_and_step(optimizer.local_value())


def test_ordinary_optimizers_on_each_worker(trio: InProcessCluster) -> None:
    """Several steps with accumulate="grad", then clip_grad_norm_ and SGD.step on each worker."""
    batches = [leaf(2, 4, seed=i).detach() for i in range(4)]

    def loss_of(x: Tensor) -> Tensor:
        h = torch.tanh(x @ W["a"])
        return (call("worker2", layer, "c", call("worker1", layer, "b", h)) * h).sum()  # type: ignore[no-any-return]

    def train() -> list[float]:
        optimizers = [make(f"worker{rank}", make_sgd, "abc"[rank]) for rank in range(3)]
        norms = []
        for x in batches:
            if isinstance(optimizers[0], rpc.RRef):
                with dist_autograd.context() as ctx:
                    dist_autograd.backward(ctx, [loss_of(x)], accumulate="grad")
            else:
                loss_of(x).backward()  # type: ignore[no-untyped-call]
            norms += [call(f"worker{rank}", step_on_owner, optimizers[rank]) for rank in range(3)]
        return norms

    with alone():
        norms = train()
    trained = {name: W[name].detach().clone() for name in "abc"}
    new_weights()
    with trio[0].as_current():
        assert train() == pytest.approx(norms, rel=1e-9)
    for name, weight in trained.items():
        assert_same(W[name].detach(), weight, exact=False)
    await_no_leftovers(trio)


def loss_on_worker(name: str, x: Tensor) -> Tensor:
    return layer(name, x).sum()


def test_references_as_roots(trio: InProcessCluster) -> None:
    """On another worker, on this one, together with tensors, and several at once."""
    x = leaf(2, 4)

    def references() -> list[Any]:
        h = call("worker1", layer, "a", x)
        return [make(f"worker{rank}", loss_on_worker, "bcd"[rank], h) for rank in range(3)]

    def tensors() -> list[Tensor]:
        h = call("worker1", layer, "a", x)
        return [*(loss_on_worker(name, h) for name in "bcd"), h.sum()]

    def program() -> list[Any]:
        return [*references(), call("worker1", layer, "a", x).sum()]

    leaves = {0: [x, W["b"]], 1: [W["a"], W["c"]], 2: [W["d"]]}
    check(trio, program, leaves, exact=False, same_as=tensors)


def test_a_single_reference_as_root(pair: InProcessCluster) -> None:
    x = leaf(2, 4)
    check(
        pair,
        lambda: make("worker1", loss_on_worker, "a", x),
        {0: [x], 1: [W["a"]]},
        same_as=lambda: loss_on_worker("a", x),
    )


@pytest.mark.parametrize("owner", [0, 1])
def test_backward_of_a_reference(pair: InProcessCluster, owner: int) -> None:
    x = leaf(2, 4)
    expected = local_grads(loss_on_worker("a", x), [x, W["a"]])
    with pair[0].as_current(), dist_autograd.context() as ctx:
        rref = make(f"worker{owner}", loss_on_worker, "a", x)
        rref.backward(ctx, retain_graph=True)
        found = gradients(pair, ctx)
        assert_same(found[0][x], expected[0])
        assert_same(found[owner][W["a"]], expected[1])
        rref.backward(int(ctx))
        assert_same(gradients(pair, ctx)[owner][W["a"]], expected[1] * 2)
        del rref
    await_no_leftovers(pair)


def backward_of(rref: Any, context_id: int) -> None:
    rref.backward(context_id)


def test_backward_of_a_reference_that_a_third_worker_asks_for(trio: InProcessCluster) -> None:
    x = leaf(2, 4)
    expected = local_grads(loss_on_worker("a", x), [x, W["a"]])
    with trio[0].as_current(), dist_autograd.context() as ctx:
        rref = make("worker1", loss_on_worker, "a", x)
        call("worker2", backward_of, rref, ctx)
        found = gradients(trio, ctx)
        del rref
    assert_same(found[0][x], expected[0])
    assert_same(found[1][W["a"]], expected[1])
    await_no_leftovers(trio)


async def layer_later(name: str, x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return layer(name, x)


async def two_at_once(x: Tensor) -> Tensor:
    h = x * W["c"]
    first, second = rpc.rpc_async("worker2", layer_later, args=("a", h)), rpc.rpc_async("worker2", layer, args=("b", h))
    left, right = await asyncio.gather(as_coroutine(first), as_coroutine(second))
    return left * right + h  # type: ignore[no-any-return]


async def as_coroutine(future: Any) -> Any:
    return await future


def test_coroutines(trio: InProcessCluster) -> None:
    x = leaf(4, 4)

    def alone_too() -> Tensor:
        h = x * W["c"]
        return (layer("a", h) * layer("b", h) + h).sum()

    leaves = {0: [x], 1: [W["c"]], 2: [W["a"], W["b"]]}
    check(trio, lambda: call("worker1", two_at_once, x).sum(), leaves, exact=False, same_as=alone_too)


@rpc.functions.async_execution
def chained(x: Tensor) -> Any:
    """A call, a callback that makes a call and waits for it, and a callback that computes."""
    h = x * W["c"]
    first = start("worker2", layer, "a", h)
    return first.then(lambda done: call("worker2", layer, "b", done.value())).then(lambda done: done.value() * W["d"])


def test_callbacks_of_an_asynchronous_function(trio: InProcessCluster) -> None:
    x = leaf(4, 4)

    def alone_too() -> Tensor:
        return (layer("b", layer("a", x * W["c"])) * W["d"]).sum()

    leaves = {0: [x], 1: [W["c"], W["d"]], 2: [W["a"], W["b"]]}
    check(trio, lambda: call("worker1", chained, x).sum(), leaves, exact=False, same_as=alone_too)


def test_callbacks_on_the_caller(trio: InProcessCluster) -> None:
    """A callback runs on another thread, but in the context in which it was added."""
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        first = start("worker1", layer, "a", h)
        second = first.then(lambda done: call("worker2", product, done.value(), h))
        return second.then(lambda done: (done.value() * h).sum()).wait()

    check(trio, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_a_done_callback_that_makes_calls(trio: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        found: list[Tensor] = []
        ready = threading.Event()

        def go_on(done: Any) -> None:
            found.append(call("worker2", multiply, "b", done.value()))
            ready.set()

        start("worker1", layer, "a", x).add_done_callback(go_on)
        assert ready.wait(WITHIN)
        return found[0].sum()

    check(trio, program, {0: [x], 1: [W["a"]], 2: [W["b"]]})


def test_futures_waited_for_in_any_order(trio: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        futures = [start(f"worker{1 + i % 2}", layer, "abcd"[i], torch.sin(x)) for i in range(4)]
        back = call("worker1", identity, x)
        return torch.stack([future.wait() for future in reversed(futures)]).prod(0).sum() + back.sum()

    leaves = {0: [x], 1: [W["a"], W["c"]], 2: [W["b"], W["d"]]}
    check(trio, program, leaves, exact=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_grad_tensors_stay_as_they_are(pair: InProcessCluster, dtype: torch.dtype) -> None:
    """Torch itself uses a view of one as ``.grad``, and adds to that memory in the next pass."""
    x = leaf(3, dtype=dtype)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        root = x.conj() if dtype.is_complex else x.view(3)
        given = torch.ones_like(root.detach()).resolve_conj()
        for _ in range(2):
            dist_autograd.backward(ctx, [root], retain_graph=True, grad_tensors=given, accumulate="grad")
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 2))
        assert torch.equal(given, torch.ones(3, dtype=dtype))
