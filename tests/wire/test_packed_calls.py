"""A packed call has the tree of a tuple of its parts."""

from __future__ import annotations

import operator
from typing import Any

import msgspec
import pytest
import torch

from backhaul.errors import UnsendableError
from backhaul.wire.values import Codec

X = torch.ones(2)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (operator.add, (), {}),
    (operator.add, (1, "a", None), {}),
    (operator.add, (), {"a": [X, {"b": X}], "c": 2}),
    (torch.add, (X, (X, X)), {"alpha": 2.5}),
    (dict, ([(1, 2)],), {"key": {1: 2}}),
    (len, (nested(97),), {}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0].__name__}{len(call[1])}{len(call[2])}")
def test_a_packed_call_has_the_tree_of_its_tuple(call: Any) -> None:
    codec = Codec()
    tree, packing = codec.pack_call(*call)
    expected, other = codec.pack(call)
    assert tree == expected
    assert [id(tensor) for tensor in packing.tensors] == [id(tensor) for tensor in other.tensors]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(tree))
    function, args, kwargs = codec.unpack(sent, packing.tensors)
    assert function is call[0]
    assert len(args) == len(call[1])
    assert kwargs.keys() == call[2].keys()


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ((lambda: None, (), {}), "func"),
        ((len, (0, [lambda: None]), {}), r"args\[1\]\[0\]"),
        ((len, (), {"x": {"y": lambda: None}}), r"kwargs\['x'\]\['y'\]"),
        ((len, (nested(99),), {}), "args"),
    ],
    ids=["function", "argument", "keyword", "depth"],
)
def test_an_unsendable_argument_is_named_with_its_place(call: Any, where: str) -> None:
    codec = Codec(allow_pickle=False)
    with pytest.raises(UnsendableError, match=where):
        codec.pack_call(*call)
