"""Misuse of contexts and passes: what is refused, and with which message; deadlines, and leaving too early."""

from __future__ import annotations

import threading

import pytest
import torch
from models import (
    WITHIN,
    await_no_leftovers,
    double,
    leaf,
    new_weights,
    product,
)
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import BackhaulError, ContextError, OptionError, RpcTimeoutError
from backhaul.testing import InProcessCluster


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


def test_unknown_context_ids_are_refused(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        x = leaf(3)
        for unknown in (0, 12345):
            text = f"Could not find autograd context with id: {unknown}"
            with pytest.raises(RuntimeError, match=text):
                dist_autograd.get_gradients(unknown)
            with pytest.raises(ContextError, match=text):
                dist_autograd.backward(unknown, [x.sum()])


def test_invalid_roots_are_refused(pair: InProcessCluster) -> None:
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", double, args=(x,))
        with pytest.raises(RuntimeError, match="No tensors provided for gradient computation"):
            dist_autograd.backward(ctx, [])
        with pytest.raises(RuntimeError, match="requires_grad not set on root"):
            dist_autograd.backward(ctx, [torch.ones(1), torch.tensor(2.0)])
        with pytest.raises(RuntimeError, match="is not a scalar, all roots need to be scalar"):
            dist_autograd.backward(ctx, [y])
        with pytest.raises(RuntimeError, match="does not have a valid gradient function"):
            dist_autograd.backward(ctx, [leaf()])
        for wrong in (None, 3, [None], ["loss"]):
            with pytest.raises(TypeError):
                dist_autograd.backward(ctx, wrong)  # type: ignore[arg-type]
        assert not dist_autograd.get_gradients(ctx)
        dist_autograd.backward(ctx, [y.sum()])
        assert dist_autograd.get_gradients(ctx)[x].eq(2).all()
        del y
    await_no_leftovers(pair)


def not_a_tensor() -> str:
    return "loss"


def test_references_that_cannot_be_roots(pair: InProcessCluster) -> None:
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        with pytest.raises(RuntimeError, match="is not a scalar, all roots need to be scalar"):
            dist_autograd.backward(ctx, rpc.remote("worker1", double, args=(x,)))
        with pytest.raises(RuntimeError, match="requires_grad not set on root"):
            rpc.remote("worker1", torch.ones, args=(1,)).backward(ctx)
        with pytest.raises((TypeError, RuntimeError), match=r"[Tt]ensor"):
            dist_autograd.backward(ctx, rpc.remote("worker1", not_a_tensor))
    await_no_leftovers(pair)


def test_other_invalid_arguments_are_refused(pair: InProcessCluster) -> None:
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", double, args=(x,))
        with pytest.raises(OptionError, match="accumulate"):
            dist_autograd.backward(ctx, [y.sum()], accumulate="both")  # type: ignore[arg-type]
        with pytest.raises((OptionError, RuntimeError), match=r"grad_tensors|gradients"):
            dist_autograd.backward(ctx, [y.sum()], grad_tensors=[None, None])
        with pytest.raises(RuntimeError, match="shape"):
            dist_autograd.backward(ctx, [y], grad_tensors=[torch.ones(2, dtype=torch.float64)])
        with pytest.raises(OptionError, match="timeout"):
            dist_autograd.backward(ctx, [y.sum()], timeout=-1)
        assert not dist_autograd.get_gradients(ctx)
        del y
    await_no_leftovers(pair)


def test_a_tensor_of_a_context_that_was_left(pair: InProcessCluster) -> None:
    x = leaf(3)
    with pair[0].as_current():
        with dist_autograd.context() as left:
            y = rpc.rpc_sync("worker1", double, args=(x,))
        await_no_leftovers(pair)
        assert torch.equal(y.detach(), 2 * x.detach())
        with dist_autograd.context() as ctx:
            z = rpc.rpc_sync("worker1", product, args=(y, x))
            with pytest.raises(BackhaulError, match=rf"context.*{left}"):
                dist_autograd.backward(ctx, [z.sum()])
            with pytest.raises(BackhaulError, match=rf"context.*{left}"):
                dist_autograd.backward(ctx, [y.sum()])
        with pytest.raises(ContextError, match=str(left)):
            dist_autograd.backward(left, [y.sum()])
        del y, z
    await_no_leftovers(pair)


def plain_backward(x: Tensor) -> None:
    (x * 2).sum().backward()  # type: ignore[no-untyped-call]


def test_a_plain_backward_through_a_received_tensor(pair: InProcessCluster) -> None:
    """The backward is refused here and on the callee, and a correct pass still works afterwards."""
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", double, args=(x,))
        with pytest.raises(RuntimeError, match=r"autograd\.backward"):
            y.sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"autograd\.backward"):
            rpc.rpc_sync("worker1", plain_backward, args=(x,))
        assert x.grad is None
        assert not dist_autograd.get_gradients(ctx)
        dist_autograd.backward(ctx, [y.sum()])
        assert dist_autograd.get_gradients(ctx)[x].eq(2).all()
        del y
    await_no_leftovers(pair)


def test_a_plain_gradient_of_a_received_tensor(pair: InProcessCluster) -> None:
    """The local pass stops at the received tensor, so nothing is sent."""
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context():
        y = rpc.rpc_sync("worker1", double, args=(x,))
        (grad,) = torch.autograd.grad((y * 3).sum(), y)
        assert grad.eq(3).all()


_gate = threading.Event()


def wait_in_backward(x: Tensor) -> Tensor:
    y = x * 2

    def wait(_: Tensor) -> None:
        assert _gate.wait(WITHIN)

    y.register_hook(wait)  # type: ignore[no-untyped-call]
    return y


def test_a_pass_ends_at_its_deadline(pair: InProcessCluster) -> None:
    _gate.clear()
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        h = torch.sin(x)
        y = rpc.rpc_sync("worker1", wait_in_backward, args=(h,))
        with pytest.raises(RpcTimeoutError):
            dist_autograd.backward(ctx, [(y * h).sum()], timeout=0.2)
        _gate.set()
        x2 = leaf(3, seed=2)
        dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", double, args=(x2,)).sum()], timeout=10)
        assert dist_autograd.get_gradients(ctx)[x2].eq(2).all()
        del h, y
    await_no_leftovers(pair)


def test_leaving_while_a_call_is_under_way(pair: InProcessCluster) -> None:
    """Messages that arrive late do not create the context again."""
    _gate.clear()
    x = leaf(3)
    with pair[0].as_current(), dist_autograd.context():
        future = rpc.rpc_async("worker1", wait_and_double, args=(x,))
    _gate.set()
    assert torch.equal(future.wait().detach(), 2 * x.detach())
    await_no_leftovers(pair)


def wait_and_double(x: Tensor) -> Tensor:
    assert _gate.wait(WITHIN)
    return x * 2
