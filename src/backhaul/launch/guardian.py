"""Kills the workers if their launcher is killed before it can do so.

The guardian is a small process of its own (this file, run as a script). The
launcher tells it the process groups through a pipe. When the launcher
is gone, for whatever reason, the guardian kills the remaining groups, removes the
launch's directory, and exits.

Two signs show that the launcher is gone: the pipe's end of file, and the launcher's
pidfd. The pipe alone is not enough, since a process that the launcher forked holds the
pipe open; the pidfd alone is missing on old kernels. `prctl(PR_SET_PDEATHSIG)` in
the workers would be an alternative, but it fires when the *thread* that started them ends,
spares their children, and needs code to run in the worker before the user's.

Protocol, one line each: ``+pgid``: watch this group. ``-pgid``: forget this group. ``=seconds``: if the next such line
does not come within that time, the launcher counts as gone. The launcher forgets a group before it reaps the group's
leader, so the group's number cannot have been reused.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time


class Guardian:
    """The launcher's end of the pipe. Call `close` only after every group is forgotten."""

    def __init__(self, directory: str = "") -> None:
        """``directory``, if given, is removed when the launcher is gone."""
        # Isolated, without site-packages and in a session of its own: the guardian starts in
        # milliseconds, and a terminal's Ctrl-C does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def expect(self, seconds: float) -> None:
        """Kill the groups unless this is called again within ``seconds``: a suspended launcher cannot act itself."""
        self._tell(f"={seconds:.3f}\n")

    def close(self) -> None:
        """End the guardian and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            pass  # the guardian was killed; the launch itself can continue


class Register:
    """The groups to kill, read from the launcher's lines. Pure."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.patience = 0.0
        """Seconds within which the next line of that kind must come."""
        self._rest = b""

    def feed(self, data: bytes) -> bool:
        """Apply the lines in ``data``; returns whether ``patience`` is new."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"+"):
                self.groups.add(int(line[1:]))
            elif line.startswith(b"="):
                self.patience = float(line[1:])
            else:
                self.groups.discard(int(line[1:]))
        return any(line.startswith(b"=") for line in lines)


def watch_over(launcher: int, directory: str) -> None:
    """Wait until process ``launcher`` is gone, then clean up after it."""
    register = Register()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        launcher_fd = os.pidfd_open(launcher)
    except (AttributeError, OSError):
        launcher_fd = -1
    else:
        poll.register(launcher_fd, select.POLLIN)
    gone = False
    until: float | None = None
    while not gone:
        ready = [fd for fd, _ in poll.poll(None if until is None else max(0.0, until - _now()) * 1000)]
        # Read the pipe first, to its end: its last lines may still be unread.
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if register.feed(data):
                until = _now() + register.patience
            gone = not data
        else:
            gone = True
    for group in register.groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _now() -> float:
    # A clock that runs on while the machine sleeps, if the system has one.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


if __name__ == "__main__":
    watch_over(int(sys.argv[1]), sys.argv[2])
