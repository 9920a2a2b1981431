"""Parameter groups behave as in one process: changes of options, and added groups."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from optim_models import Twins, assert_same, dense_inputs, dense_twins, linear, run
from torch import nn

from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.optim import DistributedOptimizer
from backhaul.rpc import MisuseError, OptionError, RRef, UnsendableError
from backhaul.testing import InProcessCluster


def in_groups(params: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Two groups, each with parameters on several workers."""
    return [
        {"params": params[::2], "lr": 0.3, **options},
        {"params": params[1::2], "momentum": 0.5},
    ]


def both(twins: Twins, make: Any = torch.optim.SGD, **options: Any) -> tuple[DistributedOptimizer, Any]:
    optimizer = DistributedOptimizer(make, in_groups(twins.rrefs), **options)
    return optimizer, make(in_groups(twins.parameters), **options)


def without_params(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_groups_over_several_workers(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, reference = both(twins, lr=0.1)
    assert_same(without_params(optimizer), without_params(reference))
    assert [group["params"] for group in optimizer.param_groups] == [twins.rrefs[::2], twins.rrefs[1::2]]
    twins.train(optimizer, reference, dense_inputs(4))
    ordered = [*twins.rrefs[::2], *twins.rrefs[1::2]]
    assert [worker.name for worker, _ in optimizer._places] == [rref.owner_name() for rref in ordered]
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_a_change_takes_effect_with_the_next_step(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, reference = both(twins, lr=0.1)
    for each in (optimizer, reference):
        each.param_groups[0]["lr"] = 0.7
        each.param_groups[1]["nesterov"] = True
        each.param_groups[1]["note"] = ["mine", 1]
    assert_same(optimizer.state_dict(), reference.state_dict())  # before it is sent
    twins.train(optimizer, reference, dense_inputs(2))
    assert_same(optimizer.state_dict(), reference.state_dict())
    for each in (optimizer, reference):
        del each.param_groups[1]["note"]
    twins.train(optimizer, reference, dense_inputs(1))
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert_same(run(optimizer.remote_optimizers[0], groups_there), without_params(reference))


def groups_there(local: Any) -> list[dict[str, Any]]:
    return without_params(local.optimizer)


def test_only_changes_are_sent(workers: InProcessCluster) -> None:
    """A change that was made on the worker itself stays, unless the same entry is changed here."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
    there: Any = optimizer.remote_optimizers[0].local_value()
    there.optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    assert groups_there(there)[0]["weight_decay"] == 0.5
    assert groups_there(there)[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["weight_decay"] == 0.5  # and param_groups shows it
    there.optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    assert groups_there(there)[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.3
    there.optimizer.param_groups[0]["lr"] = 0.4
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.state_dict()["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    optimizer.step()
    assert groups_there(there)[0]["lr"] == 0.5


def test_a_tensor_that_is_changed_in_place(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, reference = (
        DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=torch.tensor(0.1)),
        torch.optim.SGD(twins.parameters, lr=torch.tensor(0.1)),
    )
    for each in (optimizer, reference):
        each.param_groups[0]["lr"].fill_(0.4)
    twins.train(optimizer, reference, dense_inputs(2))
    # One of the local optimizers is on this worker. It must not see changes before the step either.
    optimizer.param_groups[0]["lr"].fill_(0.5)
    rates = [groups_there(run(rref, copy.copy))[0]["lr"].item() for rref in optimizer.remote_optimizers[:1]]
    assert rates == [pytest.approx(0.4)]


def test_the_caller_s_own_arguments_are_not_shared(workers: InProcessCluster) -> None:
    parameter, rate = nn.Parameter(torch.ones(2)), torch.tensor(0.1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=rate)
    rate.fill_(5.0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(parameter, torch.full((2,), 0.9))


def test_parameters_of_this_worker_need_no_reference(workers: InProcessCluster) -> None:
    here = nn.Linear(2, 2)
    there = rpc.remote("worker1", nn.Parameter, args=(torch.ones(2),))
    for given in (
        [*here.parameters(), there],
        [{"params": here.parameters()}, {"params": there}],
        [{"params": here.weight}, {"params": [there]}, {"params": (here.bias,)}],
    ):
        optimizer = DistributedOptimizer(torch.optim.SGD, given, lr=0.1)
        assert [worker.name for worker, _ in optimizer._places].count("worker1") == 1
        assert all(isinstance(param, RRef) for group in optimizer.param_groups for param in group["params"])


def test_names_of_parameters(workers: InProcessCluster) -> None:
    twins = dense_twins()
    names = [f"layer.{place}" for place in range(len(twins.rrefs))]
    optimizer = DistributedOptimizer(torch.optim.Adam, list(zip(names, twins.rrefs, strict=True)))
    reference = torch.optim.Adam(list(zip(names, twins.parameters, strict=True)))
    twins.train(optimizer, reference, dense_inputs(2))
    saved = reference.state_dict()
    assert_same(optimizer.state_dict(), saved)
    local_names = [groups_there(run(rref, copy.copy))[0]["param_names"] for rref in optimizer.remote_optimizers[:1]]
    assert local_names == [["layer.0", "layer.1"]]
    for each in (optimizer, reference):
        each.load_state_dict(saved)
    assert_same(optimizer.state_dict(), reference.state_dict())
    saved["param_groups"][0]["param_names"] = [name.upper() for name in names]
    for each in (optimizer, reference):
        each.load_state_dict(saved)
    assert_same(optimizer.state_dict(), reference.state_dict())
    with pytest.raises(OptionError, match="name all, or none"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_group_without_parameters(workers: InProcessCluster) -> None:
    twins = dense_twins()
    for first in (True, False):
        empty: list[dict[str, Any]] = [{"params": [], "lr": 0.7}]
        given = [*empty, {"params": twins.rrefs}] if first else [{"params": twins.rrefs}, *empty]
        alone = [*empty, {"params": twins.parameters}] if first else [{"params": twins.parameters}, *empty]
        optimizer = DistributedOptimizer(torch.optim.Adam, copy.copy(given))
        reference = torch.optim.Adam([dict(group) for group in alone])
        twins.train(optimizer, reference, dense_inputs(1))
        assert_same(optimizer.state_dict(), reference.state_dict())
    only = DistributedOptimizer(torch.optim.SGD, [{"params": []}], lr=0.1)
    only.step()
    only.add_param_group({"params": twins.rrefs[2]})
    assert [worker.name for worker in only._locals] == ["worker0", "worker1"]


def test_a_group_that_is_added(workers: InProcessCluster) -> None:
    """The worker of the group may have had no parameters of this optimizer before."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs[:4], lr=0.1, amsgrad=True)
    reference = torch.optim.Adam(twins.parameters[:4], lr=0.1, amsgrad=True)
    twins.train(optimizer, reference, dense_inputs(2))
    optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.05
    optimizer.add_param_group({"params": twins.rrefs[4:], "weight_decay": 0.1})
    reference.add_param_group({"params": twins.parameters[4:], "weight_decay": 0.1})
    assert_same(without_params(optimizer), without_params(reference))
    twins.train(optimizer, reference, dense_inputs(3))
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert [worker.name for worker in optimizer._locals] == ["worker0", "worker1", "worker2"]


class Picky(torch.optim.SGD):
    """Refuses groups on one worker only. Makes the state of a parameter when it gets the parameter."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in param_group["params"]:
            self.state[parameter]["mark"] = 1
        if param_group.get("refuse") == rpc.get_worker_info().name:
            raise ValueError("no group today")


@pytest.mark.parametrize("refusing", ["worker0", "worker1", "worker2"])
def test_a_group_is_added_everywhere_or_nowhere(workers: InProcessCluster, refusing: str) -> None:
    """worker2 has no part in the optimizer before."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(Picky, twins.rrefs[:4], lr=0.1, momentum=0.9)
    reference = Picky(twins.parameters[:4], lr=0.1, momentum=0.9)
    twins.train(optimizer, reference, dense_inputs(2))
    more = nn.Linear(2, 2)
    group: dict[str, Any] = {"params": [*twins.rrefs[4:], *more.parameters()]}

    def add() -> PartialError:
        with pytest.raises(PartialError, match=r"add_param_group\(\) failed on 1 of 3 workers") as caught:
            optimizer.add_param_group({**group, "refuse": refusing})
        return caught.value

    error = add()
    assert set(error.errors) == {refusing}
    assert isinstance(error.errors[refusing], ValueError)
    assert len(optimizer.param_groups) == 1
    assert [len(groups_there(run(rref, copy.copy))) for rref in optimizer.remote_optimizers[:1]] == [1]
    assert run(optimizer.remote_optimizers[1], sizes) == ([2, 1], 2)
    del error
    gc.collect()
    twins.train(optimizer, reference, dense_inputs(2))  # the others' parameters are not trained
    assert_same(optimizer.state_dict(), reference.state_dict())
    optimizer.add_param_group({"params": twins.rrefs[4:]})
    reference.add_param_group({"params": twins.parameters[4:]})
    twins.train(optimizer, reference, dense_inputs(2))
    assert_same(optimizer.state_dict(), reference.state_dict())


def sizes(local: Any) -> tuple[list[int], int]:
    groups = local.optimizer.param_groups
    return [len(group["params"]) for group in groups] + [len(groups)], len(local.params)


def test_a_parameter_that_comes_twice(workers: InProcessCluster) -> None:
    parameter = nn.Parameter(torch.ones(2))
    for given in ([parameter, parameter], [{"params": [parameter]}, {"params": [RRef(parameter)]}]):
        with pytest.raises(PartialError, match=r"of shape \[2\] is given twice"):
            DistributedOptimizer(torch.optim.SGD, given)
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter])
    with pytest.raises(PartialError, match=r"of shape \[2\] is given twice"):
        optimizer.add_param_group({"params": [parameter]})
    optimizer.step()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "params_rref is empty"),
        (nn.Parameter(torch.ones(1)), "Parameter is not a list of parameters"),
        ({"params": []}, "dict is not a list of parameters"),
        (7, "int is not a list of parameters"),
        ([7], "7 cannot be optimized: give an RRef"),
        ([{"lr": 1}], "a parameter group has no 'params'"),
        ([{"params": {nn.Parameter(torch.ones(1))}}], "a set does not have"),
        ([{"params": []}, nn.Parameter(torch.ones(1))], "give either groups or parameters"),
        ([nn.Parameter(torch.ones(1)), {"params": []}], "cannot be optimized"),
        ([("a", nn.Parameter(torch.ones(1))), nn.Parameter(torch.ones(1))], "name all of them, or none"),
        ([{"params": [("a", nn.Parameter(torch.ones(1)))]}, {"params": []}], "name all, or none"),
    ],
)
def test_invalid_parameters_are_refused(workers: InProcessCluster, given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DistributedOptimizer(torch.optim.SGD, given)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "not to str"),
        (torch.ones(1, requires_grad=True) * 2, "can't optimize a non-leaf Tensor"),
    ],
)
def test_references_to_other_values_than_parameters_are_refused(
    workers: InProcessCluster, value: Any, message: str
) -> None:
    with pytest.raises(PartialError, match=message):
        DistributedOptimizer(torch.optim.SGD, [RRef(value)])


