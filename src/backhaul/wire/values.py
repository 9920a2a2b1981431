"""Python values <-> trees that msgpack carries, plus the tensors beside them: the safe codec.

The codec turns a value into a *tree* (see `backhaul.wire.trees` for its tags) and a
list of tensors, and back. Decoding runs no code that the peer chose: classes and
functions are found by name, and instances are built from declared fields only. The codec
pickles a value of any other type, unless pickles are not allowed.

Types are matched exactly, so a subclass is never flattened into its base: an IntEnum
does not become an int. Tensors keep their identity within a message. Any other value that
occurs twice arrives as two values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from backhaul.errors import BackhaulError, MisuseError, ProtocolError, UnsendableError
from backhaul.wire import callables, objects, scalars, subclasses, trees
from backhaul.wire.trees import Bounds, Lift, Lower, Names, Packing, Refusal, Unpacking, check_arity, malformed

__all__ = ["Codec", "Names", "Packing", "Unpacking"]

_INT = frozenset({int})
_STR = frozenset({str})
_MAX_RESOLVED = 4096
_MAX_PATH = 12
_PARTS_OF_A_CALL = ("func", "args", "kwargs")
# The most keys in one message whose hash is not randomised, and the most such keys in one set or dict that share a
# hash: see `_check_keys`.
_MAX_ODD_KEYS = 4096
_MAX_COLLISIONS = 8
# A peer cannot choose many colliding keys of these types: text is hashed with a secret, and None and bool have few
# values.
_SPREAD = frozenset({type(None), bool, str, bytes})


class Codec:
    """Packs and unpacks values; one codec for each kind of peer. Thread-safe once all types are registered.

    ``names`` decides which functions and classes may be named. By default, that is everything that can be imported.

    A ``bounded`` codec is for peers that may not run code here. It carries no pickles, no bound methods or partials, no
    maps, and nothing that takes much longer to build than to send. ``max_bytes`` limits the memory that one of its
    values may represent, however few bytes are sent for it.
    """

    def __init__(
        self,
        names: Names | None = None,
        *,
        allow_pickle: bool = True,
        bounded: bool = False,
        max_depth: int = 100,
        max_bytes: int = 64 << 30,
    ) -> None:
        self._names: Names = callables if names is None else names
        self._allow_pickle = allow_pickle and not bounded
        self._bounded = bounded
        self._max_depth = max_depth
        self._max_bytes = max_bytes
        self._extensions: dict[type, tuple[str, Lower]] = {}
        self._lifts: dict[str, Callable[[Any, Unpacking], Any]] = {}
        self._fixed: dict[type, Lower] = {**scalars.LOWER, **_LOWER}
        self._lowerers = dict(self._fixed)
        lifters: dict[int, Lift] = {**scalars.LIFT, **objects.LIFT, **subclasses.LIFT, **_LIFT}
        lifters[trees.EXTENSION] = self._lift_extension
        lifters[trees.PICKLE] = self._lift_pickle
        if bounded:
            lifters |= objects.CHECKED_LIFT
            lifters[trees.METHOD] = lifters[trees.PARTIAL] = _lift_bound
        self._lifters = lifters

    def register(
        self,
        kind: type,
        tag: str,
        lower: Callable[[Any, Packing], Any],
        lift: Callable[[Any, Unpacking], Any],
    ) -> None:
        """Send instances of `kind` and its subclasses as the value that `lower` returns.

        `lower` may return any value that the codec can send. `lift` gets that value and returns the instance. The codec
        calls both for instances inside pickles too. Raises MisuseError if the tag is taken. Not thread-safe: register
        all types before the codec is used.
        """
        if tag in self._lifts:
            raise MisuseError(f"the tag {tag!r} is taken")
        self._extensions[kind] = tag, lower
        self._lifts[tag] = lift
        self._lowerers = dict(self._fixed)

    def pack(self, value: Any, labels: Sequence[str] = ()) -> tuple[Any, Packing]:
        """The tree of a value, and the state that holds its tensors.

        If the value is a tuple, ``labels`` name its items in the path that an error shows: with
        ``("args", "kwargs")`` the path is ``args[1]['x']``. Raises UnsendableError.
        """
        bounds = Bounds(self._max_bytes) if self._bounded else None
        packing = Packing(self._lowerers, self._resolve, self._lower_unknown, self._names, self._max_depth, bounds)
        try:
            kind = type(value)
            lowerer = self._lowerers.get(kind) or self._resolve(kind)
            return lowerer(value, packing), packing
        except Refusal as refusal:
            raise UnsendableError(_explain(value, refusal, labels)) from refusal.__cause__
        except RecursionError as error:
            raise UnsendableError("a value is nested too deeply, or contains itself") from error

    def pack_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Packing]:
        """The same as `pack` of the tuple of these three, but faster, because every call sends such a tuple."""
        bounds = Bounds(self._max_bytes) if self._bounded else None
        # One level less: these three are parts of the tuple.
        packing = Packing(self._lowerers, self._resolve, self._lower_unknown, self._names, self._max_depth - 1, bounds)
        try:
            kind = type(function)
            lowerer = self._lowerers.get(kind) or self._resolve(kind)
            tree = [
                trees.TUPLE,
                lowerer(function, packing),
                _LOWER_TUPLE(args, packing) if args else [trees.TUPLE],
                _lower_dict(kwargs, packing) if kwargs else {},
            ]
        except (Refusal, RecursionError):
            return self.pack((function, args, kwargs), _PARTS_OF_A_CALL)  # raises an error that shows the path
        return tree, packing

    def unpack(
        self,
        tree: Any,
        tensors: Sequence[torch.Tensor],
        names: Names | None = None,
        announced: Container[Any] | None = None,
    ) -> Any:
        """The value of a tree that msgpack has decoded.

        ``names`` decides what this peer may name. ``announced`` holds what extensions may find in the tree.
        Raises ProtocolError for a tree that no codec makes, and MisuseError if the tree names a
        class or function that does not exist here.
        """
        # Two levels more than for packing: a value without parts, which the packer does not count, may still be one or
        # two arrays in the tree.
        shape = len(tree) if type(tree) is list else 0
        if shape == 2 and tree[0] is trees.TENSOR and type(tree[1]) is int and 0 <= tree[1] < len(tensors):
            return tensors[tree[1]]  # as its lifter does; most replies are one tensor
        bounds = Bounds(self._max_bytes) if self._bounded else None
        unpacking = Unpacking(self._lifters, tensors, names or self._names, self._max_depth + 2, bounds, announced)
        try:
            if shape == 4 and tree[0] is trees.TUPLE:
                return _lift_three(tree, unpacking)
            return unpacking.lift(tree)
        except BackhaulError:
            raise
        except Exception as error:
            raise ProtocolError(f"a malformed value: {type(error).__name__}: {error}") from error

    def _resolve(self, kind: type) -> Lower:
        """How to lower a type that this codec has not met before."""
        lowerer = self._extension(kind) or scalars.numpy_lowerer(kind) or objects.lowerer(kind)
        if lowerer is None:
            lowerer = subclasses.lowerer(kind)
        if lowerer is None:
            lowerer = self._lower_unknown
        if len(self._lowerers) >= _MAX_RESOLVED:
            self._lowerers = dict(self._fixed)
        self._lowerers[kind] = lowerer
        return lowerer

    def _extension(self, kind: type) -> Lower | None:
        base = next((base for base in kind.__mro__ if base in self._extensions), None)
        if base is None:
            return None
        tag, lower = self._extensions[base]

        def lower_extension(value: Any, packing: Packing) -> Any:
            return [trees.EXTENSION, tag, packing.lower_part(lower(value, packing), "")]

        return lower_extension

    def _lift_extension(self, tree: list[Any], unpacking: Unpacking) -> Any:
        check_arity(tree, 2)
        lift = self._lifts.get(tree[1]) if type(tree[1]) is str else None
        if lift is None:
            malformed("a known kind of value", tree[1])
        return lift(unpacking.lift(tree[2]), unpacking)

    def _lower_unknown(self, value: Any, packing: Packing, reason: str = "") -> Any:
        if not self._allow_pickle:
            raise Refusal(reason or "the safe codec does not carry this type: send its parts, or make it a dataclass")
        from backhaul.wire import pickles  # imported late: a codec that refuses pickles never loads the module

        try:
            data, parts = pickles.dump(value, lambda obj: obj is not value and self._is_outside_pickles(obj))
        except Exception as error:
            raise Refusal(f"pickling it failed ({type(error).__name__}: {error}): send its parts") from error
        return packing.lower_parts([trees.PICKLE, data], parts)

    def _is_outside_pickles(self, obj: Any) -> bool:
        kind = type(obj)
        if issubclass(kind, torch.Tensor):
            return True
        return bool(self._extensions) and not self._extensions.keys().isdisjoint(kind.__mro__)

    def _lift_pickle(self, tree: list[Any], unpacking: Unpacking) -> Any:
        if not self._allow_pickle:
            raise ProtocolError("a pickled value, from a peer that may not send any")
        if len(tree) < 2 or type(tree[1]) is not bytes:
            malformed("a pickle", tree[1:])
        parts = unpacking.lift_parts(tree, 2)
        from backhaul.wire import pickles

        try:
            return pickles.load(tree[1], parts)
        except BackhaulError:
            raise
        except pickles.Broken as error:
            raise ProtocolError(f"a broken pickle: {error}") from error
        except Exception as error:
            raise UnsendableError(
                f"a pickled value cannot be restored on this worker: {type(error).__name__}: {error}"
            ) from error


def _explain(value: Any, refusal: Refusal, labels: Sequence[str]) -> str:
    path = refusal.path[::-1]
    if labels and path and path[0][1:-1].isdecimal():
        path[0] = labels[int(path[0][1:-1])]
    else:
        path.insert(0, "the value" if not path else "value")
    if len(path) > _MAX_PATH:
        path[_MAX_PATH:] = ["..."]
    kind = refusal.kind or type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{''.join(path)} ({name}) cannot be sent: {refusal.reason}"


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lower_items(tag: int) -> Lower:
    def lower(value: Any, packing: Packing) -> Any:
        if len(value) > trees.SHORT:
            # Long runs of plain values are checked by C loops alone.
            kinds = set(map(type, value))
            if (
                trees.ATOMS.issuperset(kinds)
                or (kinds == _INT and min(value) >= -(1 << 63) and max(value) < 1 << 64)
                or (kinds == _STR and _is_utf8("".join(value)))
            ):
                return [tag, *value]
        elif not value:
            return [tag]
        return packing.lower_parts([tag], value)

    return lower


_LOWER_LIST = _lower_items(trees.LIST)
_LOWER_TUPLE = _lower_items(trees.TUPLE)
_LOWER_SET = _lower_items(trees.SET)
_LOWER_FROZEN_SET = _lower_items(trees.FROZEN_SET)


def _count_keys(keys: Iterable[Any], bounds: Bounds) -> None:
    """Refuse too many keys here, because `_check_keys` at the receiver would refuse them."""
    bounds.odd_keys += sum(type(key) not in _SPREAD for key in keys)
    if bounds.odd_keys > _MAX_ODD_KEYS:
        raise Refusal(
            f"it goes to a worker of a federation, which accepts at most {_MAX_ODD_KEYS} keys of sets and dicts in one "
            "message that are not text: send lists or tensors"
        )


def _lower_set(value: set[Any], packing: Packing) -> Any:
    if packing.bounds is not None:
        _count_keys(value, packing.bounds)
    return _LOWER_SET(value, packing)


def _lower_frozenset(value: frozenset[Any], packing: Packing) -> Any:
    if packing.bounds is not None:
        _count_keys(value, packing.bounds)
    return _LOWER_FROZEN_SET(value, packing)


def _lower_dict(value: dict[Any, Any], packing: Packing) -> Any:
    if not value:
        return {}
    if packing.bounds is not None or not _STR.issuperset(map(type, value)) or not _is_utf8("".join(value)):
        return _lower_pairs(trees.DICT, value, packing)
    if trees.ATOMS.issuperset(map(type, value.values())):
        return value.copy()
    packing.enter()
    tree = {}
    try:
        for key, item in value.items():
            tree[key] = packing.lower(item)
    except Refusal as refusal:
        refusal.step_out(item, f"[{key!r}]")
        raise
    packing.depth += 1
    return tree


def _lower_ordered_dict(value: OrderedDict[Any, Any], packing: Packing) -> Any:
    return _lower_pairs(trees.ORDERED_DICT, value, packing)


def _lower_pairs(tag: int, value: dict[Any, Any], packing: Packing) -> Any:
    if packing.bounds is not None:
        _count_keys(value, packing.bounds)
    tree = [tag]
    for key, item in value.items():
        tree.append(packing.lower_part(key, f"[key {key!r:.50}]"))
        tree.append(packing.lower_part(item, f"[{key!r:.50}]"))
    return tree


def _lower_slice(value: slice, packing: Packing) -> Any:
    return packing.lower_parts([trees.SLICE], (value.start, value.stop, value.step))


def _lift_list(tree: list[Any], unpacking: Unpacking) -> Any:
    return unpacking.lift_parts(tree, 1)


def _lift_tuple(tree: list[Any], unpacking: Unpacking) -> Any:
    return tuple(unpacking.lift_parts(tree, 1))


def _lift_three(tree: list[Any], unpacking: Unpacking) -> Any:
    """`Unpacking.lift` for a tuple of three, but faster for a function, a tuple and a dict: each call is like that.

    Tags are compared by identity, which excludes a float or a bool that equals one. `Codec.unpack` allows two levels at
    least, so only the parts of the tuple and of the dict may be too deep.
    """
    _, function, args, kwargs = tree
    if (
        type(function) is not list
        or len(function) != 2
        or function[0] is not trees.NAMED
        or type(function[1]) is not str
        or type(args) is not list
        or not args
        or args[0] is not trees.TUPLE
        or type(kwargs) is not dict
    ):
        return unpacking.lift(tree)
    found = unpacking.names.find(function[1])
    if not callable(found):
        malformed("a function or class", function[1])
    unpacking.depth -= 2
    items = tuple(unpacking.lift_parts(args, 1))
    if kwargs:
        unpacking.depth += 1
        kwargs = unpacking.lift(kwargs)
    return found, items, kwargs


def _lift_set(tree: list[Any], unpacking: Unpacking) -> Any:
    return set(_distinct(unpacking.lift_parts(tree, 1), unpacking))


def _lift_frozenset(tree: list[Any], unpacking: Unpacking) -> Any:
    return frozenset(_distinct(unpacking.lift_parts(tree, 1), unpacking))


def _lift_bound(tree: list[Any], unpacking: Unpacking) -> Any:
    raise ProtocolError("a function that is bound to an object, from a peer that may not send any")


def _check_keys(keys: Sequence[Any], unpacking: Unpacking) -> None:
    """Refuse keys that a peer may have chosen to collide, before Python compares them with each other.

    Python hashes text with a secret of this process, but hashes numbers, and tuples of numbers, without one. So a peer
    can choose many keys with the same hash, and Python compares such keys one by one. A peer can also choose keys with
    different hashes that probe the same slots of a hash table, so the total number of such keys is limited, too.
    """
    bounds = unpacking.bounds
    if bounds is None:
        return
    odd = [key for key in keys if type(key) not in _SPREAD]
    bounds.odd_keys += len(odd)
    if bounds.odd_keys > _MAX_ODD_KEYS:
        raise ProtocolError(f"a message has more than {_MAX_ODD_KEYS} keys of sets and dicts that are not text")
    if len(odd) <= _MAX_COLLISIONS:
        return
    hashes = sorted(map(hash, odd))
    if any(one == other for one, other in zip(hashes, hashes[_MAX_COLLISIONS:], strict=False)):
        raise ProtocolError(f"a set or dict has more than {_MAX_COLLISIONS} keys with the same hash")


def _distinct(items: list[Any], unpacking: Unpacking) -> Any:
    _check_keys(items, unpacking)
    found = set(items)
    if len(found) != len(items):
        raise ProtocolError("a set with the same item twice")
    return found


def _lift_dict(tree: list[Any], unpacking: Unpacking) -> Any:
    return _lift_pairs({}, tree, unpacking)


def _lift_ordered_dict(tree: list[Any], unpacking: Unpacking) -> Any:
    return _lift_pairs(OrderedDict(), tree, unpacking)


def _lift_pairs(found: dict[Any, Any], tree: list[Any], unpacking: Unpacking) -> Any:
    parts = unpacking.lift_parts(tree, 1)
    if len(parts) % 2:
        malformed("a dict", tree[0])
    _check_keys(parts[::2], unpacking)
    found.update(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(found) != len(parts):
        raise ProtocolError("a dict with the same key twice")
    return found


def _lift_slice(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 3)
    return slice(*unpacking.lift_parts(tree, 1))


_LOWER: dict[type, Lower] = {
    list: _LOWER_LIST,
    tuple: _LOWER_TUPLE,
    set: _lower_set,
    frozenset: _lower_frozenset,
    dict: _lower_dict,
    OrderedDict: _lower_ordered_dict,
    slice: _lower_slice,
}

_LIFT: dict[int, Lift] = {
    trees.LIST: _lift_list,
    trees.TUPLE: _lift_tuple,
    trees.SET: _lift_set,
    trees.FROZEN_SET: _lift_frozenset,
    trees.DICT: _lift_dict,
    trees.ORDERED_DICT: _lift_ordered_dict,
    trees.SLICE: _lift_slice,
}
