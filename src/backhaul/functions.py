"""Decorators for functions that other workers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from backhaul.agent.execution import ASYNC_MARK

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a future of its result. No thread is held until the future completes.

    The caller gets the future's value, not the future. Chain with `Future.then`, or return
    what `rpc_async` returned::

        @rpc.functions.async_execution
        def add_then_double(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.value() * 2)

    Put the mark below ``@staticmethod`` or ``@classmethod``, never above. An ``async def`` function needs no mark.
    """
    setattr(fn, ASYNC_MARK, True)
    return fn
