"""Private directories for sockets, ``backhaul-…`` in the temporary directory; and the removal of abandoned ones.

The process that makes a directory locks a file in it (``flock``) for as long as the process lives. The kernel releases
the lock when the process ends, however it ends. This also works across containers, where process ids mean nothing. So a
process that gets the lock of a directory may remove the directory, and the next process of the same user does so.

Launchers and workers both import this module, so it needs only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

PREFIX = "backhaul-"
_LOCK = "lock"

# A unix socket's path holds 107 bytes, and workers add a file name to the directory's.
_LONGEST_PARENT = 60


class PrivateDirectory:
    """A new directory of mode 0700. Call `remove` at the end. Making one also removes directories of dead processes."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _LONGEST_PARENT:
            parent = "/tmp"
        remove_dead(parent)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)  # mode 0700
        # Lock the file before it gets its name: no process may find it unlocked and conclude that its maker is dead.
        making = os.path.join(self.path, f"{_LOCK}-making")
        self._lock = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(making, os.path.join(self.path, _LOCK))

    def remove(self) -> None:
        """Remove the directory and everything in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.abandon()

    def abandon(self) -> None:
        """Close the lock's descriptor and remove nothing. A forked child calls this: its parent keeps the lock."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_dead(parent: str) -> None:
    """Remove this user's directories in ``parent`` whose makers are dead. Those that cannot be removed stay."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return
    # A directory without this file is about to get it, or is not ours.
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(lock)
