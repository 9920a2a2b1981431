"""Steps skip torch's wrapper only where it would do nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from backhaul.optim.steps import hooked, quickest


def parameter() -> torch.Tensor:
    found = torch.nn.Parameter(torch.ones(2))
    found.grad = torch.ones(2)
    return found


def is_quick(optimizer: Any) -> bool:
    return isinstance(quickest(optimizer), functools.partial)


@pytest.fixture
def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], lr=0.5)


def test_a_step_without_hooks_is_quick(sgd: torch.optim.SGD) -> None:
    assert is_quick(sgd)
    quickest(sgd)()
    assert torch.equal(sgd.param_groups[0]["params"][0], torch.full((2,), 0.5))


@pytest.mark.parametrize(
    "register",
    [
        lambda sgd, hook: sgd.register_step_pre_hook(hook),
        lambda sgd, hook: sgd.register_step_post_hook(hook),
        lambda sgd, hook: register_optimizer_step_pre_hook(hook),
        lambda sgd, hook: register_optimizer_step_post_hook(hook),
    ],
)
def test_hooks_are_run(sgd: torch.optim.SGD, register: Any) -> None:
    seen: list[object] = []
    handle = register(sgd, lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        quickest(sgd)()
    finally:
        handle.remove()
    assert seen == [sgd]
    assert is_quick(sgd)


def test_a_profile_shows_the_step(sgd: torch.optim.SGD) -> None:
    with torch.autograd.profiler.profile() as profile:
        quickest(sgd)()
    assert any("Optimizer.step#SGD.step" in event.key for event in profile.key_averages())


def test_a_scheduler_counts_the_step(sgd: torch.optim.SGD) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    quickest(sgd)()
    scheduler.step()  # without this the scheduler would warn


class Counting(torch.optim.SGD):
    """Wraps torch's step in a step that looks like torch's."""

    count = 0

    @functools.wraps(torch.optim.SGD.step)
    def step(self, *args: Any) -> Any:
        Counting.count += 1
        return super().step(*args)


class Plain:
    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1


def test_steps_of_other_classes_are_left_unchanged() -> None:
    quickest(Counting([parameter()], lr=0.5))()
    assert Counting.count == 1
    plain = Plain()
    quickest(plain)()
    assert plain.count == 1


class Bare(torch.optim.Optimizer):
    @hooked
    def step(self, number: int = 0) -> int:
        return number


def test_our_class_gets_torch_s_wrapper_when_hooks_need_it() -> None:
    step = Bare.step
    optimizer: Any = Bare([parameter()], {})
    assert type(optimizer).step is step
    assert optimizer.step(3) == 3
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(args[1:]))
    assert optimizer.step(4) == 4
    assert seen == [(4,)]
