"""Features of torch's autograd that calls between workers must refuse, or keep."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import WITHIN, W, call, check, double, leaf, multiply
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import ContextError, MisuseError, UnsendableError
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, of the first make_dual
@pytest.mark.parametrize("in_context", [False, True])
def test_forward_mode_tangents_are_refused(pair: InProcessCluster, in_context: bool) -> None:
    context = dist_autograd.context() if in_context else nullcontext()
    with pair[0].as_current(), forward_ad.dual_level(), context:
        x = torch.ones(2)
        assert torch.equal(rpc.rpc_sync("worker1", double, args=(x,)), 2 * x)
        with pytest.raises(UnsendableError, match=r"args\[0\] .* has a tangent of forward-mode differentiation"):
            rpc.rpc_sync("worker1", double, args=(forward_ad.make_dual(x, x),))


@pytest.mark.parametrize("to", [torch.float32, None])
def test_the_dtype_that_a_leaf_wants_for_its_gradient(trio: InProcessCluster, to: torch.dtype | None) -> None:
    def new_leaf() -> Tensor:
        x = leaf(4, 4).detach().to(torch.bfloat16).requires_grad_()
        x.grad_dtype = to  # type: ignore[attr-defined]
        return x

    x, y, z = new_leaf(), new_leaf(), new_leaf()

    def program() -> Tensor:
        only_there = call("worker1", double, x)
        both = call("worker2", double, y) * y
        return (only_there + both + z * 3).float().sum()

    assert x.grad_dtype is to  # type: ignore[attr-defined]
    check(trio, program, {0: [x, y, z]})


def test_a_complex_root_needs_a_gradient(pair: InProcessCluster) -> None:
    x = leaf(dtype=torch.complex128)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for real scalar outputs"):
        double(x).backward()  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", double, args=(x,))
        with pytest.raises(MisuseError, match=r"only for real scalar outputs but got torch.complex128.*grad_tensors"):
            context_id.backward(y)
        context_id.backward(y, grad_tensors=torch.ones_like(y))
        assert context_id.gradients()[x] == 2


GO = threading.Event()


def slow(name: str, x: Tensor) -> Tensor:
    assert GO.wait(WITHIN)
    return multiply(name, x)


def test_a_future_that_outlives_its_context(pair: InProcessCluster) -> None:
    """The value is good. A backward pass through it raises an error that explains why, wherever the end was known."""
    x = leaf(4, 4)
    for _ in range(3):
        GO.clear()
        with pair[0].as_current():
            with dist_autograd.context() as over:
                future = rpc.rpc_async("worker1", slow, args=("a", x))
            while pair[1].autograd.contexts.get(over) is not None:
                threading.Event().wait(0.001)
            GO.set()
            y = future.wait()
            assert torch.equal(y, x * W["a"])
            with pytest.raises(
                ContextError, match=r"a tensor from worker 'worker1' in autograd context .* local backward"
            ):
                y.sum().backward()
            with dist_autograd.context() as context_id, pytest.raises(ContextError, match="across contexts"):
                context_id.backward(y.sum())


def call_it(x: Tensor) -> Any:
    return rpc.rpc_sync("worker1", double, args=(x,)).sum()


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.vmap, torch.func.jacrev, torch.func.functionalize],
    ids=lambda each: each.__name__,
)
def test_calls_inside_of_transforms_are_refused(pair: InProcessCluster, transform: Any, in_context: bool) -> None:
    context = dist_autograd.context() if in_context else nullcontext()
    with pair[0].as_current(), context:
        for requires_grad in (False, True):
            with pytest.raises(UnsendableError, match=r"a remote call inside torch\.func\.grad, vmap"):
                transform(call_it)(torch.ones(3, requires_grad=requires_grad))
        assert call_it(torch.ones(3)) == 6


@pytest.mark.parametrize("size", [3, 300_000])
def test_replies_have_memory_in_any_mode_of_the_reading_thread(pair: InProcessCluster, size: int) -> None:
    """In these modes `torch.empty` gives a tensor without memory."""
    wanted = torch.full((size,), 2.0)
    ones, one = torch.ones(size), torch.ones(())
    with pair[0].as_current():
        with FakeTensorMode():
            got = rpc.rpc_sync("worker1", double, args=(ones,))
        assert torch.equal(got, wanted)
        assert type(got) is Tensor
        for transform in (torch.func.functionalize, torch.func.grad):
            found = transform(lambda x: x * rpc.rpc_sync("worker1", double, args=(ones,)).sum())(one)
            assert found == 2 * size
        sums = torch.func.vmap(lambda x: x + rpc.rpc_sync("worker1", double, args=(ones,)))(torch.ones(2, 1))
        assert torch.equal(sums, wanted.expand(2, size) + 1)


def gradient_there(x: Tensor) -> Tensor:
    result: Tensor = torch.func.grad(lambda value: value.square().sum())(x)
    return result


def test_transforms_inside_of_the_function_that_is_called(pair: InProcessCluster) -> None:
    with pair[0].as_current(), dist_autograd.context():
        assert rpc.rpc_sync("worker1", gradient_there, args=(torch.ones(3),)).tolist() == [2, 2, 2]
