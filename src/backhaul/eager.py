"""Eager: what ``torch.compile`` leaves to the interpreter.

A call to another worker cannot be part of a compiled graph. `eager` marks the functions at which the compiler ends one
graph, lets the interpreter run the function and everything that it calls, and begins the next graph after it.

Torch's own ``torch.compiler.disable`` does the same. It is not used here because it imports the compiler, which takes
seconds, and puts a wrapper around every call. The marks below are those that its wrapper has, and cost nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch._C._dynamo import compiled_autograd as _compiled

from backhaul.compat import never_compile

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING = nullcontext()
_REASON = "it calls other workers, which a graph cannot"


def eager(function: F) -> F:
    """Have ``torch.compile`` break its graph at calls of this function, and compile nothing inside of it."""
    marked: Any = never_compile(function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    marked._torchdynamo_disable_recursive = True
    left: F = marked
    return left


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Inside, torch's engine runs a backward pass itself although compiled autograd is on.

    A distributed pass stops at gates and goes on when gradients come: there is no graph to compile beforehand.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    # Another thread may be importing it.
    is_on = compiled is not None and getattr(compiled, "compiled_autograd_enabled", False)
    return _off.while_inside(compiled) if is_on else _NOTHING


class _Off:
    """Compiled autograd is off while a thread is inside. Torch has one compiler for all threads.

    Torch's own function for that would have the first thread that leaves switch it on under the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: Any = None

    @contextmanager
    def while_inside(self, compiled: Any) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._before = _compiled.set_autograd_compiler(None, False)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and compiled.compiled_autograd_enabled:  # or the user has switched it off meanwhile
                    _compiled.set_autograd_compiler(*self._before)


# Torch has one compiler for autograd in a process.
_off = _Off()
