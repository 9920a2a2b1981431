"""Awake: a thread that waits for bytes stays awake for a moment if the bytes are likely to come soon.

Waking a thread that sleeps in the kernel takes tens of microseconds, and then the thread works with cold caches. In an
exchange of short messages that is most of the time. So a waiting thread polls for a while before it goes to sleep. A
`Rhythm` learns for how long: it knows how long the last waits in its place took, and polling is worth twice that time.
A thread that is idle, or waits for something long, sleeps.

Staying awake takes processor time from others, so there are bounds.

- It never lasts longer than ``busy_poll``. The default grows with the number of processors: on a machine with two, the
  peer and other processes need them.
- One thread of a process stays awake at a time, and none on a machine with one processor.
- The thread yields its processor after each poll. If another thread takes the processor, and bytes come meanwhile, then
  more threads want to run than there are processors, and a sleeping thread would have been woken sooner. Then all
  threads of this process sleep for a pause that gets longer each time.

The state is global to the process, since processors are: see `_turn`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_TAKEN_SECONDS = 0.0006
"""If ``sched_yield`` takes longer than this, another thread ran: a hiccup of the machine is shorter, a time slice
longer."""

_MIN_PAUSE = 0.05
_MAX_PAUSE = 2.0

_FOR_EACH_PROCESSOR = 0.001
_MOST = 0.003
_SLACK = 0.0001

Ready = list[tuple[int, int]]
"""What ``poll`` returns: descriptors and their events."""


class _Turn:
    """Which thread is awake: at most one of the process, and none in a pause."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Written by the thread that has the lock:
        self.paused_until = 0.0
        self._pause = _MIN_PAUSE

    def pause(self, now: float) -> None:
        self.paused_until = now + self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)

    def went_well(self) -> None:
        self._pause = _MIN_PAUSE


# Global to the process: its workers share the processors.
_turn = _Turn()


def most_awake(option: float | None) -> float:
    """The most seconds that a thread stays awake, for the value of the option ``busy_poll``."""
    processors = len(os.sched_getaffinity(0))
    if processors < 2:
        return 0.0
    return min(_MOST, (processors - 1) * _FOR_EACH_PROCESSOR) if option is None else option


class Rhythm:
    """How long the last waits in one place took, and so for how long staying awake is worth it. Pure."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._last = math.inf
        self._before = math.inf

    def waited(self, seconds: float) -> None:
        """Note a finished wait."""
        self._before, self._last = self._last, seconds

    def worth(self, most: float) -> float:
        """The seconds to stay awake, at most ``most``. 0 if the last wait was longer than that."""
        last, before = self._last, self._before
        if last >= most:
            return 0.0
        longest = before if last < before < most else last
        return min(most, 2 * longest + _SLACK)


def poll_awake(poll: Callable[[Any], Ready], rhythm: Rhythm, timeout: float | None, most: float) -> Ready:
    """What ``poll`` finds within ``timeout`` seconds. Without a timeout it waits until there is something."""
    start = time.perf_counter()
    if most:
        worth = rhythm.worth(most)
        if worth and start >= _turn.paused_until and _turn.lock.acquire(blocking=False):
            try:
                found = _look_until(poll, start + (worth if timeout is None else min(worth, timeout)))
            finally:
                _turn.lock.release()
            if found:
                rhythm.waited(time.perf_counter() - start)
                return found
            if timeout is not None:
                timeout = max(0.0, timeout - (time.perf_counter() - start))
    # Rounded up, because a wait that ends a little too early would be repeated at once.
    found = poll(None if timeout is None else math.ceil(timeout * 1000))
    rhythm.waited(time.perf_counter() - start)
    return found


def _look_until(poll: Callable[[Any], Ready], end: float) -> Ready:
    clock, offer = time.perf_counter, os.sched_yield
    while not (found := poll(0)):
        before = clock()
        if before >= end:
            return found
        offer()
        after = clock()
        if after - before > _TAKEN_SECONDS and (found := poll(0)):
            _turn.pause(after)
            return found
    _turn.went_well()
    return found
