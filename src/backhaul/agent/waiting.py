"""Waiting: a thread that waits for several peers at once, itself, awake where that pays.

A `Waiter` is a thread that waits. Others wake it; it sleeps on a lock, or beside sockets in ``poll``, where a `Bell`
wakes it.

A thread that waits for one reply needs no bell: whatever ends its wait comes over the socket that it reads. A
thread that waits for many (`Vigil`) takes the reader role of every line that is free, polls them all, and reads what
comes. Lines that other threads read are left to them: what they find for this thread they put where it
looks, and ring its bell.
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
    from backhaul.agent.calling import Calling


class Bell:
    """A descriptor that is readable after `ring`, until `hush`. Thread-safe."""

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
        """To be followed by a look at what the bell was rung for."""
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
    """One thread that sleeps until it is woken. `wake` is for other threads; waking it twice does no harm."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it is awake

    def sleep(self, seconds: float) -> bool:
        """True when it was woken, False after that many seconds."""
        return self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Vigil:
    """A thread that waits for many lines. Only `wake` is for other threads."""

    def __init__(self, rhythm: Rhythm, most_awake: float) -> None:
        self._rhythm = rhythm
        self._most_awake = most_awake
        self._bell = Bell()
        self._poll: Any = None
        self._polled: list[Calling] = []

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        self._bell.close()

    def wait(self, lines: Iterable[Calling], done: Callable[[], bool], seconds: float) -> None:
        """Wait for something on these lines, a `wake`, or for that many seconds. Reads and hands out what has come.

        Returns at once if ``done()``, which is asked after other threads can wake this one.
        """
        reading: list[Calling] = []
        tokens: list[int] = []
        waiting: list[Calling] = []
        ready: list[tuple[int, int]] = []
        try:
            for line in lines:
                while not (token := line.begin_reading()):
                    if line.line_up(self):
                        waiting.append(line)
                        break
                    if line.lost is not None:
                        break
                    # The role has become free between the two looks: try again, or nobody reads this line.
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

    def _end(self, reading: list[Calling], tokens: list[int], ready: list[tuple[int, int]]) -> None:
        """Give up all roles, whatever goes wrong with one of them: a line whose role is lost is deaf for good."""
        came = {descriptor for descriptor, _ in ready}
        try:
            while tokens:
                token = tokens.pop()
                line = reading[len(tokens)]
                line.end_vigil(token, comes=line.descriptor in came)
        finally:
            if tokens:
                self._end(reading, tokens, ready)

    def _await(self, reading: list[Calling], seconds: float) -> list[tuple[int, int]]:
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
    """The vigils of a worker. Each has a descriptor, so it is kept for the next thread that waits. Thread-safe."""

    def __init__(self, most_awake: float) -> None:
        self._most_awake = most_awake
        self._rhythm = Rhythm()  # of all of them: threads of one worker mostly wait for the same peers
        self._spare: list[Vigil] = []
        self._closed = False

    def take(self) -> Vigil:
        """To be given back."""
        try:
            return self._spare.pop()
        except IndexError:
            return Vigil(self._rhythm, self._most_awake)

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
