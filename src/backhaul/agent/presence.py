"""Presence: tells the user which workers are lost and which have joined.

A worker is lost when it is suspected, over, or has left, or when the launcher says that it has ended. A worker has
joined when it is new to the group, or when it, or another process of its name, answers after it was lost. So for each
worker the two events alternate. The callbacks run one after the other, in the order of the events, on a thread of this
worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from backhaul.errors import MisuseError, WorkerLostError
from backhaul.ids import WorkerInfo

_log = logging.getLogger(__name__)

OnLost = Callable[[WorkerInfo, WorkerLostError], Any]
OnJoined = Callable[[WorkerInfo], Any]


class Subscription:
    """A registered callback. Call `remove` to end it, or use it in a ``with`` block."""

    def __init__(self, callbacks: list[Any], callback: Any) -> None:
        self._callbacks = callbacks
        self._callback = callback
        callbacks.append(callback)

    def remove(self) -> None:
        """Stop the callback. It may still run for events that happened before. A second call does nothing."""
        callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            callbacks.remove(self._callback)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Presence:
    """Which workers are lost, and the callbacks for changes. Thread-safe."""

    def __init__(self, later: Callable[[Callable[[], None]], None], known: set[int]) -> None:
        """``later`` runs jobs in order on a thread of this worker. ``known`` are the ranks of the current members."""
        self._later = later
        self._known = known
        self._lock = threading.Lock()
        self._lost: dict[int, WorkerLostError] = {}
        self._on_lost: list[OnLost] = []
        self._on_joined: list[OnJoined] = []
        self.changed = threading.Condition()
        """Notified whenever a worker has joined, for threads that wait for a worker."""

    def on_lost(self, callback: OnLost) -> Subscription:
        return Subscription(self._on_lost, _checked(callback))

    def on_joined(self, callback: OnJoined) -> Subscription:
        return Subscription(self._on_joined, _checked(callback))

    def lost(self, worker: WorkerInfo, cause: WorkerLostError) -> None:
        """Note that a worker is lost. Does nothing if that is known."""
        with self._lock:
            if worker.id in self._lost:
                return
            self._lost[worker.id] = cause
        if self._on_lost:
            self._later(lambda: _run(list(self._on_lost), worker, cause))

    def came(self, worker: WorkerInfo) -> None:
        """Note that a worker is present. It has joined if it is new to the group or was lost."""
        with self._lock:
            if worker.id in self._known and worker.id not in self._lost:
                return
            self._lost.pop(worker.id, None)
            self._known.add(worker.id)
        with self.changed:
            self.changed.notify_all()
        if self._on_joined:
            self._later(lambda: _run(list(self._on_joined), worker))


def _checked(callback: Any) -> Any:
    if not callable(callback):
        raise MisuseError(f"a callback is a function, not {callback!r}")
    return callback


def _run(callbacks: list[Any], *args: Any) -> None:
    for callback in callbacks:
        try:
            callback(*args)
        except Exception:
            name = getattr(callback, "__qualname__", callback)
            _log.exception("the callback %s for worker %r failed", name, args[0].name)
