"""Values -> trees -> msgpack -> values: equal and of the same type, or an error that says where."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import math
import subprocess
import sys
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backhaul.errors import BackhaulError, MisuseError, ProtocolError, UnsendableError
from backhaul.wire import trees
from backhaul.wire.values import Codec, Packing, Unpacking

HERE = __name__

CODEC = Codec()
SAFE = Codec(allow_pickle=False)


def trip(value: Any, codec: Codec = CODEC) -> Any:
    tree, packing = codec.pack(value)
    return codec.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(tree)), packing.tensors)


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


Point = collections.namedtuple("Point", "x y")


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Triple(Pair):
    """Its instances may have attributes of their own."""


class Adorned(Pair):
    def __reduce__(self) -> Any:
        return Adorned, tuple(self)


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None
    c: Any = dataclasses.field(default=None, init=False)

    def method(self) -> Any:
        return self.a

    @classmethod
    def of_class(cls) -> None: ...

    def __secret(self) -> None: ...

    def secret(self) -> Any:
        return self.__secret


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any

    @staticmethod
    def static() -> None: ...

    @property
    def explosive(self) -> Any:
        raise SystemExit("a property must not run on arrival")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any


@dataclasses.dataclass
class Stateful:
    a: Any

    def __getstate__(self) -> Any:
        return {"a": self.a, "seen": True}


class Opaque:
    """Only pickle knows what to do with it."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: Any) -> bool:
        return type(other) is Opaque and bool(self.content == other.content)

    __hash__ = object.__hash__


class Raises:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("on arrival")

    def __getstate__(self) -> Any:
        return {"x": 1}


class Refuses:
    def __setstate__(self, state: Any) -> None:
        raise MisuseError("not here")

    def __getstate__(self) -> Any:
        return {"x": 1}


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("never")


class Text(str):
    pass


def function(x: Any) -> Any:
    return x


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
    np.datetime64("NaT"),
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


def same(got: Any, sent: Any) -> bool:
    return type(got) is type(sent) and (got == sent or repr(got) == repr(sent))


@pytest.mark.parametrize("value", SAFE_VALUES, ids=lambda value: repr(value)[:40])
def test_the_safe_codec_carries(value: Any) -> None:
    for codec in (SAFE, CODEC):
        assert same(trip(value, codec), value)
        assert same(trip([value], codec)[0], value)


@pytest.mark.parametrize("value", PICKLED_VALUES, ids=lambda value: repr(value)[:40])
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


def test_what_arrives_is_not_what_was_packed() -> None:
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
    with pytest.raises(UnsendableError, match="take them off"):
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


# Tensors


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


class Tagged(torch.Tensor):
    pass


def test_tensor_subclasses_are_pickled() -> None:
    got = trip(torch.arange(3.0).as_subclass(Tagged))
    assert type(got) is Tagged
    assert got.tolist() == [0, 1, 2]


def test_results_of_torch_operators() -> None:
    sent = torch.max(torch.arange(4.0).reshape(2, 2), 0)
    got = trip(sent, SAFE)
    assert type(got) is type(sent)
    assert got.indices.tolist() == [1, 1]


# numpy

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
    with pytest.raises(UnsendableError, match="more than its bytes"):
        SAFE.pack([array])
    record = np.zeros(2, "i4,f8")[0]
    assert trip(record) == record


# What cannot be sent


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


def cyclic() -> Any:
    value: list[Any] = []
    value.append((value,))
    return value


def cyclic_object() -> Any:
    value = Plain(1)
    value.b = value
    return value


def deep_pickle() -> Any:
    value: Any = Opaque(1)
    for _ in range(3000):
        value = Opaque(value)
    return value


def without_field() -> Any:
    value = Plain(1)
    del value.a
    return value


