"""A packed call has the tree of a tuple of its parts."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import callables
from backhaul.wire.trees import DICT, LIST, NAMED, TENSOR, TUPLE, Unpacking
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


# The parts that the short way looks at, as they are and as a peer that lies may send them.
FUNCTIONS: list[Any] = [
    [NAMED, "operator:add"],
    [NAMED, "operator:none"],
    [NAMED, "math:pi"],
    [NAMED, 5],
    [NAMED],
    [NAMED, "a", 1],
]
FUNCTIONS += [
    [float(NAMED), "operator:add"],
    [LIST],
    [],
    None,
    "operator:add",
    {"a": 1},
    [TUPLE, [NAMED, "operator:add"]],
]
ARGS: list[Any] = [[TUPLE], [TUPLE, 1, "a", None], [TUPLE, [TENSOR, 0]], [TUPLE, [TENSOR, 1], [TENSOR, 0], [TENSOR, 1]]]
ARGS += [[TUPLE, [LIST, [TUPLE, [TENSOR, 0]]]], [TUPLE, *range(20)], [TUPLE, *range(20), [TENSOR, 0]], [TUPLE, {}]]
ARGS += [
    [TUPLE, [TENSOR, 2]],
    [TUPLE, [TENSOR, -1]],
    [TUPLE, [TENSOR, 0, 0]],
    [TUPLE, [TENSOR]],
    [TUPLE, [TENSOR, 0.0]],
]
ARGS += [
    [TUPLE, [float(TENSOR), 0]],
    [True, 1],
    [float(TUPLE), 1],
    [LIST, 1],
    [],
    [[TUPLE]],
    None,
    bytes([TUPLE, 5]),
    {1: 2},
]
KWARGS: list[Any] = [
    {},
    {"a": 1},
    {"a": [TENSOR, 1], "b": {"c": [TUPLE]}},
    {"a": [99]},
    {1: 2},
    [DICT, "a", 1],
    [DICT],
    None,
]


def outcome(unpack: Callable[[Any], Any], tree: Any) -> tuple[str, str]:
    try:
        return "value", repr(unpack(tree))
    except (ProtocolError, MisuseError) as error:
        return type(error).__name__, str(error)


def test_a_call_is_unpacked_as_any_other_tuple() -> None:
    codec = Codec()
    tensors = [torch.ones(2), torch.zeros(1)]

    def general(tree: Any) -> Any:
        return Unpacking(codec._lifters, tensors, callables, 102, None, None).lift(tree)

    shapes = [[TUPLE, *parts] for parts in itertools.product(FUNCTIONS, ARGS, KWARGS)]
    shapes += [[tag, FUNCTIONS[0], ARGS[1], {}] for tag in (LIST, True, float(TUPLE), TUPLE + 0.5, -TUPLE, None)]
    shapes += [[tag, index] for tag in (TENSOR, float(TENSOR), LIST) for index in (0, 1, 2, -1, True, 0.0, None, [1])]
    shapes += [[TUPLE, FUNCTIONS[0], ARGS[1], {}, {}], [TUPLE, FUNCTIONS[0], ARGS[1]], [TUPLE, 1, 2, 3], [TUPLE]]
    values = 0
    for tree in shapes:
        found = outcome(lambda tree: codec.unpack(tree, tensors), copy.deepcopy(tree))
        assert found == outcome(general, copy.deepcopy(tree)), tree
        values += found[0] == "value"
    assert 50 < values < len(shapes) - 50


@pytest.mark.parametrize("place", ["args", "kwargs"])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_call_may_be_as_deep_as_any_other_tuple(place: str, depth: int) -> None:
    codec = Codec(max_depth=depth)
    for more in range(depth + 4):
        part = [LIST]
        for _ in range(more):
            part = [LIST, part]
        tree = [TUPLE, [NAMED, "operator:add"], [TUPLE, part] if place == "args" else [TUPLE], {}]
        if place == "kwargs":
            tree[3] = {"a": part}
        unpacking = Unpacking(codec._lifters, [], callables, depth + 2, None, None)
        assert outcome(lambda tree: codec.unpack(tree, []), tree) == outcome(unpacking.lift, tree)


def test_a_call_of_a_function_needs_no_lifters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without lifters shows that the short way was taken."""
    codec = Codec()
    tree, packing = codec.pack_call(torch.add, (X, X, 3, None), {"alpha": 2})
    monkeypatch.setattr(codec, "_lifters", {})
    function, args, kwargs = codec.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(tree)), packing.tensors)
    assert function is torch.add
    assert args[0] is args[1] is X
    assert kwargs == {"alpha": 2}
