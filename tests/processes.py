"""Waiting for processes that are not our children."""

from __future__ import annotations

import os
import select
import time

PATIENCE = 20.0


def assert_gone(pids: list[int]) -> None:
    """Wait until all the processes have ended."""
    deadline = time.monotonic() + PATIENCE
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(fd)
        assert ready, f"process {pid} is still there"
