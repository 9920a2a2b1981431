"""Penalties: a peer of a federation that does wrong again and again has to wait.

A breach of the protocol ends the connection, and a new one costs this worker more than it costs the peer. A request
that is refused costs this worker as much as one that is not. A correct peer does neither; one that is out of step with
this worker, after an update of one of them, does so now and then.
"""

from __future__ import annotations

import threading


class Penalties:
    """``burst`` wrongs at once are free, and then one in so many ``seconds``. Thread-safe; the caller has the clock."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._seconds = seconds
        self._free = burst * seconds
        self._lock = threading.Lock()
        self._clear_at: dict[str, float] = {}  # when all that a peer has done is forgiven

    def wrong(self, peer: str, now: float, times: int = 1) -> None:
        """That peer has done wrong, so many times at once."""
        with self._lock:
            self._clear_at[peer] = max(now, self._clear_at.get(peer, now)) + times * self._seconds

    def wait(self, peer: str, now: float) -> float:
        """How many seconds that peer has to wait; 0 if it may go on."""
        clear_at = self._clear_at.get(peer)
        return 0.0 if clear_at is None else max(0.0, clear_at - now - self._free)

    def forgive(self) -> None:
        """Forget all of it."""
        with self._lock:
            self._clear_at.clear()
