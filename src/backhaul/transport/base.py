"""The interface of a transport to the agent: listeners, channels, addresses."""

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
    """The progress of written bytes towards the peer, as far as the system knows it."""

    arrived: int = 0
    """Bytes that the peer's side has received; only whether the number grows matters."""
    outstanding: int = 0
    """About how many bytes the peer's side has not received yet."""


class Channel(ABC):
    """An ordered, two-way stream of frames to one peer.

    One thread at a time may write, and one at a time may read; the agent ensures that.

    A large frame is written in slices (`wire.lanes`). Between two slices a small frame can be written.
    """

    device_lending: DeviceLending | None = None
    """Puts tensors on GPUs into segments that the peer opens, where that is possible."""
    path = "memory"
    """How the bytes travel, for display: ``memory``, ``unix``, ``tls`` or ``tcp``."""
    sent = 0
    """Bytes written, without those in segments."""
    shared = 0
    """Bytes sent in segments of shared memory."""
    on_devices = 0
    """Bytes sent in segments of device memory."""
    received = 0
    """Bytes read, without those in segments."""

    between = False
    """Whether an unfinished frame is between two slices, so that `interject` is possible."""
    awaits = False
    """Whether the rest of the frame must wait: because it `fills`, or until the peer has everything that went over
    further connections.
    """
    fills = False
    """Whether the rest of the frame waits for a device of this worker, which still copies data into it."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `read` would find something."""

    @abstractmethod
    def write(self, frame: Frame) -> bool:
        """Write as much as is possible without waiting. Returns True if the whole frame is written.

        After False, call `flush` until it returns True before writing another frame. Raises `ChannelClosed`.
        """

    @abstractmethod
    def flush(self) -> bool:
        """Continue an unfinished `write`. Returns False if it is still unfinished: it must wait, or is `between`."""

    def interject(self, frame: Frame) -> bool:
        """Write a small frame between two slices. After False, call `flush` until `between` is True."""
        raise ChannelClosed("no frame is being written")  # for channels that finish every write at once

    def copy_unsent(self) -> None:  # noqa: B027 nothing to copy where every write is finished at once
        """Copy the rest of an unfinished `write`, so that the memory of its tensors may change."""

    def way(self) -> Way:
        """The progress of written bytes. Any thread may call it, as long as the channel is not closed."""
        return Way()

    @abstractmethod
    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        """Wait until the channel is ready for reading or writing, as asked, or closed. Returns False at the timeout."""

    @abstractmethod
    def read(self, timeout: float | None) -> bool:
        """Wait for bytes, at most ``timeout`` seconds, and take them. False if none came, or too few to decode.

        Raises `ChannelClosed` at the end of the stream, and `ProtocolError` for bad bytes.
        """

    @abstractmethod
    def next(self) -> Envelope | None:
        """The next message among the bytes taken so far; None if it is not complete. Raises `ProtocolError`."""

    @abstractmethod
    def shutdown(self) -> None:
        """End both directions now, and wake the threads that wait on this channel. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Free the channel. The caller must ensure that no other thread uses it."""


class Visitor(ABC):
    """An incoming connection that was not admitted yet. Not thread-safe."""

    trusted = False
    """Whether TLS, or the kernel, has already authenticated the peer."""
    whence = ""
    """The peer's address, if it has one. For display."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable, or writable, when the next step is possible."""

    @abstractmethod
    def step(self, judge: Callable[[Hello], Welcome]) -> Want | tuple[Channel, Hello] | None:
        """Continue the greeting without waiting. Returns what to wait for before the next step, or the channel.

        Returns None if the connection is a further one of a channel that was admitted before.

        ``judge`` decides whether to admit the peer. If it refuses, the welcome is sent, and this raises. Raises
        `AuthenticationError`, `ProtocolError` or `ChannelClosed`; the connection is then closed.
        """

    @abstractmethod
    def turn_away(self) -> None:
        """Close the connection without an answer."""


class Listener(ABC):
    """Accepts connections of peers."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `accept` would find a visitor."""

    @abstractmethod
    def accept(self) -> Visitor | None:
        """The next visitor, or None if there is none. Does not wait."""

    @abstractmethod
    def close(self) -> None: ...


class Transport(ABC):
    """Makes channels of one or several kinds."""

    @abstractmethod
    def listen(self) -> Sequence[Listener]:
        """Start to listen. After that `addresses` is known. Call `introduce` before a peer is admitted."""

    def introduce(self, name: str) -> None:  # noqa: B027 some transports have no credentials
        """Set the name of this worker. Raises `OptionError` if its credentials are not for that name."""

    @property
    @abstractmethod
    def addresses(self) -> Addresses: ...

    @abstractmethod
    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        """Connect to the worker at ``addresses``, and greet it.

        Raises `AuthenticationError`, `ProtocolError`, or `ChannelClosed` with the reason.
        """

    @abstractmethod
    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        """Whether a process listens at ``addresses``, as far as this worker can see."""

    def is_over(self, addresses: Addresses) -> bool:
        """Whether this machine's kernel says that the worker at ``addresses`` has ended. False if it does not know."""
        return False

    def trim(self) -> float:
        """Free memory that was not used for a while. Returns the seconds until the next call is due, or infinity."""
        return math.inf

    def when_used(self, callback: Callable[[], None]) -> None:  # noqa: B027 most have nothing to trim
        """Set a function to call when memory is in use again, so that `trim` must be called later."""

    def memory(self) -> dict[str, int]:
        """The bytes of shared memory that this worker has made for large tensors, and the number of segments."""
        return {"bytes": 0, "segments": 0}

    @abstractmethod
    def close(self) -> None:
        """Stop listening, and remove the files that were made for it."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: close the descriptors, and remove nothing."""


__all__ = ["Addresses", "Channel", "ChannelClosed", "Listener", "Transport", "Visitor", "Want", "Way"]
