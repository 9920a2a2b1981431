"""For every optimizer class, steps and state dicts are those of one process, to the last bit."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from optim_models import (
    Twins,
    assert_same,
    dense_inputs,
    dense_twins,
    matrix_twins,
    run,
    sparse_inputs,
    sparse_twins,
)
from torch import Tensor, nn

from backhaul.optim import DistributedOptimizer
from backhaul.rpc import MisuseError, OptionError
from backhaul.testing import InProcessCluster

STEPS = 5

CLASSES = sorted(
    (
        found
        for found in vars(torch.optim).values()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    ),
    key=lambda found: found.__name__,
)


def needs_a_closure(optimizer_class: type) -> bool:
    closure = inspect.signature(optimizer_class.step).parameters["closure"]  # type: ignore[attr-defined]
    return closure.default is closure.empty


def suits(optimizer_class: Any, layer: nn.Module, x: Tensor) -> bool:
    """Whether the optimizer class supports such parameters and gradients."""
    try:
        optimizer = optimizer_class(layer.parameters())
        layer(x).sum().backward()
        optimizer.step()
    except (ValueError, RuntimeError):
        return False
    return True


def twins_for(optimizer_class: Any) -> tuple[Twins, list[Tensor]]:
    if suits(optimizer_class, nn.Linear(2, 2), torch.ones(1, 2)):
        return dense_twins(), dense_inputs(STEPS)
    if suits(optimizer_class, nn.Linear(2, 2, bias=False), torch.ones(1, 2)):
        return matrix_twins(), dense_inputs(STEPS)
    assert suits(optimizer_class, nn.Embedding(2, 2, sparse=True), torch.tensor([1]))
    return sparse_twins(), sparse_inputs(STEPS)


def test_the_classes_are_found() -> None:
    assert {torch.optim.SGD, torch.optim.Adam, torch.optim.SparseAdam, torch.optim.LBFGS} < set(CLASSES)
    assert [each for each in CLASSES if needs_a_closure(each)] == [torch.optim.LBFGS]


def check(make: Any, twins: Twins, inputs: list[Tensor], **options: Any) -> None:
    """Train both, and compare their state dicts in between and at the end."""
    optimizer = DistributedOptimizer(make, twins.rrefs, **options)
    reference = make(twins.parameters, **options)
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert_same(optimizer.defaults, reference.defaults)
    before = [parameter.detach().clone() for parameter in twins.parameters]
    twins.train(optimizer, reference, inputs[:2])
    assert_same(optimizer.state_dict(), reference.state_dict())
    twins.train(optimizer, reference, inputs[2:])
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert not optimizer.state
    changed = [not torch.equal(*each) for each in zip(before, twins.parameters, strict=True)]
    assert all(changed), "a parameter that was not trained"


@pytest.mark.parametrize("optimizer_class", [each for each in CLASSES if not needs_a_closure(each)])
def test_every_class_of_torch(workers: InProcessCluster, optimizer_class: Any) -> None:
    check(optimizer_class, *twins_for(optimizer_class))


@pytest.mark.parametrize("optimizer_class", [each for each in CLASSES if needs_a_closure(each)])
def test_an_optimizer_that_needs_a_closure_is_refused(workers: InProcessCluster, optimizer_class: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    counts = workers[0].references.counts()
    with pytest.raises(OptionError, match=rf"{optimizer_class.__name__} needs arguments for its step \(closure\)"):
        DistributedOptimizer(optimizer_class, [parameter])
    with pytest.raises(OptionError, match="needs arguments for its step"):
        DistributedOptimizer(functools.partial(optimizer_class, lr=0.5), [parameter])
    assert workers[0].references.counts() == counts


OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1)}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    (torch.optim.AdamW, {"lr": 0.1, "foreach": False, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIONS)
def test_options(workers: InProcessCluster, optimizer_class: Any, options: dict[str, Any]) -> None:
    check(optimizer_class, dense_twins(), dense_inputs(STEPS), **options)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # Adagrad makes sparse tensors
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_for_optimizers_that_take_both(workers: InProcessCluster, optimizer_class: Any) -> None:
    check(optimizer_class, sparse_twins(), sparse_inputs(STEPS), lr=0.1)


class SignedMomentum(torch.optim.Optimizer):
    """A user's optimizer with state, a counter that belongs to no parameter, and an option that it changes itself."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("average", torch.zeros_like(parameter))
                    average.mul_(group["decay"]).add_(parameter.grad)
                    parameter.add_(average.sign(), alpha=-group["lr"] / group["steps"])


