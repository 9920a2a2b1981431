"""Private directories for sockets, ``backhaul-…`` in the temporary directory, and the removal of those of the dead.

Each has a file that its maker holds a lock on (``flock``) for as long as it lives. The kernel releases the lock when
the process ends, however it ends, also across containers, where process ids mean nothing. So whoever gets the lock of a
directory may remove it, and the next process of that user does.

Launchers and workers both import this, so it needs no more than the standard library.
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
    """A directory of mode 0700; `remove` it at the end. Making one removes those whose makers are dead."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _LONGEST_PARENT:
            parent = "/tmp"
        remove_dead(parent)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)  # mode 0700
        # Locked before it has its name: nobody finds a lock that is free, and takes the maker for dead.
        making = os.path.join(self.path, f"{_LOCK}-making")
        self._lock = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(making, os.path.join(self.path, _LOCK))

    def remove(self) -> None:
        """Remove it with all that is in it; nothing if that was done already."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.abandon()

    def abandon(self) -> None:
        """Give the descriptor up, and remove nothing. In a forked child the maker keeps the lock."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_dead(parent: str) -> None:
    """Remove the directories of this user there whose makers are dead. What cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return
    # One without this file is about to get it, or is none of ours.
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(lock)
