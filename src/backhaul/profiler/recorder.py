"""Recorder: an observer that keeps the events of one worker in memory, thread by thread, up to a limit.

With each event it notes the thread's processor time: a function that runs for longer than it computes
has waited for something.

The calls that control a profile are not part of it. While the holder makes such a call, its calling thread is not
recorded (`Recorder.deaf`). The thread that serves such a call discards the record of its beginning, and records nothing
until its next message (`Recorder.hide`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backhaul.agent import observing
from backhaul.agent.observing import Began, Event, Read, Resumes, Starts, Waits

Row = list[Any]
"""The name of the event's kind, its time, the thread's processor time, and the event's other fields by name."""

KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in vars(observing).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}

_BEGINNINGS = (Began, Starts)
_WAKING = frozenset((Read, Began, Starts))
_clock = time.thread_time_ns


class _Log:
    """The events that one thread has recorded."""

    __slots__ = ("deaf", "name", "native", "rows", "woken")

    def __init__(self) -> None:
        self.native = threading.get_native_id()
        self.name = threading.current_thread().name
        self.rows: list[tuple[Event, int, int]] = []
        self.deaf = False
        self.woken = False
        """Whether the next message ends the deafness."""


class Recorder:
    """Records while ``on``. `observe` is an observer; it is called on the threads of the worker."""

    def __init__(self, most: int) -> None:
        self.on = False
        self.dropped = 0
        self._most = most
        self._count = 0  # updated by several threads without a lock, so it may be off by a few
        self._logs: list[_Log] = []
        self._mine = threading.local()

    def observe(self, event: Event) -> None:
        if not self.on:
            return
        log = self._log()
        kind = type(event)
        if log.deaf:
            if not log.woken or kind not in _WAKING:
                return
            log.deaf = log.woken = False
        if self._count >= self._most:
            self.dropped += 1
            return
        self._count += 1
        call = 0
        if kind is Waits or kind is Resumes:
            # A slot refers to its reply and so to tensors, which must not be kept alive.
            call = getattr(event.slot, "id", 0)  # type: ignore[attr-defined]
            event = kind(at=event.at, thread=event.thread)
        log.rows.append((event, _clock(), call))

    def hide(self) -> None:
        """Hide the call that the calling thread serves: it is not part of the profile."""
        if not self.on:  # then its beginning was not recorded either
            return
        log = self._log()
        rows = log.rows
        while rows:
            event = rows.pop()[0]
            self._count -= 1
            if isinstance(event, _BEGINNINGS):
                if rows and isinstance(rows[-1][0], Read):
                    rows.pop()
                    self._count -= 1
                break
        log.deaf = log.woken = True

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """A context in which nothing that the calling thread does is recorded."""
        log = self._log()
        log.deaf, log.woken = True, False
        try:
            yield
        finally:
            log.deaf = False

    def take(self) -> list[dict[str, Any]]:
        """The events recorded since the last call, as plain data: a dict for each thread."""
        taken = []
        for log in list(self._logs):
            rows, log.rows = log.rows, []
            self._count -= len(rows)
            if rows:
                taken.append({"native": log.native, "name": log.name, "rows": [_plain(*row) for row in rows]})
        return taken

    def _log(self) -> _Log:
        try:
            log: _Log = self._mine.log
        except AttributeError:
            log = self._mine.log = _Log()
            self._logs.append(log)
        return log


def _plain(event: Event, processor: int, call: int) -> Row:
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("at", "thread", "slot")}
    if call:
        fields["call"] = call
    return [type(event).__name__, event.at, processor, fields]
