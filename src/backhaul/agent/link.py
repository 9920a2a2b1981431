"""Link: everything about one peer that outlives a single line.

A line that this worker has opened ends with its connection, and the next request opens a new line. The link lasts as
long as both workers are members. It holds what is known about the peer itself, and decides which line a message takes.
No layer above the link knows which line that is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from backhaul.agent.fate import Fate
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Addresses
from backhaul.wire.frames import Frame

if TYPE_CHECKING:
    from backhaul.agent.calling import Calling
    from backhaul.agent.serving import Served

MOST_AWAITED = 64 * 1024


class Link:
    """See the module's docstring. Thread-safe."""

    def __init__(self, peer: WorkerInfo) -> None:
        self.peer = peer
        self.connecting = threading.Lock()
        """Held by the thread that is opening a line."""
        self.greeting = threading.Lock()
        """Held by the thread that checks whether the peer is a different process than before."""
        self.calling: Calling | None = None
        """The line that this worker opened last. The line may be lost."""
        self.left = False
        """The peer has said goodbye."""
        self.fate = Fate()
        """What is known about the process at the other end. Only `fates` changes it."""
        self.addresses: Addresses | None = None
        """The addresses of the peer at its last greeting."""
        self._served: tuple[Served, ...] = ()
        self._up = False

    @property
    def open(self) -> Calling | None:
        """The line for requests; None if there is none or it is lost."""
        calling = self.calling
        return None if calling is None or calling.lost is not None else calling

    @property
    def served(self) -> Served | None:
        """The line that the peer opened last; None if none is open."""
        return self._served[-1] if self._served else None

    @property
    def up(self) -> bool:
        """Whether there is any line with the peer."""
        return bool(self._served) or self.open is not None

    def renew(self, incarnation: str) -> None:
        """Begin a new fate: another process has replaced the peer, or the peer is back after it was given up."""
        self.fate = Fate(incarnation)

    def came_up(self) -> None:
        """Note that a line has been opened."""
        self._up = True
        self.left = False

    def goes_down(self) -> bool:
        """Note that a line has ended. True once if no line is left and the peer said no goodbye. Not thread-safe."""
        if not self._up or self._served or self.open is not None:
            return False
        self._up = False
        return not self.left

    def opened(self, served: Served) -> None:
        """Note that the peer has opened a line."""
        self._served = (*self._served, served)
        self.came_up()

    def ended(self, served: Served) -> None:
        self._served = tuple(line for line in self._served if line is not served)

    def heard(self) -> None:
        """Note that the peer is alive: it has sent something on a line that it opened."""
        calling = self.calling
        if calling is not None:
            calling.heard()


def may_be_awaited(frame: Frame) -> bool:
    """Whether a message that a thread of the peer waits for may take the line where that thread reads replies.

    Large messages may not: the sender would be busy until the message is read, and the peer may have stopped waiting.
    """
    return (not frame.keep or bool(frame.places)) and frame.size <= MOST_AWAITED
