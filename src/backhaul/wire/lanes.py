"""Lanes: how a large frame is cut into slices, and which messages may overtake one.

`Slices` cuts a frame, and the decoder puts the slices together again. The size of a slice depends on the connection:
`Pace` learns it. Pure: no clock, no socket.

A small message may overtake a large one. For most messages the order does not matter: replies name their call, and
calls of different threads have no order. Calls of one thread have an order, which `agent.outbox` keeps. For references
the order matters: a message that brings a reference, or asks for its value, must not overtake the message that makes
the value. A notice about a reference must not overtake the message that shares it. The end of a context must not
overtake the calls of the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from backhaul.wire.frames import HEADER, MAGIC, SLICE, TRACED, VERSION, Frame, kind_of
from backhaul.wire.messages import KINDS, Call, Create, Fetch, Inquire, Leave, Notices

SMALL = 64 * 1024
"""A frame up to this size may overtake a large one."""

LEAST_APART = 256 * 1024
"""The fewest bytes of one tensor that go over another connection."""
LAST = 16 * 1024
"""The bytes at the end of a frame that stay on its own connection: they leave after all others have arrived."""
LEAST_SLICE = 4 * 1024
MOST_SLICE = 1 << 20
_FIRST_SLICE = 16 * 1024
SHORT = 0.02
"""If a slice takes fewer seconds than this, the connection is faster than it is used."""
_LONG = 0.1

_ORDERED = (Create, Fetch, Notices, Leave, Inquire)

# Decoders of msgspec have no state, so all connections share them.
_decoders = {kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()}


class Pace:
    """The size of a slice: about as many bytes as the connection takes in a twentieth of a second. Not thread-safe."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = _FIRST_SLICE

    def took(self, size: int, seconds: float) -> bool:
        """A slice of that size has left, in that time. True if the size of slices changes."""
        before = self.size
        if seconds > _LONG:
            self.size = max(LEAST_SLICE, self.size // 2)
        elif seconds < SHORT and size >= self.size:
            self.size = min(MOST_SLICE, self.size * 2)
        return self.size != before


class Slices:
    """Cuts the pieces of a large frame into slices. Not thread-safe."""

    __slots__ = ("_pieces", "_tensors", "left")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in reversed(pieces) if len(piece)]
        self._tensors = len(self._pieces) - 1  # the number of pieces that are memory of tensors: all but the head
        self.left = sum(map(len, self._pieces))
        """Bytes that are in no slice yet."""

    @property
    def apart(self) -> int:
        """The number of next bytes that may go over another connection; 0 if none may."""
        if not self._pieces or len(self._pieces) > self._tensors:
            return 0
        size = min(len(self._pieces[-1]), self.left - LAST, MOST_SLICE)
        return size if size >= LEAST_APART else 0

    def take_apart(self, strand: int) -> tuple[memoryview, memoryview]:
        """The next slice, for another connection: the header that announces it on this one, and its bytes."""
        size = self.apart
        piece = self._pieces.pop()
        if len(piece) > size:
            self._pieces.append(piece[size:])
        self.left -= size
        return memoryview(HEADER.pack(MAGIC, VERSION, SLICE, strand, 0, size)), piece[:size]

    def take(self, most: int) -> list[memoryview]:
        """The next slice, of up to ``most`` bytes, its header first."""
        size = min(most, self.left)
        taken = [memoryview(HEADER.pack(MAGIC, VERSION, SLICE, 0, 0, size))]
        self.left -= size
        while size:
            piece = self._pieces.pop()
            if len(piece) > size:
                self._pieces.append(piece[size:])
                piece = piece[:size]
            taken.append(piece)
            size -= len(piece)
        return taken

    def copy(self) -> None:
        """Copy the bytes that are left, so that the memory of the tensors may change."""
        self._pieces = [memoryview(bytes(piece)) for piece in self._pieces]


def messages(frame: Frame) -> Iterator[tuple[Any, int]]:
    """The messages of a frame, or of several that were joined, and their sizes."""
    head = memoryview(frame.pieces[0])
    start = 0
    while start < len(head):
        _, _, bits, metadata, table, payload = HEADER.unpack_from(head, start)
        body = head[start + HEADER.size : start + HEADER.size + metadata]
        if bits & TRACED:
            body = body[1 + body[0] :]
        size = HEADER.size + metadata + table + payload
        yield _decoders[kind_of(head[start:])].decode(body), size
        start += size


def may_pass(frame: Frame) -> bool:
    """Whether a frame, or several joined ones, may overtake a large frame that was sent earlier."""
    if frame.keep or frame.places or len(frame.pieces) > 1 or frame.size > SMALL:
        return False
    return not any(isinstance(message, _ORDERED) or getattr(message, "refs", ()) for message, _ in messages(frame))


def has_calls(frame: Frame) -> bool:
    """Whether a frame, or one of several that were joined, is a call."""
    return any(isinstance(message, Call) for message, _ in messages(frame))
