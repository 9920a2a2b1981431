"""What the codecs share: the tags of a tree, and the state of one packing or unpacking.

A *tree* is what msgpack carries natively: None, bool, int of 64 bits, float, str,
bytes, maps with str keys, and arrays. Every array starts with a tag that says what it
stands for; the tensors of a message travel beside its tree and are named by index.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import torch
from torch.autograd import forward_ad

from backhaul.errors import ProtocolError

_unpack_dual: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual

# fmt: off
# The tags are on the wire: append only. The comment gives what follows the tag.
(
    LIST,           # items
    TUPLE,          # items
    DICT,           # key, value, key, value, ...
    TENSOR,         # index
    BIG_INT,        # little-endian two's complement bytes
    COMPLEX,        # real, imaginary
    TEXT,           # a str that is not valid UTF-8, as bytes with surrogates passed
    BYTE_ARRAY,     # bytes
    SET,            # items
    FROZEN_SET,     # items
    ORDERED_DICT,   # key, value, key, value, ...
    SLICE,          # start, stop, step
    RANGE,          # start, stop, step
    ELLIPSIS,
    DTYPE,          # name in torch
    DEVICE,         # as str() gives it
    SIZE,           # ints
    LAYOUT,         # name in torch
    MEMORY_FORMAT,  # name in torch
    ARRAY,          # numpy dtype, index of its bytes or None when it has none, sizes
    NUMPY_SCALAR,   # numpy dtype, bytes
    ENUM,           # class, name of the member
    FLAG,           # class, int
    NAMED_TUPLE,    # class, items
    RETURN_TYPE,    # name in torch.return_types, items
    DATACLASS,      # class, field, value, field, value, ...
    NAMED,          # "module:qualname" of a function or class
    METHOD,         # object, name
    PARTIAL,        # function, arguments, keyword arguments
    EXTENSION,      # tag, payload
    PICKLE,         # bytes, objects that the pickle refers to
    SUBCLASS,       # number, how, ... (see `subclasses`); for another mention of the same tensor, its number alone
) = range(32)
# fmt: on

# Up to this many items, a loop is faster than looking at all their types first.
SHORT = 8

# Every value of these types is its own tree.
ATOMS = frozenset({type(None), bool, float})


class Names(Protocol):
    """Which functions and classes may be named, and how."""

    def name_of(self, obj: Any) -> str: ...
    def find(self, name: str) -> Any: ...


class Bounds:
    """The limits of one value that goes to, or comes from, a peer that may lie.

    The value may represent at most ``max_bytes`` of memory.
    """

    __slots__ = ("max_bytes", "odd_keys")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.odd_keys = 0  # keys of its sets and dicts so far whose hash is not randomised: see `values`


class Refusal(Exception):
    """A value cannot travel. The exception collects the path to it on its way up, and never leaves the codec."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind: type | None = None  # of the value that is refused
        self.path: list[str] = []  # from that value outwards

    def step_out(self, value: Any, step: str) -> None:
        """Note that the refusal is about `value` or a part of it. `step` leads to `value` from the value around it."""
        if self.kind is None:
            self.kind = type(value)
        self.path.append(step)


Lower = Callable[[Any, "Packing"], Any]
Lift = Callable[[list[Any], "Unpacking"], Any]


