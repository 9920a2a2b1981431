"""Futures with torch's behaviour."""

from __future__ import annotations

import threading
from typing import Any

import torch

from backhaul.agent.future import Future

_wait_all = torch.futures.wait_all


def wait_all(futures: list[Any]) -> list[Any]:
    """The values of all futures. Raises the first error, without waiting for the others.

    torch's own function does not see errors of futures that are set from Python, as ours are.
    """
    if not any(isinstance(future, Future) for future in futures):
        return _wait_all(futures)
    changed = threading.Semaphore(0)
    finished: list[Any] = []

    def note(future: Any) -> None:
        finished.append(future)
        changed.release()

    for future in futures:
        future.add_done_callback(note)
    for _ in futures:
        changed.acquire()
        finished.pop(0).wait()
    return [future.wait() for future in futures]


def callback_error(error: BaseException) -> BaseException:
    """The error as torch reports it: torch turns a callback's exception into a RuntimeError."""
    if isinstance(error, RuntimeError):
        return error
    made = RuntimeError(f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def adopt() -> None:
    """Have all futures behave so, from now on."""
    # Futures are torch's, which knows no worker.
    torch.futures.wait_all = wait_all
    Future.callback_error = staticmethod(callback_error)
