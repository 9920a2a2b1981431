"""Message -> frame: the bytes of one message, ready to be written.

A frame, all numbers little-endian::

    offset  size  field
    0       2     magic "BH"
    2       1     version, 1
    3       1     kind of message (messages.KINDS)
    4       4     M: length of the metadata
    8       4     T: length of the tensor table
    12      8     P: length of the payload
    20      M     metadata: the message, msgpack
    20+M    T     tensor table (tensors.py); empty when the message has no tensors
    20+M+T  P     payload: the tensors' buffers, one after another

If the highest bit of the kind is set, some buffers are not in the payload but in segments (`transport.segments`). The
tensor table then ends with 4 bytes for each buffer: the number of its segment, or 0 if it is in the payload.
Segments of device memory (`devices.segments`) are numbered separately, and their numbers have the highest bit set.

If the next lower bit of the kind is set, the metadata begins with a tracer's mark (`inspection.spans`): one byte with
the length of the mark, then its characters. These bytes count in M.

**Lanes.** A large frame leaves in slices, so that small messages need not wait for all of it. A slice has the header of
a frame, with the kind `SLICE` and without metadata and table. Its payload is the next part of the large frame. Other
frames may come between two slices. So a connection has two lanes, each a stream of whole frames. Only one large frame
is under way at a time.

**Strands.** Between hosts a large frame may use further connections (`transport.strands`). A slice whose M is not 0 has
no payload on this connection: its P bytes come over the connection of number M. All of them belong to one tensor. The
last slice of a frame always comes over this connection, after the peer has said that it has all others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import torch

from backhaul.errors import UnsendableError
from backhaul.wire.filling import Filling
from backhaul.wire.messages import KIND_OF, Failure, Gradients
from backhaul.wire.messages import VERSION as VERSION  # defined there, so that the greeting does not import torch
from backhaul.wire.tensors import Packed, Staging, pack_small, pack_staged, pack_tensors

MAGIC = b"BH"
HEADER = struct.Struct("<2sBBIIQ")
START = struct.Struct("<4sIIQ")
"""The same header, with the bytes up to the kind of the message as one field: see `LEADS`."""
PLACED = 0x80
"""The bit of the kind that says that some buffers are in segments."""
TRACED = 0x40
"""The bit of the kind that says that the metadata begins with a tracer's mark."""
LONGEST_TRACE = 255
SLICE = 0
"""The kind of a slice, which is part of a large frame and not a message."""

DEVICE_PLACE = 1 << 31
"""The bit of a place that says that the segment is in device memory."""

MAX_METADATA = (1 << 32) - 1
MAX_TABLE = 1 << 28

# Up to this size, copying all pieces into one is cheaper than passing several to a system call.
_JOIN_BELOW = 128 * 1024

_FAILURE = KIND_OF[Failure]

LEADS = {message: MAGIC + bytes((VERSION, kind)) for message, kind in KIND_OF.items()}
"""The first four bytes of the frame of each message, unless its kind has further bits."""

_encode = msgspec.msgpack.Encoder().encode


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Pieces to write in order. ``keep`` must stay alive until they are written."""

    pieces: list[bytes | memoryview]
    size: int
    keep: Any = None
    places: Sequence[int] = ()
    """If some buffers are in segments already: the segment of each buffer, or 0. Those are not among the pieces."""
    filling: Filling | None = None
    """How far a device is that still copies data into the pieces. None if all bytes are there."""
    owned: bool = False
    """No other code changes the memory of the pieces, although there is a ``keep``."""

    @property
    def holds(self) -> bool:
        """Whether the memory is the user's, and must not change before the frame has left."""
        return bool(self.keep) and not self.owned

    def __bytes__(self) -> bytes:
        if self.filling is not None and self.filling.missing:
            raise ValueError("a device still copies data into this frame")
        return b"".join(self.pieces)


def encode(message: Any, tensors: Sequence[torch.Tensor] = (), staging: Staging | None = None) -> Frame:
    """The frame of a message whose trees refer to ``tensors`` by index.

    Large tensors are not copied, so they must not change before the frame is written. Raises UnsendableError.
    """
    metadata = _encode(message)
    size = len(metadata)
    if size > MAX_METADATA:
        raise UnsendableError(
            f"the values of this message take {size} bytes without its tensors, more than {MAX_METADATA}; "
            "send large data as tensors or in several calls"
        )
    lead = LEADS[type(message)]
    if not tensors:
        whole = START.pack(lead, size, 0, 0) + metadata
        return Frame([whole], len(whole))
    if staging is not None:
        return _staged(lead[3], metadata, pack_staged(tensors, staging))
    if len(tensors) == 1:
        try:
            small = pack_small(tensors[0])
        except (RuntimeError, TypeError) as error:
            raise UnsendableError(f"torch gives no access to the memory of a tensor: {error}") from error
        if small is not None:
            table, data = small
            whole = b"".join((START.pack(lead, size, len(table), len(data)), metadata, table, data))
            return Frame([whole], len(whole))
    packed = pack_tensors(tensors, apart=type(message) is Gradients)
    if len(packed.table) > MAX_TABLE:
        raise UnsendableError("this message has too many tensors; send them in several calls, or stacked")
    payload = sum(map(len, packed.buffers))
    head = START.pack(lead, size, len(packed.table), payload) + metadata + packed.table
    total = len(head) + payload
    if total <= _JOIN_BELOW:
        return Frame([b"".join((head, *packed.buffers))], total)
    return Frame([head, *packed.buffers], total, packed.keep)