class Packing(msgspec.Struct, eq=False):  # every message makes one, and a struct is made without Python code
    """The state of one pack: the tensors seen so far, and how to lower a part of the value."""

    _lowerers: dict[type, Lower]
    _resolve: Callable[[type], Lower]
    _lower_unknown: Callable[[Any, Packing, str], Any]
    names: Names
    depth: int  # how many levels may still be entered
    bounds: Bounds | None
    tensors: list[torch.Tensor] = []
    attached: list[Any] = []  # the objects that extensions send with the message: see `attach`
    unrecorded: str | None = None
    """The class name of a tensor that requires grad but travels without its history; None if there is none."""
    _indices: dict[int, int] = {}
    _noted: set[Hashable] | None = None
    _subclasses: dict[int, tuple[Any, Any]] | None = None

    def add(self, tensor: torch.Tensor) -> int:
        """The index of a tensor among the tensors of the message. The same tensor always gets the same index."""
        index: int = lower_tensor(tensor, self)[1]
        return index

    def known(self, value: Any) -> Any:
        """The tree of another mention of an instance of a tensor subclass; None if this is the first."""
        found = None if self._subclasses is None else self._subclasses.get(id(value))
        return None if found is None else found[1]

    def remember(self, value: Any, tree: Any = None) -> Any:
        """Note an instance of a tensor subclass, with the tree for its other mentions, and return that tree.

        Without ``tree``, the instance gets a number, which its other mentions refer to. Returns that number.
        """
        if self._subclasses is None:
            self._subclasses = {}
        number = len(self._subclasses)
        # Keep the value too: nothing else may keep it alive, and its id must stay unique.
        self._subclasses[id(value)] = value, [SUBCLASS, number] if tree is None else tree
        return number if tree is None else tree

    def attach(self, key: Hashable, thing: Any) -> None:
        """Note an object that is sent with the message, once for each key."""
        if self._noted is None:
            self._noted = set()
        if key not in self._noted:
            self._noted.add(key)
            self.attached.append(thing)

    def lower(self, value: Any) -> Any:
        """The tree of a value that is not a part of another."""
        kind = type(value)
        lowerer = self._lowerers.get(kind)
        if lowerer is None:
            lowerer = self._resolve(kind)
        return lowerer(value, self)

    def lower_part(self, value: Any, step: str) -> Any:
        """The tree of a part of a value; `step` leads to it from the whole: ``.name`` or ``[0]``."""
        self.enter()
        try:
            tree = self.lower(value)
        except Refusal as refusal:
            refusal.step_out(value, step)
            raise
        self.depth += 1
        return tree

    def lower_parts(self, tree: list[Any], values: Sequence[Any]) -> list[Any]:
        """Append the trees of all these parts to a tree."""
        if self.depth <= 0:
            raise _too_deep()
        self.depth -= 1
        lowerers = self._lowerers
        before = len(tree)
        append = tree.append
        try:
            for value in values:
                kind = type(value)
                if kind in ATOMS:
                    append(value)
                    continue
                lowerer = lowerers.get(kind)
                if lowerer is None:
                    lowerer = self._resolve(kind)
                append(lowerer(value, self))
        except Refusal as refusal:
            refusal.step_out(value, f"[{len(tree) - before}]")
            raise
        self.depth += 1
        return tree

    def lower_unknown(self, value: Any, reason: str) -> Any:
        """Pickle a value that the safe codec cannot carry, or refuse it for this reason."""
        return self._lower_unknown(value, self, reason)

    def enter(self) -> None:
        """Go one level down. After an error the depth is wrong, so the packing must not be used again."""
        if self.depth <= 0:
            raise _too_deep()
        self.depth -= 1


def lower_tensor(tensor: torch.Tensor, packing: Packing) -> list[Any]:
    """The tree of a tensor, which becomes one of the tensors of the message, if it is not one of them yet."""
    index = packing._indices.get(id(tensor))
    if index is None:
        if forward_ad._current_level >= 0 and _unpack_dual(tensor).tangent is not None:
            raise Refusal(
                "it has a tangent of forward-mode differentiation (make_dual), which would stay behind: send "
                "forward_ad.unpack_dual(tensor).primal, or compute without remote calls"
            )
        index = packing._indices[id(tensor)] = len(packing.tensors)
        packing.tensors.append(tensor)
    return [TENSOR, index]


