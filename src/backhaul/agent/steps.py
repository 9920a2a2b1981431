"""Steps: runs the coroutines of one thread so that each keeps its own torch modes.

Torch keeps ``no_grad``, ``inference_mode``, autocast and ``with torch.device(…)`` for each thread, and one thread of a
worker runs the coroutines of all callers. A coroutine that awaits something inside ``torch.no_grad()`` would switch
gradients off for all other coroutines until it resumes. So the modes of a coroutine are saved after each of its steps,
and restored for the next step.

A task that a coroutine starts, such as for ``asyncio.gather``, begins with the coroutine's modes at that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack

_KINDS = ("cpu", "cuda")


class _Modes(NamedTuple):
    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]


def _here() -> _Modes:
    return _Modes(
        torch.is_grad_enabled(),
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS),
    )


def _change(now: _Modes, to: _Modes) -> None:
    if to.grad != now.grad:
        torch._C._set_grad_enabled(to.grad)
    if to.autocast != now.autocast:
        # The cache keeps copies of weights until the thread's last autocast ends, and others may change the weights.
        torch.clear_autocast_cache()
        for kind, on, dtype in to.autocast:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)


class Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps run in its own modes. Between the steps, the thread has its previous modes."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._modes = _here()
        self._aside: torch.inference_mode | None = None
        self._functions: list[Any] = []
        """Torch function modes, such as devices, the latest first."""

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._step(self._coroutine.close)

    def _step(self, go_on: Callable[..., Any], *args: Any) -> Any:
        outside = _here()
        if self._aside is not None:
            self._aside.__exit__(None, None, None)
            self._aside = None
        _change(_here(), self._modes)
        below = _len_torch_function_stack()
        while self._functions:
            _push_on_torch_function_stack(self._functions.pop())
        try:
            return go_on(*args)
        finally:
            while _len_torch_function_stack() > below:
                self._functions.append(_pop_torch_function_stack())
            self._modes = _here()
            if torch.is_inference_mode_enabled():
                self._aside = torch.inference_mode(False)
                self._aside.__enter__()
            _change(_here(), outside)

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # for tools that show what a task runs


def start_in_steps(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory for a loop: each task has its own modes."""
    if torch.is_inference_mode_enabled():
        coroutine = _infer(coroutine)
    return asyncio.Task(Steps(coroutine), loop=loop, **options)


async def _infer(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with torch.inference_mode():
        return await coroutine
