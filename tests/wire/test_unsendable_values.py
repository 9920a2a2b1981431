"""Values that cannot be sent, or fail on arrival: an error that says where and why."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from value_kinds import (
    CODEC,
    HERE,
    SAFE,
    Color,
    Frozen,
    Opaque,
    Plain,
    Point,
    Raises,
    Refuses,
    Triple,
    Unpicklable,
    function,
    trip,
)

from backhaul.errors import BackhaulError, MisuseError, ProtocolError, UnsendableError
from backhaul.wire import trees
from backhaul.wire.values import Codec


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
    for _ in range(30_000):
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, of the first make_dual
def test_a_tangent_of_forward_mode_would_stay_behind() -> None:
    x = torch.ones(2)
    with forward_ad.dual_level():
        assert torch.equal(trip(x), x)
        with pytest.raises(UnsendableError, match="has a tangent of forward-mode differentiation"):
            CODEC.pack([forward_ad.make_dual(x, x)])


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


# Pickles that fail on arrival.


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
