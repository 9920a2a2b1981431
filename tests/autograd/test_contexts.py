"""Contexts: what they record and where, which workers may use them, and that a context that was left is gone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from models import (
    WITHIN,
    W,
    await_no_leftovers,
    double,
    gradients,
    gradients_on,
    identity,
    layer,
    leaf,
    multiply,
    new_weights,
    on_threads,
    product,
    relay,
)
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd.contexts import current_context
from backhaul.errors import ContextError
from backhaul.testing import InProcessCluster

NESTED = "Already have an autograd context id for this thread"


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


def test_the_id_is_an_int(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        assert isinstance(ctx, int)
        assert f"{ctx}" == str(int(ctx))
        loss = rpc.rpc_sync("worker1", multiply, args=("a", x)).sum()
        dist_autograd.backward(int(ctx), [loss])
        assert torch.equal(dist_autograd.get_gradients(int(ctx))[x], W["a"].detach())
        assert ctx.gradients().keys() == dist_autograd.get_gradients(ctx).keys()


def test_ids_differ(trio: InProcessCluster) -> None:
    ids: list[int] = []
    for worker in trio:
        for _ in range(3):
            with worker.as_current(), dist_autograd.context() as ctx:
                ids.append(ctx)
    assert len(set(ids)) == 9


def kind_of(value: Any) -> str:
    return type(value).__name__


def test_a_context_id_can_be_sent_and_returned(pair: InProcessCluster) -> None:
    with pair[0].as_current(), dist_autograd.context() as ctx:
        assert rpc.rpc_sync("worker1", kind_of, args=(ctx,)) == type(ctx).__name__ == "ContextId"
        back = rpc.rpc_sync("worker1", identity, args=([ctx],))[0]
        assert back == ctx
        assert isinstance(back, dist_autograd.ContextId)


def test_a_context_needs_a_worker() -> None:
    with pytest.raises(rpc.NotInitializedError), dist_autograd.context():
        pass


def open_context() -> int:
    with dist_autograd.context() as ctx:
        return int(ctx)


def open_context_there(to: str) -> int:
    return rpc.rpc_sync(to, open_context)


def test_nested_contexts_are_refused(trio: InProcessCluster) -> None:
    """A remote function runs in its caller's context, so it cannot open one either, even two hops away."""
    with trio[0].as_current():
        with dist_autograd.context() as ctx:
            with pytest.raises(RuntimeError, match=NESTED), dist_autograd.context():
                pass
            with pytest.raises(RuntimeError, match=NESTED):
                rpc.rpc_sync("worker1", open_context)
            with pytest.raises(RuntimeError, match=NESTED):
                rpc.rpc_sync("worker1", open_context_there, args=("worker2",))
            x = leaf(4, 4)
            dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", double, args=(x,)).sum()])
            assert dist_autograd.get_gradients(ctx)[x].eq(2).all()
        with dist_autograd.context():
            pass
        assert rpc.rpc_sync("worker1", open_context) != rpc.rpc_sync("worker2", open_context)
    await_no_leftovers(trio)


def gradients_of_own_context(name: str, x: Tensor) -> Tensor:
    with dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [rpc.rpc_sync("worker2", multiply, args=(name, x)).sum()])
        (grad,) = dist_autograd.get_gradients(ctx).values()
        return grad


def test_a_remote_function_may_open_a_context_if_its_caller_has_none(trio: InProcessCluster) -> None:
    x = leaf(4, 4)
    assert torch.equal(trio[0].rpc_sync("worker1", gradients_of_own_context, args=("a", x)), W["a"].detach())
    await_no_leftovers(trio)


