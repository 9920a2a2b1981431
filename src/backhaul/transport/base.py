"""What a transport offers to the agent: listeners, channels, addresses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from backhaul.devices.segments import DeviceLending
from backhaul.ids import Addresses
from backhaul.security.handshake import Hello, Welcome
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame

Want = Literal["read", "write"]
"""What a greeting waits for: something to read, or room to write."""


class ChannelClosed(Exception):
    """The channel is gone: its peer closed it or died, or it was closed here."""


class Way(NamedTuple):
    """How what was written gets on, as far as the system knows."""

    arrived: int = 0
    """Bytes that the peer's side has taken; only whether the number grows matters."""
    outstanding: int = 0
    """About how many bytes it has not."""


class Channel(ABC):
    """An ordered, two-way stream of frames to one peer.

    One thread at a time may write, and one at a time may read; the agent sees to that.

    A large frame leaves in slices (`wire.lanes`). Between two slices a small one can be written.
    """

    device_lending: DeviceLending | None = None
    """Puts tensors on GPUs into segments that the peer opens, where that is possible."""
    path = "memory"
    """How the bytes go, for people: ``memory``, ``unix``, ``tls`` or ``tcp``."""
    sent = 0
    """Bytes that were written, without those in segments."""
    shared = 0
    """Bytes that went in segments of shared memory."""
    on_devices = 0
    """Bytes that went in segments of device memory."""
    received = 0
    """Bytes that were read, without those in segments."""

    between = False
    """An unfinished frame is between two slices: `interject` is possible."""
    awaits = False
    """What is left of it has to wait: the peer has not got all that went over further connections."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `read` would find something."""

    @abstractmethod
    def write(self, frame: Frame) -> bool:
        """Write what can be written without waiting; True once the whole frame is out.

        After False, call `flush` until it returns True before writing another frame.
        Raises `ChannelClosed`.
        """

    @abstractmethod
    def flush(self) -> bool:
        """Go on with an unfinished `write`. False if it is still unfinished: it has to wait, or is `between`."""

    def interject(self, frame: Frame) -> bool:
        """Write a small frame between two slices; True once it is out. After False, `flush` until `between` is True."""
        raise ChannelClosed("nothing is under way")  # where every write is finished at once

    def copy_unsent(self) -> None:  # noqa: B027 nothing to copy where every write is finished at once
        """Copy what an unfinished `write` has left, so that the memory of its tensors may change."""

    def way(self) -> Way:
        """How what was written gets on. Any thread may call it, as long as the channel is not closed."""
        return Way()

    @abstractmethod
    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        """Return True when the channel is ready for one of those, or closed, and False at the timeout."""

    @abstractmethod
    def read(self, timeout: float | None) -> bool:
        """Wait for bytes, at most ``timeout`` seconds, and take them. False if none came, or too few to mean anything.

        Raises `ChannelClosed` at the end of the stream, `ProtocolError` for bad bytes.
        """

    @abstractmethod
    def next(self) -> Envelope | None:
        """The next message among the bytes taken so far. Raises `ProtocolError`."""

    @abstractmethod
    def shutdown(self) -> None:
        """End both directions now; whoever waits on this channel returns. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Free the channel. The caller makes sure that no other thread uses it."""


class Visitor(ABC):
    """A connection that has come in and has not been let in yet. For one thread."""

    trusted = False
    """Whether somebody vouches for the peer already: TLS, or the kernel."""
    whence = ""
    """The address that it comes from, if it has one. For people."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable, or writable, when the next step can be made."""

    @abstractmethod
    def step(self, judge: Callable[[Hello], Welcome]) -> Want | tuple[Channel, Hello] | None:
        """Go on with the greeting without waiting: what to wait for before the next step, or the channel.

        None if the connection is a further one of a channel that was let in before.

        ``judge`` decides; a welcome that refuses is sent and raises. Raises `AuthenticationError`, `ProtocolError` or
        `ChannelClosed`; the connection is then closed.
        """

    @abstractmethod
    def turn_away(self) -> None:
        """Close it without a word."""


class Listener(ABC):
    """Where peers connect to."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `accept` would find a visitor."""

    @abstractmethod
    def accept(self) -> Visitor | None:
        """A visitor, or None if there is none. Does not wait."""

    @abstractmethod
    def close(self) -> None: ...


class Transport(ABC):
    """Makes channels of one or several kinds."""

    @abstractmethod
    def listen(self) -> Sequence[Listener]:
        """Start to listen; `addresses` is known after it. Before anybody is let in, `introduce` this worker."""

    def introduce(self, name: str) -> None:  # noqa: B027 some have nothing to show to a peer
        """From now on this is the worker of that name. Raises `OptionError` if its credentials are not for it."""

    @property
    @abstractmethod
    def addresses(self) -> Addresses: ...

    @abstractmethod
    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        """Reach the worker at ``addresses``, and greet it.

        Raises `AuthenticationError`, `ProtocolError`, or `ChannelClosed` with the reason.
        """

    @abstractmethod
    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        """Somebody listens at ``addresses``, as far as can be seen from here."""

    def is_over(self, addresses: Addresses) -> bool:
        """The machine itself says that the worker at ``addresses`` has ended. False if it cannot be known here."""
        return False

    def trim(self) -> float:
        """Free memory that has not been used for a while; in how many seconds to call this again, or infinity."""
        return math.inf

    def when_used(self, callback: Callable[[], None]) -> None:  # noqa: B027 most have nothing to trim
        """Have ``callback`` called when there is something to `trim` after there was nothing."""

    def memory(self) -> dict[str, int]:
        """Bytes of shared memory that this worker has made for large tensors, and how many segments they are in."""
        return {"bytes": 0, "segments": 0}

    @abstractmethod
    def close(self) -> None:
        """Stop listening and remove what was made for it."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: close the descriptors, and remove nothing."""


__all__ = ["Addresses", "Channel", "ChannelClosed", "Listener", "Transport", "Visitor", "Want", "Way"]
