"""Activity: what the threads of a worker are doing for peers at this moment, and what they wait for.

The notes are for people who inspect a running worker, above all one that hangs. By then it is too late to begin, so the
notes are taken all the time. Each costs a fraction of a microsecond. Each thread writes its own notes without a lock,
and other threads read them.

- A thread that handles messages has one `Note`, and writes there which message it handles.
- A thread that waits for the reply to its own call writes this into the slot of the request (`pending.Slot`). The slot
  disappears when the reply has come.
- All other waits are in ``waiting``.

A waiting thread may handle messages meanwhile, and these may wait in turn. So each note keeps the one that it hides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

import msgspec

from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope

Description = dict[str, Any]

_FEW = 256


class Handling(msgspec.Struct, frozen=True, gc=False):
    """What a thread handles: a message of a peer, since when, and what the thread had begun before."""

    peer: WorkerInfo
    message: Any
    since: float
    before: Handling | None = None


Handled = tuple[WorkerInfo, Envelope, float] | tuple[WorkerInfo, Envelope, float, Any]
"""What a thread handles, and since when. The optional fourth item is what the thread had begun before."""


class Note:
    """What one thread handles, or None. Only that thread writes here; see `Activity.new_note`."""

    __slots__ = ("handles",)

    def __init__(self) -> None:
        self.handles: Handled | None = None


class Wait(msgspec.Struct, frozen=True):
    """A wait of a thread. ``describe()`` returns what it waits for, as plain data with a ``kind``."""

    describe: Callable[[], Description]
    since: float
    before: Wait | None = None


class Late(msgspec.Struct, frozen=True, gc=False):
    """A call that continues without a thread: its function is a coroutine, or has returned a future."""

    peer: WorkerInfo
    message: Any
    since: float


class Asking(Protocol):
    """A line on which threads wait for replies."""

    def waits(self) -> list[tuple[int, Wait]]:
        """The threads that wait on this line, and what each one waits for."""


class Activity:
    """The notes of one worker, by thread. Times are `time.monotonic` times. Any thread may read."""

    __slots__ = ("_forget_at", "_notes", "late", "lines", "waiting")

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}
        self._forget_at = _FEW
        self.waiting: dict[int, Wait] = {}
        self.lines: Callable[[], Iterable[Asking]] = lambda: ()
        """The lines on which threads may wait for replies."""
        self.late: dict[tuple[int, int], Late] = {}
        """By the rank of the caller and the id of the call."""

    def new_note(self) -> Note:
        """A new note for the calling thread. Call once in each thread."""
        if len(self._notes) >= self._forget_at:  # some notes belong to threads that have ended
            alive = {thread.ident for thread in threading.enumerate()}
            for thread, each in list(self._notes.items()):
                if thread not in alive and each.handles is None:
                    self._notes.pop(thread, None)
            self._forget_at = 2 * len(self._notes) + _FEW
        note = self._notes[get_ident()] = Note()
        return note

    def handling(self) -> dict[int, Handling]:
        """What each thread handles now, by thread."""
        found = ((thread, _read(note.handles)) for thread, note in list(self._notes.items()))
        return {thread: handling for thread, handling in found if handling is not None}

    def handled_by(self, thread: int) -> Handling | None:
        """What a thread handles now."""
        note = self._notes.get(thread)
        return None if note is None else _read(note.handles)

    def all_waits(self) -> dict[int, list[Wait]]:
        """The waits of each waiting thread, the innermost first."""
        found: dict[int, list[Wait]] = {}
        for thread, innermost in list(self.waiting.items()):
            wait: Wait | None = innermost
            while wait is not None:
                found.setdefault(thread, []).append(wait)
                wait = wait.before
        for line in self.lines():
            for thread, each in line.waits():
                found.setdefault(thread, []).append(each)
        for waits in found.values():
            waits.sort(key=lambda wait: -wait.since)
        return found

    @contextmanager
    def waits(self, describe: Callable[[], Description]) -> Iterator[None]:
        """A context in which the calling thread waits for what ``describe()`` returns."""
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


def _read(handled: Handled | None) -> Handling | None:
    if handled is None:
        return None
    peer, envelope, since, *before = handled
    return Handling(peer, envelope.message, since, _read(before[0]) if before else None)
