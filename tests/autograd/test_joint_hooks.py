"""Hooks over several tensors, and before leaves, see the same and run as often as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import alone, call, double, leaf
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd import joint_hooks
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("quiet")

Seen = list[list[list[float] | None]]


@pytest.fixture(autouse=True)
def _leave_none_behind() -> Iterator[None]:
    """Remove hooks. Torch keeps hooks over computed tensors forever, and they affect runs that other tests count."""
    yield
    joint_hooks._hooks.clear()


def tolist(gradients: Any) -> list[list[float] | None]:
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    return [None if each is None else each.tolist() for each in gradients]


def sent_apart(seen: Seen, mode: Any, used: int) -> Tensor:
    """Two tensors of this worker go to different workers. The result for the second may be unused."""
    x = torch.ones(2, requires_grad=True)
    a, b = x * 2, x * 3
    register_multi_grad_hook([a, b], lambda gradients: seen.append(tolist(gradients)), mode=mode)
    results = [call("worker1", double, a), call("worker2", double, b)]
    return torch.stack([result * 5 for result in results[:used]]).sum()


@pytest.mark.parametrize("used", [1, 2])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_tensors_sent_to_different_workers(trio: InProcessCluster, mode: str, used: int) -> None:
    expected: Seen = []
    with alone():
        sent_apart(expected, mode, used).backward()  # type: ignore[no-untyped-call]
    assert len(expected) == 1
    for _ in range(2):
        seen: Seen = []
        with trio[0].as_current(), dist_autograd.context() as context_id:
            context_id.backward(sent_apart(seen, mode, used))
        assert seen == expected


HELD: dict[str, Any] = {}


def take(x: Tensor) -> Tensor:
    """The second call registers the hook over the tensors of both calls."""
    got = HELD.setdefault("got", [])
    got.append(x)
    if len(got) == 2:
        register_multi_grad_hook(got, lambda gradients: HELD["seen"].append(tolist(gradients)))
    return x * 4


def received(seen: Seen) -> Tensor:
    HELD.clear()
    HELD["seen"] = seen
    x = torch.ones(2, requires_grad=True)
    one = call("worker1", take, x * 2)
    two = call("worker1", take, x * 3)
    return (one * 5).sum() + (two * 7).sum()


def test_tensors_that_were_received(pair: InProcessCluster) -> None:
    expected: Seen = []
    with alone():
        received(expected).backward()  # type: ignore[no-untyped-call]
    assert expected == [[[20.0, 20.0], [28.0, 28.0]]]
    seen: Seen = []
    with pair[0].as_current(), dist_autograd.context() as context_id:
        context_id.backward(received(seen))
        HELD.clear()
    assert seen == expected


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_leaves(trio: InProcessCluster, accumulate: Any) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: Seen = []
    handle = register_multi_grad_hook([x, y], lambda gradients: seen.append(tolist(gradients)))
    with trio[0].as_current(), dist_autograd.context() as context_id:
        one = rpc.rpc_async("worker1", double, args=(x,))
        two = rpc.rpc_async("worker2", double, args=(y,))
        context_id.backward((one.wait() * 3 + two.wait() * 5 + x).sum(), accumulate=accumulate)
        if accumulate == "context":
            assert {leaf: each.tolist() for leaf, each in context_id.gradients().items()} == {x: [7, 7], y: [10, 10]}
            assert x.grad is None
        else:
            assert x.grad is not None
            assert x.grad.tolist() == [7, 7]
    assert seen == [[[7.0, 7.0], [10.0, 10.0]]]
    handle.remove()


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_prehooks_of_the_node_of_a_leaf(trio: InProcessCluster, accumulate: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    seen: list[list[float]] = []

    def tenfold(gradients: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(gradients[0].tolist())
        return (gradients[0] * 10,)

    handle = node.register_prehook(tenfold)
    with trio[0].as_current(), dist_autograd.context() as context_id:
        one = rpc.rpc_async("worker1", double, args=(x,))
        two = rpc.rpc_async("worker2", double, args=(x,))
        context_id.backward((one.wait() * 3 + two.wait() * 5 + x).sum(), accumulate=accumulate)
        found = context_id.gradients()[x] if accumulate == "context" else x.grad
        assert found is not None
        assert found.tolist() == [170.0, 170.0]
    assert seen == [[17.0, 17.0]]
    handle.remove()


def test_hooks_of_a_context_are_forgotten_with_it(pair: InProcessCluster) -> None:
    """Torch itself keeps them forever."""
    with pair[0].as_current():
        before = len(list(joint_hooks.groups()))
        for _ in range(3):
            with dist_autograd.context():
                register_multi_grad_hook([leaf(2) * 2, leaf(2) * 3], print)
                assert len(list(joint_hooks.groups())) == before + 1
        assert len(list(joint_hooks.groups())) == before
    for _ in range(100):
        register_multi_grad_hook([leaf(2) * 2, leaf(2) * 3], print)
    assert len(list(joint_hooks.groups())) <= before + 8


def test_hooks_that_are_gone_are_forgotten() -> None:
    tensors = [leaf(2) * 2, leaf(2) * 3]
    before = len(list(joint_hooks.groups()))
    handle = register_multi_grad_hook(tensors, print)
    assert len(list(joint_hooks.groups())) == before + 1
    nodes = [each.grad_fn for each in tensors]
    assert joint_hooks.on_any(nodes)
    handle.remove()
    assert len(list(joint_hooks.groups())) == before
    assert not joint_hooks.on_any(nodes)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_over_one_or_several_leaves(pair: InProcessCluster, mode: Any, count: int) -> None:
    leaves = [leaf(2, 2), leaf(2, 2, seed=2)]
    seen: Seen = []
    handle = register_multi_grad_hook(leaves[:count], lambda gradients: seen.append(tolist(gradients)), mode=mode)
    try:
        with pair[0].as_current(), dist_autograd.context() as context_id:
            context_id.backward((call("worker1", double, leaves[0]) * leaves[0] * leaves[1]).sum())
            assert len(context_id.gradients()) == 2
        found, seen = seen, []
        with alone():
            (call("worker1", double, leaves[0]) * leaves[0] * leaves[1]).sum().backward()
    finally:
        handle.remove()
    assert len(found) == 1
    if mode == "all":
        assert found == seen


def hooked_over_a_leaf(seen: Seen, x: Tensor, made: Tensor) -> None:
    register_multi_grad_hook([made, x], lambda gradients: seen.append(tolist(gradients)))


def test_a_leaf_calls_its_hook_in_later_contexts(pair: InProcessCluster) -> None:
    """The hook is on a leaf and on a tensor of the first pass."""
    expected: Seen = []
    x, y = leaf(2), leaf(2, seed=2)
    for step in range(3):
        made = y * 2
        if not step:
            hooked_over_a_leaf(expected, x, made)
        (made * 3 + x * 5).sum().backward()  # type: ignore[no-untyped-call]
    assert expected == [[[3.0, 3.0], [5.0, 5.0]], [None, [5.0, 5.0]], [None, [5.0, 5.0]]]
    seen: Seen = []
    x, y = leaf(2), leaf(2, seed=2)
    for step in range(3):
        with pair[0].as_current(), dist_autograd.context() as context_id:
            made = call("worker1", double, y)
            if not step:
                hooked_over_a_leaf(seen, x, made)
            context_id.backward((made * 3 + x * 5).sum())
            assert context_id.gradients()[x].tolist() == [5.0, 5.0]
    assert seen == expected


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_one_tensor_of_a_hook_has_been_freed(pair: InProcessCluster) -> None:
    """Before torch 2.13, the part of the hook on a Function's result is freed with that result."""
    seen: Seen = []
    x = leaf(2)
    hooked_over_a_leaf(seen, x, Rounded.apply(leaf(2)))  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        context_id.backward((call("worker1", double, x) * 3).sum())
        assert context_id.gradients()[x].tolist() == [6.0, 6.0]
    assert seen == [[None, [6.0, 6.0]]]
