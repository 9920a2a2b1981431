"""A man in the middle of a TCP connection."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transport_group import SOON


class Relay:
    """A man in the middle. It forwards everything, records it, and may change it."""

    def __init__(self, there: Any, threads: ThreadPoolExecutor, change: Callable[[bytes], bytes] = bytes) -> None:
        self.noted = b""
        self.change = change
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._there = there
        self._done: Future[None] = threads.submit(self._relay)

    def _relay(self) -> None:
        near, _ = self._server.accept()
        with self._server, near, socket.create_connection(self._there, timeout=SOON) as far:
            ends = {near.fileno(): (near, far), far.fileno(): (far, near)}
            poll = select.poll()
            for descriptor in ends:
                poll.register(descriptor, select.POLLIN)
            while True:
                for descriptor, _ in poll.poll(SOON * 1000):
                    source, target = ends[descriptor]
                    try:
                        data = source.recv(65536)
                        self.noted += data
                        if not data:
                            return
                        target.sendall(self.change(data) if source is far else data)
                    except OSError:
                        return

    def wait(self) -> None:
        self._done.result(timeout=SOON)
