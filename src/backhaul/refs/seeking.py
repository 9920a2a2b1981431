"""Seeking: looks for the processes that have replaced dead workers.

A worker may get a reference to a value of a process that it has not met, while all it knows of that process is that an
earlier one with the same rank is dead. The reference can register only at the process itself. So this worker connects
to it, and tries again until that works or the option ``lost_after`` says that the process counts as dead.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from backhaul.agent.agent import Agent
from backhaul.errors import BackhaulError
from backhaul.ids import WorkerInfo

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0

Sought = tuple[int, int]
"""The rank and the life of a process."""


class Seeking:
    """See the module's docstring. Thread-safe."""

    def __init__(
        self, agent: Agent, info: Callable[[int], WorkerInfo], on_given_up: Callable[[int, int], None]
    ) -> None:
        """``on_given_up`` gets the rank and the life of a process that counts as dead."""
        self._agent = agent
        self._info = info
        self._on_given_up = on_given_up
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._sought: dict[Sought, threading.Timer | None] = {}  # each with the timer of its next attempt
        self._closed = False

    def seek(self, worker: int, life: int) -> None:
        """Connect to a process. Returns at once; `Agent.on_connected` is called when there is a connection."""
        sought = worker, life
        with self._lock:
            if self._closed or sought in self._sought:
                return
            self._sought[sought] = None
        self._try(sought, time.monotonic(), _FIRST_PAUSE)

    def _try(self, sought: Sought, since: float, pause: float) -> None:
        try:
            self._agent.pool.run(lambda: self._look(sought, since, pause))
        except RuntimeError as error:  # no thread is available
            _log.info("rank %s will be looked for later: %s", sought[0], error)
            self._try_later(sought, since, pause)

    def _look(self, sought: Sought, since: float, pause: float) -> None:
        options = self._agent.options
        try:
            self._agent.reach(self._info(sought[0]), options.probe_timeout)
        except (BackhaulError, OSError) as error:
            lost_after = math.inf if options.lost_after is None else options.lost_after
            if time.monotonic() - since < lost_after:
                _log.debug("= the process that has replaced rank %s cannot be reached: %s", sought[0], error)
                self._try_later(sought, since, pause)
                return
            self._on_given_up(*sought)
        with self._lock:
            self._sought.pop(sought, None)

    def _try_later(self, sought: Sought, since: float, pause: float) -> None:
        timer = threading.Timer(pause, self._try, (sought, since, min(2 * pause, _LONGEST_PAUSE)))
        timer.daemon = True
        with self._lock:
            if self._closed:
                return
            self._sought[sought] = timer
            timer.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            timers = [timer for timer in self._sought.values() if timer is not None]
            self._sought.clear()
        for timer in timers:
            timer.cancel()
