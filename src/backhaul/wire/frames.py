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
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from backhaul.errors import UnsendableError
from backhaul.wire.messages import KIND_OF
from backhaul.wire.tensors import pack_tensors

MAGIC = b"BH"
VERSION = 1
HEADER = struct.Struct("<2sBBIIQ")

MAX_METADATA = (1 << 32) - 1
MAX_TABLE = 1 << 28

# Up to here one copy into one piece is cheaper than several pieces to a system call.
_JOIN_BELOW = 128 * 1024
_COPY_BELOW = 256 * 1024

_encoder = msgspec.msgpack.Encoder()


class Frame(NamedTuple):
    """Pieces to be written in order; ``keep`` must live until they are."""

    pieces: list[bytes | memoryview]
    size: int
    keep: Any = None

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


def encode(message: Any, tensors: Sequence[torch.Tensor] = ()) -> Frame:
    """The frame of a message whose trees refer to ``tensors`` by index.

    Large tensors are not copied: they must not change before the frame is written.
    """
    kind = KIND_OF[type(message)]
    metadata = _encoder.encode(message)
    size = len(metadata)
    if size > MAX_METADATA:
        raise UnsendableError(
            f"the values of this message take {size} bytes without its tensors, more than {MAX_METADATA}; "
            "send large data as tensors or in several calls"
        )
    if not tensors:
        head = HEADER.pack(MAGIC, VERSION, kind, size, 0, 0) + metadata
        return Frame([head], len(head))
    packed = pack_tensors(tensors)
    if len(packed.table) > MAX_TABLE:
        raise UnsendableError("this message has too many tensors; send them in several calls, or stacked")
    payload = sum(map(len, packed.buffers))
    head = HEADER.pack(MAGIC, VERSION, kind, size, len(packed.table), payload) + metadata + packed.table
    total = len(head) + payload
    if total <= _JOIN_BELOW:
        return Frame([b"".join((head, *packed.buffers))], total)
    return Frame([head, *packed.buffers], total, packed.keep)


def join(frames: Sequence[Frame]) -> Frame:
    """Several frames as one, so that they leave in one write."""
    if len(frames) == 1:
        return frames[0]
    pieces = [piece for frame in frames for piece in frame.pieces]
    size = sum(frame.size for frame in frames)
    if size <= _COPY_BELOW:
        return Frame([b"".join(pieces)], size)
    return Frame(pieces, size, [frame.keep for frame in frames])
