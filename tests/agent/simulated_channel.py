"""The channel of a line in a `link_simulation`, what travels on it, and what the judge has seen of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from simulated_waiting import Listener

from backhaul.agent import link_state
from backhaul.agent.pending import Slot
from backhaul.transport.base import ChannelClosed, Way

if TYPE_CHECKING:
    from link_simulation import Simulation

SMALL, LARGE = 100, link_state.SMALL + 1
"""Sizes of frames."""

END = "end"
"""The last item that comes from a peer that has died."""


class Frame(NamedTuple):
    """What leaves: a request, or a ping, whose number is 0."""

    id: int
    size: int
    may_be_ignored: bool = False

    @property
    def holds(self) -> bool:
        """Whether the frame is large: then it leaves in slices, and must not change before it has left."""
        return self.size > SMALL


class Joined(NamedTuple):
    """Several small frames that leave in one write."""

    frames: tuple[Frame, ...]

    @property
    def size(self) -> int:
        return sum(frame.size for frame in self.frames)

    @property
    def holds(self) -> bool:
        return False


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
    """Both ends of a channel. The peer takes from ``outbox`` and puts into ``inbox``."""

    def __init__(self, world: Simulation, name: str) -> None:
        self.world = world
        self.name = name
        self.inbox: deque[Any] = deque()
        self.outbox: list[Frame] = []  # for the peer to take
        self.room = True
        self.under_way: list[Frame] = []  # small frames that did not fit
        self.large: Frame | None = None
        self.slices = 0  # of it that have not left
        self.in_slice = False
        self.between = False
        self.arrived = 0
        self.shut = False
        self.closed = False
        # For the judge:
        self.slots: dict[int, Slot] = {}
        self.opened_at: dict[int, float] = {}
        self.ended: dict[int, str] = {}
        self.readers: set[int] = set()
        self.ordered: list[Frame] = []  # requests in the order in which they were given their place
        self.written: list[Frame] = []
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

    def write(self, frame: Frame | Joined) -> bool:
        """True once the frame has left: small frames leave at once if there is room, a large one slice by slice."""
        if self.shut or self.closed:
            raise ChannelClosed
        if self.under_way or self.large is not None:
            raise self.world.failure(f"{self} begins a frame in the middle of another one")
        if frame.holds:
            assert isinstance(frame, Frame)
            self.large, self.slices, self.between = frame, 3, True
        else:
            self.under_way = list(frame.frames if isinstance(frame, Joined) else [frame])
        return self.flush()

    def interject(self, frame: Frame | Joined) -> bool:
        if not self.between or self.under_way:
            raise self.world.failure(f"{self} interjects something in the middle of a slice")
        self.between = False
        self.under_way = list(frame.frames if isinstance(frame, Joined) else [frame])
        self.flush()
        return self.between

    def flush(self) -> bool:
        if self.shut or self.closed:
            raise ChannelClosed
        if self.between:
            self.between = False
            self.in_slice = True
        if not self.room:
            return False
        self.room = self.world.random.random() < self.world.style.room
        self.deliver(self.under_way)
        self.under_way = []
        if self.large is None:
            return True
        self.slices -= self.in_slice
        self.in_slice = False
        if self.slices:
            self.between = True
            return False
        self.deliver([self.large])
        self.large = None
        return True

    def way(self) -> Way:
        """What the peer's system has taken, whether or not the peer itself runs."""
        return Way(self.arrived, len(self.under_way) + (self.large is not None))

    def deliver(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.arrived += frame.size
            self.world.note("writes", self, frame.id)
            if frame.id:
                self.written.append(frame)
        self.world.judge_order(self)
        self.outbox += frames
