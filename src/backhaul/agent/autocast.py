"""Autocast: applies the caller's mixed precision on the worker that it calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from backhaul.errors import ProtocolError

Autocast = tuple[tuple[str, str], ...]
"""The device types for which autocast is on, each with the name of its dtype."""

_KINDS = ("cpu", "cuda")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on in the calling thread, for any device type. Faster than `here`."""


def here() -> Autocast:
    """The autocast state of the calling thread; ``()`` if autocast is off."""
    return tuple(
        (kind, str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
        for kind in _KINDS
        if torch.is_autocast_enabled(kind)
    )


@contextmanager
def entered(autocast: Autocast) -> Iterator[None]:
    """A context in which the calling thread uses this autocast state, for the device types that this machine has."""
    with ExitStack() as stack:
        for kind, dtype in autocast:
            if kind != "cuda" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(kind, _DTYPES[dtype]))
        yield


def under(autocast: Autocast, function: Any) -> Any:
    """A wrapper that runs a function, or a coroutine function, under an autocast state.

    Raises `ProtocolError` for an unknown device type or dtype.
    """
    for kind, dtype in autocast:
        if kind not in _KINDS or dtype not in _DTYPES:
            raise ProtocolError(f"autocast for {kind!r:.50} to {dtype!r:.50}")

    @functools.wraps(function, updated=())  # it may be a callable object, whose attributes must not be copied
    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(autocast):
            value = function(*args, **kwargs)
        return _finish(value, autocast) if type(value) is types.CoroutineType else value

    if isinstance(function, types.FunctionType | types.MethodType):
        vars(run).update(vars(function))
    return run


async def _finish(coroutine: Coroutine[Any, Any, Any], autocast: Autocast) -> Any:
    with entered(autocast):  # other coroutines of this thread are not affected: see `steps`
        return await coroutine
