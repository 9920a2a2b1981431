"""Segments of device memory as their receiver sees them before it opens them: a page that the peer has passed."""

from __future__ import annotations

import fcntl
import os

from backhaul.devices import pages
from backhaul.transport.segments import Borrowing


class Pages:
    """Pages of segments without memory. The first has the number 1, and the size that it claims is ``sizes[0]``."""

    def __init__(self, *sizes: int) -> None:
        self._pages = [page(number + 1, size) for number, size in enumerate(sizes)]

    def descriptors(self, number: int) -> list[int]:
        """What the sender passes for a segment: its page, and something in place of its memory."""
        return [os.dup(self._pages[number - 1]), os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]

    def borrowing(self) -> Borrowing:
        made = Borrowing()
        for number in range(1, len(self._pages) + 1):
            made.add(self.descriptors(number))
        return made

    def use(self) -> None:
        """What the sender does when it takes the segments: all are marked as in use."""
        for each in self._pages:
            os.pwrite(each, b"\x01", 0)

    def in_use(self) -> list[bool]:
        return [os.pread(each, 1, 0) != b"\x00" for each in self._pages]

    def close(self) -> None:
        for each in self._pages:
            os.close(each)


def page(
    number: int,
    size: int,
    *,
    seals: int = pages.SEALS,
    magic: bytes = pages.MAGIC,
    length: int = pages.PAGE,
    given_up: bool = False,
) -> int:
    """The descriptor of a page. The options make it one that no good peer passes, or that of a segment given up."""
    made = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, length)
    fields = pages.FIELDS.pack(magic, size, bytes(64), bytes(64), bytes(40), number, bytes(16))
    os.pwrite(made, bytes((0, given_up)), 0)
    os.pwrite(made, fields, pages.FIELDS_AT)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made