def undeclared() -> Any:
    value = Plain(1)
    value.extra = 1  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 0, r"args\[1\]\['x'\] \(function\) cannot be sent: the lambda"),
        (local_class(), "local to a function"),
        (sys.stdout, r"args\[1\]\['x'\] .*pickling it failed"),
        (Unpicklable(), rf"\({HERE}.Unpicklable\).*ValueError: never"),
        (cyclic(), "nested too deeply, or contains itself"),
        (cyclic_object(), r"\.b\.b.*nested too deeply, or contains itself"),
        (deep_pickle(), "pickling it failed"),
        (without_field(), "field 'a' has no value"),
        (Frozen([1, {"k": lambda: 0}]), r"args\[1\]\['x'\]\.a\[1\]\['k'\]"),
        ({1: lambda: 0}, r"args\[1\]\['x'\]\[1\] \(function\)"),
        ({function: 1, local_class: lambda: 0}, "function local_class"),
        ({(lambda: 0): 1}, r"\[key <function"),
        ({lambda: 0}, r"args\[1\]\['x'\]\[0\]"),
        (functools.partial(lambda: 0), r"args\[1\]\['x'\]\.func"),
        (Point(1, lambda: 0), r"args\[1\]\['x'\]\[1\]"),
    ],
)
def test_an_error_names_the_path_and_the_type(value: Any, says: str) -> None:
    with pytest.raises(UnsendableError, match=says):
        CODEC.pack(((1, {"x": value}), {}), ("args", "kwargs"))


def test_an_error_without_labels() -> None:
    with pytest.raises(UnsendableError, match=r"^value\[1\] \(function\)"):
        CODEC.pack([1, lambda: 0])
    with pytest.raises(UnsendableError, match=r"^the value \(function\)"):
        CODEC.pack(lambda: 0)
    with pytest.raises(UnsendableError, match=r"^kwargs\['k'\] \(function\)"):
        CODEC.pack(((), {"k": lambda: 0}), ("args", "kwargs"))


def test_undeclared_attributes_need_pickle() -> None:
    triple = Triple(1, 2)
    triple.extra = 1  # type: ignore[attr-defined]
    for value in (undeclared(), triple):
        assert trip(value).extra == 1
        with pytest.raises(UnsendableError, match="does not declare"):
            SAFE.pack(value)


def test_a_member_that_its_enum_does_not_have() -> None:
    stray = object.__new__(Color)
    stray._name_ = "STRAY"
    with pytest.raises(UnsendableError, match="not a member"):
        CODEC.pack(stray)


def test_bytes_that_msgpack_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.wire.scalars._MAX_BYTES", 3)
    with pytest.raises(UnsendableError, match="tensor of uint8"):
        CODEC.pack([b"four"])


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: {1: v}, Frozen, lambda v: (v, 1)])
def test_depth_is_capped_alike_on_both_sides(wrap: Any) -> None:
    codec = Codec(max_depth=10)
    value: Any = range(2**70)
    for _ in range(10):
        value = wrap(value)
    tree, _ = codec.pack(value)
    assert codec.unpack(tree, []) == value
    with pytest.raises(UnsendableError, match="too deeply"):
        codec.pack(wrap(value))
    deeper = [trees.LIST, [trees.LIST, [trees.LIST, tree]]]
    with pytest.raises(ProtocolError, match="too deeply"):
        codec.unpack(deeper, [])


def test_a_stack_that_is_nearly_full() -> None:
    codec = Codec(max_depth=1_000_000)
    with pytest.raises(UnsendableError, match="contains itself"):
        codec.pack(cyclic())
    tree: Any = [trees.LIST]
    for _ in range(100_000):
        tree = [trees.LIST, tree]
    with pytest.raises(ProtocolError):
        codec.unpack(tree, [])


# Pickles that fail on arrival


def test_an_exception_in_the_user_s_own_unpickling() -> None:
    with pytest.raises(UnsendableError, match="on arrival") as caught:
        trip(Raises())
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(MisuseError, match="not here"):
        trip(Refuses())


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x05."])
def test_broken_pickles(data: bytes) -> None:
    with pytest.raises(BackhaulError):
        CODEC.unpack([trees.PICKLE, data], [])


def test_a_pickle_that_refers_to_nothing() -> None:
    tree, _ = CODEC.pack(Opaque(torch.ones(1)))
    with pytest.raises(ProtocolError, match="part 0 of 0"):
        CODEC.unpack(tree[:2], [])


