"""Bytes -> messages, without I/O.

There are two ways to feed a decoder. `receive_data(data)` takes bytes and returns the messages
that they complete. A transport that receives large tensors without a copy asks `writable()`
where the next bytes belong, lets the system call write there, calls `wrote(n)`, and takes
messages with `next()`. The bytes of a large buffer then land in the tensor's own memory.

The decoder is total: for any bytes it returns messages, waits for more, or raises
`ProtocolError`. After an error it must not be used again. A claim in a header alone costs no
memory (`payload` says where the bytes go).

If there is no room here for the tensors of a message, the decoder returns the message without them. Code that asks for
the tensors gets a `MemoryError`, and the connection stays open. The connection also stays open after a call or a reply
whose values are over the limit: the decoder reads only its id.

Slices of a large frame go to a second decoder, which sees a stream of whole frames, as this one does. During a slice,
`writable()` returns memory of the second decoder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from backhaul.errors import ProtocolError
from backhaul.wire.frames import (
    DEVICE_PLACE,
    HEADER,
    LEADS,
    LONGEST_TRACE,
    MAGIC,
    MAX_TABLE,
    PLACED,
    SLICE,
    START,
    TRACED,
    VERSION,
)
from backhaul.wire.headers import recognise_alone
from backhaul.wire.landing import COLLECT_BELOW, LandingOfOne, Later, Missing, land_plain, landing_of
from backhaul.wire.messages import KIND_OF, KINDS, Call, Create, Failed, Failure, Inspect, Result
from backhaul.wire.payload import MIN_ROOM, START_SIZE, Payload, Segments
from backhaul.wire.plain import refuse_maps

_KEEP = 1 << 20
_MOST_DRAINED = 1 << 42  # no message is larger than this, so a header that claims more is garbage

_BITS = PLACED | TRACED

# The kinds with a tree, for which msgpack decodes whatever the peer sends, and the kinds that no peer of a federation
# has a reason to send.
_UNTYPED = frozenset(KIND_OF[message] for message in (Call, Result, Failure, Create, Failed))
_FOR_CLUSTERS = frozenset({KIND_OF[Inspect]})

# The message that replaces one whose values are over the limit. A `Call` replaces a `Create`, so that a creation fails
# like any call. The tree of the replacement is an empty list, which is not a value. No code decodes it: code that opens
# a message asks for its tensors first, and gets the `MemoryError` that says why.
_STAND_INS = {KIND_OF[Call]: Call, KIND_OF[Create]: Call, KIND_OF[Result]: Result, KIND_OF[Failure]: Result}
_LONGEST_START = 1 + LONGEST_TRACE + 5 + 9  # a tracer's mark, the head of an array, a number
_OVER = "is over the limit of {} at the receiver; option max_message_bytes sets it"

# Decoders of msgspec have no state, so all connections share them.
_decoders = {kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()}

# The first bytes of the frames that `_next_plain` reads, and what decodes their metadata.
_DECODE = {lead: _decoders[KIND_OF[message]].decode for message, lead in LEADS.items()}
_LEAD = MAGIC + bytes((VERSION,))
_DECODE_PLACED = {kind | PLACED: decoder.decode for kind, decoder in _decoders.items()}
_HEADER_SIZE = HEADER.size
_MOST_PLAIN = 1 << 20  # a larger frame is not read by `_next_plain`
_PLACE = struct.Struct("<I")


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A message that arrived, and the tensors that its trees refer to."""

    message: Any
    tensors: list[torch.Tensor]
    trace: str = ""
    """The mark of the sender's tracer, or an empty string."""
    size: int = 0
    """The size of the frame in bytes, with its buffers in segments."""


class Apart(Protocol):
    """Receives the slices that come over other connections: see `transport.strands`."""

    def expect(self, strand: int, place: memoryview | None, size: int) -> None:
        """Write the next ``size`` bytes of a strand to ``place``; if it is None, drop them. Raises `ProtocolError`."""

    def finish(self, size: int) -> None:
        """A frame of that size is complete. Raises `ProtocolError` if any expected bytes have not come."""


