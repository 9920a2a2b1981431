"""Values -> trees -> msgpack -> values: equal and of the same type."""

from __future__ import annotations

import collections
import datetime
import functools
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from value_kinds import (
    CODEC,
    SAFE,
    Adorned,
    Color,
    Frozen,
    Level,
    Opaque,
    Pair,
    Plain,
    Point,
    Right,
    Slotted,
    Stateful,
    Text,
    Triple,
    function,
    same,
    short,
    trip,
)

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import trees
from backhaul.wire.values import Codec

SAFE_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**100,
    -(10**100),
    0.0,
    1.5,
    math.inf,
    -math.inf,
    1 + 2j,
    complex(0.0, -math.inf),
    "",
    "text",
    "žluťoučký 🐎",
    "lone \ud800 surrogate",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    [1, "a", None, 2.5],
    [[[]]],
    list(range(20)),
    [*range(20), 2**70],
    ["a"] * 20,
    [*["a"] * 20, "\udfff"],
    [None, True, 1.0] * 10,
    [b"x"] * 20,
    (),
    (1,),
    ((), {}),
    {},
    {"a": 1},
    {"a": 1.0, "b": None},
    {"a": [1], "b": {"c": ()}},
    {1: 2, "a": 3, (1, 2): 4, None: 5, 1.5: 6, b"x": 7, frozenset({1}): 8},
    {"\ud800": 1},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    set(),
    {1, "a", (2, 3)},
    frozenset({1, 2}),
    set(range(50)),
    slice(None),
    slice(1, 2**70, -1),
    range(5),
    range(2**70, 0, -3),
    ...,
    torch.float32,
    torch.bool,
    torch.qint8,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    torch.Size([]),
    torch.Size([2, 3]),
    torch.strided,
    torch.sparse_csr,
    torch.channels_last,
    torch.preserve_format,
    Color.RED,
    Color.CRIMSON,
    Color.BLUE,
    Level.LOW,
    Right.READ,
    Right.READ | Right.WRITE,
    Right(0),
    Point(1, "y"),
    Pair([1], Pair(2)),
    Triple(1, 2),
    Plain(1, [2]),
    Frozen((1, 2)),
    {Frozen(1): Slotted(1, Frozen(2))},
    len,
    function,
    Plain,
    Color,
    torch.add,
    torch.Tensor.add,
    Plain(7).method,
    np.float32(1.5),
    np.float64(-0.0),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("žluť"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.datetime64("2020-02-29T12:00", "s"),
    np.timedelta64(3, "D"),
    np.datetime64("NaT", "s"),
]

PICKLED_VALUES = [
    Opaque(1),
    [Opaque((1, "a"))],
    collections.defaultdict(list, a=[1]),
    collections.Counter("aab"),
    collections.deque([1, 2]),
    Text("x"),
    Adorned(1, 2),
    Stateful(3),
    datetime.datetime(2020, 1, 1),
    datetime.timedelta(3),
]


@pytest.mark.parametrize("value", SAFE_VALUES, ids=short)
def test_the_safe_codec_carries(value: Any) -> None:
    for codec in (SAFE, CODEC):
        assert same(trip(value, codec), value)
        assert same(trip([value], codec)[0], value)


@pytest.mark.parametrize("value", PICKLED_VALUES, ids=short)
def test_pickle_carries_the_rest(value: Any) -> None:
    assert same(trip(value), value)
    with pytest.raises(UnsendableError, match="cannot be sent"):
        SAFE.pack(value)
    tree, packing = CODEC.pack(value)
    with pytest.raises(ProtocolError, match="pickle"):
        SAFE.unpack(tree, packing.tensors)


def test_floats_keep_their_bits() -> None:
    assert math.isnan(trip(math.nan))
    assert math.copysign(1, trip(-0.0)) == -1
    assert math.copysign(1, trip(complex(1, -0.0)).imag) == -1


def test_order_and_identity_of_aliases() -> None:
    assert list(trip({"b": 1, "a": 2})) == ["b", "a"]
    assert list(trip({2: 1, 1: 2})) == [2, 1]
    assert trip(Color.CRIMSON) is Color.RED


def test_packed_values_do_not_follow_later_changes() -> None:
    value = {"a": 1.0}
    tree, packing = CODEC.pack(value)
    value["b"] = 2.0
    assert CODEC.unpack(tree, packing.tensors) == {"a": 1.0}


