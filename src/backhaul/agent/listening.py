"""Listener: a thread that waits for messages about one thing, wherever they come."""

from __future__ import annotations

import threading
from collections import deque

from backhaul.agent.line import Line
from backhaul.agent.waiting import Vigil
from backhaul.wire.decoder import Envelope


class Listener:
    """What has arrived for one thread. `add` and `wake` are for all threads."""

    def __init__(self, vigil: Vigil) -> None:
        self.vigil = vigil
        self.arrived: deque[tuple[Line, Envelope]] = deque()
        self._thread = threading.get_ident()

    def add(self, line: Line, envelope: Envelope) -> None:
        """A message has come, read by whichever thread."""
        self.arrived.append((line, envelope))
        self.wake()

    def wake(self) -> None:
        """End the wait of the thread."""
        if threading.get_ident() != self._thread:
            self.vigil.wake()

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that listens."""
        return threading.get_ident() == self._thread
