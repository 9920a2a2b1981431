"""A running `backhaul run`, whose output can be awaited line by line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from processes import PATIENCE, assert_gone


class Launch:
    """``backhaul run`` with ``argv``.

    ``before`` is the beginning of the command line. ``merged``: standard error goes into standard output.
    """

    def __init__(
        self,
        *argv: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        merged: bool = False,
        **options: object,
    ) -> None:
        self.popen = subprocess.Popen(
            [*before, sys.executable, "-m", "backhaul", "run", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            cwd=cwd,
            env={**os.environ, **(env or {})},
            **options,  # type: ignore[call-overload]
        )

    def line(self) -> str:
        """The next line of its output; empty at its end."""
        assert self.popen.stdout is not None
        return str(self.popen.stdout.readline())

    def lines(self, count: int) -> list[str]:
        return sorted(self.line() for _ in range(count))

    def complaint(self) -> str:
        """The next line of its standard error."""
        assert self.popen.stderr is not None
        return str(self.popen.stderr.readline())

    def finish(self, patience: float = PATIENCE) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=patience)
        return self.popen.returncode, out, err

    def stop_unread(self, workers: list[int]) -> None:
        """Stop it while nobody reads its output: it ends, but not before the reader has had the grace time."""
        started = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        assert self.popen.wait(PATIENCE) == 143
        assert time.monotonic() - started > 4
        assert_gone(workers)


def pids(lines: list[str]) -> list[int]:
    """The numbers in ``[name] 1 2``."""
    return [int(number) for line in lines for number in line.split("] ")[1].split()]
