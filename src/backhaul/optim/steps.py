"""Steps of optimizers without torch's wrapper around them, where that makes no difference.

Torch wraps the ``step`` of every class of optimizers, to run hooks and to show the step in profiles. When there are no
hooks and no profiler, that takes as long as a step over a few small parameters.
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
    """A ``step`` with torch's wrapper, for the class of an optimizer. The wrapper is used only when it is needed."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def quick(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (wrapped if _needs_wrapper(self) else step)(self, *args, **kwargs)

    quick.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it once more
    return cast("Step", quick)


def quickest(optimizer: Any) -> Callable[[], Any]:
    """The optimizer's ``step``, or what torch has wrapped for it."""
    step: Any = getattr(type(optimizer), "step", None)
    if (
        getattr(step, "__code__", None) is not _WRAPPER  # another's, around torch's or instead of it
        or "step" in vars(optimizer)  # a scheduler's, which counts
        or _needs_wrapper(optimizer)
    ):
        return optimizer.step  # type: ignore[no-any-return]
    return functools.partial(step.__wrapped__, optimizer)


def _needs_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _after_all
        or len(_before_all) > (step_hook in _before_all)  # it looks for steps without gradients: these here have some
        or torch.autograd._profiler_enabled()
    )
