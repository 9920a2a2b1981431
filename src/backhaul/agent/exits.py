"""Exits: a process that ends waits for the calls of torch's store that its threads are making.

At the end of a process, Python unwinds the stacks of daemon threads that want the interpreter back. If torch's code is
on such a stack, the process aborts: "terminate called without an active exception", SIGABRT.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def awaited_at_exit(seconds: float) -> Iterator[threading.Event]:
    """A context whose calls a process that exits waits for, at most for ``seconds``.

    The event is set at the end of the context. A thread that makes the calls on behalf of another one may set it.
    """
    over = threading.Event()
    atexit.register(over.wait, seconds)
    try:
        yield over
    finally:
        over.set()
        atexit.unregister(over.wait)
