"""Slurm's lists of nodes, as in ``SLURM_JOB_NODELIST``: ``rack[1-2]node[01-16,20]-ib``. Pure; needs no ``scontrol``.

A list consists of items separated by commas. An item is a name with any number of brackets. Brackets hold
numbers and ranges of numbers, separated by commas. A number with leading zeros keeps its width.
Several brackets in one item mean all combinations; the last one changes fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from backhaul.errors import OptionError

MOST = 1 << 16
"""The largest number of nodes. A longer list is a mistake; Slurm itself allows no more."""

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> list[str]:
    """The names of all nodes in order. Raises `OptionError` if the text is not such a list."""
    items = [_parse(text, item) for item in _items(text)]
    if sum(math.prod(map(len, item)) for item in items) > MOST:
        raise OptionError(f"the list of nodes {_short(text)} has more than {MOST} of them")
    return ["".join(parts) for item in items for parts in itertools.product(*item)]


def first(text: str) -> str:
    """The name of the first node."""
    return next("".join(part[0] for part in _parse(text, item)) for item in _items(text))


def _items(text: str) -> Iterator[str]:
    position = 0
    while True:
        found = _ITEM.match(text, position)
        if found is None:
            raise _bad(text, "a name is expected", position)
        yield found[0]
        position = found.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise _bad(text, "a comma is expected", position)
        position += 1


def _parse(text: str, item: str) -> list[list[str]]:
    """The parts of a name; each is a list of its alternatives."""
    parts = []
    for found in _PART.finditer(item):
        parts.append([found[2]] if found[1] is None else [*_numbers(text, found[1])])
    return parts


def _numbers(text: str, ranges: str) -> Iterator[str]:
    count = 0
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None or len(each) > 40:
            raise OptionError(
                f"the list of nodes {_short(text)} has [{_short(ranges)}]: {each!r} is not a range of numbers"
            )
        low, high = int(found[1]), int(found[2] or found[1])
        count += high - low + 1
        if low > high or count > MOST:
            why = "ends before it begins" if low > high else f"has more than {MOST} numbers"
            raise OptionError(f"the list of nodes {_short(text)}: the range {each!r} {why}")
        for number in range(low, high + 1):
            yield f"{number:0{len(found[1])}d}"


def _bad(text: str, what: str, position: int) -> OptionError:
    return OptionError(f"the list of nodes {_short(text)} cannot be read: {what} at character {position + 1}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")
