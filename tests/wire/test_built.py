"""Instances from a peer that may lie are built by calling their class with checked parts."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import built, trees
from backhaul.wire.values import Codec


@dataclasses.dataclass
class Payment:
    amount: int
    to: str = "shop"
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.amount <= 0:
            raise ValueError("no such amount")
        self.total = 2 * self.amount


class Range(NamedTuple):
    low: float
    high: float


class Ordered(Range):
    __slots__ = ()

    def __new__(cls, low: float, high: float) -> Ordered:
        if low > high:
            raise ValueError("the wrong way round")
        return super().__new__(cls, low, high)


Untyped = collections.namedtuple("Untyped", "a b")


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2
    RUN = 4


class Many(enum.Flag):
    ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN, EIGHT, NINE, TEN, ELEVEN, TWELVE = (1 << bit for bit in range(12))


@dataclasses.dataclass
class WithInitVar:
    x: dataclasses.InitVar[int]


strict = Codec(bounded=True)
lax = Codec()


def name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def there_and_back(value: Any) -> Any:
    tree, packing = strict.pack(value)
    return strict.unpack(tree, packing.tensors)


def test_a_dataclass_is_made_by_its_init() -> None:
    assert there_and_back(Payment(3)) == Payment(3)
    assert there_and_back(Payment(3)).total == 6
    cls = name(Payment)
    assert strict.unpack([trees.DATACLASS, cls, "amount", 3, "to", "me"], ()).total == 6
    for fields in (
        ["amount", 0, "to", "me"],
        ["amount", "3", "to", "me"],
        ["amount", True, "to", "me"],
        ["amount", 3, "to", None],
        ["amount", 3],
        ["amount", 3, "to", "me", "total", 7],
        ["to", "me", "amount", 3],
        ["amount", 3, "amount", 3],
        ["amount", 3, "to"],
    ):
        with pytest.raises(ProtocolError):
            strict.unpack([trees.DATACLASS, cls, *fields], ())
    with pytest.raises(UnsendableError, match="InitVar"):  # which Python 3.10 cannot evaluate, and says so
        strict.pack(WithInitVar(1))
    with pytest.raises(MisuseError, match="InitVar"):
        strict.unpack([trees.DATACLASS, name(WithInitVar)], ())
    # In a cluster its sender has checked it.
    assert lax.unpack([trees.DATACLASS, cls, "amount", 0, "to", "me", "total", 5], ()).total == 5


def test_a_named_tuple_is_made_by_its_new() -> None:
    assert there_and_back(Range(1, 2)) == Range(1, 2)
    assert there_and_back(Ordered(1, 2)) == Ordered(1, 2)
    assert type(there_and_back(Untyped("x", None))) is Untyped
    for tree in (
        [trees.NAMED_TUPLE, name(Ordered), 2, 1],
        [trees.NAMED_TUPLE, name(Range), "1", 2],
        [trees.NAMED_TUPLE, name(Range), 1],
        [trees.NAMED_TUPLE, name(Range), 1, None],
    ):
        with pytest.raises(ProtocolError):
            strict.unpack(tree, ())


def test_flags_do_not_fill_the_memory() -> None:
    assert there_and_back(Rights.READ | Rights.RUN) == Rights.READ | Rights.RUN
    for value in (8, -1, 1 << 70, True):
        with pytest.raises(ProtocolError):
            strict.unpack([trees.FLAG, name(Rights), value], ())
    made = 0
    for value in range(1 << 12):
        try:
            made += strict.unpack([trees.FLAG, name(Many), value], ()).value == value
        except ProtocolError:
            continue
    assert made <= len(Many) + 1026
    assert len(Many._value2member_map_) <= len(Many) + 1026
    assert there_and_back(Many.ONE | Many.TWO).value == 3  # as before


def test_results_of_torch_are_of_tensors() -> None:
    assert there_and_back(torch.ones(2).max(0)).values == 1
    with pytest.raises(ProtocolError):
        strict.unpack([trees.RETURN_TYPE, "max", 1, 2], ())


@dataclasses.dataclass
class All:
    a: Any = None
    b: int | None = None
    c: list[int] = dataclasses.field(default_factory=list)
    d: dict[str, float] = dataclasses.field(default_factory=dict)
    e: tuple[int, str] = (1, "x")
    f: tuple[int, ...] = ()
    g: Literal["fast", "slow"] = "fast"
    h: torch.Tensor | None = None
    i: Annotated[str, "a name"] = ""
    j: set[str] = dataclasses.field(default_factory=set)
    k: complex = 0


GOOD: list[dict[str, Any]] = [
    {},
    {"a": object, "b": 3, "c": [1, 2], "d": {"x": 1}, "e": (2, "y"), "f": (1, 2, 3), "g": "slow"},
    {"h": torch.ones(1), "i": "x", "j": {"a"}, "k": 1.5},
]
BAD: list[dict[str, Any]] = [
    {"b": "3"},
    {"c": [1, "2"]},
    {"c": (1,)},
    {"d": {1: 1.0}},
    {"d": {"x": "y"}},
    {"e": (1,)},
    {"e": ("x", 1)},
    {"f": (1, None)},
    {"g": "other"},
    {"h": 1},
    {"i": b"x"},
    {"j": {1}},
    {"k": "1"},
]


@pytest.mark.parametrize("values", GOOD)
def test_values_that_annotations_allow(values: dict[str, Any]) -> None:
    assert dataclasses.asdict(built.dataclass(All, values)).keys() >= values.keys()


@pytest.mark.parametrize("values", BAD)
def test_values_that_annotations_do_not_allow(values: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=rf"All\.{next(iter(values))} is a "):
        built.dataclass(All, values)


def test_annotations_that_cannot_be_checked() -> None:
    @dataclasses.dataclass
    class Odd:
        x: "7"  # type: ignore[valid-type]  # noqa: UP037

    with pytest.raises(MisuseError, match=r"x has the annotation 7, which cannot be checked|cannot be evaluated"):
        built.dataclass(Odd, {"x": 7})
