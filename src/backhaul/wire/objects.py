"""Values whose class or function is known by name <-> trees.

Enums, NamedTuples, dataclasses, functions and classes, bound methods, partials. An
object is built without its ``__init__``, as pickle does, and only from what its class
declares: a name that leads to another kind of class is refused. In a federation the parts are
checked, and the class is called to build the object (`wire.built`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any

import torch

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import built, trees
from backhaul.wire.trees import Lift, Lower, Packing, Refusal, Unpacking, check_arity, malformed

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.jit.ScriptFunction,
)


def lowerer(kind: type) -> Lower | None:
    """How to lower instances of a class; None if the safe codec does not know it."""
    if issubclass(kind, enum.Enum):
        return _lower_enum
    if issubclass(kind, type) or kind in _FUNCTIONS:
        return _lower_named
    if kind is types.MethodType:
        return _lower_method
    if kind is functools.partial:
        return _lower_partial
    if issubclass(kind, tuple) and kind.__module__ == "torch.return_types":
        return _lower_return_type
    if is_named_tuple(kind):
        return _lower_named_tuple
    if dataclasses.is_dataclass(kind) and _is_plain(kind):
        return _lower_dataclass
    return None


def _name(obj: Any, packing: Packing) -> str:
    try:
        return packing.names.name_of(obj)
    except UnsendableError as error:
        raise Refusal(str(error)) from error


def _lower_named(value: Any, packing: Packing) -> Any:
    try:
        return [trees.NAMED, packing.names.name_of(value)]
    except UnsendableError as error:
        # tensor.add and the like: a builtin function that is bound to an object
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (type, types.ModuleType)):
            raise Refusal(str(error)) from error
    return _lower_method(value, packing)


def _lift_named(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 1)
    found = unpacking.find(tree[1])
    if not callable(found):
        malformed("a function or class", tree[1])
    return found


def _lower_method(value: Any, packing: Packing) -> Any:
    owner, name = value.__self__, value.__name__
    if isinstance(owner, type):
        return [trees.NAMED, _name(value, packing)]
    if packing.bounds:
        raise Refusal("it is bound to an object, and goes to a worker of a federation: pass a function and the object")
    if _method(owner, name) != value:
        raise Refusal(f"its object has no such method under the name {name!r}: pass the object and a function")
    return [trees.METHOD, packing.lower_part(owner, ".__self__"), name]


def _lift_method(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 2)
    owner, name = unpacking.lift(tree[1]), tree[2]
    method = None if isinstance(owner, type) else _method(owner, name)
    if method is None:
        malformed(f"a method of {type(owner).__name__}", name)
    return method


def _method(owner: Any, name: Any) -> Any:
    """The public or protected method of that name that the class of `owner` gives it, or None."""
    if type(name) is not str or not name.isidentifier() or name.startswith("__"):
        return None
    # Look in the class first: looking up a property on the object would run it.
    if not callable(getattr(type(owner), name, None)):
        return None
    method = getattr(owner, name, None)
    return method if getattr(method, "__self__", None) is owner else None


def _lower_partial(value: functools.partial[Any], packing: Packing) -> Any:
    if packing.bounds:
        raise Refusal("a partial does not go to a worker of a federation: pass the function and its arguments")
    if vars(value):
        return packing.lower_unknown(value, "a partial with attributes of its own: remove them")
    return [
        trees.PARTIAL,
        packing.lower_part(value.func, ".func"),
        packing.lower_part(value.args, ".args"),
        packing.lower_part(value.keywords, ".keywords"),
    ]


def _lift_partial(tree: list[Any], unpacking: Unpacking) -> functools.partial[Any]:
    check_arity(tree, 3)
    func, args, keywords = unpacking.lift_parts(tree, 1)
    if (
        not callable(func)
        or type(args) is not tuple
        or type(keywords) is not dict
        or any(type(name) is not str for name in keywords)
    ):
        malformed("a partial", tree[1:])
    return functools.partial(func, *args, **keywords)


def _lower_enum(value: enum.Enum, packing: Packing) -> Any:
    cls = type(value)
    name = value.name
    if name is not None and cls.__members__.get(name) is value:
        return [trees.ENUM, _name(cls, packing), name]
    if isinstance(value, enum.Flag):  # several members at once
        return [trees.FLAG, _name(cls, packing), packing.lower(value.value)]
    raise Refusal(f"it is not a member of the enum {cls.__qualname__}")


def _lift_enum(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 2)
    cls = _class(tree[1], unpacking)
    if not issubclass(cls, enum.Enum) or type(tree[2]) is not str or tree[2] not in cls.__members__:
        malformed("a member of an enum", tree[1:])
    return cls.__members__[tree[2]]


def _lift_flag(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 2)
    cls = _class(tree[1], unpacking)
    value = unpacking.lift(tree[2])
    if not issubclass(cls, enum.Flag) or type(value) is not int:
        malformed("a flag", tree[1:])
    return cls(value)


def _class(name: Any, unpacking: Unpacking) -> type:
    found = unpacking.find(name)
    if not isinstance(found, type):
        malformed("a class", name)
    return found


def is_named_tuple(kind: type) -> bool:
    """Whether typing.NamedTuple or collections.namedtuple made the class, or its base."""
    fields = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and isinstance(fields, tuple)
        and all(type(field) is str for field in fields)
        and hasattr(kind, "_make")
        and kind.__reduce__ is object.__reduce__
    )


def _lower_named_tuple(value: Any, packing: Packing) -> Any:
    if getattr(value, "__dict__", None):
        return packing.lower_unknown(value, "it has attributes that its named tuple does not declare")
    return packing.lower_parts([trees.NAMED_TUPLE, _name(type(value), packing)], value)


def _lift_named_tuple(tree: list[Any], unpacking: Unpacking) -> Any:
    if len(tree) < 2:
        malformed("a named tuple", tree)
    cls = _class(tree[1], unpacking)
    if not is_named_tuple(cls) or len(tree) - 2 != len(cls._fields):  # type: ignore[attr-defined]
        malformed(f"a {cls.__qualname__}", tree[1:])
    return tuple.__new__(cls, unpacking.lift_parts(tree, 2))


def _lower_return_type(value: Any, packing: Packing) -> Any:
    return packing.lower_parts([trees.RETURN_TYPE, type(value).__name__.rpartition(".")[2]], value)


def _lift_return_type(tree: list[Any], unpacking: Unpacking) -> Any:
    name = tree[1] if len(tree) > 1 else None
    cls = vars(torch.return_types).get(name) if type(name) is str else None
    if not isinstance(cls, type) or not issubclass(cls, tuple):
        malformed("a result type of torch", name)
    return cls(unpacking.lift_parts(tree, 2))


def _is_plain(kind: type) -> bool:
    """Whether the fields of a dataclass are all of its state: it does not change how pickle treats it."""
    for name in ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"):
        method = getattr(kind, name, None)
        # Only the methods of object, and those that dataclasses adds to a frozen class with slots, are allowed.
        if method is not getattr(object, name, None) and method.__module__ != "dataclasses":
            return False
    return True


def _lower_dataclass(value: Any, packing: Packing) -> Any:
    fields = dataclasses.fields(value)
    if not getattr(value, "__dict__", {}).keys() <= {field.name for field in fields}:
        return packing.lower_unknown(value, "it has attributes that its dataclass does not declare as fields")
    tree = [trees.DATACLASS, _name(type(value), packing)]
    if packing.bounds is not None:
        fields = _init_fields(value)
    for field in fields:
        try:
            part = object.__getattribute__(value, field.name)
        except AttributeError:
            raise Refusal(f"its field {field.name!r} has no value") from None
        tree.append(field.name)
        tree.append(packing.lower_part(part, f".{field.name}"))
    return tree


def _init_fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields that a worker of a federation needs to call the class."""
    try:
        names = built.init_fields(type(value))
    except MisuseError as error:
        raise Refusal(str(error)) from error
    return tuple(field for field in dataclasses.fields(value) if field.name in names)


