"""Optimizer steps without torch's wrapper, where the wrapper would do nothing.

Torch wraps the ``step`` of every optimizer class, to run hooks and to show the step in profiles. Without hooks and
without a profiler, the wrapper takes as long as a step of a few small parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.optim import optimizer as _torch

from backhaul.autograd.mistakes import step_hook

Step = TypeVar("Step", bound=Callable[..., Any])

_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
_before_all: Any = _torch._global_optimizer_pre_hooks
_after_all: Any = _torch._global_optimizer_post_hooks


def hooked(step: Step) -> Step:
    """A ``step`` for an optimizer class that goes through torch's wrapper only when the wrapper is needed."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def quick(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (wrapped if _needs_wrapper(self) else step)(self, *args, **kwargs)

    quick.hooked = True  # type: ignore[attr-defined]  # otherwise torch would wrap it again
    return cast("Step", quick)


def quickest(optimizer: Any) -> Callable[[], Any]:
    """The optimizer's ``step``, or the function inside torch's wrapper if the wrapper is not needed."""
    step: Any = getattr(type(optimizer), "step", None)
    if (
        getattr(step, "__code__", None) is not _WRAPPER  # other code wraps or replaces torch's wrapper
        or "step" in vars(optimizer)  # a scheduler's wrapper, which counts steps
        or _needs_wrapper(optimizer)
    ):
        return optimizer.step  # type: ignore[no-any-return]
    return functools.partial(step.__wrapped__, optimizer)


def _needs_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _after_all
        or len(_before_all)
        > (step_hook in _before_all)  # step_hook finds steps without gradients; these steps have some
        or torch.autograd._profiler_enabled()
    )
