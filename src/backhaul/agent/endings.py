"""Endings: how processes of this launch have ended, as their launcher tells (`news`).

A connection that breaks says only that it did. The launcher knows more, a moment later: the process was killed by a
signal, or has exited with a code. So a worker that loses a peer of its own launch waits for that moment before it fails
what waits for the peer, and never on a thread that others need. A loss is explained once: later ones do not wait.

The directory is closed to other users, so a datagram there is as good as a word of this user's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from backhaul.news import EXPECTED, OF_ALL_HOSTS, SOCKETS
from backhaul.transport.stream import RUNTIME_DIR_VARIABLE

PATIENCE = 0.25
"""Seconds after a loss within which its cause is waited for."""
PATIENCE_OVER_HOSTS = 1.0
"""The same where the news may come from another host, by way of the launcher's."""
_LARGEST = 4096


class Ending(msgspec.Struct, frozen=True):
    """How a process has ended, in words, and whether the launcher starts another one in its place."""

    process: str
    ending: str
    replaced: bool = False


_ending_decoder = msgspec.json.Decoder(Ending)


class Endings:
    """What the launcher of this worker has told. Thread-safe."""

    def __init__(self) -> None:
        self.of_all_hosts = False
        """Whether the launcher tells of processes on other machines, too."""
        self._told: dict[str, Ending] = {}
        self._missed: dict[str, float] = {}  # process -> until when its news are waited for
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._path = ""
        directory = os.environ.get(RUNTIME_DIR_VARIABLE)
        if directory is not None:
            with contextlib.suppress(OSError):
                self.of_all_hosts = Path(directory, EXPECTED).read_text() == OF_ALL_HOSTS
                self._listen(os.path.join(directory, f"{SOCKETS}{os.getpid()}-{os.urandom(4).hex()}"))

    def _listen(self, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.bind(path)
        except OSError:
            sock.close()  # a path that is too long, say: then causes are not known
            return
        sock.setblocking(False)
        self._socket, self._path = sock, path

    @property
    def expected(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        """A descriptor that is readable when `read` finds something; only if news are expected."""
        return -1 if self._socket is None else self._socket.fileno()

    def read(self) -> list[Ending]:
        """What has come since. Does not wait."""
        found: list[Ending] = []
        while self._socket is not None:
            try:
                found.append(_ending_decoder.decode(self._socket.recv(_LARGEST)))
            except OSError:
                break
            except msgspec.MsgspecError:
                continue
        with self._changed:
            for each in found:
                self._told[each.process] = each
                self._missed.pop(each.process, None)
            self._changed.notify_all()
        return found

    def of(self, process: str) -> Ending | None:
        """How a process has ended, if that is known."""
        return self._told.get(process)

    def is_awaited(self, process: str) -> bool:
        """Whether `wait` may wait for news of a process that seems to have ended."""
        if self._socket is None or process in self._told:
            return False
        patience = PATIENCE_OVER_HOSTS if self.of_all_hosts else PATIENCE
        with self._changed:
            return time.monotonic() < self._missed.setdefault(process, time.monotonic() + patience)

    def wait(self, process: str) -> Ending | None:
        """How a process that seems to have ended did so; None if no news come within a moment of its loss."""
        if self.is_awaited(process):
            with self._changed:
                until = self._missed.get(process, 0.0)
                self._changed.wait_for(lambda: process in self._told, max(0.0, until - time.monotonic()))
        return self._told.get(process)

    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def abandon(self) -> None:
        """In a forked child: close the descriptor, and remove nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