def test_partials() -> None:
    got = trip(functools.partial(torch.add, 1, alpha=Frozen(2)), SAFE)
    assert type(got) is functools.partial
    assert (got.func, got.args, got.keywords) == (torch.add, (1,), {"alpha": Frozen(2)})
    odd = functools.partial(len)
    odd.note = "x"  # type: ignore[attr-defined]
    assert trip(odd).note == "x"
    with pytest.raises(UnsendableError, match="remove them"):
        SAFE.pack(odd)


def test_methods() -> None:
    got = trip([3, 1].sort, SAFE)
    got()
    assert got.__self__ == [1, 3]
    x = torch.ones(2)
    method, same_x = trip((x.add, x), SAFE)
    assert method.__self__ is same_x
    assert method(1).tolist() == [2, 2]
    assert trip(Plain.method) is Plain.method
    assert trip(Plain.of_class) == Plain.of_class
    with pytest.raises(UnsendableError, match="no such method"):
        CODEC.pack(Plain(1).secret())


# Tensors.


def test_tensors_ride_beside_the_tree() -> None:
    x, p = torch.ones(2), nn.Parameter(torch.ones(3))
    tree, packing = CODEC.pack({"a": [x, p], "b": (x,)})
    assert tree == {"a": [trees.LIST, [trees.TENSOR, 0], [trees.TENSOR, 1]], "b": [trees.TUPLE, [trees.TENSOR, 0]]}
    assert packing.tensors[0] is x
    assert packing.tensors[1] is p
    got = CODEC.unpack(tree, packing.tensors)
    assert got["a"][0] is got["b"][0]


def test_tensors_inside_a_pickle_ride_beside_it_too() -> None:
    x = torch.ones(2)
    tree, packing = CODEC.pack((Opaque([x, x]), x))
    assert packing.tensors == [x]
    opaque, got = CODEC.unpack(tree, packing.tensors)
    assert opaque.content[0] is opaque.content[1] is got


def test_modules_travel_with_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    _, packing = CODEC.pack(model)
    assert len(packing.tensors) == len(model.state_dict())
    got = trip(model)
    assert [type(p) for p in got.parameters()] == [nn.Parameter] * 4
    got.eval()
    model.eval()
    x = torch.ones(1, 2)
    assert torch.equal(got(x), model(x))


def test_results_of_torch_operators() -> None:
    sent = torch.max(torch.arange(4.0).reshape(2, 2), 0)
    got = trip(sent, SAFE)
    assert type(got) is type(sent)
    assert got.indices.tolist() == [1, 1]


# numpy.


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.arange(6, dtype=np.int16).reshape(2, 3).T,
    np.arange(20)[::3],
    np.array(3.5),
    np.zeros((2, 0, 3), np.float32),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.array(["a", "bcd", "ž"]),
    np.array([b"a", b"bcd"]),
    np.array([""]),
    np.array(["2020-01", "NaT"], "M8[M]"),
    np.array([3], "m8[ns]"),
    np.arange(3, dtype=">i4"),
    np.array([1.5], np.float16),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_arrays(array: Any) -> None:
    got = trip(array, SAFE)
    assert type(got) is np.ndarray
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    np.testing.assert_array_equal(got, array)
    assert got.flags.writeable


def test_read_only_arrays_arrive_writable() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    got = trip(array, SAFE)
    got[0] = 5
    assert array[0] == 0


@pytest.mark.parametrize("array", [np.array([1, "a", None], object), np.zeros(2, "i4,f8")])
def test_arrays_of_more_than_bytes_are_pickled(array: Any) -> None:
    got = trip(array)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)
    with pytest.raises(UnsendableError, match="cannot be sent as its bytes"):
        SAFE.pack([array])
    record = np.zeros(2, "i4,f8")[0]
    assert trip(record) == record


def test_arrays_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, packing = CODEC.pack(np.ones(2))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MisuseError, match="not installed"):
        CODEC.unpack(tree, packing.tensors)
    assert same(trip(Frozen(1), Codec()), Frozen(1))


# Any value.


keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.sampled_from(list(Color))
leaves = (
    keys
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.characters(categories=["Cs"])
    | st.sampled_from([torch.float16, torch.Size([1]), len, Plain, range(3), slice(1), ..., Right(3)])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.text(), inner)
        | st.sets(keys)
        | st.builds(Plain, inner, inner)
        | st.builds(Slotted, inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Opaque, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_any_value_survives(value: Any) -> None:
    assert same(trip(value), value)
