"""Waiting: how a thread sleeps until another thread wakes it, and how one thread waits for several peers at once.

A `Waiter` is a thread that sleeps on a lock. A `Vigil` is a thread that sleeps in ``poll`` beside sockets, and a `Bell`
wakes it there.

A thread that reads one line needs no bell: everything that ends its wait comes over the socket that it reads. A `Vigil`
waits for many lines. It takes the reader role of every line whose role is free, polls these lines, and reads what
comes. Other threads go on reading the remaining lines. When such a thread finds something for the vigil, it stores it
where the vigil looks, and rings the vigil's bell. The vigil polls without sleeping while that pays (`transport.awake`).
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from backhaul.transport.awake import Rhythm, poll_awake

if TYPE_CHECKING:
    from backhaul.agent.reading import Reading


class Bell:
    """A descriptor that is readable from `ring` until `hush`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if not self._rung and self._descriptor >= 0:
                self._rung = True
                os.eventfd_write(self._descriptor, 1)

    def hush(self) -> None:
        """Silence the bell. The caller must then check what the bell was rung for."""
        if not self._rung:
            return
        with self._lock:
            if self._rung and self._descriptor >= 0:
                self._rung = False
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Waiter:
    """One thread that sleeps until it is woken. Other threads call `wake`; waking it twice does no harm."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # the thread is already awake

    def sleep(self, seconds: float) -> bool:
        """Sleep. True if the thread was woken, False after this many seconds."""
        return self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Vigil:
    """A thread that waits for many lines. Other threads may call only `wake`."""

    def __init__(self, rhythm: Rhythm, most_awake: float) -> None:
        self._rhythm = rhythm
        self._most_awake = most_awake
        self._bell = Bell()
        self._poll: Any = None
        self._polled: list[Reading] = []

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        self._bell.close()

    def wait(self, lines: Iterable[Reading], done: Callable[[], bool], seconds: float) -> None:
        """Wait for data on these lines, for `wake`, or for this many seconds. Reads and hands out what has come.

        Returns at once if ``done()``. That is checked only after other threads can wake this one, so no wake-up is
        missed.
        """
        reading: list[Reading] = []
        tokens: list[int] = []
        waiting: list[Reading] = []
        ready: list[tuple[int, int]] = []
        try:
            for line in lines:
                while not (token := line.begin_reading()):
                    if line.line_up(self):
                        waiting.append(line)
                        break
                    if line.lost is not None:
                        break
                    # The role became free between the two calls. Try again: otherwise no thread reads this line.
                if token:
                    reading.append(line)
                    tokens.append(token)
            if not done():
                ready = self._await(reading, seconds)
        finally:
            self._bell.hush()
            for line in waiting:
                line.leave(self)
            self._end(reading, tokens, ready)

    def _end(self, reading: list[Reading], tokens: list[int], ready: list[tuple[int, int]]) -> None:
        """Give up all roles, even if one raises: a line whose role is never given up is never read again."""
        came = {descriptor for descriptor, _ in ready}
        try:
            while tokens:
                token = tokens.pop()
                line = reading[len(tokens)]
                line.end_vigil(token, comes=line.descriptor in came)
        finally:
            if tokens:
                self._end(reading, tokens, ready)

    def _await(self, reading: list[Reading], seconds: float) -> list[tuple[int, int]]:
        if self._poll is None or reading != self._polled:
            poll = select.poll()
            poll.register(self._bell.fileno(), select.POLLIN)
            for line in reading:
                poll.register(line.descriptor, select.POLLIN)
            self._poll, self._polled = poll.poll, reading
        return poll_awake(
            self._poll, self._rhythm, None if seconds == math.inf else max(0.0, seconds), self._most_awake
        )


class Vigils:
    """The vigils of a worker. Each owns a descriptor, so it is reused by the next waiting thread. Thread-safe."""

    def __init__(self, most_awake: float) -> None:
        self.most_awake = most_awake
        """For how many seconds at most a waiting thread stays awake."""
        self._rhythm = Rhythm()  # shared by all vigils: the threads of a worker mostly wait for the same peers
        self._spare: list[Vigil] = []
        self._closed = False

    def take(self) -> Vigil:
        """A vigil. Call `give_back` after the wait. Raises `OSError` if no descriptor is left."""
        try:
            return self._spare.pop()
        except IndexError:
            return Vigil(self._rhythm, self.most_awake)

    def give_back(self, vigil: Vigil) -> None:
        self._spare.append(vigil)
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        while self._spare:
            try:
                self._spare.pop().close()
            except IndexError:
                return