def _staged(kind: int, metadata: bytes, packed: Packed) -> Frame:
    """The frame of a message whose tensors were packed by `pack_staged`."""
    if len(packed.table) > MAX_TABLE:
        raise UnsendableError("this message has too many tensors; send them in several calls, or stacked")
    payload = sum(map(len, packed.buffers))
    filling = _filling(packed, payload) if packed.copies else None
    owned = filling is not None and len(packed.copies) == sum(type(buffer) is memoryview for buffer in packed.buffers)
    if not any(packed.places):
        head = HEADER.pack(MAGIC, VERSION, kind, len(metadata), len(packed.table), payload) + metadata + packed.table
        return Frame([head, *packed.buffers], len(head) + payload, packed.keep or True, (), filling, owned)
    places = struct.pack(f"<{len(packed.places)}I", *packed.places)
    start = HEADER.pack(MAGIC, VERSION, kind | PLACED, len(metadata), len(packed.table) + len(places), payload)
    head = b"".join((start, metadata, packed.table, places))
    return Frame([head, *packed.buffers], len(head) + payload, packed.keep, packed.places, filling, owned)


def _filling(packed: Packed, payload: int) -> Filling:
    starts = list(accumulate(map(len, packed.buffers), initial=0))
    return Filling([(starts[index], copying) for index, copying in packed.copies], payload)


def place(frame: Frame, segments: Sequence[int]) -> Frame:
    """The frame without the buffers that are in segments. ``segments`` has the segment of each buffer, or 0.

    The frame must not be filling.
    """
    if frame.places:
        return _place_more(frame, segments)
    head, *buffers = frame.pieces
    magic, version, kind, metadata, table, _ = HEADER.unpack_from(head)
    places = struct.pack(f"<{len(segments)}I", *segments)
    left = [buffer for buffer, segment in zip(buffers, segments, strict=True) if not segment]
    payload = sum(map(len, left))
    start = HEADER.pack(magic, version, kind | PLACED, metadata, table + len(places), payload)
    head = b"".join((start, memoryview(head)[HEADER.size :], places))
    return Frame([head, *left], len(head) + payload, frame.keep, (), None, frame.owned)


def _place_more(frame: Frame, segments: Sequence[int]) -> Frame:
    """Like `place`, for a frame with buffers in segments already. ``segments`` has an entry for each other buffer."""
    head, *buffers = frame.pieces
    left = [buffer for buffer, segment in zip(buffers, segments, strict=True) if not segment]
    rest = iter(segments)
    places = [before or next(rest) for before in frame.places]
    magic, version, kind, metadata, table, _ = HEADER.unpack_from(head)
    payload = sum(map(len, left))
    start = HEADER.pack(magic, version, kind, metadata, table, payload)
    ends = len(head) - 4 * len(places)
    head = b"".join((start, memoryview(head)[HEADER.size : ends], struct.pack(f"<{len(places)}I", *places)))
    return Frame([head, *left], len(head) + payload, frame.keep, places, None, frame.owned)


def with_trace(frame: Frame, trace: str) -> Frame:
    """The frame with a tracer's mark of at most `LONGEST_TRACE` ASCII characters."""
    head, *buffers = frame.pieces
    magic, version, kind, metadata, table, payload = HEADER.unpack_from(head)
    mark = trace.encode("ascii")
    start = HEADER.pack(magic, version, kind | TRACED, metadata + 1 + len(mark), table, payload)
    head = b"".join((start, bytes((len(mark),)), mark, memoryview(head)[HEADER.size :]))
    size = frame.size + 1 + len(mark)
    return Frame([head, *buffers], size, frame.keep, frame.places, frame.filling, frame.owned)


def kind_of(head: bytes | memoryview) -> int:
    """The kind of the message whose frame begins with these bytes."""
    return head[3] & ~(PLACED | TRACED)


def is_failure(frame: Frame) -> bool:
    """Whether the first message of a frame is a `Failure`. A joined frame has several messages."""
    return kind_of(frame.pieces[0]) == _FAILURE


def join(frames: Sequence[Frame]) -> Frame:
    """Several frames as one, so that they leave in one write. Their ``keep`` must be empty."""
    if len(frames) == 1:
        return frames[0]
    return Frame([b"".join([piece for frame in frames for piece in frame.pieces])], sum(frame.size for frame in frames))
