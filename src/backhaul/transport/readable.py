"""Readable: waits for bytes on a socket, awake for a moment if they are likely to come at once.

A thread that sleeps in the kernel takes tens of microseconds to be woken, and then works with cold caches: in an
exchange of short messages that is most of the time. So who waits looks again and again for a while before it
goes to sleep, if the last time the bytes came within that while. That is only so in the middle of
an exchange: who is idle, or waits for something long, sleeps.

- One thread of a process does so at a time, and none where there is one processor only.
- It offers its processor to others each time it has looked.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

AWAKE_SECONDS = 0.0004
"""How long to stay awake. Longer than the peer takes for a short request, with its gradients."""

_looking = threading.Lock()


def may_stay_awake() -> bool:
    """Whether the peer can run while a thread of this process stays awake."""
    return len(os.sched_getaffinity(0)) > 1


class Readable:
    """For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        # Not recv: the kernel wakes who waits in it on a unix socket also when the peer has read what this side sent.
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._poll = poll.poll
        self._awake_seconds = AWAKE_SECONDS if may_stay_awake() else 0.0
        self._comes_soon = False

    def wait(self, timeout: float | None) -> bool:
        """True when there is something to read, or the connection has ended; False after ``timeout`` seconds."""
        start = time.perf_counter()
        if self._comes_soon and _looking.acquire(blocking=False):
            try:
                if self._look_until(start + self._awake_seconds):
                    return True
            finally:
                _looking.release()
        ready = bool(self._poll(None if timeout is None else timeout * 1000))
        self._comes_soon = time.perf_counter() - start < self._awake_seconds
        return ready

    def _look_until(self, end: float) -> bool:
        poll = self._poll
        while not poll(0):
            if time.perf_counter() >= end:
                return False
            os.sched_yield()
        return True
