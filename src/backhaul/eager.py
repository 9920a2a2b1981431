"""Eager: what ``torch.compile`` leaves to the interpreter.

A call to another worker cannot be part of a compiled graph. `eager` marks the functions at which the compiler ends one
graph, lets the interpreter run the function and everything that it calls, and begins the next graph after it.

Torch's own ``torch.compiler.disable`` does the same. It is not used here because it imports the compiler, which takes
seconds, and puts a wrapper around every call. The marks below are those that its wrapper has, and cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch._C._dynamo import compiled_autograd as _compiled
from torch._C._dynamo import eval_frame as _frames

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING = nullcontext()
_REASON = "it calls other workers, which a graph cannot"


def eager(function: F) -> F:
    """Have ``torch.compile`` break its graph at calls of this function, and compile nothing inside of it."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    marked._torchdynamo_disable_recursive = True
    _skip(marked.__code__)
    return function


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Inside, torch's engine runs a backward pass itself although compiled autograd is on.

    A distributed pass stops at gates and goes on when gradients come: there is no graph to compile beforehand.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return _compiler_off() if compiled is not None and compiled.compiled_autograd_enabled else _NOTHING


@contextmanager
def _compiler_off() -> Iterator[None]:
    """For this thread alone. Torch's own function for that changes a variable of all threads."""
    before = _compiled.set_autograd_compiler(None, False)
    try:
        yield
    finally:
        _compiled.set_autograd_compiler(*before)


def _skip(code: Any) -> None:
    strategy = getattr(_frames, "_FrameExecStrategy", None)
    if strategy is None:  # before torch 2.7
        _frames.skip_code(code)  # type: ignore[attr-defined]
        return
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(code, strategy(skip, skip))
