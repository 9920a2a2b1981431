"""Bytes -> messages, without I/O.

Feed it in one of two ways. `receive_data(data)` takes bytes and returns what they
complete. A transport that wants its large tensors without a copy asks `writable()`
where the next bytes belong, lets the system call write there, says `wrote(n)`, and takes
messages with `next()`: bytes of a large buffer then land in the tensor's own memory.

The decoder is total: for any bytes it returns messages, waits for more, or raises
`ProtocolError`, after which it must not be used again. Nothing is allocated because a
header claims it: metadata is collected in a buffer that grows with what has arrived, and a
large tensor's memory is reserved, not touched, until its bytes come.

A message whose tensors have no room here is taken all the same, without them: whoever wants the tensors gets a
`MemoryError`, and the connection goes on. So does a call or a reply whose values are over the limit: nothing but its
number is read.

Slices of a large frame go to a second decoder, which sees a stream of whole frames as this one does. Its memory is what
`writable()` gives out during a slice.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch

from backhaul.errors import ProtocolError
from backhaul.wire.frames import DEVICE_PLACE, HEADER, LONGEST_TRACE, MAGIC, MAX_TABLE, PLACED, SLICE, TRACED, VERSION
from backhaul.wire.headers import split_places
from backhaul.wire.landing import Landing, Missing, land_small
from backhaul.wire.messages import KIND_OF, KINDS, Call, Create, Failed, Failure, Inspect, Result
from backhaul.wire.plain import refuse_maps

_START = 64 * 1024
_DRAIN = 512 * 1024
_KEEP = 1 << 20
# Buffers beyond this are received in place rather than collected first.
_COLLECT_BELOW = 64 * 1024
_MIN_ROOM = 16 * 1024
_MOST_DRAINED = 1 << 42  # no message is larger than that: what claims it is garbage
_LARGE = 64 << 20  # so much that it is worth a look whether there is room for it

_BITS = PLACED | TRACED

# The kinds with values that msgpack decodes as they come, and those that no peer of a federation has to send.
_UNTYPED = frozenset(KIND_OF[message] for message in (Call, Result, Failure, Create, Failed))
_FOR_CLUSTERS = frozenset({KIND_OF[Inspect]})

# What stands for a message whose values are over the limit. The creation of a value fails like any call. Its tree, an
# empty list, is not a value: to open it, the tensors are asked for first, and say why.
_STAND_INS = {KIND_OF[Call]: Call, KIND_OF[Create]: Call, KIND_OF[Result]: Result, KIND_OF[Failure]: Result}
_LONGEST_START = 1 + LONGEST_TRACE + 5 + 9  # a mark of a tracer, the head of an array, a number
_OVER = "is over the limit of {} at the receiver; option max_message_bytes sets it"

# Without state.
_decoders = {kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()}

# The header as `_next_plain` reads it: what all frames begin with, and the rest.
_HEADER = struct.Struct("<3sBIIQ")
_LEAD = MAGIC + bytes((VERSION,))
_DECODE = {kind: decoder.decode for kind, decoder in _decoders.items()}


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A message that arrived, and the tensors that its trees refer to."""

    message: Any
    tensors: list[torch.Tensor]
    trace: str = ""
    """The mark of the sender's tracer, if there is one."""
    size: int = 0
    """Of the frame, in bytes, buffers in segments included."""


class Segments(Protocol):
    """Where buffers lie that are not in the payload: see `transport.segments`."""

    def lend(self, id: int, size: int) -> Any: ...

    def lend_device(self, id: int, size: int) -> Any: ...


class Apart(Protocol):
    """Fills in what comes over other connections: see `transport.strands`."""

    def expect(self, strand: int, place: memoryview | None, size: int) -> None:
        """The next ``size`` bytes of a strand belong to ``place``; None: nobody gets them. Raises `ProtocolError`."""

    def settle(self, size: int) -> None:
        """A frame of that size is complete. Raises `ProtocolError` if something that was expected has not come."""


