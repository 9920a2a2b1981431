"""State dicts equal those of one process, and can be exchanged with it and between placements."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from optim_models import (
    Twins,
    assert_same,
    dense_inputs,
    dense_twins,
    linear,
    run,
    set_grad,
    sparse_inputs,
    sparse_twins,
)
from torch import nn

from backhaul.errors import PartialError
from backhaul.optim import DistributedOptimizer
from backhaul.rpc import OptionError
from backhaul.testing import InProcessCluster

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adafactor, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 0.01}),
]


def trained(optimizer_class: Any, options: dict[str, Any], steps: int = 3) -> tuple[Twins, DistributedOptimizer, Any]:
    twins = dense_twins()
    optimizer = DistributedOptimizer(optimizer_class, twins.rrefs, **options)
    reference = optimizer_class(twins.parameters, **options)
    twins.train(optimizer, reference, dense_inputs(steps))
    return twins, optimizer, reference


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_a_local_optimizer_loads_a_distributed_state(
    workers: InProcessCluster, optimizer_class: Any, options: dict[str, Any]
) -> None:
    twins, optimizer, reference = trained(optimizer_class, options)
    fresh = optimizer_class(twins.parameters, **options)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(fresh.state_dict(), reference.state_dict())
    twins.train(optimizer, fresh, dense_inputs(3, seed=2))


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_a_distributed_optimizer_loads_a_local_state(
    workers: InProcessCluster, optimizer_class: Any, options: dict[str, Any]
) -> None:
    twins, _, reference = trained(optimizer_class, options)
    fresh = DistributedOptimizer(optimizer_class, twins.rrefs)  # the options come with the state
    fresh.load_state_dict(through_a_file(reference.state_dict()))
    assert_same(fresh.state_dict(), reference.state_dict())
    assert fresh.param_groups[0]["lr"] == options["lr"]
    twins.train(fresh, reference, dense_inputs(3, seed=2))


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_a_state_is_loaded_on_another_placement(
    workers: InProcessCluster, optimizer_class: Any, options: dict[str, Any]
) -> None:
    twins, optimizer, reference = trained(optimizer_class, options)
    saved = optimizer.state_dict()
    moved = Twins([(worker, linear, args) for worker, args in zip(["worker2"] * 3 + ["worker0"], SHAPES, strict=True)])
    moved.alone.load_state_dict(twins.alone.state_dict())
    moved.load_alone()
    fresh = DistributedOptimizer(optimizer_class, moved.rrefs, lr=7.0)
    fresh.load_state_dict(saved)
    alone = optimizer_class(moved.parameters, lr=7.0)
    alone.load_state_dict(copy.deepcopy(reference.state_dict()))
    moved.train(fresh, alone, dense_inputs(3, seed=2))
    assert_same(fresh.state_dict(), alone.state_dict())
    assert [worker.name for worker in fresh._locals] == ["worker2", "worker0"]


SHAPES = [(4, 6), (6, 5), (5, 6), (6, 3)]


def test_sparse_state(workers: InProcessCluster) -> None:
    twins = sparse_twins()
    optimizer = DistributedOptimizer(torch.optim.SparseAdam, twins.rrefs, lr=0.1)
    reference: Any = torch.optim.SparseAdam(twins.parameters, lr=0.1)
    twins.train(optimizer, reference, sparse_inputs(2))
    fresh = DistributedOptimizer(torch.optim.SparseAdam, twins.rrefs)
    fresh.load_state_dict(reference.state_dict())
    twins.train(fresh, reference, sparse_inputs(2))


def test_the_state_of_some_parameters_only(workers: InProcessCluster) -> None:
    """Parameters that never had a gradient have no state."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs, lr=0.1)
    reference = torch.optim.Adam(twins.parameters, lr=0.1)
    for place in (1, 5):
        gradient = torch.ones_like(twins.parameters[place])
        twins.parameters[place].grad = gradient
        run(twins.rrefs[place], set_grad, gradient)
    optimizer.step()
    reference.step()
    assert optimizer.state_dict()["state"].keys() == {1, 5}
    assert_same(optimizer.state_dict(), reference.state_dict())
    fresh = DistributedOptimizer(torch.optim.Adam, twins.rrefs)
    fresh.load_state_dict(optimizer.state_dict())
    assert_same(fresh.state_dict(), reference.state_dict())


