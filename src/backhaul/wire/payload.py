"""Payload: where the bytes that arrive belong: in the decoder's buffer, in the memory of a tensor, or nowhere.

Headers, metadata and small tensors are collected in one buffer, which grows with the bytes that have arrived. The bytes
of a large tensor go straight to its own memory, which is reserved, but not touched, until they come. If there is no
room for the tensors of a message, its bytes are dropped as they come.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from backhaul.errors import ProtocolError
from backhaul.wire.frames import DEVICE_PLACE, HEADER
from backhaul.wire.headers import split_places
from backhaul.wire.landing import Landing, LandingTogether, Missing

START_SIZE = 64 * 1024
_DRAIN = 512 * 1024
MIN_ROOM = 16 * 1024
_LARGE = 64 << 20  # for a buffer of this size or more, check first that there is room for it


class Segments(Protocol):
    """Lends the buffers that are in segments and not in the payload: see `transport.segments`."""

    def lend(self, id: int, size: int) -> Any: ...

    def lend_device(self, id: int, size: int) -> Any: ...


class Payload:
    """The bytes of one direction of one connection, and the payload that is arriving. Not thread-safe."""

    def __init__(
        self,
        max_message_bytes: int,
        segments: Segments | None,
        *,
        drains: bool,
        check_room: Callable[[int], None] | None,
    ) -> None:
        """See `decoder.Decoder`."""
        self._limit = max_message_bytes
        self._segments = segments
        self._buffer = bytearray(START_SIZE)
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._start = 0  # first byte not yet consumed
        self._end = 0  # first byte not yet received
        self._wanted = HEADER.size  # bytes from _start that the next step needs
        self._size = 0  # of the frame whose payload is arriving
        self._landing: Landing | LandingTogether | Missing | None = None
        self._drains = drains
        self._check_room = check_room
        self._skip = 0  # bytes of a payload that are still to be dropped
        self._drain: memoryview | None = None  # scratch memory for them
        self._index = 0  # buffer of the landing that comes next
        self._places: Sequence[int] = ()  # the segment of each buffer, or 0; empty if all are in the payload
        self._place: memoryview | None = None  # the rest of a buffer that is received in place

    # The buffer.

    def _make_room(self) -> None:
        live = self._end - self._start
        if live + MIN_ROOM <= len(self._buffer) // 2:
            self._view[:live] = bytes(self._view[self._start : self._end])
        else:
            try:
                grown = bytearray(len(self._buffer) * 2)
            except MemoryError:
                raise ProtocolError(f"no memory for a message whose values take more than {live} bytes") from None
            grown[:live] = self._view[self._start : self._end]
            self._replace(grown)
        self._start, self._end = 0, live

    def _replace(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    # The payload.

    def _read_payload(self, landing: Landing | LandingTogether | Missing) -> bool:
        """Move the arrived bytes to their buffers; True when all buffers are full."""
        if self._place is not None:
            return False
        if isinstance(landing, Missing):
            return self._read_nothing()
        try:
            return self._fill(landing)
        except MemoryError as error:
            rest = [
                size
                for index, size in enumerate(landing.sizes)
                if index >= self._index and not (self._places and self._places[index])
            ]
            self._miss(f"has no room at the receiver: {error}", sum(rest))
            return self._read_nothing()

    def _fill(self, landing: Landing | LandingTogether) -> bool:
        sizes = landing.sizes
        while self._index < len(sizes):
            if self._places and self._places[self._index]:
                self._index += 1
                continue
            size = sizes[self._index]
            available = self._end - self._start
            if size >= _LARGE and self._check_room is not None:
                self._check_room(size)
            if available >= size:
                landing.copy(self._index, self._address + self._start)
                self._start += size
            elif size <= landing.collects:
                self._wanted = size
                return False
            else:
                place = landing.place(self._index)
                place[:available] = self._view[self._start : self._end]
                self._start = self._end = 0
                self._place = place[available:]
                self._index += 1
                return False
            self._index += 1
        self._places = ()
        self._wanted = HEADER.size
        return True

    def _land(self, table: bytes, payload: int) -> Landing:
        """The landing of tensors some of which are in segments already."""
        table, places, elsewhere = split_places(table)
        if payload + elsewhere > self._limit and not self._drains:
            raise ProtocolError(f"tensors of {payload + elsewhere} bytes are over the limit of {self._limit}")
        self._size += elsewhere - 4 * len(places)
        landing = Landing.parse(table, payload + elsewhere)
        for index, segment in enumerate(places):
            if segment & DEVICE_PLACE and self._segments is not None:
                landing.adopt_device(index, self._segments.lend_device(segment & ~DEVICE_PLACE, landing.sizes[index]))
            elif segment and self._segments is not None:
                landing.adopt(index, self._segments.lend(segment, landing.sizes[index]))
        self._places = places
        return landing

    def _miss(self, why: str, payload: int) -> None:
        """Give up the tensors of this message: the remaining ``payload`` bytes are dropped as they come."""
        self._landing = Missing(f"a message of {self._size} bytes {why}")
        self._skip = payload
        self._places = ()

    def _read_nothing(self) -> bool:
        """Drop the arrived bytes of a payload that is given up; True once all of them are dropped."""
        dropped = min(self._skip, self._end - self._start)
        self._start += dropped
        self._skip -= dropped
        if self._skip:
            self._start = self._end = 0
            self._place = self._drained_to()[: self._skip]
            self._skip -= len(self._place)
            return False
        self._drain = None
        self._wanted = HEADER.size
        return True

    def _drained_to(self) -> memoryview:
        """Scratch memory for bytes to drop: a large piece if many are left and there is memory for it."""
        if self._drain is None and self._skip > _DRAIN:
            with contextlib.suppress(MemoryError):
                self._drain = memoryview(bytearray(_DRAIN))
        return self._view if self._drain is None else self._drain