class Decoder:
    """Collects the bytes of one direction of one connection. Not thread-safe."""

    def __init__(
        self,
        max_message_bytes: int = 64 << 30,
        segments: Segments | None = None,
        max_head_bytes: int | None = None,
        *,
        bounded: bool = False,
        drains: bool = False,
        check_room: Callable[[int], None] | None = None,
        sliced: bool = False,
        apart: Apart | None = None,
    ) -> None:
        """``max_head_bytes`` is for what becomes objects, which take far more memory than their bytes.

        A ``bounded`` decoder is for peers that may lie: no map is decoded, and tensors do not claim to be larger than a
        message may be. ``drains``: a message whose payload is over the limit is taken without its tensors, instead of
        being an error. ``check_room(size)`` raises MemoryError if this process cannot have that much memory.
        ``sliced``: its bytes come in slices, which have no slices in them. ``apart``: some of them come over others of
        the peer's connections.
        """
        self._bounded = bounded
        self._limit = max_message_bytes
        self._head_limit = max_message_bytes if max_head_bytes is None else max_head_bytes
        self._segments = segments
        self._buffer = bytearray(_START)
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._start = 0  # first byte not yet consumed
        self._end = 0  # first byte not yet received
        self._wanted = HEADER.size  # bytes from _start that the next step needs
        self._message: Any = None  # of the frame whose payload is arriving
        self._trace = ""  # its mark of a tracer
        self._size = 0  # of that frame
        self._tensor: torch.Tensor | None = None  # its tensor, if that was read at once
        self._landing: Landing | Missing | None = None
        self._drains = drains
        self._check_room = check_room
        self._skip = 0  # bytes of a payload that nobody gets
        self._drain: memoryview | None = None  # where they go
        self._index = 0  # buffer of the landing that comes next
        self._places: Sequence[int] = ()  # segments of its buffers, if any lie in one
        self._place: memoryview | None = None  # the rest of a buffer that is received in place
        self._sliced = sliced
        self._apart = apart
        self._announced = False  # the last header was one of a slice that comes over another connection
        self._large: Decoder | None = None  # of the frames that come in slices, once there has been one
        self._slice = 0  # bytes of a slice that have not gone there

    def writable(self) -> memoryview:
        """Where the next bytes belong. Valid until the next call of any method."""
        if self._place is not None:
            return self._place
        if self._large is not None:
            self._look_for_slice()
            if self._slice:
                return self._large.writable()[: self._slice]
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEEP and self._wanted <= _KEEP:
                self._replace(bytearray(_START))
        if len(self._buffer) - self._end < _MIN_ROOM:
            self._make_room()
        return self._view[self._end :]

    @property
    def placed(self) -> bool:
        """All of `writable()` is memory of one tensor, so that whatever fits may be written there at once."""
        large = self._large
        return self._place is not None or (self._slice > 0 and large is not None and large._place is not None)

    def wrote(self, count: int) -> None:
        """The first ``count`` bytes of `writable()` have been written."""
        if self._place is None:
            if self._slice and self._large is not None:
                self._large.wrote(count)
                self._slice -= count
            else:
                self._end += count
        else:
            self._place = self._place[count:] if count < len(self._place) else None

    def next(self) -> Envelope | None:
        """The next complete message, or None when more bytes are needed."""
        if self._landing is None and not self._bounded:
            if self._large is not None and (envelope := self._next_large()) is not None:
                return envelope
            if self._end - self._start < self._wanted or self._slice:
                return None
            if (envelope := self._next_plain()) is not None:
                return envelope
        if self._landing is None:
            if self._large is not None and (envelope := self._next_large()) is not None:
                return envelope
            available = self._end - self._start
            if available < self._wanted or self._slice:
                return None
            while not self._read_head(available):
                if not self._in_slice() and not self._took_announcement():
                    return None
                # That was the header of a slice.
                if (envelope := self._next_large()) is not None:
                    return envelope
                available = self._end - self._start
                if available < HEADER.size or self._in_slice():
                    return None
            if self._landing is None:
                message, self._message = self._message, None
                if self._tensor is None:
                    return Envelope(message, [], self._trace, self._size)
                tensors, self._tensor = [self._tensor], None
                return Envelope(message, tensors, self._trace, self._size)
        if not self._read_payload(self._landing):
            return None
        tensors = self._landing.tensors()
        message = self._message
        self._message = self._landing = None
        return Envelope(message, tensors, self._trace, self._size)

    def _next_plain(self) -> Envelope | None:
        """A message that has arrived as a whole, with no tensor or a small one: what most are.

        None if it is another one, or not right: then the general way says so.
        """
        start = self._start
        view = self._view
        lead, kind, metadata, table, payload = _HEADER.unpack_from(view, start)
        body = start + _HEADER.size
        data = body + metadata
        payload_start = data + table
        end = payload_start + payload
        decode = _DECODE.get(kind)
        if end > self._end or lead != _LEAD or decode is None or payload > _COLLECT_BELOW or end - start > self._limit:
            return None
        if payload_start - start > self._head_limit:
            return None
        if table:
            tensor = land_small(bytes(view[data:payload_start]), self._address + payload_start, payload)
            if tensor is None:
                return None
            tensors = [tensor]
        elif payload:
            return None
        else:
            tensors = []
        try:
            message = decode(view[body:data])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"metadata that is no {KINDS[kind].__name__}: {error}") from None
        self._start = end
        self._wanted = HEADER.size
        return Envelope(message, tensors, "", end - start)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Envelope]:
        """Take all of ``data``; return the messages that it completes."""
        done = []
        rest = memoryview(data).cast("B")
        while True:
            while (envelope := self.next()) is not None:
                done.append(envelope)
            if not rest:
                return done
            room = self.writable()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            self.wrote(count)
            rest = rest[count:]

    def _read_head(self, available: int) -> bool:
        """Consume header, metadata and table once they are complete."""
        start = self._start
        magic, version, kind, metadata, table, payload = HEADER.unpack_from(self._buffer, start)
        size = HEADER.size + metadata + table
        if available < size or self._wanted == HEADER.size:
            # Judge a header when it is first seen, before a byte is collected for it.
            if magic != MAGIC:
                raise ProtocolError(f"not a frame: it starts with {bytes(magic)!r}")
            if version != VERSION:
                raise ProtocolError(f"a frame of version {version}; this worker speaks version {VERSION}")
            if kind & ~_BITS not in KINDS or (kind & PLACED and (self._segments is None or not table)):
                if kind == SLICE and payload and not (table or self._sliced):
                    if not metadata:
                        self._begin_slice(payload)
                        return False
                    if self._apart is not None:
                        self._announce(self._apart, metadata, payload)
                        return False
                raise ProtocolError(f"a frame of unknown kind {kind}")
            if self._bounded and kind & ~_BITS in _FOR_CLUSTERS:
                raise ProtocolError(f"a {KINDS[kind & ~_BITS].__name__}, in a federation")
            drains = self._drains and payload <= _MOST_DRAINED
            if drains and size > self._limit and kind & ~TRACED in _STAND_INS and table <= MAX_TABLE:
                return self._read_id(available, kind, metadata, size + payload)
            if table > MAX_TABLE or size > self._limit or (size + payload > self._limit and not drains):
                raise ProtocolError(
                    f"a message of {size + payload} bytes (tensor table {table}) is over the limit of "
                    f"{self._limit}; option max_message_bytes sets it"
                )
            if size > self._head_limit:
                raise ProtocolError(
                    f"values that take {size} bytes without their tensors are over the limit of {self._head_limit}"
                )
            if not table and payload:
                raise ProtocolError("a payload without a tensor table")
            if available < size:
                self._wanted = size
                return False
        body = start + HEADER.size
        self._size = size + payload
        placed = kind & PLACED
        self._trace = ""
        if kind & TRACED:
            self._trace = self._read_trace(body, metadata)
            body += 1 + len(self._trace)
            metadata -= 1 + len(self._trace)
        kind &= ~_BITS
        data = self._view[body : body + metadata]
        if self._bounded and kind in _UNTYPED:
            refuse_maps(data)
        try:
            self._message = _decoders[kind].decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"metadata that is no {KINDS[kind].__name__}: {error}") from None
        if table and size + payload > self._limit:
            self._miss(_OVER.format(self._limit), payload)
        elif table:
            self._index = 0
            headers = bytes(self._view[body + metadata : start + size])
            if not placed and size + payload <= available and payload <= _COLLECT_BELOW:
                # All of it is here.
                tensor = land_small(headers, self._address + start + size, payload)
                if tensor is not None:
                    self._tensor = tensor
                    self._start = start + size + payload
                    self._wanted = HEADER.size
                    return True
            if placed:
                self._landing = self._land(headers, payload)
                if self._size > self._limit:
                    self._miss(f"is over the limit of {self._limit} at the receiver (max_message_bytes)", payload)
            else:
                self._landing = Landing.parse(headers, payload)
            if self._bounded and self._landing.claimed > self._limit:
                raise ProtocolError(
                    f"tensors that claim {self._landing.claimed} bytes beyond those that follow; {self._limit} may be"
                )
        self._start = start + size
        self._wanted = HEADER.size
        return True

    def _read_id(self, available: int, kind: int, metadata: int, size: int) -> bool:
        """Of a message whose values are over the limit, take the number alone: whoever waits for it is told.

        References that it brings are not seen. Their sender keeps its pins until the connection ends.
        """
        peek = HEADER.size + min(metadata, _LONGEST_START)
        if available < peek:
            self._wanted = peek
            return False
        body = self._start + HEADER.size
        if kind & TRACED:
            skipped = 1 + len(self._read_trace(body, metadata))
            body += skipped
        self._message = _STAND_INS[kind & ~TRACED](_first_number(self._view[body : self._start + peek]), [])
        self._trace = ""
        self._size = size
        self._start += HEADER.size
        self._miss(_OVER.format(self._limit), size - HEADER.size)
        return True

    def _in_slice(self) -> bool:
        """Bytes of a slice are to come."""
        return self._slice > 0

    def _begin_slice(self, size: int) -> None:
        """The header at the beginning of the buffer is one of a slice."""
        self._start += HEADER.size
        self._slice = size
        if self._large is None:
            self._large = Decoder(
                self._limit,
                self._segments,
                self._head_limit,
                bounded=self._bounded,
                drains=self._drains,
                check_room=self._check_room,
                sliced=True,
            )

    def _announce(self, apart: Apart, strand: int, size: int) -> None:
        """The header is one of a slice that comes over another connection."""
        self._start += HEADER.size
        if self._large is None:
            raise ProtocolError("a slice on another connection, and no large message has begun")
        apart.expect(strand, self._large.reserve(size), size)
        self._announced = True

    def _took_announcement(self) -> bool:
        announced, self._announced = self._announced, False
        return announced

    def reserve(self, size: int) -> memoryview | None:
        """The memory of the next ``size`` bytes, which are of one tensor. Somebody else fills it.

        The bytes count as written. None if nobody gets them. Raises `ProtocolError` if no tensor is so large.
        """
        if isinstance(self._landing, Missing):
            scratch = 0 if self._place is None else len(self._place)
            if size > scratch + self._skip:
                raise ProtocolError(f"{size} bytes on another connection, which are more than the message has")
            dropped = min(size, self._skip)
            self._skip -= dropped
            if self._place is not None:
                self._place = self._place[size - dropped :] if size - dropped < scratch else None
            return None
        place = self._place
        if place is None or len(place) < size:
            raise ProtocolError(f"{size} bytes on another connection, which are not those of one tensor")
        self.wrote(size)
        return place[:size]

    def _look_for_slice(self) -> None:
        """Begin a slice whose header has come, so that its bytes go where they belong at once."""
        start = self._start
        if self._slice or self._landing is not None or self._end - start != HEADER.size:
            return
        magic, version, kind, metadata, table, payload = HEADER.unpack_from(self._buffer, start)
        if (magic, version, kind, metadata, table) == (MAGIC, VERSION, SLICE, 0, 0) and payload:
            self._begin_slice(payload)

    def _next_large(self) -> Envelope | None:
        """The next complete message that came in slices."""
        large = self._large
        if large is None:
            return None
        while (envelope := large.next()) is None and self._slice and self._start < self._end:
            room = large.writable()
            count = min(len(room), self._slice, self._end - self._start)
            room[:count] = self._view[self._start : self._start + count]
            large.wrote(count)
            self._start += count
            self._slice -= count
        if envelope is not None and self._apart is not None:
            self._apart.settle(envelope.size)
        return envelope

    def _read_trace(self, start: int, metadata: int) -> str:
        """The tracer's mark at the beginning of the metadata."""
        size = self._buffer[start] if metadata else 0
        if size >= metadata:
            raise ProtocolError("a frame whose mark of a tracer is longer than its metadata")
        try:
            return self._buffer[start + 1 : start + 1 + size].decode("ascii")
        except UnicodeDecodeError:
            raise ProtocolError("a frame whose mark of a tracer is not text") from None

    def _land(self, table: bytes, payload: int) -> Landing:
        """The landing of tensors some of which are there already, in segments."""
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
        """This message comes without its tensors; that many bytes of its payload are still to come."""
        self._landing = Missing(f"a message of {self._size} bytes {why}")
        self._skip = payload
        self._places = ()

    def _read_nothing(self) -> bool:
        """Drop what has arrived of a payload that nobody gets; True when that was all of it."""
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
        """Where bytes go that nobody gets: many at a time if many are to come, and there is memory for that."""
        if self._drain is None and self._skip > _DRAIN:
            with contextlib.suppress(MemoryError):
                self._drain = memoryview(bytearray(_DRAIN))
        return self._view if self._drain is None else self._drain

    def _read_payload(self, landing: Landing | Missing) -> bool:
        """Move what has arrived to where it belongs; True when all buffers are full."""
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

    def _fill(self, landing: Landing) -> bool:
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
            elif size <= _COLLECT_BELOW:
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

    def _make_room(self) -> None:
        live = self._end - self._start
        if live + _MIN_ROOM <= len(self._buffer) // 2:
            self._view[:live] = bytes(self._view[self._start : self._end])
        else:
            try:
                grown = bytearray(len(self._buffer) * 2)
            except MemoryError:
                raise ProtocolError(f"no memory for values of more than {live} bytes in a message") from None
            grown[:live] = self._view[self._start : self._end]
            self._replace(grown)
        self._start, self._end = 0, live

    def _replace(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _first_number(data: memoryview) -> int:
    """The first element of an array in msgpack, which is the id of a message. Raises `ProtocolError` if it is none."""
    head = {0xDC: 3, 0xDD: 5}.get(data[0], 1)
    if head == 1 and not 0x91 <= data[0] <= 0x9F:
        raise ProtocolError("metadata that is no array")
    first = data[head]
    if first < 0x80:
        return first
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first, 0)
    if not size:
        raise ProtocolError("a message whose id is not a number")
    return int.from_bytes(data[head + 1 : head + 1 + size], "big")
