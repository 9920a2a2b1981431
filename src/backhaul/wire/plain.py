"""Refuses maps in the metadata of a message before it is decoded.

In a federation a tree has no maps: a dict is an array of keys and values. msgpack allows keys of any kind in a map, and
a decoder hashes the keys at once. Python's hashes of numbers, and of tuples of numbers, are the same in every process,
so a peer can choose keys that all collide. A few hundred kilobytes of such keys keep the interpreter busy for minutes.
So the bytes are checked before they are decoded.

msgpack is a sequence of tokens, and the first byte of a token tells its size. The head of an array is a token too, and
the items of the array follow.
"""

from __future__ import annotations

import re

from backhaul.errors import ProtocolError

# The first bytes of maps that are not empty. Data without any of these bytes has no such map, which is quick to find.
_MAPS = re.compile(rb"[\x81-\x8f\xde\xdf]")

# Tokens whose size follows from the first byte alone: numbers, constants, short text, heads of arrays, {}.
_FIXED = b"|".join(
    (
        rb"[\x00-\x80\x90-\xa0\xc0\xc2\xc3\xe0-\xff]",
        rb"[\xcc\xd0].",
        rb"[\xcd\xd1\xdc].{2}",
        rb"[\xca\xce\xd2\xdd].{4}",
        rb"[\xcb\xcf\xd3].{8}",
        *(b"%b.{%d}" % (re.escape(bytes((0xA0 + size,))), size) for size in range(1, 32)),
    )
)
# At most 512 tokens in one match, because the engine of `re` remembers each repetition.
_TOKENS = re.compile(b"(?:%b){1,512}" % _FIXED, re.DOTALL)
_LENGTHS = {0xC4: 1, 0xD9: 1, 0xC5: 2, 0xDA: 2, 0xC6: 4, 0xDB: 4}  # bytes and text -> the size of their length field


def refuse_maps(data: bytes | memoryview) -> None:
    """Raise ProtocolError for msgpack that has a map with keys. Takes time in proportion to the data."""
    if not _MAPS.search(data):
        return
    position, end = 0, len(data)
    while position < end:
        found = _TOKENS.match(data, position)
        if found is not None:
            position = found.end()
            continue
        width = _LENGTHS.get(data[position])
        if width is None:
            raise ProtocolError("values with a map, where dicts are arrays of keys and values")
        start = position + 1 + width
        position = start + int.from_bytes(data[position + 1 : start], "big")