def test_contexts_on_several_threads_do_not_mix(pair: InProcessCluster) -> None:
    """One weight, a different factor on each thread, and all contexts open at the same time."""
    together = threading.Barrier(8)

    def work(index: int) -> None:
        x = torch.full((4, 4), index + 1.0, dtype=torch.float64, requires_grad=True)
        with pair[0].as_current(), dist_autograd.context() as ctx:
            together.wait(WITHIN)
            y = rpc.rpc_sync("worker1", multiply, args=("a", x))
            together.wait(WITHIN)
            dist_autograd.backward(ctx, [(y * x).sum()])
            together.wait(WITHIN)
            found = gradients(pair, ctx)
            assert set(map(id, found[0])) == {id(x)}
            assert torch.equal(found[1][W["a"]], (x * x).detach())
            assert len(ctx.sends) == len(ctx.recvs) == 1
            together.wait(WITHIN)

    on_threads(8, work)
    assert W["a"].grad is None
    await_no_leftovers(pair)


def test_a_new_thread_is_in_no_context(pair: InProcessCluster) -> None:
    with pair[0].as_current(), dist_autograd.context() as ctx:

        def work(_: int) -> None:
            with pair[0].as_current(), dist_autograd.context() as other:
                assert other != ctx

        on_threads(1, work)
        assert not ctx.sends


def test_several_initiators_at_once(trio: InProcessCluster) -> None:
    """Each worker calls both others in its own context, with weights that all use."""
    together = threading.Barrier(3)

    def work(rank: int) -> None:
        x = leaf(4, 4, seed=rank)
        left, right = f"worker{(rank + 1) % 3}", f"worker{(rank + 2) % 3}"
        with trio[rank].as_current(), dist_autograd.context() as ctx:
            together.wait(WITHIN)
            y = rpc.rpc_sync(left, multiply, args=("abc"[rank], x))
            z = rpc.rpc_sync(right, product, args=(y, x))
            together.wait(WITHIN)
            dist_autograd.backward(ctx, [z.sum()])
            together.wait(WITHIN)
            found = gradients(trio, ctx)
            assert list(map(len, found)) == [1 if i in (rank, (rank + 1) % 3) else 0 for i in range(3)]
            assert torch.equal(found[(rank + 1) % 3][W["abc"[rank]]], (x * x).detach())
            torch.testing.assert_close(found[rank][x], (2 * x * W["abc"[rank]]).detach(), rtol=1e-9, atol=1e-9)
            together.wait(WITHIN)

    on_threads(3, work)
    await_no_leftovers(trio)


def gradient_there(ctx: int, name: str) -> Tensor:
    return dist_autograd.get_gradients(ctx)[W[name]]


def backward_there(ctx: int, name: str, x: Tensor) -> float:
    loss = layer(name, x).sum()
    dist_autograd.backward(ctx, [loss])
    return loss.item()


