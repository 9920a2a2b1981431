"""Failures: errors say which workers have stepped, and a failed construction leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_models import (
    Twins,
    assert_same,
    dense_inputs,
    dense_twins,
    get_data,
    linear,
    parameters_of,
    run,
    set_data,
    set_grad,
)
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import PartialError, RpcTimeoutError, WorkerLostError
from backhaul.optim import DistributedOptimizer
from backhaul.optim.claims import claims
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster
from crew import Crew

FAILING: set[str] = set()
"""The workers of this process on which `Fragile` fails."""


@pytest.fixture(autouse=True)
def _nobody_fails() -> None:
    FAILING.clear()


class Fragile(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        name = rpc.get_worker_info().name
        if name in FAILING:
            raise ArithmeticError(f"no step on {name}")
        super().step()


def backward(twins: Twins, context_id: int) -> None:
    dist_autograd.backward(context_id, [twins.loss(dense_inputs(1)[0])])


@pytest.mark.parametrize(
    "failing", [{"worker0"}, {"worker1"}, {"worker0", "worker2"}, {"worker0", "worker1", "worker2"}]
)
def test_an_error_names_the_workers_that_have_stepped(workers: InProcessCluster, failing: set[str]) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(Fragile, twins.rrefs, lr=0.1)
    for rref, parameter in zip(twins.rrefs, twins.parameters, strict=True):
        run(rref, set_grad, torch.full_like(parameter, 3))
    before = [run(rref, get_data) for rref in twins.rrefs]
    FAILING.update(failing)
    optimizer.param_groups[0]["lr"] = 0.5
    with dist_autograd.context() as context_id:
        backward(twins, context_id)
        with pytest.raises(PartialError) as caught:
            optimizer.step(context_id)
        error = caught.value
        others = {"worker0", "worker1", "worker2"} - failing
        assert set(error.done) == others
        assert {name: str(each) for name, each in error.errors.items()} == {
            name: f"no step on {name}" for name in failing
        }
        assert all(type(each) is ArithmeticError for each in error.errors.values())
        assert f"the optimizer step failed on {len(failing)} of 3 workers" in str(error)
        assert type(error.__cause__) is ArithmeticError
        for rref, value, gradient in zip(twins.rrefs, before, twins.gradients(), strict=True):
            stepped = not torch.equal(run(rref, get_data), value)
            assert stepped == (rref.owner_name() in others)
            assert gradient is not None
            assert gradient.eq(3).all(), "its .grad is not as before"
        assert len(claims) == 0

        FAILING.clear()  # the change still reaches the workers that failed
        for rref, value in zip(twins.rrefs, before, strict=True):
            run(rref, set_data, value)
        optimizer.step(context_id)
    reference = torch.optim.SGD(twins.parameters, lr=0.5)
    twins.backward_alone(dense_inputs(1)[0])
    reference.step()
    twins.assert_same_parameters()
    error = caught = None  # type: ignore[assignment]


class FragileToMake(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        if rpc.get_worker_info().name in FAILING:
            raise ArithmeticError("cannot be made")


def count_values(workers: InProcessCluster) -> list[int]:
    return [worker.references.counts()["values"] for worker in workers]


def await_values(workers: InProcessCluster, expected: list[int]) -> None:
    deadline = time.monotonic() + 10
    while count_values(workers) != expected:
        assert time.monotonic() < deadline, f"{count_values(workers)} values, not {expected}"
        threading.Event().wait(0.002)


@pytest.mark.parametrize("failing", [{"worker0"}, {"worker1"}, {"worker0", "worker1", "worker2"}])
def test_a_failed_constructor_leaves_nothing_on_any_worker(workers: InProcessCluster, failing: set[str]) -> None:
    """Not even while the error is kept alive."""
    twins = dense_twins()
    FAILING.update(failing)
    gc.collect()
    before = count_values(workers)
    with pytest.raises(PartialError, match="making the optimizer FragileToMake failed") as caught:
        DistributedOptimizer(FragileToMake, twins.rrefs, lr=0.1)
    assert set(caught.value.errors) == failing
    await_values(workers, before)
    FAILING.clear()
    optimizer = DistributedOptimizer(FragileToMake, twins.rrefs, lr=0.1)
    twins.train(optimizer, torch.optim.SGD(twins.parameters, lr=0.1), dense_inputs(1))
    with pytest.raises(PartialError, match="Invalid learning rate: -1"):
        DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=-1)
    caught = None  # type: ignore[assignment]


def no_parameter() -> nn.Parameter:
    raise ArithmeticError("no parameter today")


def test_a_parameter_that_could_not_be_made(workers: InProcessCluster) -> None:
    with pytest.raises(PartialError, match="no parameter today"):
        DistributedOptimizer(torch.optim.SGD, [rpc.remote("worker1", no_parameter)])


def test_a_class_that_cannot_be_found_there(workers: InProcessCluster) -> None:
    class Local(torch.optim.SGD):
        pass

    twins = dense_twins()
    with pytest.raises(PartialError, match="is local to a function: define it at module level"):
        DistributedOptimizer(Local, twins.rrefs[2:], lr=0.1)


def test_a_group_is_taken_back_though_a_worker_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The group is taken back where possible, and the log names the lost worker."""
    with InProcessCluster(3) as workers, workers[0].as_current():
        twins = dense_twins()
        optimizer = DistributedOptimizer(torch.optim.SGD, [twins.rrefs[0], twins.rrefs[2], twins.rrefs[4]], lr=0.1)
        workers[2].shutdown(graceful=False)
        with pytest.raises(PartialError) as caught:
            optimizer.add_param_group({"params": [twins.rrefs[1], twins.rrefs[3], twins.rrefs[5]]})
        assert caught.value.done == ("worker0", "worker1")
        assert "taking a parameter group back failed on 1 of 3 workers" in caplog.text
        for rref in optimizer.remote_optimizers[:2]:
            assert run(rref, count_groups) == 1
        assert len(optimizer.param_groups) == 1


