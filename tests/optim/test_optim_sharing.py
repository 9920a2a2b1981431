"""Several trainers, one parameter server: steps on common parameters take turns, other steps run in parallel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optim_models import assert_same
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.optim import DistributedOptimizer
from backhaul.optim.claims import claims
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster

WITHIN = 20.0

PARAMETERS: dict[str, nn.Parameter] = {}
"""The parameters of the server, worker2."""

BARRIER: list[threading.Barrier] = []
LOG: list[tuple[str, list[float]]] = []


@pytest.fixture(autouse=True)
def _parameters() -> Iterator[None]:
    PARAMETERS.clear()
    PARAMETERS.update({name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in "abc"})
    BARRIER[:] = [threading.Barrier(2)]
    LOG.clear()
    yield
    PARAMETERS.clear()


def reference_to(name: str) -> RRef[nn.Parameter]:
    return RRef(PARAMETERS[name])


def weighted(names: str, factor: float) -> Tensor:
    return torch.stack([PARAMETERS[name].sum() * factor for name in names]).sum()


def optimizer_over(names: str, make: Any, **options: Any) -> DistributedOptimizer:
    rrefs = [rpc.rpc_sync("worker2", reference_to, args=(name,)) for name in names]
    return DistributedOptimizer(make, rrefs, **options)


def step(optimizer: DistributedOptimizer, names: str, factor: float) -> None:
    """Step with a gradient of that value for all these parameters."""
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker2", weighted, args=(names, factor))])
        optimizer.step(context_id)


def trainers(workers: InProcessCluster, count: int, work: Callable[[int], None]) -> None:
    """Run the function as workers 0, 1, …, at the same time. Raises what one of them raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with workers[rank].as_current():
                work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Meeting(torch.optim.SGD):
    """An optimizer whose step waits a limited time for another one's step to get as far, and notes whether it did."""

    def __init__(self, params: Any, name: str, seconds: float) -> None:
        super().__init__(params, lr=1.0)
        self.name, self.seconds = name, seconds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        LOG.append((f"{self.name} starts", self.gradients()))
        try:
            BARRIER[0].wait(self.seconds)
            met = "met"
        except threading.BrokenBarrierError:
            met = "not met"
        LOG.append((f"{self.name} has {met}", self.gradients()))
        super().step()

    def gradients(self) -> list[float]:
        return [parameter.grad[0].item() for group in self.param_groups for parameter in group["params"]]


def meet(workers: InProcessCluster, first: str, second: str, seconds: float) -> list[tuple[str, list[float]]]:
    """Let two trainers step these parameters at the same time."""

    def train(rank: int) -> None:
        name, names = (("first", first), ("second", second))[rank]
        step(optimizer_over(names, Meeting, name=name, seconds=seconds), names, 1.0 + rank)

    trainers(workers, 2, train)
    return LOG


def test_steps_on_unrelated_parameters_run_at_the_same_time(workers: InProcessCluster) -> None:
    log = meet(workers, "a", "b", WITHIN)
    assert sorted(what for what, _ in log) == ["first has met", "first starts", "second has met", "second starts"]


def test_steps_on_common_parameters_take_turns(workers: InProcessCluster) -> None:
    """Each step has its own gradient from its beginning to its end."""
    log = meet(workers, "ab", "bc", 0.3)
    turns = [("first", [1.0, 1.0]), ("second", [2.0, 2.0])]
    expected = [
        [(f"{name} {what}", gradients) for name, gradients in order for what in ("starts", "has not met")]
        for order in (turns, turns[::-1])
    ]
    assert log in expected
    assert PARAMETERS["a"].tolist() == [0, 0]
    assert PARAMETERS["b"].tolist() == [-2, -2]
    assert PARAMETERS["c"].tolist() == [-1, -1]
    assert all(parameter.grad is None for parameter in PARAMETERS.values())


class Folding(torch.optim.Optimizer):
    """An optimizer whose steps do not commute, so the result shows their order."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            value = parameter.clone()
            threading.Event().wait(0.001)
            parameter.copy_(value * 0.5 + parameter.grad)


def test_the_result_is_that_of_some_serial_order(workers: InProcessCluster) -> None:
    steps, factors = 4, (1.0, 10.0)

    def train(rank: int) -> None:
        optimizer = optimizer_over("ab", Folding)
        for number in range(steps):
            step(optimizer, "ab", factors[rank] + number)

    trainers(workers, 2, train)
    possible = set()
    for mine in itertools.combinations(range(2 * steps), steps):
        value, numbers = 1.0, [0, 0]
        for turn in range(2 * steps):
            rank = 0 if turn in mine else 1
            value = value * 0.5 + factors[rank] + numbers[rank]
            numbers[rank] += 1
        possible.add(value)
    assert PARAMETERS["a"][0].item() in possible
    assert_same(PARAMETERS["a"].detach(), PARAMETERS["b"].detach())


def test_threads_of_one_trainer_share_an_optimizer(workers: InProcessCluster) -> None:
    optimizer = optimizer_over("abc", torch.optim.SGD, lr=1.0)

    def train(rank: int) -> None:
        with workers[0].as_current():
            for _ in range(10):
                step(optimizer, "abc", 1.0)

    trainers(workers, 3, train)
    assert PARAMETERS["b"].tolist() == [1 - 30, 1 - 30]


class Nested(torch.optim.SGD):
    """A hook of its step steps another optimizer over the same parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.inner = DistributedOptimizer(
            torch.optim.SGD, [each for g in self.param_groups for each in g["params"]], lr=lr
        )
        self.register_step_post_hook(lambda *_: self.inner.step())


def test_a_step_within_a_step(workers: InProcessCluster) -> None:
    optimizer = optimizer_over("a", Nested, lr=1.0)
    step(optimizer, "a", 1.0)
    assert PARAMETERS["a"].tolist() == [-1, -1]
    assert len(claims) == 0


def test_many_trainers(workers: InProcessCluster) -> None:
    """Two trainers and the server itself step parameters, some of which are common."""
    names = ["ab", "bc", "ac"]
    steps = 15

    def train(rank: int) -> None:
        optimizer = optimizer_over(names[rank], torch.optim.SGD, lr=1.0)
        for _ in range(steps):
            step(optimizer, names[rank], 1.0)
            optimizer.zero_grad()
            optimizer.state_dict()

    trainers(workers, 3, train)
    for parameter in PARAMETERS.values():
        assert parameter.tolist() == [1 - 2 * steps] * 2