def test_a_class_of_the_user_s_own(workers: InProcessCluster) -> None:
    check(SignedMomentum, dense_twins(), dense_inputs(STEPS), lr=0.2)


def test_options_that_the_optimizer_changes_itself_are_seen_and_not_overwritten(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(SignedMomentum, twins.rrefs)
    reference = SignedMomentum(twins.parameters)
    twins.train(optimizer, reference, dense_inputs(2))
    assert optimizer.param_groups[0]["steps"] == reference.param_groups[0]["steps"] == 2
    for each in (optimizer, reference):
        each.param_groups[0]["lr"] = 0.01
    twins.train(optimizer, reference, dense_inputs(2))
    for each in (optimizer, reference):
        each.param_groups[0]["steps"] = 10
    assert optimizer.state_dict()["param_groups"][0]["steps"] == 10
    twins.train(optimizer, reference, dense_inputs(2))
    assert optimizer.param_groups[0]["steps"] == 12
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_state_that_belongs_to_no_parameter(workers: InProcessCluster) -> None:
    """Such state is sent to all workers, and read back from one of them."""
    twins = dense_twins()
    optimizer, reference = DistributedOptimizer(SignedMomentum, twins.rrefs), SignedMomentum(twins.parameters)
    twins.train(optimizer, reference, dense_inputs(3))
    assert optimizer.state_dict()["state"]["count"] == 3
    fresh = DistributedOptimizer(SignedMomentum, twins.rrefs)
    fresh.load_state_dict(reference.state_dict())
    assert [run(rref, count_of) for rref in fresh.remote_optimizers] == [3, 3, 3]
    twins.train(fresh, reference, dense_inputs(2))
    assert_same(fresh.state_dict(), reference.state_dict())


def count_of(local: Any) -> Any:
    return local.optimizer.state["count"]


class HalfADuck:
    """Has groups, but no methods for them."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params, "lr": 0.1}]

    def step(self) -> None:
        pass


def test_an_optimizer_with_only_groups_and_a_step(workers: InProcessCluster) -> None:
    optimizer = DistributedOptimizer(HalfADuck, [nn.Parameter(torch.ones(1))])
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    there: Any = optimizer.remote_optimizers[0].local_value()
    assert there.optimizer.param_groups[0]["lr"] == 0.2
    for what, name in (
        (optimizer.state_dict, "state_dict"),
        (lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}), "load_state_dict"),
        (lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "add_param_group"),
    ):
        with pytest.raises(Exception, match=rf"HalfADuck has no method {name}\(\)"):
            what()
    optimizer.step()


class Duck:
    """Not a torch optimizer: it only has a ``step``."""

    def __init__(self, params: list[Tensor], rate: float) -> None:
        self.params = list(params)
        self.rate = rate

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.params:
                if parameter.grad is not None:
                    parameter -= self.rate * parameter.grad

    def zero_grad(self) -> None:
        raise AssertionError("its own has other arguments than torch's: not to be called")


class Twin(Duck):
    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None


def test_an_optimizer_with_only_a_step(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(Duck, twins.rrefs, 0.1)
    twins.train(optimizer, Twin(twins.parameters, 0.1), dense_inputs(STEPS))
    assert optimizer.param_groups == [{"params": twins.rrefs}]
    assert optimizer.defaults == {}
    for what in (optimizer.state_dict, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})):
        with pytest.raises(Exception, match="Duck has none, or makes its own") as caught:
            what()
        assert {type(error) for error in caught.value.errors.values()} == {MisuseError}  # type: ignore[attr-defined]
    optimizer.param_groups[0]["rate"] = 0.2
    with pytest.raises(Exception, match="changing options of a parameter group needs an optimizer whose param_groups"):
        optimizer.step()


def test_zero_grad_of_an_optimizer_with_only_a_step(workers: InProcessCluster) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(Duck, [parameter], 0.1)
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is None
    gradient = parameter.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert gradient.tolist() == [0, 0]
    optimizer.zero_grad()
    assert parameter.grad is None


class OddlyNamed(torch.optim.SGD):
    def step(this, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def test_a_method_may_name_its_first_argument_freely(workers: InProcessCluster) -> None:
    check(OddlyNamed, dense_twins(), dense_inputs(STEPS), lr=0.1)


def scheduled(params: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer with its own scheduler, which wraps its step."""
    optimizer = torch.optim.SGD(params, lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def test_an_optimizer_with_its_own_scheduler(workers: InProcessCluster) -> None:
    check(scheduled, dense_twins(), dense_inputs(STEPS), lr=0.1)


def sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **options)


@pytest.mark.parametrize("make", [sgd, functools.partial(torch.optim.SGD, momentum=0.5)])
def test_a_factory_can_be_given_instead_of_a_class(workers: InProcessCluster, make: Any) -> None:
    check(make, dense_twins(), dense_inputs(STEPS), lr=0.1)


class MakesItsOwnGroups(torch.optim.SGD):
    def __init__(self, params: list[Tensor], lr: float) -> None:
        params = list(params)
        groups: list[dict[str, Any]] = [{"params": params[:1], "lr": 2 * lr}, {"params": params[1:]}]
        super().__init__(groups, lr=lr)


def test_an_optimizer_that_makes_its_own_groups_can_step(workers: InProcessCluster) -> None:
    twins = Twins([("worker1", nn.Linear, (4, 3))])
    optimizer = DistributedOptimizer(MakesItsOwnGroups, twins.rrefs, lr=0.1)
    twins.train(optimizer, MakesItsOwnGroups(twins.parameters, lr=0.1), dense_inputs(2))
    with pytest.raises(Exception, match="MakesItsOwnGroups has none, or makes its own"):
        optimizer.state_dict()


class ExtraState(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "extra": 1}


def test_state_that_cannot_be_put_together_is_refused(workers: InProcessCluster) -> None:
    optimizer = DistributedOptimizer(ExtraState, dense_twins().rrefs, lr=0.1)
    with pytest.raises(Exception, match=r"the state_dict\(\) of ExtraState must have 'state' and 'param_groups'"):
        optimizer.state_dict()


class NoStep:
    def __init__(self, params: Any) -> None:
        pass


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoStep, "NoStep has no step"),
        ("SGD", "must be a class such as torch.optim.SGD, not 'SGD'"),
        (list, "list has no step"),
        (len, r"len\(\) takes exactly one argument|has no step"),
        (lbfgs, "LBFGS needs arguments for its step"),
    ],
)
def test_classes_that_are_not_optimizers_are_refused(workers: InProcessCluster, make: Any, message: str) -> None:
    twins = Twins([("worker1", nn.Linear, (4, 3))])
    with pytest.raises(Exception, match=message):
        DistributedOptimizer(make, twins.rrefs)


def test_the_user_s_optimizer_can_be_reached(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.25)
    assert [rref.owner_name() for rref in optimizer.remote_optimizers] == ["worker0", "worker1", "worker2"]
    assert [run(rref, rate_of) for rref in optimizer.remote_optimizers] == [0.25] * 3


def rate_of(local: Any) -> float:
    return float(local.optimizer.param_groups[0]["lr"])
