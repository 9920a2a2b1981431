"""Types of users' values, and a trip through the codec and msgpack."""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
from typing import Any, NamedTuple

import msgspec

from backhaul.errors import MisuseError
from backhaul.wire.values import Codec

HERE = __name__

CODEC = Codec()
SAFE = Codec(allow_pickle=False)


def trip(value: Any, codec: Codec = CODEC) -> Any:
    tree, packing = codec.pack(value)
    return codec.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(tree)), packing.tensors)


def same(got: Any, sent: Any) -> bool:
    return type(got) is type(sent) and (got == sent or repr(got) == repr(sent))


def named(cls: str) -> str:
    return f"{HERE}:{cls}"


def short(value: object) -> str:
    """A name for a test with this value, without addresses: all processes of pytest-xdist must find the same names."""
    text = (
        f"{type(value).__name__} of {sorted(map(repr, value))}" if isinstance(value, set | frozenset) else repr(value)
    )
    return re.sub(r" at 0x[0-9a-f]+", "", text)[:40]


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
    """A named tuple whose instances may have attributes of their own."""


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
    """Only pickle can send it."""

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
