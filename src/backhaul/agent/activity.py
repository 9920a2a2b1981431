"""Activity: what the threads of a worker do for peers at this moment, and what they wait for.

This is for people who look at a running worker, and above all at one that stands still: whoever looks comes after the
fact, so these notes are taken all the time. Each costs a fraction of a microsecond. They are written by the thread that
they are about, without a lock, and read by other threads.

A thread that waits may handle messages meanwhile, which may wait in turn: each note has the one that it hides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import msgspec

from backhaul.ids import WorkerInfo

Description = dict[str, Any]


class Handling(msgspec.Struct, frozen=True, gc=False):
    """A thread handles a message of a peer."""

    peer: WorkerInfo
    message: Any
    since: float
    before: Handling | None = None


class Wait(msgspec.Struct, frozen=True):
    """A thread waits. ``describe()`` says for what, as plain data with a ``kind``."""

    describe: Callable[[], Description]
    since: float
    before: Wait | None = None


class Late(msgspec.Struct, frozen=True, gc=False):
    """A call goes on without a thread: its function is a coroutine, or has returned a future."""

    peer: WorkerInfo
    message: Any
    since: float


class Activity:
    """The notes of one worker, by thread. Times are those of `time.monotonic`."""

    __slots__ = ("handling", "late", "waiting")

    def __init__(self) -> None:
        self.handling: dict[int, Handling] = {}
        self.waiting: dict[int, Wait] = {}
        self.late: dict[tuple[int, int], Late] = {}
        """By the rank of the caller and the number of the call."""

    @contextmanager
    def waits(self, describe: Callable[[], Description]) -> Iterator[None]:
        """Inside, the calling thread waits for what ``describe()`` says."""
        thread = get_ident()
        before = self.waiting.get(thread)
        self.waiting[thread] = Wait(describe, time.monotonic(), before)
        try:
            yield
        finally:
            if before is None:
                del self.waiting[thread]
            else:
                self.waiting[thread] = before
