"""Readable: waits for bytes on a socket, awake for a moment if they are likely to come at once.

A thread that sleeps in the kernel takes tens of microseconds to be woken, and then works with cold caches: in an
exchange of short messages that is most of the time. So who waits looks again and again for a while before it
goes to sleep, if the last time the bytes came within that while. That is only so in the middle of
an exchange: who is idle, or waits for something long, sleeps.

- One thread of a process does so at a time, and none where there is one processor only.
- It offers its processor to others each time it has looked. If somebody takes it, there are more who want to work than
  processors: then all threads of this process sleep at once, for a while that gets longer each time.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable

_TAKEN_SECONDS = 0.0006
"""An offer that comes back later than this has been taken: a hiccup of the machine is shorter, a time slice longer."""

_MIN_PAUSE = 0.05
_MAX_PAUSE = 2.0


class _Turn:
    """Who is awake: at most one thread of the process, and none in a pause."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Written by who has the lock:
        self.paused_until = 0.0
        self._pause = _MIN_PAUSE

    def pause(self, now: float) -> None:
        self.paused_until = now + self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)

    def went_well(self) -> None:
        self._pause = _MIN_PAUSE


_turn = _Turn()


def may_stay_awake() -> bool:
    """Whether the peer can run while a thread of this process stays awake."""
    return len(os.sched_getaffinity(0)) > 1


class Readable:
    """For one thread at a time."""

    def __init__(self, sock: socket.socket, awake_seconds: float) -> None:
        # Not recv: the kernel wakes who waits in it on a unix socket also when the peer has read what this side sent.
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._poll = poll.poll
        self._socket = sock
        self._belled: tuple[int, Callable[[float | None], object]] | None = None
        self._awake_seconds = awake_seconds if may_stay_awake() else 0.0
        self._comes_soon = False

    def wait(self, timeout: float | None, bell: int | None = None) -> bool:
        """True when there is something to read, or the connection has ended; False after ``timeout`` seconds.

        True as well when the descriptor ``bell`` can be read from.
        """
        poll = self._poll if bell is None else self._with(bell)
        start = time.perf_counter()
        if self._comes_soon and start >= _turn.paused_until and _turn.lock.acquire(blocking=False):
            try:
                if self._look_until(poll, start + self._awake_seconds):
                    return True
            finally:
                _turn.lock.release()
        ready = bool(poll(None if timeout is None else timeout * 1000))
        self._comes_soon = time.perf_counter() - start < self._awake_seconds
        return ready

    def _with(self, bell: int) -> Callable[[float | None], object]:
        if self._belled is None or self._belled[0] != bell:
            poll = select.poll()
            try:
                poll.register(self._socket, select.POLLIN)
            except ValueError:  # which has no descriptor any more
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
            poll.register(bell, select.POLLIN)
            self._belled = bell, poll.poll
        return self._belled[1]

    def _look_until(self, poll: Callable[[float | None], object], end: float) -> bool:
        while not poll(0):
            before = time.perf_counter()
            if before >= end:
                return False
            os.sched_yield()
            after = time.perf_counter()
            if after - before > _TAKEN_SECONDS:
                _turn.pause(after)
                return False
        _turn.went_well()
        return True
