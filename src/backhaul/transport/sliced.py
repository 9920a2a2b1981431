"""SlicedChannel: the base of all channels over a socket. It cuts large frames into slices, and ends channels.

A subclass writes bytes in its own way. It calls `_take_slice` for the next slice whenever it is `between` two slices,
and `_slice_left` when a slice is written.

A frame into which a device still copies data (`wire.filling`) leaves in slices, too, each when its bytes are there.
Small frames pass it meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time

from msgspec import structs

from backhaul.errors import ProtocolError
from backhaul.options import RpcOptions
from backhaul.transport import sockets
from backhaul.transport.base import Channel, ChannelClosed, Way
from backhaul.transport.filling import fills_for_long, missing, wait_while
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
from backhaul.transport.strands import WIDE, Strands
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.filling import Filling
from backhaul.wire.frames import Frame
from backhaul.wire.lanes import LAST, MOST_SLICE, SHORT, Pace, Slices

_LARGE_SLICE = 64 * 1024


class SlicedChannel(Channel):
    """Frames over a connected socket, large ones in slices whose size fits the link."""

    def __init__(
        self, sock: socket.socket, options: RpcOptions, decoder: Decoder, strands: Strands | None = None
    ) -> None:
        self._socket = sock
        self._decoder = decoder
        self.next = decoder.next  # type: ignore[method-assign]
        self._slices: Slices | None = None  # the rest of a large frame
        self._filling: Filling | None = None  # of that frame
        self._whole: Frame | None = None  # a frame that begins to leave when all of its bytes are there
        self._pace = Pace()
        self._began = 0.0  # when the current slice began
        self._taken = 0  # the size of the current slice
        self._keep: object = None
        self._readable = Readable(sock, options.busy_poll)
        tune(sock, options.keepalive)
        self._buffer = None if sock.family == sockets.UNIX else SendBuffer(sock)
        if self._buffer is not None:
            keep_unsent(sock, self._pace.size)
        self._strands = strands
        self._wide = False  # whether the current frame may use the strands
        if strands is not None:
            strands.on_broken = self.shutdown
            strands.on_announced = self._count

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def _flags(self) -> int:
        """The flags for sending a part of a large frame."""
        return SEND_SLICE_FLAGS if self._buffer is not None and self._pace.size < _LARGE_SLICE else SEND_FLAGS

    def _begin(self, frame: Frame) -> bool:
        """Begin a frame, and keep its memory until it is written. Returns whether it must be written in slices."""
        self._keep = frame.keep
        fills = fills_for_long(frame)
        if frame.size <= self._pace.size and not fills:
            return False
        self._slices = Slices(frame.pieces)
        self._filling = frame.filling if fills else None
        if self._buffer is not None:
            self._buffer.begin()
        self._wide = self._strands is not None and frame.size >= WIDE
        if self._wide and self._strands is not None:
            self._strands.want()
        self.between = True
        return True

    def _begin_whole(self, frame: Frame) -> bool:
        """Keep a frame until all of its bytes are there. Returns False, because it has not left."""
        self._whole = frame
        self.between = True
        return False

    def _take_whole(self) -> Frame | None:
        """The frame of `_begin_whole`, if it can leave now."""
        frame = self._whole
        if frame is None or frame.filling is None or self.fills:
            return None
        self._whole = None
        self.between = False
        return structs.replace(frame, filling=None)

    @property
    def awaits(self) -> bool:  # type: ignore[override]
        if self._whole is not None:
            return self.fills
        if self._slices is None:
            return False
        return self.fills or (
            self._wide and self._slices.left <= LAST and self._strands is not None and not self._strands.idle
        )

    @property
    def fills(self) -> bool:  # type: ignore[override]
        whole, slices, filling = self._whole, self._slices, self._filling
        if whole is not None and whole.filling is not None:
            return missing(whole.filling) > 0
        if slices is None or filling is None:
            return False
        unfilled = missing(filling)
        return unfilled > 0 and slices.left - unfilled < min(self._pace.size, slices.left)

    def _take_slice(self, slices: Slices) -> list[memoryview]:
        """The bytes to write next."""
        self.between = False
        self._began = time.monotonic()
        size = self._pace.size if self._buffer is None else min(self._pace.size, self._buffer.slice)
        if self._wide and self._strands is not None:
            self._strands.check()
            if size == MOST_SLICE and slices.apart and (found := self._strands.free()) is not None:
                number, strand = found
                head, data = slices.take_apart(number)
                strand.give(data, self._keep)
                self._taken = 0
                return [head]
            if slices.left > LAST:
                size = min(size, slices.left - LAST)
        self._taken = min(size, slices.left)
        return slices.take(size)

    def _slice_left(self) -> bool:
        """Note that the current slice is written. Returns True if the whole frame is."""
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
            self._slices = self._filling = None
        if self._whole is not None:
            self.between = True
            return False
        self._keep = None
        return True

    def copy_unsent(self) -> None:
        if self._slices is not None:
            self._slices.copy()
        if self._strands is not None:
            self._strands.copy()

    def way(self) -> Way:
        way = way_of(self._socket)
        return way if self._strands is None else self._strands.way(way)

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        if write and self.between and self.fills:
            return self._await_filling(read, timeout)
        if write and self._strands is not None and self.between and self.awaits:
            return self._strands.await_progress(self._socket, read=read, timeout=timeout)
        return await_ready(self._socket, read=read, write=write, timeout=timeout)

    def _await_filling(self, read: bool, timeout: float | None) -> bool:
        def goes_on() -> bool:
            return self.fills and not (read and await_ready(self._socket, read=True, write=False, timeout=0))

        return wait_while(goes_on, math.inf if timeout is None else timeout)

    def next(self) -> Envelope | None:  # replaced in __init__, to save a call
        return self._decoder.next()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._strands is not None:
            self._strands.shutdown()

    def _count(self, size: int) -> None:
        """Count bytes that come over a strand."""
        self.received += size

    def _ended(self) -> ChannelClosed | ProtocolError:
        """The exception for the end of the stream."""
        problem = None if self._strands is None else self._strands.problem
        if problem is None:
            return ChannelClosed("the connection ended")
        if isinstance(problem, ProtocolError):
            return problem
        return ChannelClosed(f"one of the connections for large tensors has broken: {problem}")

    def close(self) -> None:
        self._slices = self._filling = self._whole = None
        self._keep = None
        self._socket.close()
        if self._strands is not None:
            self._strands.close()
