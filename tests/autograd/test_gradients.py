"""Which captured gradients are used directly, and which are copied: tensors that other code holds must not change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from backhaul.autograd.gradients import run_hooks, store, without_a_run


def stored(captured: list[torch.Tensor | None], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    into: dict[torch.Tensor, torch.Tensor] = {}
    store(into, leaves, captured)
    return [into[leaf] for leaf in leaves]


def test_an_unshared_gradient_is_kept_without_a_copy() -> None:
    captured: list[torch.Tensor | None] = [torch.ones(3)]
    place = captured[0].data_ptr()  # type: ignore[union-attr]
    (found,) = stored(captured, [torch.zeros(3)])
    assert found.data_ptr() == place


def test_unshared_views_from_a_linear_layer_are_kept_without_a_copy() -> None:
    layer = nn.Linear(3, 2)
    leaves: list[torch.Tensor] = list(layer.parameters())
    captured: list[torch.Tensor | None] = list(torch.autograd.grad(layer(torch.ones(4, 3)).sum(), leaves))
    assert all(gradient is not None and gradient._is_view() for gradient in captured)
    places = [gradient.data_ptr() for gradient in captured if gradient is not None]
    assert [found.data_ptr() for found in stored(captured, leaves)] == places


def test_a_gradient_that_is_in_use_elsewhere_is_copied() -> None:
    kept = torch.ones(3)
    (found,) = stored([kept], [torch.zeros(3)])
    assert found.data_ptr() != kept.data_ptr()


def test_a_view_whose_base_is_in_use_is_copied() -> None:
    kept = torch.ones(6)
    (found,) = stored([kept.view(2, 3)], [torch.zeros(2, 3)])
    assert found.data_ptr() != kept.data_ptr()


def test_a_gradient_with_another_view_in_use_is_copied() -> None:
    captured: list[torch.Tensor | None] = [torch.ones(6)]
    kept = captured[0].view(2, 3)  # type: ignore[union-attr]
    (found,) = stored(captured, [torch.zeros(6)])
    assert found.data_ptr() != kept.data_ptr()
    captured = [torch.ones(6).view(2, 3)]
    kept = captured[0][1:]  # type: ignore[index]
    (found,) = stored(captured, [torch.zeros(2, 3)])
    assert found[1:].data_ptr() != kept.data_ptr()


def test_gradients_that_share_memory_are_separated() -> None:
    shared = torch.ones(6)
    captured: list[torch.Tensor | None] = [shared.view(2, 3), shared.view(3, 2)]
    del shared
    one, other = stored(captured, [torch.zeros(2, 3), torch.zeros(3, 2)])
    one += 1
    assert torch.equal(other, torch.ones(3, 2))


def test_one_gradient_for_two_leaves_is_separated() -> None:
    one, other = stored([torch.ones(3)] * 2, [torch.zeros(3), torch.zeros(3)])
    one += 1
    assert torch.equal(other, torch.ones(3))


def test_a_gradient_is_added_to_an_existing_one() -> None:
    leaf = torch.zeros(3)
    into: dict[torch.Tensor, torch.Tensor] = {}
    for _ in range(2):
        store(into, [leaf], [torch.ones(3)])
    store(into, [leaf], [None])
    assert torch.equal(into[leaf], torch.full((3,), 2.0))


def test_a_gradient_gets_the_layout_of_its_leaf() -> None:
    leaf = torch.zeros(2, 3)
    (found,) = stored([torch.ones(3, 2).t()], [leaf])
    assert found.stride() == leaf.stride()


def test_dense_and_sparse_gradients_of_a_sent_leaf_are_added_in_either_order() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    edge = get_gradient_edge(leaf)
    dense, sparse = torch.ones(3), torch.ones(3).to_sparse()
    for values in ((dense, sparse), (sparse, dense)):
        found = without_a_run((edge, edge), values)
        assert found is not None
        assert torch.equal(found[leaf].to_dense(), torch.full((3,), 2.0))


def leaf_with_hook(hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.full((1,), 7.0)
    leaf.register_post_accumulate_grad_hook(hook)
    return leaf


def test_hooks_see_the_gradient_of_the_pass_and_may_change_it() -> None:
    seen: list[float] = []

    def hook(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        seen.append(leaf.grad.item())
        leaf.grad = 2 * leaf.grad

    leaf = leaf_with_hook(hook)
    (found,) = run_hooks([leaf], [torch.ones(1)], lambda: None)
    assert found is not None
    assert (seen, found.item()) == ([1.0], 2.0)
    assert leaf.grad == 7.0


def test_a_hook_that_raises_leaves_grad_as_it_was() -> None:
    def hook(_: torch.Tensor) -> None:
        raise ValueError("wrong")

    leaf = leaf_with_hook(hook)
    with pytest.raises(ValueError, match="wrong"):
        run_hooks([leaf], [torch.ones(1)], lambda: None)
    assert leaf.grad == 7.0


def test_one_pass_at_a_time_runs_the_hooks_of_a_leaf() -> None:
    inside: list[int] = []
    most: list[int] = []
    waits = threading.Event()

    def hook(_: torch.Tensor) -> None:
        inside.append(1)
        most.append(len(inside))
        if len(inside) > 1:
            waits.set()
        waits.wait(20)
        inside.pop()

    leaf = leaf_with_hook(hook)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(run_hooks, [leaf], [torch.ones(1)], waits.set) for _ in range(2)]
        for each in done:
            each.result(40)
    assert most == [1, 1]
    assert leaf.grad == 7.0