def _lift_checked_dataclass(tree: list[Any], unpacking: Unpacking) -> Any:
    if len(tree) < 2:
        malformed("a dataclass", tree)
    cls = _class(tree[1], unpacking)
    if not dataclasses.is_dataclass(cls) or not _is_plain(cls):
        malformed("a dataclass", tree[1])
    fields = built.init_fields(cls)
    if tree[2::2] != fields or len(tree) != 2 + 2 * len(fields):
        raise ProtocolError(f"a {cls.__qualname__} is made of the fields {fields}, not {tree[2::2]!r:.200}")
    return built.dataclass(cls, dict(zip(fields, map(unpacking.lift, tree[3::2]), strict=True)))


def _lift_checked_named_tuple(tree: list[Any], unpacking: Unpacking) -> Any:
    if len(tree) < 2:
        malformed("a named tuple", tree)
    cls = _class(tree[1], unpacking)
    if not is_named_tuple(cls) or len(tree) - 2 != len(cls._fields):  # type: ignore[attr-defined]
        malformed(f"a {cls.__qualname__}", tree[1:])
    return built.named_tuple(cls, unpacking.lift_parts(tree, 2))


def _lift_checked_flag(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 2)
    cls = _class(tree[1], unpacking)
    if not issubclass(cls, enum.Flag) or type(tree[2]) is not int:
        malformed("a flag", tree[1:])
    return built.flag(cls, tree[2])


def _lift_checked_return_type(tree: list[Any], unpacking: Unpacking) -> Any:
    made = _lift_return_type(tree, unpacking)
    if not all(isinstance(part, torch.Tensor) for part in made):
        malformed("a result of torch", tree[1])
    return made


def _lift_dataclass(tree: list[Any], unpacking: Unpacking) -> Any:
    if len(tree) < 2:
        malformed("a dataclass", tree)
    cls = _class(tree[1], unpacking)
    if not dataclasses.is_dataclass(cls) or not _is_plain(cls):
        malformed("a dataclass", tree[1])
    names = tree[2::2]
    fields = [field.name for field in dataclasses.fields(cls)]
    if names != fields or len(tree) != 2 + 2 * len(fields):
        raise ProtocolError(f"a {cls.__qualname__} has the fields {fields}, not {names!r:.200}")
    value = object.__new__(cls)
    for name, part in zip(fields, tree[3::2], strict=True):
        object.__setattr__(value, name, unpacking.lift(part))
    return value


LIFT: dict[int, Lift] = {
    trees.NAMED: _lift_named,
    trees.METHOD: _lift_method,
    trees.PARTIAL: _lift_partial,
    trees.ENUM: _lift_enum,
    trees.FLAG: _lift_flag,
    trees.NAMED_TUPLE: _lift_named_tuple,
    trees.RETURN_TYPE: _lift_return_type,
    trees.DATACLASS: _lift_dataclass,
}

CHECKED_LIFT: dict[int, Lift] = {
    trees.DATACLASS: _lift_checked_dataclass,
    trees.NAMED_TUPLE: _lift_checked_named_tuple,
    trees.FLAG: _lift_checked_flag,
    trees.RETURN_TYPE: _lift_checked_return_type,
}
"""Replaces the entries of `LIFT` for values from a peer that may lie."""
