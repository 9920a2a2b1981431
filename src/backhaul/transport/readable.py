"""Readable: one socket, and the wait for bytes on it."""

from __future__ import annotations

import select
import socket

from backhaul.transport.awake import Rhythm, most_awake, poll_awake


class Readable:
    """Waits for bytes on one socket. Not thread-safe."""

    def __init__(self, sock: socket.socket, busy_poll: float | None) -> None:
        # poll, not recv: on a unix socket, the kernel also wakes a thread in recv when the peer has read what this side
        # sent.
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._poll = poll.poll
        self._rhythm = Rhythm()
        self._most = most_awake(busy_poll)

    def wait(self, timeout: float | None) -> bool:
        """True when there is something to read, or the connection has ended; False after ``timeout`` seconds."""
        return bool(poll_awake(self._poll, self._rhythm, timeout, self._most))
