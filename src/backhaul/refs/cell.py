"""Cell: holds a value on its owner, from before the value exists until no worker can reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from backhaul.errors import fresh, kept


class Cell:
    """A value, or the error of making it, or neither yet. The first `set` or `fail` counts. Thread-safe."""

    __slots__ = ("_callbacks", "_error", "_lock", "_ready", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def ready(self) -> bool:
        return self._ready

    def set(self, value: Any) -> None:
        self._settle(value, None)

    def fail(self, error: BaseException, worker: str) -> None:
        """Note that making the value failed on that worker."""
        self._settle(None, kept(error, worker))

    @property
    def error(self) -> BaseException | None:
        """A fresh copy of the error (`errors.fresh`), or None. Valid only when ready."""
        return None if self._error is None else fresh(self._error)

    def get(self) -> Any:
        """The value. Raises the error if making it failed. Valid only when ready."""
        if self._error is not None:
            raise fresh(self._error)
        return self._value

    def when_ready(self, callback: Callable[[], None]) -> bool:
        """True if the cell is ready. Otherwise the thread that makes it ready calls ``callback``."""
        with self._lock:
            if not self._ready:
                self._callbacks.append(callback)
            return self._ready

    def wait(self, deadline: float) -> bool:
        """Wait until the cell is ready. True if it is, False at the deadline."""
        event = threading.Event()
        if self.when_ready(event.set):
            return True
        return event.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))

    def _settle(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._ready:
                return
            self._value, self._error, self._ready = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
