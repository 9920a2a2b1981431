"""Completions: a queue of futures to complete when the thread that read the reply must not do it.

Completing a future may run user code (`then`, `collect_all`), and that code may block. So a thread that reads for
others, above all the watch thread, only queues the completion. One pool thread works off the queue in order. If one
completion takes long while others wait, a tick of the watch thread gives the queue to another thread: running the queue
is a `role`, like leading a line. So a burst of callbacks needs only one thread, and a callback that waits for the
future of another callback gets its value.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backhaul.agent.observing import Observers, Queued, Starts, Stops
from backhaul.agent.pool import Pool
from backhaul.agent.role import Role

if TYPE_CHECKING:
    from backhaul.agent.watch import Watch

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Completions:
    """A queue of jobs. One thread runs them in order; if a job blocks, another thread continues. Thread-safe."""

    def __init__(self, pool: Pool, watch: Watch, observers: Observers) -> None:
        self._pool = pool
        self._observers = observers
        self._watch = watch
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._jobs: deque[Job] = deque()
        self._role: Role[Any] = Role()
        self._seen_turn = 0

    def add(self, job: Job) -> None:
        if self._observers:
            self._observers.emit(Queued())
        with self._lock:
            self._jobs.append(job)
            token = self._role.take()
        if not token:
            return
        self._start(token)
        if self._watch.asleep:
            self._watch.wake()

    def tick(self) -> bool:
        """Give the queue to another thread if a job holds it up. False if no job is queued or running."""
        role = self._role
        with self._lock:
            stuck = self._jobs and role.turn == self._seen_turn
            token = role.take() or role.pass_on(role.turn) if stuck else 0
            self._seen_turn = role.turn
            if self._jobs:
                self._watch.hurry()
            active = bool(self._jobs) or not role.free
        if token:
            self._start(token)
        return active

    def _start(self, token: int) -> None:
        try:
            self._pool.run(lambda: self._run(token))
        except Exception:
            # No thread is available. Free the queue, so that the next tick tries again.
            _log.warning("no thread can be started to complete futures", exc_info=True)
            with self._lock:
                self._role.release(token)

    def _run(self, token: int) -> None:
        while True:
            with self._lock:
                self._role.finish(token)
                if not self._role.holds(token):
                    return
                if not self._jobs:
                    self._role.release(token)
                    return
                job = self._jobs.popleft()
                self._role.begin()
            if self._observers:
                self._observers.emit(Starts())
            try:
                job()
            except Exception:
                _log.exception("a completion failed")
            if self._observers:
                self._observers.emit(Stops())
            del job