def test_the_safe_codec_never_loads_pickle() -> None:
    """The module with the unpickler is not imported for a peer whose pickles are refused."""
    script = (
        "import sys\n"
        "from backhaul.wire.values import Codec\n"
        "codec = Codec(allow_pickle=False)\n"
        "for act in (lambda: codec.pack(sys.stdout), lambda: codec.unpack([30, b''], [])):\n"
        "    try: act()\n"
        "    except RuntimeError: pass\n"
        "assert 'backhaul.wire.pickles' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Extensions


class Handle:
    def __init__(self, key: int, tensor: torch.Tensor | None = None) -> None:
        self.key = key
        self.tensor = tensor


class Special(Handle):
    pass


def lower_handle(handle: Handle, packing: Packing) -> Any:
    packing.attached.append(handle)
    return (handle.key, handle.tensor)


def lift_handle(payload: Any, unpacking: Unpacking) -> Handle:
    key, tensor = payload
    return Handle(key + 100, tensor)


def extended(*, allow_pickle: bool = True) -> Codec:
    codec = Codec(allow_pickle=allow_pickle)
    codec.register(Handle, "handle", lower_handle, lift_handle)
    return codec


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_registered_types_travel_as_what_they_are_lowered_to(allow_pickle: bool) -> None:
    codec = extended(allow_pickle=allow_pickle)
    x = torch.ones(1)
    sent = [Handle(1, x), Special(2), x]
    tree, packing = codec.pack(sent)
    assert packing.attached == sent[:2]
    first, second, got = codec.unpack(tree, packing.tensors)
    assert (first.key, second.key) == (101, 102)
    assert first.tensor is got


def test_registered_types_inside_pickles() -> None:
    codec = extended()
    handle = Handle(1, torch.ones(1))
    tree, packing = codec.pack(Opaque([handle, handle]))
    assert packing.attached == [handle]
    got = codec.unpack(tree, packing.tensors).content
    assert got[0] is got[1]
    assert got[0].key == 101


def test_registering_forgets_what_was_known() -> None:
    codec = Codec()
    assert codec.pack(Handle(1))[0][0] == trees.PICKLE
    codec.register(Handle, "handle", lower_handle, lift_handle)
    assert codec.pack(Handle(1))[0][0] == trees.EXTENSION
    with pytest.raises(MisuseError, match="taken"):
        codec.register(Special, "handle", lower_handle, lift_handle)


def test_a_payload_that_does_not_lift() -> None:
    codec = extended()
    for tree in ([trees.EXTENSION, "handle", 1], [trees.EXTENSION, "nobody", 1], [trees.EXTENSION, 1, 1]):
        with pytest.raises(ProtocolError):
            codec.unpack(tree, [])


def test_many_types_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.wire.values._MAX_RESOLVED", 40)
    codec = Codec()
    for _ in range(50):
        with pytest.raises(UnsendableError):
            codec.pack(type("Fresh", (), {"__reduce__": Unpicklable.__reduce__})())
    assert len(codec._lowerers) <= 41


# Names


class Only:
    """Names that one party agreed to."""

    def __init__(self) -> None:
        self.table = {"f": function, "color": Color, "number": 3}

    def name_of(self, obj: Any) -> str:
        for name, known in self.table.items():
            if known is obj:
                return name
        raise UnsendableError("not agreed")

    def find(self, name: str) -> Any:
        if name not in self.table:
            raise MisuseError("not agreed")
        return self.table[name]


def test_names_can_be_somebody_else_s() -> None:
    codec = Codec(Only(), allow_pickle=False)
    assert codec.pack([function, Color.RED])[0] == [
        trees.LIST,
        [trees.NAMED, "f"],
        [trees.ENUM, "color", "RED"],
    ]
    assert trip([function, Color.RED], codec) == [function, Color.RED]
    with pytest.raises(UnsendableError, match="not agreed"):
        codec.pack(Frozen(1))
    with pytest.raises(MisuseError, match="not agreed"):
        codec.unpack([trees.NAMED, "math:sqrt"], [])
    with pytest.raises(ProtocolError):
        codec.unpack([trees.NAMED, "number"], [])


# Trees that nobody makes


def named(cls: str) -> str:
    return f"{HERE}:{cls}"


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


@pytest.mark.parametrize("tree", BAD_TREES, ids=repr)
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


def test_names_that_do_not_exist_here() -> None:
    for tree in ([trees.NAMED, "math:nothing"], [trees.ENUM, "no_such_module:X", "a"]):
        with pytest.raises(MisuseError):
            CODEC.unpack(tree, [])


def test_arrays_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, packing = CODEC.pack(np.ones(2))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MisuseError, match="not installed"):
        CODEC.unpack(tree, packing.tensors)
    assert same(trip(Frozen(1), Codec()), Frozen(1))


# Any value, any tree

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
