"""Waiting for a condition about a worker that the worker's own activity brings about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backhaul.agent.observing import Event
from backhaul.worker import Worker

_LOOK_AGAIN = 0.5  # some events are emitted a moment before they are true


def await_events(worker: Worker, holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``holds()``, which is checked after each event of this worker. False at the timeout."""
    happened = threading.Event()

    def observe(event: Event) -> None:
        happened.set()

    deadline = time.monotonic() + seconds
    end = worker.agent.observers.add(observe)
    try:
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            happened.wait(min(left, _LOOK_AGAIN))
            happened.clear()
        return True
    finally:
        end()
