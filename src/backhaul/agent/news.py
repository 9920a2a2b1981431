"""News: one-way messages of a peer's that come where replies do, since a thread waits for them there.

Usually what a peer has to tell comes over its own connection, and the thread that reads that one deals with it. But
a thread that has just given the peer something to do, and has nothing to do but wait for what comes of it, is awake
already: to have another one woken up for it, which then wakes this one, takes longer than what there is to do.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from backhaul.agent.pending import Slot
from backhaul.wire.decoder import Envelope

if TYPE_CHECKING:
    from backhaul.agent.outbound import Outbound


class Bell:
    """A descriptor that can be read from once somebody has rung. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if not self._rung and self._descriptor >= 0:
                self._rung = True
                os.eventfd_write(self._descriptor, 1)

    def hush(self) -> None:
        """To be followed by a look at what it was rung for."""
        with self._lock:
            if self._rung and self._descriptor >= 0:
                self._rung = False
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class News:
    """What one thread waits for on one connection. Only `ring` is for other threads."""

    def __init__(self, outbound: Outbound, about: int, bell: Bell) -> None:
        self.outbound = outbound
        self.about = about
        self.bell = bell
        self.slot = Slot(0, "news", float("inf"), False)
        self.arrived: deque[Envelope] = deque()

    def reset(self) -> None:
        """What comes from now on ends the next `wait`. To be followed by a look at what has come before."""
        self.slot.done = False

    def wait(self, seconds: float) -> None:
        """Return when something has arrived, or somebody has rung, since `reset`; or after so many seconds."""
        self.outbound.await_news(self, seconds)

    def ring(self) -> None:
        """End the wait."""
        self.slot.finish()
        self.bell.ring()

    def close(self) -> None:
        """What arrives from now on is dropped."""
        self.outbound.close_news(self.about)
