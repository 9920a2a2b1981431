"""A relay for unix sockets. It replaces a listening socket, and forwards bytes and descriptors with one bit flipped.

A worker's socket is moved aside and the relay listens at its path. The relay is a process of the same user, so the
kernel vouches for it as for a worker.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from pathlib import Path

_MOST_DESCRIPTORS = 250
_CHUNK = 1 << 16


def _end(sock: socket.socket) -> None:
    """End a connection, or a listener. Wakes the thread that waits in it, which closing it would not."""
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


class Relay:
    """A relay between clients that connect to ``path`` and the worker that listened there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path.with_name(path.name + "-real")
        path.rename(self._aside)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._lock = threading.Lock()
        self._flip: tuple[int, int] | None = None  # the direction, and the number of the bit from here on
        self.flipped = threading.Event()
        self._sockets: list[socket.socket] = []
        self._carriers: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._acceptor.start()

    def flip(self, direction: int, bit: int) -> None:
        """Invert this bit of the next bytes. Direction 0 is towards the worker, 1 is back."""
        with self._lock:
            self.flipped.clear()
            self._flip = direction, bit

    def close(self) -> None:
        """End all connections, and give the worker its socket back. Returns when no thread of the relay is left."""
        _end(self._listener)
        self._acceptor.join()  # from here on there are no new connections
        for sock in self._sockets:
            _end(sock)
        for carrier in self._carriers:
            carrier.join()
        for sock in (self._listener, *self._sockets):
            sock.close()
        os.replace(self._aside, self._path)

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.socket(socket.AF_UNIX)
            self._sockets += [here, there]
            try:
                there.connect(str(self._aside))
            except OSError:  # the worker is gone
                _end(here)
                continue
            for direction, (source, target) in enumerate(((here, there), (there, here))):
                carrier = threading.Thread(target=self._carry, args=(source, target, direction), daemon=True)
                self._carriers.append(carrier)
                carrier.start()

    def _carry(self, source: socket.socket, target: socket.socket, direction: int) -> None:
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        try:
            while True:
                data, beside, _, _ = source.recvmsg(_CHUNK, room)
                if not data:
                    break
                descriptors = array.array("i")
                for level, kind, raw in beside:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
                damaged = memoryview(self._damaged(data, direction))
                passing = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if descriptors else []
                try:
                    sent = target.sendmsg([damaged], passing)
                    target.sendall(damaged[sent:])
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except OSError:  # a side is gone; so the other one ends, too
            pass
        for sock in (source, target):
            _end(sock)

    def _damaged(self, data: bytes, direction: int) -> bytes:
        with self._lock:
            if self._flip is None or self._flip[0] != direction:
                return data
            at, shift = divmod(self._flip[1], 8)
            if at >= len(data):
                self._flip = direction, self._flip[1] - 8 * len(data)
                return data
            self._flip = None
        damaged = bytearray(data)
        damaged[at] ^= 1 << shift
        self.flipped.set()
        return bytes(damaged)
