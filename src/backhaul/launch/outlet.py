"""Outlet: a thread that writes what workers print, so that a terminal that stands still holds up nothing else.

The launcher of several hosts has to answer their stewards while nobody reads its output (Ctrl-S, a pager). What is
under way is bounded: a steward sends more only when the thread has written what it sent before (`protocol.Credit`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import BinaryIO


class Outlet:
    """Writes in the order of the calls. ``wake`` is called from its thread when something was written."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.error: OSError | None = None
        """Why nothing is written any more: the reader has gone."""
        self._wake = wake
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._written: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="backhaul-outlet", daemon=True)
        self._thread.start()

    def writer(self, stream: BinaryIO) -> Callable[[bytes], None]:
        """What has bytes written to ``stream``."""

        def write(data: bytes) -> None:
            def do() -> None:
                stream.write(data)
                stream.flush()

            self._jobs.put(do)

        return write

    def mark(self, host: int, size: int) -> None:
        """Report this many bytes of a host through `written` once everything put before is written."""
        self._jobs.put(lambda: self._written.put((host, size)))

    def written(self) -> list[tuple[int, int]]:
        """The marks that were come to since."""
        found = []
        while True:
            try:
                found.append(self._written.get_nowait())
            except Empty:
                return found

    def finish(self, seconds: float) -> bool:
        """Wait until all is written, for at most ``seconds``; whether it is."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self.error is None:
                    job()
            except OSError as error:
                self.error = error
            self._wake()
