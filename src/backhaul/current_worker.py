"""The current worker: a context variable that falls back to the process's own worker.

The threads of a worker set the variable to their worker, so that one process can host many workers. This module is at
the bottom of the layers, so that every layer can import it. `Worker` is at the top, and is imported for types only.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from backhaul.errors import NotInitializedError

if TYPE_CHECKING:
    from backhaul.worker import Worker

# These two name the current worker, so they cannot belong to a worker.
variable: ContextVar[Worker | None] = ContextVar("backhaul_worker", default=None)
process_worker: Worker | None = None  # what `init_rpc` makes: one for the process, as in torch


def get_or_none() -> Worker | None:
    return variable.get() or process_worker


def get() -> Worker:
    """The current worker. Raises `NotInitializedError` if there is none."""
    found = variable.get() or process_worker
    if found is None:
        raise NotInitializedError("RPC has not been initialized. Call init_rpc first.")
    return found


def set_process_worker(worker: Worker | None) -> None:
    """Make ``worker`` the one that this process falls back to."""
    global process_worker
    process_worker = worker