class Decoder(Payload):
    """Turns the bytes of one direction of one connection into messages. Not thread-safe."""

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
        """``max_head_bytes`` limits a frame without its payload: its values become objects, which take far more memory.

        A ``bounded`` decoder is for peers that may lie: it refuses maps, and tensors that claim to be larger than a
        message may be. With ``drains``, a message whose payload is over the limit comes without its tensors, and is no
        error. ``check_room(size)`` raises MemoryError if this process cannot have that much memory. With ``sliced``,
        the decoder gets the contents of slices, in which no further slices may occur. ``apart`` receives the slices
        that come over other connections of the peer; without it, such a slice is an error.
        """
        super().__init__(max_message_bytes, segments, drains=drains, check_room=check_room)
        self._bounded = bounded
        self._head_limit = max_message_bytes if max_head_bytes is None else max_head_bytes
        self._plain_limit = min(max_message_bytes, self._head_limit, _MOST_PLAIN)
        self._message: Any = None  # of the frame whose payload is arriving
        self._trace = ""  # the tracer's mark of that frame
        self._tensors: list[torch.Tensor] | None = None  # its tensors, if they were read together with the head
        self._sliced = sliced
        self._apart = apart
        self._announced = False  # whether the last header announced a slice on another connection
        self._large: Decoder | None = None  # decodes the frames that come in slices; made for the first slice
        self._slice = 0  # bytes of the current slice that have not gone to `_large` yet

    def writable(self) -> memoryview:
        """The memory for the next bytes. Call `wrote` once they are there. Valid until the next call of any method."""
        if self._place is not None:
            return self._place
        if self._large is not None:
            self._look_for_slice()
            if self._slice:
                return self._large.writable()[: self._slice]
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEEP and self._wanted <= _KEEP:
                self._replace(bytearray(START_SIZE))
            return self._view
        if len(self._buffer) - self._end < MIN_ROOM:
            self._make_room()
        return self._view[self._end :]

    @property
    def placed(self) -> bool:
        """Whether all of `writable()` is memory of one tensor, so that a transport may fill all of it at once."""
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
        """The next complete message, or None if more bytes are needed. Raises `ProtocolError`."""
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
                # The header was that of a slice, here or on another connection.
                if (envelope := self._next_large()) is not None:
                    return envelope
                available = self._end - self._start
                if available < HEADER.size or self._in_slice():
                    return None
            if self._landing is None:
                message, self._message = self._message, None
                tensors, self._tensors = self._tensors or [], None
                return Envelope(message, tensors, self._trace, self._size)
        if not self._read_payload(self._landing):
            return None
        tensors = self._landing.tensors()
        message = self._message
        self._message = self._landing = None
        return Envelope(message, tensors, self._trace, self._size)

    def _next_plain(self) -> Envelope | None:
        """A message that has arrived completely and whose tensors, if any, are plain. Most messages are like this.

        None for any other message, and for most invalid ones: the general path then reads it and reports the error.
        """
        start = self._start
        view = self._view
        lead, metadata, table, payload = START.unpack_from(view, start)
        body = start + _HEADER_SIZE
        data = body + metadata
        payload_start = data + table
        end = payload_start + payload
        decode = _DECODE.get(lead)
        if decode is None:
            kind = lead[3]
            return self._next_on_device(kind, body, data, payload_start, payload) if kind in _DECODE_PLACED else None
        if end > self._end or end - start > self._plain_limit:
            return None
        if table:
            landed = land_plain(bytes(view[data:payload_start]), self._address + payload_start, payload)
            if landed is None:
                return None
        elif payload:
            return None
        else:
            landed = []
        try:
            message = decode(view[body:data])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the metadata is not a valid {KINDS[lead[3]].__name__}: {error}") from None
        self._start = end
        self._wanted = _HEADER_SIZE
        return Envelope(message, landed, "", end - start)

    def _next_on_device(self, kind: int, body: int, data: int, end: int, payload: int) -> Envelope | None:
        """Like `_next_plain`, for a message with one plain tensor in a segment of device memory.

        ``body``, ``data`` and ``end``: where the metadata, the table and the payload begin.
        """
        start = self._start
        if payload or end > self._end or end - start > self._head_limit or self._segments is None:
            return None
        if self._view[start : start + len(_LEAD)] != _LEAD:
            return None
        table = bytes(self._view[data : end - _PLACE.size])
        (place,) = _PLACE.unpack_from(self._view, end - _PLACE.size)
        alone = recognise_alone(table)
        if alone is None or not place & DEVICE_PLACE or alone.nbytes + end - start > self._limit:
            return None
        try:
            message = _DECODE_PLACED[kind](self._view[body:data])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the metadata is not a valid {KINDS[kind & ~PLACED].__name__}: {error}") from None
        lease = self._segments.lend_device(place & ~DEVICE_PLACE, alone.nbytes)
        self._start = end
        self._wanted = HEADER.size
        size = end - start + alone.nbytes - _PLACE.size
        return Envelope(message, Later(LandingOfOne(alone, lease, table)), "", size)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Envelope]:
        """The messages that ``data`` completes. Takes all of ``data``. Raises `ProtocolError`."""
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
        """Consume header, metadata and table once they are complete.

        True if they were. False if bytes are missing, or if the header was that of a slice.
        """
        start = self._start
        magic, version, kind, metadata, table, payload = HEADER.unpack_from(self._buffer, start)
        size = HEADER.size + metadata + table
        if available < size or self._wanted == HEADER.size:
            # Check a header as soon as it arrives, before any byte is collected because of it.
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
            raise ProtocolError(f"the metadata is not a valid {KINDS[kind].__name__}: {error}") from None
        if table and size + payload > self._limit:
            self._miss(_OVER.format(self._limit), payload)
        elif table:
            self._index = 0
            headers = bytes(self._view[body + metadata : start + size])
            if not placed and size + payload <= available and payload <= COLLECT_BELOW:
                # The whole payload has arrived.
                self._tensors = land_plain(headers, self._address + start + size, payload)
                if self._tensors is not None:
                    self._start = start + size + payload
                    self._wanted = HEADER.size
                    return True
            if placed:
                self._landing = self._land(headers, payload)
                if self._size > self._limit:
                    self._miss(f"is over the limit of {self._limit} at the receiver (max_message_bytes)", payload)
            else:
                self._landing = landing_of(headers, payload)
            if self._bounded and self._landing.claimed > self._limit:
                raise ProtocolError(
                    f"the tensors claim {self._landing.claimed} bytes more than are sent; the limit is {self._limit}"
                )
        self._start = start + size
        self._wanted = HEADER.size
        return True

    def _read_id(self, available: int, kind: int, metadata: int, size: int) -> bool:
        """Read only the id of a message whose values are over the limit, so that the waiting thread gets an error.

        The references in the message are not read, so their sender keeps its pins until the connection ends.
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
        """Whether more bytes of a slice are expected."""
        return self._slice > 0

    def _begin_slice(self, size: int) -> None:
        """Begin the slice whose header is at the beginning of the buffer."""
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
        """Handle the header of a slice that comes over another connection."""
        self._start += HEADER.size
        if self._large is None:
            raise ProtocolError("a slice on another connection, but no large message has begun")
        apart.expect(strand, self._large.reserve(size), size)
        self._announced = True

    def _took_announcement(self) -> bool:
        announced, self._announced = self._announced, False
        return announced

    def reserve(self, size: int) -> memoryview | None:
        """The memory for the next ``size`` bytes, which must belong to one tensor. The caller fills it.

        The bytes count as written. None if the caller must drop them. Raises `ProtocolError` if they do not all belong
        to one tensor.
        """
        if isinstance(self._landing, Missing):
            scratch = 0 if self._place is None else len(self._place)
            if size > scratch + self._skip:
                raise ProtocolError(f"{size} bytes on another connection, but the message has fewer left")
            dropped = min(size, self._skip)
            self._skip -= dropped
            if self._place is not None:
                self._place = self._place[size - dropped :] if size - dropped < scratch else None
            return None
        place = self._place
        if place is None or len(place) < size:
            raise ProtocolError(f"{size} bytes on another connection do not belong to one tensor")
        self.wrote(size)
        return place[:size]

    def _look_for_slice(self) -> None:
        """Begin a slice whose header has come, so that its bytes go straight to their tensor."""
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
            self._apart.finish(envelope.size)
        return envelope

    def _read_trace(self, start: int, metadata: int) -> str:
        """The tracer's mark at the beginning of the metadata."""
        size = self._buffer[start] if metadata else 0
        if size >= metadata:
            raise ProtocolError("the tracer's mark of a frame is longer than its metadata")
        try:
            return self._buffer[start + 1 : start + 1 + size].decode("ascii")
        except UnicodeDecodeError:
            raise ProtocolError("the tracer's mark of a frame is not text") from None


def _first_number(data: memoryview) -> int:
    """The id of a message: the first element of its msgpack array. Raises `ProtocolError` if that is not a number."""
    head = {0xDC: 3, 0xDD: 5}.get(data[0], 1)
    if head == 1 and not 0x91 <= data[0] <= 0x9F:
        raise ProtocolError("the metadata is not an array")
    first = data[head]
    if first < 0x80:
        return first
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first, 0)
    if not size:
        raise ProtocolError("the id of a message is not a number")
    return int.from_bytes(data[head + 1 : head + 1 + size], "big")
