"""Maps are found in the bytes before anything is decoded."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from backhaul.errors import ProtocolError
from backhaul.wire.plain import refuse_maps

encode = msgspec.msgpack.encode

PLAIN: list[Any] = [
    None,
    [1, -1, 127, 128, 255, 256, 65535, 65536, 2**32, 2**63, -129, -(2**31) - 1, -(2**63)],
    [1.5, float("nan"), -0.0],
    ["", "a", "x" * 31, "x" * 32, "x" * 300, "x" * 70_000, "\x81\x8f", "ünï"],
    [b"", b"\x81", b"\xde\x00\x01" * 100, bytes(range(256)), bytes(70_000) + b"\x82"],
    [[[[]]], [{}], [[1] * 20], [[2] * 70_000]],
    {},
    list(range(-600, 600)),
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_values_without_maps_are_accepted(value: Any) -> None:
    refuse_maps(encode(value))
    refuse_maps(memoryview(encode([value, b"\x81"])))


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
@pytest.mark.parametrize("map", [{"a": 1}, {1: 2}, {(1, 2): 3}, {str(each): 0 for each in range(20)}], ids=range(4))
def test_a_map_at_any_place_is_refused(value: Any, map: Any) -> None:
    for tree in ([value, map], [map, value], [value, [value, [map]], value]):
        with pytest.raises(ProtocolError, match="values with a map"):
            refuse_maps(encode(tree))


def test_maps_of_all_sizes() -> None:
    for count in (1, 15, 16, 70_000):
        with pytest.raises(ProtocolError):
            refuse_maps(encode([1, dict.fromkeys(range(count))]))


def test_invalid_tokens_are_refused() -> None:
    for token in (b"\xc1", b"\xd4\x01\x00", b"\xc7\x01\x01\x00"):
        with pytest.raises(ProtocolError):
            refuse_maps(b"\x92" + token + b"\x81\x01\x01")


def _tree(choose: random.Random, depth: int) -> tuple[Any, bool]:
    """A value, and whether it has a map with keys."""
    kind = choose.randrange(9 if depth else 6)
    if kind > 5:
        parts = [_tree(choose, depth - 1) for _ in range(choose.randrange(4))]
        if kind == 8 and parts and choose.random() < 0.3:
            return {str(place): part for place, (part, _) in enumerate(parts)}, True
        return [part for part, _ in parts], any(has for _, has in parts)
    plain = (
        None,
        choose.getrandbits(64),
        choose.random(),
        choose.randbytes(choose.choice([0, 3, 300])),
        "x" * choose.randrange(40),
        "\u00df" * choose.randrange(300),
    )
    return plain[kind], False


def test_random_trees() -> None:
    choose = random.Random(7)
    seen = set()
    for _ in range(2000):
        tree, has = _tree(choose, 5)
        seen.add(has)
        if has:
            with pytest.raises(ProtocolError):
                refuse_maps(encode(tree))
        else:
            refuse_maps(encode(tree))
    assert seen == {True, False}
