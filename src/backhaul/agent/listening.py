"""Listener: a thread that waits for messages about one thing, wherever they come.

The thread reads the lines of the workers that it expects messages from, and handles the messages itself. While it does
something else for long, such as a run of torch's engine, it is **away**: the watch thread reads those lines, and the
pool handles what comes. A thread that is about to block says so at once (`Agent.step_away`), otherwise ticks notice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from backhaul.agent.line import Line
from backhaul.agent.waiting import Vigil
from backhaul.wire.decoder import Envelope

if TYPE_CHECKING:
    from backhaul.agent.calling import Calling


class Listener:
    """What has arrived for one thread, and what the thread does. `add` and `wake` are for all threads."""

    def __init__(self, vigil: Vigil, ranks: Callable[[], Collection[int]]) -> None:
        self.vigil = vigil
        self.ranks = ranks
        """The workers that messages are expected from."""
        self.arrived: deque[tuple[Line, Envelope]] = deque()
        self.waits = False
        """The thread waits for messages."""
        self.turn = 0
        """Counts the times that it has begun to do something else."""
        self.seen = -1
        """The turn that the last tick has found it at."""
        self.known_ranks: Collection[int] = ()
        self.known: list[Calling] = []
        """The lines to those workers, as they were at the last wait."""
        self.lock = threading.Lock()
        # Guarded by lock:
        self.away = False
        self.lines: list[Calling] = []
        """What is read for it while it is away."""
        self._thread = threading.get_ident()

    def add(self, line: Line, envelope: Envelope) -> bool:
        """A message has come, read by whichever thread. False if the thread is away."""
        with self.lock:
            if self.away:
                return False
            self.arrived.append((line, envelope))
        self.wake()
        return True

    def wake(self) -> None:
        """End the wait of the thread."""
        if threading.get_ident() != self._thread:
            self.vigil.wake()

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that listens."""
        return threading.get_ident() == self._thread
