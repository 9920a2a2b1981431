"""Endings: how processes of this launch ended, as reported by their launcher (`news`).

A broken connection does not say why it broke. A moment later the launcher knows more: a signal killed the process, or
the process exited with a code. So a worker that loses a peer of its own launch waits for that moment before it fails
the calls to the peer. It never waits on a thread that others need. Only the first loss of a process waits; later ones
do not.

Other users cannot access the directory, so a datagram there comes from this user.
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
"""For how many seconds after a loss to wait for its cause."""
PATIENCE_OVER_HOSTS = 1.0
"""The same if the news may come from another host, through the launcher's host."""
_LARGEST = 4096


class Ending(msgspec.Struct, frozen=True):
    """How a process ended, in words, and whether the launcher starts a replacement."""

    process: str
    ending: str
    replaced: bool = False


_ending_decoder = msgspec.json.Decoder(Ending)


class Endings:
    """What the launcher of this worker has reported. Thread-safe."""

    def __init__(self) -> None:
        self.of_all_hosts = False
        """Whether the launcher also reports processes on other machines."""
        self._told: dict[str, Ending] = {}
        self._missed: dict[str, float] = {}  # process -> until when to wait for news of it
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
            sock.close()  # for example, the path is too long; then causes stay unknown
            return
        sock.setblocking(False)
        self._socket, self._path = sock, path

    @property
    def expected(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        """A descriptor that is readable when `read` finds something; -1 if no news is expected."""
        return -1 if self._socket is None else self._socket.fileno()

    def read(self) -> list[Ending]:
        """The endings reported since the last call. Does not wait."""
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
        """How a process ended, if that is known."""
        return self._told.get(process)

    def is_awaited(self, process: str) -> bool:
        """Whether `wait` would wait for news of a process that seems to have ended."""
        if self._socket is None or process in self._told:
            return False
        patience = PATIENCE_OVER_HOSTS if self.of_all_hosts else PATIENCE
        with self._changed:
            return time.monotonic() < self._missed.setdefault(process, time.monotonic() + patience)

    def wait(self, process: str) -> Ending | None:
        """How a process that seems to have ended did end; None if no news comes shortly after its loss. May wait."""
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
        """In a forked child: close the descriptor without removing the parent's socket file."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
