"""Eager: marks for functions that ``torch.compile`` must leave to the interpreter.

A call to another worker cannot be part of a compiled graph. At a function marked with `eager`, the compiler ends its
graph, lets the interpreter run the function and everything that the function calls, and begins the next graph after it.

``torch.compiler.disable`` does the same. It is not used here because it imports the compiler, which takes
seconds, and wraps every call. `eager` sets the same attributes that this wrapper has, at no cost.
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
_REASON = "it calls other workers, which a compiled graph cannot do"


def eager(function: F) -> F:
    """Make ``torch.compile`` break its graph at calls of this function, and compile nothing inside."""
    marked: Any = never_compile(function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    marked._torchdynamo_disable_recursive = True
    left: F = marked
    return left


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """A context in which torch's engine runs backward passes itself, even if compiled autograd is on.

    A distributed pass stops at gates and continues when gradients arrive, so there is no graph to compile beforehand.
    """
    return _off.while_inside(sys.modules["torch._dynamo.compiled_autograd"]) if compiles_autograd() else _NOTHING


def compiles_autograd() -> bool:
    """Whether compiled autograd is on."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    # getattr, because another thread may be importing the module.
    return compiled is not None and getattr(compiled, "compiled_autograd_enabled", False)


class _Off:
    """Switches compiled autograd off while any thread is inside. Torch has one compiler for all threads.

    With torch's own function, the first thread that leaves would switch it on while others are still inside.
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
                # The user may have switched compiled autograd off in the meantime.
                if not self._inside and compiled.compiled_autograd_enabled:
                    _compiled.set_autograd_compiler(*self._before)


# Torch has one compiler for autograd in a process.
_off = _Off()
