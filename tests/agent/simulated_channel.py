"""The channel of a line in a `link_simulation`, what travels on it, and what the judge has seen of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from simulated_waiting import Listener

from backhaul.agent import link_state
from backhaul.agent.pending import Slot
from backhaul.transport.base import ChannelClosed

if TYPE_CHECKING:
    from link_simulation import Simulation

SMALL, LARGE = 100, link_state.SMALL + 1
"""Sizes of frames."""

END = "end"
"""The last thing that comes from a peer that has died."""


class Frame(NamedTuple):
    """What leaves: a request, or a ping, whose number is 0."""

    id: int
    size: int
    may_be_ignored: bool = False


class Reply(NamedTuple):
    id: int


class News(NamedTuple):
    """A message for a thread that listens."""

    listener: Listener


class Future:
    """Stands for `future.Future`."""

    def __init__(self) -> None:
        self.has_callbacks = False
        self.settled = False


class Channel:
    """Both ends of it. The peer takes from ``outbox`` and puts into ``inbox``."""

    def __init__(self, world: Simulation, name: str) -> None:
        self.world = world
        self.name = name
        self.inbox: deque[Any] = deque()
        self.outbox: list[Frame] = []  # for the peer to take
        self.room = True
        self.shut = False
        self.closed = False
        # For the judge:
        self.slots: dict[int, Slot] = {}
        self.opened_at: dict[int, float] = {}
        self.ended: dict[int, str] = {}
        self.readers: set[int] = set()
        self.ordered: list[int] = []  # requests in the order in which they were given their place
        self.written: list[int] = []
        self.calls_opened = 0

    def __repr__(self) -> str:
        return self.name

    @property
    def readable(self) -> bool:
        return bool(self.inbox) or self.shut

    @property
    def hangs_up(self) -> bool:
        """What ``EPOLLRDHUP`` says."""
        return self.shut or END in self.inbox

    def write(self, frames: Any) -> bool:
        """The channel takes everything, and is full afterwards or not."""
        if self.shut or self.closed:
            raise ChannelClosed
        for frame in frames:
            self.world.note("writes", self, frame.id)
            if frame.id:
                self.written.append(frame.id)
        self.world.judge_order(self)
        self.outbox += frames
        self.room = self.room and self.world.random.random() < self.world.style.room
        return self.room

    def flush(self) -> bool:
        if self.shut or self.closed:
            raise ChannelClosed
        return self.room
