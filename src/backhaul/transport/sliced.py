"""What all channels over a socket share: the slices of a large frame, and the end.

A subclass writes bytes in its own way. It asks `_take_slice` for the next slice whenever it is `between` two of them,
and says `_slice_left` when one has left.
"""

from __future__ import annotations

import contextlib
import socket
import time

from backhaul.options import RpcOptions
from backhaul.transport import sockets
from backhaul.transport.base import Channel, Way
from backhaul.transport.readable import Readable
from backhaul.transport.sockets import (
    SEND_FLAGS,
    SEND_SLICE_FLAGS,
    SendBuffer,
    await_ready,
    keep_unsent,
    tune,
    way_of,
)
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.lanes import SHORT, Pace, Slices

_LARGE_SLICE = 64 * 1024


class SlicedChannel(Channel):
    """Frames over a connected socket, large ones in slices whose size fits the link."""

    def __init__(self, sock: socket.socket, options: RpcOptions, decoder: Decoder) -> None:
        self._socket = sock
        self._decoder = decoder
        self.next = decoder.next  # type: ignore[method-assign]
        self._slices: Slices | None = None  # what else there is of a large frame
        self._pace = Pace()
        self._began = 0.0  # when its slice began
        self._taken = 0  # how large that is
        self._keep: object = None
        self._readable = Readable(sock, options.busy_poll)
        tune(sock, options.keepalive)
        self._buffer = None if sock.family == sockets.UNIX else SendBuffer(sock)
        if self._buffer is not None:
            keep_unsent(sock, self._pace.size)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def _flags(self) -> int:
        """How to send a part of a large frame."""
        return SEND_SLICE_FLAGS if self._buffer is not None and self._pace.size < _LARGE_SLICE else SEND_FLAGS

    def _begin(self, frame: Frame) -> bool:
        """Whether a frame leaves in slices; the first is taken next. Its memory is kept until all of it has left."""
        self._keep = frame.keep
        if frame.size <= self._pace.size:
            return False
        self._slices = Slices(frame.pieces)
        if self._buffer is not None:
            self._buffer.begin()
        self.between = True
        return True

    def _take_slice(self, slices: Slices) -> list[memoryview]:
        """What leaves next."""
        self.between = False
        self._began = time.monotonic()
        size = self._pace.size if self._buffer is None else min(self._pace.size, self._buffer.slice)
        self._taken = min(size, slices.left)
        return slices.take(size)

    def _slice_left(self) -> bool:
        """All that was begun has left. True if that is the whole frame."""
        if self._slices is not None:
            if self._taken:
                now = time.monotonic()
                changed = self._pace.took(self._taken, now - self._began)
                if self._buffer is not None:
                    if changed:
                        keep_unsent(self._socket, self._pace.size)
                    self._buffer.fit(now, now - self._began > SHORT)
            if self._slices.left:
                self.between = True
                return False
            self._slices = None
        self._keep = None
        return True

    def copy_unsent(self) -> None:
        if self._slices is not None:
            self._slices.copy()

    def way(self) -> Way:
        return way_of(self._socket)

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        return await_ready(self._socket, read=read, write=write, timeout=timeout)

    def next(self) -> Envelope | None:  # replaced in __init__, to save a call
        return self._decoder.next()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._slices = None
        self._keep = None
        self._socket.close()
