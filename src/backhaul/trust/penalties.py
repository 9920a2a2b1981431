"""Penalties: a peer of a federation that repeatedly does wrong must wait.

A breach of the protocol ends the connection, and a new connection costs this worker more than it costs the peer. A
refused request costs this worker as much as a granted one. A correct peer causes neither, except now and then, when it
and this worker have different versions of the code.
"""

from __future__ import annotations

import threading


class Penalties:
    """Counts the wrongs of peers. ``burst`` wrongs at once are free, and after that one in each period of ``seconds``.

    Thread-safe. The caller passes the time.
    """

    def __init__(self, burst: int, seconds: float) -> None:
        self._seconds = seconds
        self._free = burst * seconds
        self._lock = threading.Lock()
        self._clear_at: dict[str, float] = {}  # the time at which all wrongs of a peer are forgiven

    def wrong(self, peer: str, now: float, times: int = 1) -> None:
        """Note that the peer has done wrong, ``times`` times at once."""
        with self._lock:
            self._clear_at[peer] = max(now, self._clear_at.get(peer, now)) + times * self._seconds

    def wait(self, peer: str, now: float) -> float:
        """The seconds that the peer must wait; 0 if it may go on."""
        clear_at = self._clear_at.get(peer)
        return 0.0 if clear_at is None else max(0.0, clear_at - now - self._free)

    def forgive(self) -> None:
        """Forget the wrongs of all peers."""
        with self._lock:
            self._clear_at.clear()
