"""Outlet: a thread that writes the workers' output, so that a blocked terminal delays nothing else.

A launcher must handle signals, and that of several hosts must answer their stewards, even while nobody reads its output
(Ctrl-S, a pager). The amount in flight is bounded: `console` holds the output of workers back while much is unwritten,
and a steward sends more only when its earlier output is written (`protocol.Credit`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import BinaryIO


class Outlet:
    """Writes in the order of the calls. Calls ``wake`` from its thread after each write."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.error: OSError | None = None
        """The error if writing has failed because the reader is gone; nothing is written after that."""
        self._wake = wake
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._written: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="backhaul-outlet", daemon=True)
        self._thread.start()

    def writer(self, stream: BinaryIO) -> Callable[[bytes], None]:
        """A function that queues bytes for ``stream``."""

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
        """The marks passed since the last call."""
        found = []
        while True:
            try:
                found.append(self._written.get_nowait())
            except Empty:
                return found

    def finish(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until all is written; returns whether it is."""
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
