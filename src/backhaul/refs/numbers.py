"""Numbers: a set of numbers. It takes little memory if they come nearly in order. Pure."""

from __future__ import annotations

from bisect import bisect_right


class Numbers:
    """Kept as ranges ``starts[i] <= n < ends[i]``."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        before = bisect_right(self._starts, number)
        return before > 0 and number < self._ends[before - 1]

    def add(self, number: int) -> None:
        """Add a number that is not in the set yet."""
        at = bisect_right(self._starts, number)
        self._starts.insert(at, number)
        self._ends.insert(at, number + 1)
        for left in (at, at - 1):
            if 0 <= left < len(self._starts) - 1 and self._ends[left] == self._starts[left + 1]:
                del self._ends[left], self._starts[left + 1]

    def __len__(self) -> int:
        """The number of ranges, not of numbers."""
        return len(self._starts)