class Unpacking(msgspec.Struct, eq=False):
    """The state of one unpack: the tensors of the message, and how to lift a part of its tree."""

    _lifters: Mapping[int, Lift]
    tensors: Sequence[torch.Tensor]
    names: Names
    depth: int
    bounds: Bounds | None
    announced: Container[Any] | None  # what extensions may find in the tree; None means no limit
    _subclasses: dict[int, Any] | None = None

    def keep(self, number: int, value: Any) -> Any:
        """Note an instance of a tensor subclass for its other mentions, and return it."""
        if self._subclasses is None:
            self._subclasses = {}
        self._subclasses[number] = value
        return value

    def recall(self, number: int) -> Any:
        """The instance of a tensor subclass that has this number. Raises ProtocolError."""
        if self._subclasses is None or number not in self._subclasses:
            raise ProtocolError(f"a tensor subclass {number}, of which nothing is known")
        return self._subclasses[number]

    def tensor(self, index: Any) -> torch.Tensor:
        """The tensor of that index. Raises ProtocolError."""
        if type(index) is not int or not 0 <= index < len(self.tensors):
            raise ProtocolError(f"tensor {index!r} of {len(self.tensors)}")
        return self.tensors[index]

    def find(self, name: Any) -> Any:
        """The function or class of that name. Raises MisuseError if it does not exist here or may not be named."""
        if type(name) is not str:
            raise ProtocolError(f"{name!r} is not a name")
        return self.names.find(name)

    def lift(self, tree: Any) -> Any:
        """The value of a part of the tree."""
        kind = type(tree)
        if kind is list:
            depth = self.depth
            if depth <= 0:
                raise ProtocolError("a value is nested too deeply")
            tag = tree[0] if tree else None
            if (
                tag is TENSOR and len(tree) == 2
            ):  # most lists in a tree stand for a tensor; others are left to its lifter
                index, tensors = tree[1], self.tensors
                if type(index) is int and 0 <= index < len(tensors):
                    return tensors[index]
            lifter = self._lifters.get(tag) if type(tag) is int else None
            if lifter is None:
                raise ProtocolError(f"a value with the tag {tag!r}")
            self.depth = depth - 1
            value = lifter(tree, self)
            self.depth = depth
            return value
        if kind in _NATIVE:
            return tree
        if self.depth <= 0:
            raise ProtocolError("a value is nested too deeply")
        if kind is not dict:
            raise ProtocolError(f"a {kind.__name__} in a value")
        if not tree:
            return tree
        self.depth -= 1
        lifted = self._lift_map(tree)
        self.depth += 1
        return lifted

    def lift_parts(self, tree: list[Any], start: int) -> list[Any]:
        """The values of all parts from `start` on."""
        parts = tree[start:]
        if len(parts) > SHORT and _NATIVE.issuperset(map(type, parts)):
            return parts
        tensors = self.tensors
        count = len(tensors) if self.depth > 0 else 0  # `lift` refuses a tensor that is nested too deeply
        for place, part in enumerate(parts):
            kind = type(part)
            if kind is list and len(part) == 2 and part[0] is TENSOR and type(part[1]) is int and 0 <= part[1] < count:
                parts[place] = tensors[part[1]]  # as its lifter does; most lists in a tree stand for a tensor
            elif kind not in _NATIVE:
                parts[place] = self.lift(part)
        return parts

    def _lift_map(self, tree: dict[Any, Any]) -> dict[str, Any]:
        if not _STR.issuperset(map(type, tree)):
            raise ProtocolError("a map with keys that are not str")
        if _NATIVE.issuperset(map(type, tree.values())):
            return tree
        lift = self.lift
        return {key: lift(part) for key, part in tree.items()}


_NATIVE = frozenset({type(None), bool, float, int, str, bytes})
_STR = frozenset({str})


def _too_deep() -> Refusal:
    return Refusal("it is nested too deeply, or contains itself")


def check_arity(tree: list[Any], arity: int) -> None:
    """Refuse a tree whose tag is not followed by exactly `arity` parts."""
    if len(tree) != arity + 1:
        raise ProtocolError(f"a value of tag {tree[0]} with {len(tree) - 1} parts")


def malformed(what: str, part: Any) -> NoReturn:
    """Refuse a part of a tree."""
    raise ProtocolError(f"{part!r:.100} is not {what}")
