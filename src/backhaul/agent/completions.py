"""Completions: futures are completed here when the thread that read their reply should not do it.

User code may hang on a future (`then`, `collect_all`), and may block. So a thread that reads for
others, and the watch thread above all, only queues the completion. One thread of the pool works
the queue off in order; if one completion takes long while others wait, a tick of the watch thread gives
the queue to another thread, as `serving` does with a lead. So a burst of callbacks needs one thread,
and a callback that waits for another one's future does not wait for ever.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul.agent.pool import Pool

if TYPE_CHECKING:
    from backhaul.agent.watch import Watch

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Completions:
    """A queue of jobs that are run in order, by one thread unless one blocks. Thread-safe."""

    def __init__(self, pool: Pool, watch: Watch) -> None:
        self._pool = pool
        self._watch = watch
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._jobs: deque[Job] = deque()
        self._generation = 0  # tells a runner whether it still has the queue
        self._active = False
        self._turn = 0
        self._seen_turn = 0

    def add(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._active:
                return
            self._active = True
            generation = self._generation
        self._pool.run(lambda: self._run(generation))
        if self._watch.asleep:
            self._watch.wake()

    def tick(self) -> bool:
        """Give the queue to another thread if one job holds it up. False if there is none."""
        with self._lock:
            stuck = self._active and bool(self._jobs) and self._turn == self._seen_turn
            self._seen_turn = self._turn
            if stuck:
                self._generation += 1
                generation = self._generation
            active = self._active
            if self._jobs:
                self._watch.hurry()
        if stuck:
            self._pool.run(lambda: self._run(generation))
        return active

    def _run(self, generation: int) -> None:
        while True:
            with self._lock:
                if self._generation != generation:
                    return
                if not self._jobs:
                    self._active = False
                    return
                job = self._jobs.popleft()
                self._turn += 1
            try:
                job()
            except Exception:
                _log.exception("a completion failed")
            del job