def test_a_state_dict_is_a_copy(workers: InProcessCluster) -> None:
    """Steps and loading do not change it, and changing it does not change the optimizer."""
    twins, optimizer, reference = trained(torch.optim.SGD, {"lr": torch.tensor(0.1), "momentum": 0.9})
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    twins.train(optimizer, reference, dense_inputs(1))
    assert_same(saved, kept)
    optimizer.load_state_dict(saved)
    reference.load_state_dict(copy.deepcopy(kept))
    twins.train(optimizer, reference, dense_inputs(2))
    assert_same(saved, kept)
    for state in saved["state"].values():
        state["momentum_buffer"].zero_()
    saved["param_groups"][0]["lr"].zero_()
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_entries_that_were_changed_and_not_sent(workers: InProcessCluster) -> None:
    """Such entries are in the state dict. Loading a state dict discards them."""
    twins, optimizer, reference = trained(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    before = optimizer.state_dict()
    for each in (optimizer, reference):
        each.param_groups[0]["lr"] = 0.5
    assert_same(optimizer.state_dict(), reference.state_dict())
    for each in (optimizer, reference):
        each.load_state_dict(before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    twins.train(optimizer, reference, dense_inputs(2))
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_an_old_state_dict_is_completed_as_in_torch(workers: InProcessCluster) -> None:
    """Options that later versions of torch added get their defaults."""
    twins, optimizer, reference = trained(torch.optim.Adam, {"lr": 0.1})
    old = reference.state_dict()
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del old["param_groups"][0][name]
    for each in (optimizer, reference):
        each.load_state_dict(copy.deepcopy(old))
    assert optimizer.param_groups[0]["maximize"] is False
    assert_same(optimizer.state_dict(), reference.state_dict())
    twins.train(optimizer, reference, dense_inputs(1))


def test_a_mismatched_state_is_refused_before_anything_changes(workers: InProcessCluster) -> None:
    _, optimizer, reference = trained(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    before = optimizer.state_dict()
    fewer = torch.optim.SGD(list(reference.param_groups[0]["params"])[:5], lr=0.5).state_dict()
    more = copy.deepcopy(before)
    more["param_groups"].append(more["param_groups"][0])
    for wrong, message in (
        (fewer, r"has 1 parameter groups with \[5\] parameters, and this optimizer has 1 with \[8\]"),
        (more, r"has 2 parameter groups with \[8, 8\] parameters"),
        ({"state": {}}, "it has no 'param_groups'"),
        ({}, "it has no 'param_groups'"),
    ):
        with pytest.raises(OptionError, match=message):
            optimizer.load_state_dict(wrong)
    assert_same(optimizer.state_dict(), before)


class FailsToLoad(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        if state_dict["param_groups"][0].get("refused by") == len(self.param_groups[0]["params"]):
            raise ValueError("cannot be loaded")
        super().load_state_dict(state_dict)


def test_a_worker_that_fails_to_load_is_named(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(FailsToLoad, twins.rrefs, lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["refused by"] = 4  # worker1 has two layers
    with pytest.raises(PartialError, match=r"load_state_dict\(\) failed on 1 of 3 workers") as caught:
        optimizer.load_state_dict(saved)
    assert caught.value.done == ("worker0", "worker2")
    assert isinstance(caught.value.errors["worker1"], ValueError)


def test_hooks_of_state_dicts(workers: InProcessCluster) -> None:
    twins, optimizer, _ = trained(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    seen: list[str] = []

    def mark(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "mark": 1}

    def unmark(_: Any, state_dict: dict[str, Any]) -> None:
        seen.append(f"loading {state_dict.pop('mark')}")

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(unmark)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["mark"] == 1
    optimizer.load_state_dict(saved)
    assert saved["mark"] == 1
    assert seen == ["saving", "loading 1", "loaded"]
    assert len(twins.rrefs) == len(saved["state"])


def test_export_and_load_of_local_optimizers(workers: InProcessCluster) -> None:
    """`export` and `load` of each local optimizer are all that a checkpoint needs."""
    twins, optimizer, reference = trained(torch.optim.Adam, {"lr": 0.1})
    expected = reference.state_dict()
    state: dict[int, Any] = {}
    for worker, rref in optimizer._locals.items():
        groups, exported = rref.rpc_sync().export()
        assert [
            {**group, "params": expected["param_groups"][0]["params"]} for group in groups
        ] == optimizer._group_options()
        for index, (owner, place) in enumerate(optimizer._places):
            if owner == worker:
                state[index] = exported[place]
        fresh = DistributedOptimizer(torch.optim.Adam, [rref for rref in twins.rrefs if rref.owner() == worker])
        fresh._locals[worker].rpc_sync().load(groups, exported)
        assert_same(fresh.state_dict()["state"], exported)
        assert fresh.state_dict()["param_groups"][0]["lr"] == 0.1
    assert_same(dict(sorted(state.items())), expected["state"])
    assert optimizer._group_options() == expected["param_groups"]


def test_a_local_optimizer_refuses_a_mismatched_state(workers: InProcessCluster) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))], lr=0.1)
    there: Any = optimizer.remote_optimizers[0].local_value()
    with pytest.raises(OptionError, match=r"2 parameter groups for an optimizer that has 1$"):
        there.load([{}, {}], {})
