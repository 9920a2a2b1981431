"""Hooks on the node that accumulates into a leaf run once, with the sum in ``.grad``, wherever it comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd import node_hooks
from backhaul.testing import InProcessCluster


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def node_of(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_a_leaf_that_was_sent_twice(accumulate: Any) -> None:
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    node = node_of(leaf)
    seen: list[torch.Tensor] = []
    handle = node.register_hook(lambda *_: seen.append(leaf.grad.clone()))  # type: ignore[union-attr]
    other = torch.tensor([5.0], requires_grad=True)
    with InProcessCluster(3) as workers, workers[0].as_current(), dist_autograd.context() as context:
        one = rpc.rpc_async("worker1", scaled, args=(leaf, 2.0))
        two = rpc.rpc_async("worker2", scaled, args=(leaf, 3.0))
        loss = one.wait().sum() + two.wait().sum() + (leaf * other).sum()
        dist_autograd.backward(context, [loss], accumulate=accumulate)
        assert [each.tolist() for each in seen] == [[10.0, 10.0]]
        if accumulate == "context":
            assert leaf.grad is None
            assert other.grad is None
            found = dist_autograd.get_gradients(context)
            assert found[leaf].tolist() == [10.0, 10.0]
            assert found[other].tolist() == [3.0]
        else:
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [10.0, 10.0]
    handle.remove()


def test_an_existing_grad_stays_and_is_not_added_to() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.full((2,), 7.0)
    node = node_of(leaf)
    seen: list[list[float]] = []
    handle = node.register_hook(lambda *_: seen.append(leaf.grad.tolist()))  # type: ignore[union-attr]
    with InProcessCluster(2) as workers, workers[0].as_current(), dist_autograd.context() as context:
        for _ in range(2):
            loss = rpc.rpc_sync("worker1", scaled, args=(leaf, 2.0)).sum()
            dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[leaf].tolist() == [4.0, 4.0]
    assert seen == [[2.0, 2.0], [2.0, 2.0]]
    assert leaf.grad.tolist() == [7.0, 7.0]
    handle.remove()


def test_nodes_are_asked_only_if_there_are_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    node = node_of(leaf)
    assert not node_hooks.on(node)
    handle = node.register_hook(lambda *_: None)
    assert node_hooks.are_there()
    assert node_hooks.on(node)
    handle.remove()
    assert not node_hooks.on(node)
    del node, handle
    assert not node_hooks.are_there()
