"""The current worker: a context variable that falls back to the process's own worker.

The threads of a worker set the variable to it, so that one process can host many. This module
is at the bottom, so that every layer can ask; `backhaul.worker` has the typed functions.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from backhaul.errors import NotInitializedError

variable: ContextVar[Any] = ContextVar("backhaul_worker", default=None)
process_worker: Any = None


def worker_or_none() -> Any:
    return variable.get() or process_worker


def worker() -> Any:
    """The current worker. Raises `NotInitializedError` if there is none."""
    found = variable.get() or process_worker
    if found is None:
        raise NotInitializedError("RPC has not been initialized. Call init_rpc first.")
    return found


def set_process_worker(worker: Any) -> None:
    """Make it the worker that this process falls back to."""
    global process_worker
    process_worker = worker
