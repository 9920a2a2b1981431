"""Trees that no codec makes are refused."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from value_kinds import CODEC, SAFE, named, short

from backhaul.errors import MisuseError, ProtocolError
from backhaul.wire import trees
from backhaul.wire.values import Codec

BYTES = torch.zeros(8, dtype=torch.uint8)
BAD_TREES = [
    [],
    [None],
    [True],
    ["x"],
    [-1],
    [31],
    [1 << 63],
    [[trees.LIST]],
    {1: 2},
    {b"a": 1},
    {"a": []},
    msgspec.msgpack.Ext(1, b""),
    datetime.datetime(2020, 1, 1),
    (1,),
    [trees.LIST, []],
    [trees.DICT, 1],
    [trees.DICT, 1, 2, 1, 3],
    [trees.DICT, [trees.LIST], 2],
    [trees.ORDERED_DICT, 1],
    [trees.SET, 1, 1],
    [trees.SET, [trees.LIST]],
    [trees.FROZEN_SET, {}],
    [trees.TENSOR],
    [trees.TENSOR, 1],
    [trees.TENSOR, -1],
    [trees.TENSOR, True],
    [trees.TENSOR, 0, 0],
    [trees.BIG_INT],
    [trees.BIG_INT, 1],
    [trees.COMPLEX, 1.0],
    [trees.COMPLEX, 1, 2],
    [trees.TEXT, "x"],
    [trees.TEXT, b"\xff"],
    [trees.BYTE_ARRAY, 5],
    [trees.SLICE, 1, 2],
    [trees.RANGE, 1, 2, 0],
    [trees.RANGE, 1, 2, 1.0],
    [trees.RANGE, 1, 2],
    [trees.ELLIPSIS, 1],
    [trees.DTYPE, "nn"],
    [trees.DTYPE, 1],
    [trees.DTYPE],
    [trees.DEVICE, "nowhere"],
    [trees.DEVICE, "cpu:99999"],
    [trees.DEVICE, 1],
    [trees.SIZE, "a"],
    [trees.SIZE, 1 << 63],
    [trees.LAYOUT, "float32"],
    [trees.MEMORY_FORMAT, "float32"],
    [trees.ARRAY],
    [trees.ARRAY, "<f8"],
    [trees.ARRAY, "|O8", 0, 1],
    [trees.ARRAY, "f8", 0, 1],
    [trees.ARRAY, "<q9", 0, 1],
    [trees.ARRAY, "<f7", 0, 1],
    [trees.ARRAY, "<b1", 0, 8],
    [trees.ARRAY, "<M8[banana]", 0, 1],
    [trees.ARRAY, "<f8", 0, 2],
    [trees.ARRAY, "<f8", 0, -1],
    [trees.ARRAY, "<f8", 0, 1.0],
    [trees.ARRAY, "<f8", None, 1],
    [trees.ARRAY, "<f8", 1, 1],
    [trees.ARRAY, 8, 0, 1],
    [trees.ARRAY, "<f8", None, 1 << 62, 1 << 62, 0],
    [trees.NUMPY_SCALAR, "<f8", b"short"],
    [trees.NUMPY_SCALAR, "<f8", 1],
    [trees.NUMPY_SCALAR, "<f8"],
    [trees.ENUM, named("Color"), "GREEN"],
    [trees.ENUM, named("Color"), 1],
    [trees.ENUM, named("Plain"), "RED"],
    [trees.ENUM, named("function"), "RED"],
    [trees.ENUM, 1, "RED"],
    [trees.ENUM, named("Color")],
    [trees.FLAG, named("Right"), 99],
    [trees.FLAG, named("Right"), "READ"],
    [trees.FLAG, named("Color"), 1],
    [trees.NAMED_TUPLE],
    [trees.NAMED_TUPLE, named("Point"), 1],
    [trees.NAMED_TUPLE, named("Point"), 1, 2, 3],
    [trees.NAMED_TUPLE, named("Adorned"), 1, 2],
    [trees.NAMED_TUPLE, named("Plain"), 1, 2],
    [trees.NAMED_TUPLE, "builtins:tuple", 1, 2],
    [trees.RETURN_TYPE],
    [trees.RETURN_TYPE, "nothing", 1],
    [trees.RETURN_TYPE, "max", 1],
    [trees.RETURN_TYPE, "__name__", 1],
    [trees.DATACLASS],
    [trees.DATACLASS, named("Plain")],
    [trees.DATACLASS, named("Plain"), "a", 1, "b", 2],
    [trees.DATACLASS, named("Plain"), "a", 1, "b", 2, "z", 3],
    [trees.DATACLASS, named("Plain"), "a", 1, "b", 2, "c"],
    [trees.DATACLASS, named("Plain"), "a", 1, "b", 2, "c", 3, "d", 4],
    [trees.DATACLASS, named("Plain"), [trees.LIST], 1, "b", 2, "c", 3],
    [trees.DATACLASS, named("Stateful"), "a", 1],
    [trees.DATACLASS, named("Opaque"), "content", 1],
    [trees.DATACLASS, named("function"), "a", 1],
    [trees.NAMED],
    [trees.NAMED, 1],
    [trees.NAMED, "sys:path"],
    [trees.METHOD, 1],
    [trees.METHOD, 1, 2],
    [trees.METHOD, "x", "__class__"],
    [trees.METHOD, "x", "nothing"],
    [trees.METHOD, [trees.NAMED, "builtins:str"], "mro"],
    [trees.METHOD, 1, "real"],
    [trees.METHOD, [trees.DATACLASS, named("Frozen"), "a", 1], "static"],
    [trees.METHOD, [trees.DATACLASS, named("Frozen"), "a", 1], "explosive"],
    [trees.PARTIAL, 1, [trees.TUPLE], {}],
    [trees.PARTIAL, [trees.NAMED, "builtins:len"], [trees.LIST], {}],
    [trees.PARTIAL, [trees.NAMED, "builtins:len"], [trees.TUPLE], [trees.DICT, 1, 2]],
    [trees.PARTIAL, [trees.NAMED, "builtins:len"], [trees.TUPLE]],
    [trees.EXTENSION, "x", 1],
    [trees.EXTENSION],
    [trees.PICKLE],
    [trees.PICKLE, "x"],
]


@pytest.mark.parametrize("tree", BAD_TREES, ids=short)
def test_malformed_trees_are_refused(tree: Any) -> None:
    for codec in (CODEC, SAFE):
        for around in (tree, [trees.LIST, tree], {"k": tree}):
            with pytest.raises(ProtocolError):
                codec.unpack(around, [BYTES])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
        torch.zeros(8, dtype=torch.uint8, device="meta"),
        torch.zeros(8, dtype=torch.uint8).to_sparse(),
        nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False),
    ],
)
def test_an_array_needs_plain_bytes(tensor: torch.Tensor) -> None:
    with pytest.raises(ProtocolError):
        CODEC.unpack([trees.ARRAY, "<f8", 0, 1], [tensor])


# Any tree.


tag = st.sampled_from([t for t in range(32) if t != trees.PICKLE])
names = st.sampled_from([named(name) for name in ("Plain", "Point", "Color", "Right", "function", "nothing")])
parts = st.none() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.binary(max_size=9) | names
parts = parts | st.sampled_from(["<f8", "float32", "cpu", "a", "b", "max", "RED"])
wild_trees = st.recursive(
    parts,
    lambda inner: (
        st.builds(lambda head, rest: [head, *rest], tag, st.lists(inner, max_size=5))
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(wild_trees)
def test_any_tree_is_a_value_or_refused(tree: Any) -> None:
    try:
        SAFE.unpack(tree, [BYTES])
    except (ProtocolError, MisuseError):
        pass


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_tensor_counts_as_a_level(depth: int) -> None:
    """A tensor directly in a list is unpacked by a short way, which must refuse it as any other part."""
    codec = Codec(max_depth=depth)
    for part in ([trees.TENSOR, 0], [trees.LIST]):
        tree = part
        for _ in range(depth + 1):
            tree = [trees.LIST, tree]
        codec.unpack(tree, [BYTES])
        with pytest.raises(ProtocolError, match="nested too deeply"):
            codec.unpack([trees.LIST, tree], [BYTES])


@pytest.mark.parametrize("part", [(1,), [(1,)], {"a": (1,)}, {1: (1,)}], ids=repr)
def test_siblings_are_not_deeper_than_each_other(part: Any) -> None:
    """The limit applies to nesting only: many parts side by side do not reach it."""
    value = [part] * 3000
    tree, packing = SAFE.pack(value)
    assert SAFE.unpack(tree, packing.tensors) == value
