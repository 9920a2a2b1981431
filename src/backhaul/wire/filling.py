"""Filling: the memory of a frame into which a device still copies data.

A tensor on a GPU that cannot go in a segment of device memory is copied to the host, chunk by chunk. The frame is made
at once, and its bytes leave as far as they are there (`transport.filling`). So the sending thread does not wait for the
device, and the copy of one chunk overlaps with the sending of the chunk before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol


class Copying(Protocol):
    """A copy that a device makes of some bytes, from the first to the last."""

    size: int

    def done(self) -> int:
        """The number of bytes that have been copied. Raises the error of the device."""


class Filling:
    """The copies that are made into the buffers of one frame. Not thread-safe."""

    __slots__ = ("_copies", "_size")

    def __init__(self, copies: Iterable[tuple[int, Copying]], size: int) -> None:
        """``copies``: each with its place in the payload, in order. ``size``: the number of bytes of the payload."""
        self._copies = deque(copies)
        self._size = size

    @property
    def missing(self) -> int:
        """The number of bytes at the end of the payload that are still to come. Raises the error of a device."""
        while self._copies:
            start, copying = self._copies[0]
            done = copying.done()
            if done < copying.size:
                return self._size - start - done
            self._copies.popleft()
        return 0