def count_groups(local: Any) -> int:
    return len(local.optimizer.param_groups)


# Real processes.


class Deadly(torch.optim.SGD):
    """Kills its worker in the step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name in _victims:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


class DeadlyToMake(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        if rpc.get_worker_info().name == "worker2":
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(params, lr=lr)


_victims: set[str] = set()


def mark_victim(name: str) -> None:
    _victims.add(name)


def make_model() -> list[RRef[Any]]:
    layers = [rpc.remote(f"worker{rank}", linear, args=(4, 4)) for rank in range(3)]
    return [rref for layer in layers for rref in rpc.rpc_sync(layer.owner(), parameters_of, args=(layer,))]


def train_between_processes() -> int:
    """Adam's steps over three processes equal those in one."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs, lr=0.1)
    reference = torch.optim.Adam(twins.parameters, lr=0.1)
    scheduler, its = (torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, reference))
    for x in dense_inputs(5):
        twins.train(optimizer, reference, [x])
        scheduler.step()
        its.step()
    assert_same(optimizer.state_dict(), reference.state_dict())
    return len(optimizer.remote_optimizers)


def step_and_tell() -> tuple[str, tuple[str, ...], dict[str, tuple[str, str]]]:
    """Step until it fails. Returns the error's text, the workers that have stepped, and the errors by worker."""
    rrefs = make_model()
    optimizer = DistributedOptimizer(Deadly, rrefs, lr=0.1)
    optimizer.step()
    rpc.rpc_sync("worker1", mark_victim, args=("worker1",))
    try:
        optimizer.step()
    except PartialError as error:
        told = {name: (type(each).__name__, getattr(each, "worker", "")) for name, each in error.errors.items()}
        return str(error), error.done, told
    raise AssertionError("it goes on to step")


def step_again_and_tell() -> tuple[tuple[str, ...], list[str]]:
    """The remaining workers go on with the remaining layers."""
    rrefs = [rpc.remote(name, nn.Parameter, args=(torch.ones(2),)) for name in ("worker0", "worker2")]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    return tuple(worker.name for worker in optimizer._locals), sorted(map(str, optimizer.state_dict()))


def make_and_tell() -> tuple[tuple[str, ...], list[str]]:
    rref = rpc.remote("worker2", nn.Parameter, args=(torch.ones(2),))
    rref.to_here()
    try:
        DistributedOptimizer(DeadlyToMake, [rref, nn.Parameter(torch.ones(1))], lr=0.1)
    except PartialError as error:
        return error.done, [type(each).__name__ for each in error.errors.values()]
    raise AssertionError("it was made")


def test_workers_that_are_killed() -> None:
    """Workers are killed while they step, and while an optimizer is made on them."""
    with Crew(3) as crew:
        assert crew[0].run(train_between_processes) == 3
        text, done, errors = crew[0].run(step_and_tell)
        assert done == ("worker0", "worker2")
        assert errors == {"worker1": ("WorkerLostError", "worker1")}
        assert "worker 'worker1' failed, but may have done its part: WorkerLostError" in text
        assert "done on 'worker0', 'worker2'" in text
        assert crew[0].run(step_again_and_tell) == (("worker0", "worker2"), ["param_groups", "state"])
        assert crew[0].run(make_and_tell) == (("worker0",), ["WorkerLostError"])


def test_a_partial_error_says_whether_the_step_may_have_been_done() -> None:
    assert "may have done" in str(PartialError("the step", (), {"worker1": RpcTimeoutError("late")}))
    assert "may have done" in str(PartialError("the step", (), {"worker1": WorkerLostError("dead", "worker1")}))
    assert "may have done" not in str(PartialError("the step", (), {"worker1": ValueError("wrong")}))
