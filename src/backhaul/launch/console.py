"""Console: prints the output of workers on this machine, and the launcher's own lines.

The reader of the output may stop reading: Ctrl-S in a terminal, or a pager. Then the workers wait in ``print``, as they
would without a launcher. The launcher must not wait, since it handles signals and the ends of workers. So a thread
writes (`outlet`), and while much is unwritten, the workers' output stays in their pipes.

A launch that is told to stop waits for its reader only for the grace time, and then drops the rest of the output.
"""

from __future__ import annotations

import math
import sys
import time

from backhaul.launch.guardian import Guardian
from backhaul.launch.outlet import Outlet
from backhaul.launch.prefix import prefixed_output
from backhaul.launch.supervisor import Supervisor

_MOST_UNWRITTEN = 1 << 20
_WRITE_SECONDS = 0.2


class Console:
    """See the module's docstring. ``supervisor`` runs the workers whose output is printed."""

    def __init__(self, guardian: Guardian, *, colour: bool) -> None:
        self.supervisor = Supervisor(self._print, guardian)
        self._outlet = Outlet(self.supervisor.wake)
        self._err = self._outlet.writer(sys.stderr.buffer)
        self._output = prefixed_output(self._outlet.writer(sys.stdout.buffer), self._err, colour=colour)
        self._unwritten = 0
        self._until = math.inf  # when to stop waiting for the reader

    def say(self, text: str) -> None:
        """Print a line of the launcher."""
        self._err(f"backhaul: {text}\n".encode(errors="backslashreplace"))

    def hurry(self, seconds: float) -> None:
        """Wait for the reader only this long from now on. Safe from a signal handler."""
        self._until = min(self._until, time.monotonic() + seconds)

    def look_after(self) -> None:
        """Hold, resume or drop the workers' output. Call after each poll.

        Raises `BrokenPipeError` if the reader is gone.
        """
        self._unwritten -= sum(size for _, size in self._outlet.written())
        if self._outlet.error is not None:
            raise self._outlet.error
        full = self._unwritten > _MOST_UNWRITTEN
        if full and time.monotonic() >= self._until:
            self.supervisor.drop_output()
        else:
            self.supervisor.hold_output(full)

    def finish(self) -> bool:
        """Wait until everything is written. False if the reader did not read all of it in time.

        Raises `BrokenPipeError` if the reader is gone.
        """
        while not self._outlet.finish(_WRITE_SECONDS):
            if time.monotonic() >= self._until:
                return False
        if self._outlet.error is not None:
            raise self._outlet.error
        return True

    def _print(self, name: str, index: int, stream: int, data: bytes) -> None:
        """The sink of the supervisor."""
        self._output(name, index, stream, data)
        self._unwritten += len(data)
        self._outlet.mark(index, len(data))
