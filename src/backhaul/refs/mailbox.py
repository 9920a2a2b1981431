"""Mailbox: notices between two workers arrive in order and exactly once, over connections that may break.

The sender numbers its batches and keeps the batch under way until it is answered. After a break it
sends the same batch again. The receiver accepts each number once. One batch at a time is
under way, and notices that are added meanwhile go with the next one, so a burst of notices costs few messages. Pure.
"""

from __future__ import annotations

from backhaul.wire.messages import Notice

_MOST = 10_000  # the most notices in a batch: it must fit into a message


class Outbox:
    """Notices to one peer."""

    def __init__(self) -> None:
        self._waiting: list[Notice] = []
        self._under_way: tuple[Notice, ...] = ()
        self._number = 0

    def add(self, notice: Notice) -> None:
        self._waiting.append(notice)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def next_batch(self) -> tuple[int, tuple[Notice, ...]] | None:
        """The batch to send now, with its number. None if a batch is under way, or no notice waits."""
        if self._under_way or not self._waiting:
            return None
        self._under_way, self._waiting = tuple(self._waiting[:_MOST]), self._waiting[_MOST:]
        self._number += 1
        return self._number, self._under_way

    def again(self) -> tuple[int, tuple[Notice, ...]] | None:
        """The batch under way, to send again; None if there is none."""
        return (self._number, self._under_way) if self._under_way else None

    def clear(self) -> None:
        """Throw all notices away. The numbers continue."""
        self._waiting, self._under_way = [], ()

    def answered(self, number: int) -> None:
        """Note that the peer has the batch of that number."""
        if number == self._number:
            self._under_way = ()


class Inbox:
    """Notices from one peer, or from the process that takes its place."""

    def __init__(self) -> None:
        self._process = 0
        self._last = 0

    def accept(self, number: int, process: int = 0) -> bool:
        """Whether a batch is new. A new ``process`` starts its numbers again."""
        if process != self._process:
            self._process, self._last = process, 0
        if number <= self._last:
            return False
        self._last = number
        return True