def test_the_id_as_an_argument(trio: InProcessCluster) -> None:
    """A remote function reads its worker's gradients, and runs a pass in the caller's context."""
    x = leaf(4, 4)
    expected = torch.autograd.grad(layer("a", torch.sin(x)).sum(), [x, W["a"]])
    with trio[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", layer, args=("a", torch.sin(x))).sum()])
        assert torch.equal(rpc.rpc_sync("worker1", gradient_there, args=(ctx, "a")), expected[1])
        assert rpc.rpc_sync("worker2", backward_there, args=(ctx, "a", torch.sin(x))) != 0
        assert torch.equal(rpc.rpc_sync("worker2", gradient_there, args=(int(ctx), "a")), expected[1])
        assert torch.equal(dist_autograd.get_gradients(ctx)[x], expected[0] * 2)
    await_no_leftovers(trio)


def test_nothing_is_recorded_outside_a_context(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current():
        y = rpc.rpc_sync("worker1", multiply, args=("a", torch.sin(x)))
        z = rpc.remote("worker1", multiply, args=("a", x)).to_here()
        assert "Recv" not in f"{y.grad_fn}{z.grad_fn}"
        assert all(not any(worker.autograd.counts().values()) for worker in pair)
        with dist_autograd.context() as ctx:
            assert (dict(ctx.sends), dict(ctx.recvs)) == ({}, {})
            assert not ctx.workers


def context_and_sends(ctx: Any) -> tuple[int, int]:
    return len(ctx.sends), len(ctx.recvs)


def test_without_tensors_that_need_grad_there_is_no_send(pair: InProcessCluster) -> None:
    """The function still runs in the context, so its worker knows the context."""
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        assert not y.requires_grad
        assert not ctx.sends
        assert not ctx.recvs
        assert ctx.workers == {1}
        with pytest.raises(RuntimeError, match=NESTED):
            rpc.rpc_sync("worker1", open_context)
        assert rpc.rpc_sync("worker1", context_and_sends, args=(ctx,)) == (0, 0)
        assert rpc.rpc_sync("worker1", gradient_count, args=(ctx,)) == 0
    await_no_leftovers(pair)


def gradient_count(ctx: int) -> int:
    return len(dist_autograd.get_gradients(ctx))


def own_weight(name: str) -> Tensor:
    return W[name] * 2


def test_a_reply_is_recorded_if_its_tensors_need_grad(pair: InProcessCluster) -> None:
    """The request need not have had such tensors."""
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", own_weight, args=("a",))
        assert not ctx.sends
        assert list(ctx.recvs.values()) == [y.grad_fn]
        dist_autograd.backward(ctx, [y.sum()])
        assert gradients_on(pair[1], ctx)[W["a"]].eq(2).all()


def test_references_are_recorded(trio: InProcessCluster) -> None:
    """A value made by a function without tensor arguments, fetched here and on a third worker."""
    with trio[0].as_current(), dist_autograd.context() as ctx:
        rref = rpc.remote("worker1", own_weight, args=("a",))
        y = rref.to_here()
        assert y.grad_fn is not None
        assert y.grad_fn.name() == "RecvRpcBackward"
        z = rpc.rpc_sync("worker2", fetch, args=(rref,))
        dist_autograd.backward(ctx, [(y * 3).sum() + z.sum()])
        assert gradients_on(trio[1], ctx)[W["a"]].eq(8).all()
        del rref
    await_no_leftovers(trio)


def fetch(rref: Any) -> Tensor:
    return rref.to_here()  # type: ignore[no-any-return]


def test_sends_and_recvs_are_nodes_of_torch_s_graph(pair: InProcessCluster) -> None:
    x, y = leaf(3), leaf(3, seed=2)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        result = rpc.rpc_sync("worker1", torch.add, args=(x, y))
        ((sent, send),) = ctx.sends.items()
        ((received, recv),) = ctx.recvs.items()
        assert send.name() == "SendRpcBackward"
        assert recv.name() == "RecvRpcBackward"
        assert result.grad_fn is recv
        assert not result.is_leaf
        edges = send.next_functions
        assert [node.name() for node, _ in edges] == ["torch::autograd::AccumulateGrad"] * 2
        assert all(node.variable is tensor for (node, _), tensor in zip(edges, (x, y), strict=True))
        assert [index for _, index in edges] == [0, 0]
        with pair[1].as_current():
            assert set(ctx.sends) == {received}
            assert set(ctx.recvs) == {sent}
            ((add, index),) = ctx.sends[received].next_functions
            assert (add.name(), index) == ("AddBackward0", 0)
            items = [node for node, _ in add.next_functions]
            assert [item.name() for item in items] == ["LiftBackward0"] * 2
            assert [item.next_functions for item in items] == [((ctx.recvs[sent], 0),), ((ctx.recvs[sent], 1),)]


def test_the_send_of_a_tensor_within_the_graph(pair: InProcessCluster) -> None:
    """The edges of a Send lead to the nodes of the tensors that require grad, in order."""
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        first, second = torch.sin(x), torch.exp(x).split([1, 2])[1]  # type: ignore[no-untyped-call]
        rpc.rpc_sync("worker1", identity, args=([first, torch.ones(2), second, first],))
        (send,) = ctx.sends.values()
        assert [(node.name(), index) for node, index in send.next_functions] == [
            ("SinBackward0", 0),
            (second.grad_fn.name(), 1),
        ]


def test_workers_known_to_a_context(trio: InProcessCluster) -> None:
    x = leaf(2, 4)
    with trio[0].as_current(), dist_autograd.context() as ctx:
        assert not ctx.workers
        rpc.rpc_sync("worker1", layer, args=("a", x))
        assert ctx.workers == {1}
        rpc.rpc_sync("worker2", who)
        assert ctx.workers == {1, 2}


def who() -> str:
    return rpc.get_worker_info().name


def test_gradients_are_on_the_worker_of_their_leaf(trio: InProcessCluster) -> None:
    x = leaf(2, 4)
    with trio[0].as_current(), dist_autograd.context() as ctx:
        loss = relay([("worker1", "a"), ("worker2", "b"), ("worker0", "c")], x).sum()
        dist_autograd.backward(ctx, [loss])
        found = [set(map(id, by_leaf)) for by_leaf in gradients(trio, ctx)]
        assert found == [{id(x), id(W["c"])}, {id(W["a"])}, {id(W["b"])}]


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_keeps_a_context_that_was_left(trio: InProcessCluster, fails: bool) -> None:
    """This covers workers two hops away, contexts with and without a pass, and a body that raises."""
    x = leaf(2, 4)
    path = [("worker1", "a"), ("worker2", "b")]
    for passes in (0, 1):
        try:
            with trio[0].as_current(), dist_autograd.context() as ctx:
                loss = relay(path, x).sum()
                assert all(worker.autograd.counts()["contexts"] == 1 for worker in trio)
                if passes:
                    dist_autograd.backward(ctx, [loss])
                if fails:
                    raise ValueError("the body fails")
        except ValueError:
            assert fails
        await_no_leftovers(trio)
        for worker in trio:
            with worker.as_current(), pytest.raises(ContextError, match=rf"Could not find autograd context.*{ctx}"):
                dist_autograd.get_gradients(ctx)


def test_gradients_of_a_context_outlive_it(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", multiply, args=("a", x)).sum()])
        found = dist_autograd.get_gradients(ctx)
    await_no_leftovers(pair)
    assert torch.equal(found[x], W["a"].detach())


_watched: list[weakref.ref[Tensor]] = []


def watched(x: Tensor) -> Tensor:
    y = x * W["a"]
    z = torch.sin(y.exp())
    _watched.extend(map(weakref.ref, (x, y, z)))
    return z * y


@pytest.mark.parametrize("passes", [0, 1])
def test_a_context_that_was_left_holds_no_memory(pair: InProcessCluster, passes: int) -> None:
    """The memory is free here and on the callee, without help from the garbage collector."""
    _watched.clear()
    gc.disable()
    try:
        x = leaf(4, 4)
        with pair[0].as_current(), dist_autograd.context() as ctx:
            h = torch.sin(x)
            y = rpc.rpc_sync("worker1", watched, args=(h,))
            for _ in range(passes):
                dist_autograd.backward(ctx, [(y * h).sum()])
            _watched.extend(map(weakref.ref, (h, y)))
            del h, y
        await_no_leftovers(pair)
        deadline = time.monotonic() + WITHIN
        while any(tensor() is not None for tensor in _watched):
            assert time.monotonic() < deadline, [tensor() for tensor in _watched]
            threading.Event().wait(0.001)
    finally:
        gc.enable()


def test_a_pass_on_another_thread(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = rpc.rpc_sync("worker1", multiply, args=("a", torch.sin(x))).sum()

        def work(_: int) -> None:
            with pair[0].as_current():
                ctx.backward(loss)

        on_threads(1, work)
        assert torch.equal(gradients_on(pair[1], ctx)[W["a"]], torch.sin(x).detach())


contexts_of_hooks: list[int | None] = []


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda _: contexts_of_hooks.append(current_context.get()))  # type: ignore[no-untyped-call]
    return y


def test_a_backward_pass_runs_in_its_context(pair: InProcessCluster) -> None:
    """The calls of a hook, or of a checkpointed segment, are recorded in that context."""
    contexts_of_hooks.clear()
    with pair[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", hooked, args=(leaf(3),)).sum()])
        assert contexts_of_hooks == [ctx]
