"""Link: the relation with one peer, for as long as both are members, over whatever lines there are.

A line that this worker has opened ends with its connection, and the next request opens another one. What is true of the
peer itself, and which line a message takes, is known here. Nothing above the link knows which line that is.
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
        """Held by the thread that opens a line."""
        self.greeting = threading.Lock()
        """Held while it is found out whether the peer is another process than before."""
        self.calling: Calling | None = None
        """The line that this worker has opened last. It may be lost."""
        self.left = False
        """The peer has said goodbye."""
        self.fate = Fate()
        """What is known about the process at the other end; see `fates`, which changes it."""
        self.addresses: Addresses | None = None
        """Where the peer was when it greeted last."""
        self._served: tuple[Served, ...] = ()
        self._up = False

    @property
    def open(self) -> Calling | None:
        """The line for requests, if there is one that is not lost."""
        calling = self.calling
        return None if calling is None or calling.lost is not None else calling

    @property
    def served(self) -> Served | None:
        """The line that the peer has opened last."""
        return self._served[-1] if self._served else None

    @property
    def up(self) -> bool:
        """There is a line with the peer."""
        return bool(self._served) or self.open is not None

    def renew(self, incarnation: str) -> None:
        """Another process has taken the peer's place, or the peer comes back after it was given up."""
        self.fate = Fate(incarnation)

    def came_up(self) -> None:
        """A line has been opened."""
        self._up = True
        self.left = False

    def goes_down(self) -> bool:
        """A line has ended: True, once, if none is left and the peer has not said that it leaves. Not thread-safe."""
        if not self._up or self._served or self.open is not None:
            return False
        self._up = False
        return not self.left

    def opened(self, served: Served) -> None:
        """The peer has opened a line."""
        self._served = (*self._served, served)
        self.came_up()

    def ended(self, served: Served) -> None:
        self._served = tuple(line for line in self._served if line is not served)

    def heard(self) -> None:
        """The peer has said something on a line of its own: it is alive."""
        calling = self.calling
        if calling is not None:
            calling.heard()

    def post_awaited(self, frame: Frame) -> bool:
        """Send a message that a thread of the peer waits for, where it reads replies. False if it cannot go there.

        A large message would keep the sender busy until it is read, and the peer may have given up.
        """
        served = self.served
        if served is None or (frame.keep and not frame.places) or frame.size > MOST_AWAITED:
            return False
        served.reply(frame)
        return True
