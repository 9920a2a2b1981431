"""Records: bytes of frames with checksums, for connections that may corrupt bits. Without I/O.

A record, all numbers little-endian::

    offset  size  field
    0       4     N: length of the data
    4       4     CRC-32 of these four bytes
    8       4     CRC-32 of the data
    12      N     data: any part of the stream of frames

The length has its own checksum: with a wrong length, the receiver would wait for bytes that never come.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from zlib import crc32

from backhaul.errors import ProtocolError
from backhaul.wire.decoder import Decoder, Envelope

HEADER = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
MOST = 4 << 20
"""The data of a record has at most this many bytes."""
_START = 64 * 1024


def seal(pieces: Sequence[memoryview]) -> list[memoryview]:
    """These bytes as records: as one record, unless there are more than `MOST` bytes."""
    found: list[memoryview] = []
    data: list[memoryview] = []
    size = check = 0
    for piece in map(_plain, pieces):
        while len(piece):
            part, piece = piece[: MOST - size], piece[MOST - size :]
            data.append(part)
            size += len(part)
            check = crc32(part, check)
            if size == MOST:
                found += [_head(size, check), *data]
                data, size, check = [], 0, 0
    return [*found, _head(size, check), *data] if size else found


def _plain(piece: memoryview) -> memoryview:
    return piece if piece.format == "B" and piece.ndim == 1 else piece.cast("B")


def _head(size: int, check: int) -> memoryview:
    return memoryview(HEADER.pack(size, crc32(_LENGTH.pack(size)), check))


class Records:
    """Collects records, and passes their data to a decoder once the checksums are verified. Not thread-safe."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._buffer = bytearray(_START)
        self._start = 0  # first byte not yet checked
        self._end = 0  # first byte not yet received
        self._ready: deque[Envelope] = deque()

    def writable(self) -> memoryview:
        """The memory for the next bytes. Call `wrote` once they are there. Valid until the next call of any method."""
        return memoryview(self._buffer)[self._end :]

    def wrote(self, count: int) -> None:
        """The first ``count`` bytes of `writable()` have been written. Raises `ProtocolError`."""
        self._end += count
        while (wanted := self._take()) == 0:
            pass
        live = self._buffer[self._start : self._end]
        if wanted > len(self._buffer) or self._start:
            size = max(_START, wanted)
            if size != len(self._buffer):
                self._buffer = bytearray(size)
            self._buffer[: len(live)] = live
            self._start, self._end = 0, len(live)

    def next(self) -> Envelope | None:
        """The next complete message, or None when more bytes are needed."""
        return self._ready.popleft() if self._ready else None

    def _take(self) -> int:
        """Take a complete record and return 0. If none is complete, return the size of the next one as far as known.

        Raises `ProtocolError`.
        """
        start = self._start + HEADER.size
        if start > self._end:
            return HEADER.size
        size, check_of_size, check = HEADER.unpack_from(self._buffer, self._start)
        if crc32(_LENGTH.pack(size)) != check_of_size or not 0 < size <= MOST:
            raise ProtocolError("bytes that are not what the peer sent: the head of a record has a wrong checksum")
        if start + size > self._end:
            return HEADER.size + int(size)
        data = memoryview(self._buffer)[start : start + size]
        if crc32(data) != check:
            raise ProtocolError(f"bytes that are not what the peer sent: {size} of them have a wrong checksum")
        self._start = start + size
        self._ready.extend(self._decoder.receive_data(data))
        return 0