def test_a_changed_list_of_groups_is_refused(workers: InProcessCluster) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))])
    optimizer.param_groups.append({"params": []})
    with pytest.raises(MisuseError, match=r"use add_param_group\(\)"):
        optimizer.step()


def test_an_optimizer_cannot_be_sent_or_copied(workers: InProcessCluster) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))], lr=0.1)
    assert "of SGD on 'worker0'" in repr(optimizer)
    assert "lr: 0.1" in repr(optimizer)
    with pytest.raises(UnsendableError, match="cannot be sent, copied or pickled: make one where you need it"):
        copy.deepcopy(optimizer)
    with pytest.raises(UnsendableError, match="cannot be sent, copied or pickled: make one where you need it"):
        rpc.rpc_sync("worker1", len, args=([optimizer],))


def test_places_of_interleaved_layers(workers: InProcessCluster) -> None:
    """Checkpoints rely on this: for each parameter its worker, and its index in the local optimizer there."""
    twins = Twins([("worker2", linear, (4, 4)), ("worker1", linear, (4, 4)), ("worker2", linear, (4, 4))])
    optimizer = DistributedOptimizer(torch.optim.SGD, in_groups(twins.rrefs), lr=0.1)
    expected = [("worker2", 0), ("worker1", 0), ("worker2", 1), ("worker2", 2), ("worker1", 1), ("worker2", 3)]
    assert [(worker.name, place) for worker, place in optimizer._places] == expected
    assert [group["params"] for group in optimizer._group_options()] == [[0, 1, 2], [3, 4, 5]]
