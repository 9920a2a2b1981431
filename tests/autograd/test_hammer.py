"""Many threads and workers at once: on one peer, in one context, over one graph, and leaving early."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import (
    W,
    assert_same,
    await_no_leftovers,
    call,
    gradients,
    layer,
    leaf,
    multiply,
    new_weights,
    on_threads,
    reference,
    start,
)
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul.testing import InProcessCluster

_INITIATORS = 3
_THREADS = 20
_CONTEXTS = 4
_PEER = "worker3"


def model(x: Tensor, w: Tensor, kind: int) -> Any:
    """A chain, a skip connection, an unused result, or a fan: all kinds of components."""
    h = torch.sin(x @ w)
    y = call(_PEER, layer, "a", h)
    if kind == 1:
        y = y * h
    elif kind == 2:
        call(_PEER, layer, "b", h)
        y = call(_PEER, layer, "c", y + h) * h
    elif kind == 3:
        y = y + call(_PEER, layer, "b", h) + call(_PEER, layer, "c", h)
    return y.sum()


_USED = {0: "a", 1: "a", 2: "ac", 3: "abc"}


def shared_gradients(ctx: int) -> dict[str, Tensor]:
    """The context's gradients on the peer, by the name of the weight."""
    found = dist_autograd.get_gradients(ctx)
    return {name: found[W[name]] for name in "abc" if W[name] in found}


def test_many_threads_of_several_workers() -> None:
    new_weights("abc")
    expected = {}
    for thread in range(_INITIATORS * _THREADS):
        x, w = leaf(2, 4, seed=thread), leaf(4, 4, seed=1000 + thread)
        for kind in range(4):
            leaves = {0: [x, w], 3: [W[name] for name in _USED[kind]]}
            expected[thread, kind] = x, w, reference(lambda x=x, w=w, kind=kind: model(x, w, kind), leaves)  # type: ignore[misc]
    errors: list[BaseException] = []
    together = threading.Barrier(_INITIATORS * _THREADS)

    with InProcessCluster(_INITIATORS + 1) as workers:

        def work(thread: int) -> None:
            try:
                with workers[thread % _INITIATORS].as_current():
                    together.wait(60)
                    for turn in range(_CONTEXTS):
                        run_one(thread, (thread + turn) % 4)
            except BaseException as error:
                errors.append(error)

        def run_one(thread: int, kind: int) -> None:
            x, w, grads = expected[thread, kind]
            with dist_autograd.context() as ctx:
                dist_autograd.backward(ctx, [model(x, w, kind)], timeout=60)
                mine = dist_autograd.get_gradients(ctx)
                assert set(map(id, mine)) == {id(x), id(w)}
                shared = call(_PEER, shared_gradients, ctx)
            for got, want in zip((mine[x], mine[w]), grads[0], strict=True):
                assert want is not None
                assert_same(got, want, exact=False)
            assert list(shared) == list(_USED[kind])
            for got, want in zip(shared.values(), grads[3], strict=True):
                assert want is not None
                assert_same(got, want, exact=False)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(_INITIATORS * _THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(100)
            assert not each.is_alive()
        assert not errors, errors[0]
        await_no_leftovers(workers)


def run_passes(ctx: int, name: str, x: Tensor) -> None:
    for _ in range(5):
        dist_autograd.backward(ctx, [layer(name, x).sum()], retain_graph=True, timeout=60)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_passes_of_several_workers_in_one_context(seed: int | None) -> None:
    """The passes run at the same time, over a shared graph with a skip connection."""
    new_weights()
    x = leaf(4, 4)
    with InProcessCluster(3, seed=seed) as workers, workers[0].as_current():
        with dist_autograd.context() as ctx:
            h = torch.sin(x)
            y = call("worker1", layer, "a", h) * h
            futures = [start(to, run_passes, ctx, name, y) for to, name in zip(_OTHERS, "bcd", strict=True)]
            run_passes(ctx, "e", y)
            for future in futures:
                future.wait()
            found = gradients(workers, ctx)
        del h, y
        await_no_leftovers(workers)
    h = torch.sin(x)
    y = layer("a", h) * h
    total = sum(5 * layer(name, y).sum() for name in "bcde")
    expected = torch.autograd.grad(total, [x, *(W[name] for name in "abcde")])  # type: ignore[arg-type]
    for rank, tensor, want in zip((0, 1, 1, 2, 2, 0), (x, *(W[name] for name in "abcde")), expected, strict=True):
        assert_same(found[rank][tensor], want, exact=False)


_OTHERS = ("worker1", "worker2", "worker2")


def test_contexts_that_share_a_part_of_the_graph() -> None:
    """The part was made before the contexts, and each thread runs its own pass through it."""
    new_weights()
    x = leaf(4, 4)
    h = torch.sin(x)
    expected = torch.autograd.grad((layer("a", h) * h).sum(), [x, W["a"]], retain_graph=True)
    with InProcessCluster(2) as workers:

        def work(_: int) -> None:
            with workers[0].as_current():
                for _ in range(10):
                    with dist_autograd.context() as ctx:
                        ctx.backward((call("worker1", layer, "a", h) * h).sum(), retain_graph=True, timeout=60)
                        found = gradients(workers, ctx)
                    assert_same(found[0][x], expected[0], exact=False)
                    assert_same(found[1][W["a"]], expected[1], exact=False)

        on_threads(6, work)
        await_no_leftovers(workers)


def test_threads_that_accumulate_into_one_grad() -> None:
    new_weights()
    with InProcessCluster(2) as workers:

        def work(index: int) -> None:
            with workers[0].as_current():
                for _ in range(10):
                    x = torch.full((4, 4), index + 1.0, dtype=torch.float64, requires_grad=True)
                    with dist_autograd.context() as ctx:
                        ctx.backward(call("worker1", multiply, "a", x).sum(), accumulate="grad", timeout=60)
                    assert x.grad is not None
                    assert torch.equal(x.grad, W["a"].detach())

        on_threads(8, work)
        assert W["a"].grad is not None
        assert W["a"].grad.eq(10 * 36).all()
        await_no_leftovers(workers)


def pass_on(path: list[str], x: Tensor) -> Tensor:
    return call(path[0], pass_on, path[1:], x * 2) if path else x * 2


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_contexts_left_while_calls_spread(seed: int | None) -> None:
    """The end of a context overtakes the calls that introduce it to other workers."""
    x = leaf(4, 4)
    with InProcessCluster(4, seed=seed) as workers, workers[0].as_current():
        for turn in range(100 if seed is None else 25):
            with dist_autograd.context():
                futures = [start("worker1", pass_on, ["worker2", "worker3"], x) for _ in range(4)]
                if turn % 3:
                    futures[turn % 4].wait()
            for future in futures:
                assert torch.equal(future.wait().detach(), 8 * x.detach())
        await_no_leftovers(workers)
