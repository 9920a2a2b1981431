"""Builds instances of exposed classes that a peer of a federation sends: checks the parts, then calls the class.

In a cluster an object is built without its ``__init__``, as pickle does, because its sender has checked it. A peer that
may lie has not. So here ``__post_init__`` and ``__new__`` run. Before that, each part must match its annotation: a
check in ``__post_init__`` such as ``self.amount > 0`` relies on the type.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backhaul.errors import MisuseError, ProtocolError

Check = Callable[[Any], bool]

_MAX_COMBINATIONS = 1024


def dataclass(cls: Any, values: Mapping[str, Any]) -> Any:
    """The instance of a dataclass with these values for the fields of its ``__init__``. Raises ProtocolError."""
    _check(cls, values)
    return cls(**values)


def named_tuple(cls: Any, values: Sequence[Any]) -> Any:
    """The named tuple of these items. Raises ProtocolError."""
    _check(cls, dict(zip(cls._fields, values, strict=True)))
    made = cls(*values)
    if type(made) is not cls:
        raise ProtocolError(f"{cls.__qualname__} makes a {type(made).__qualname__}")
    return made


def flag(cls: type[enum.Flag], value: int) -> enum.Flag:
    """The combination of flags with that value. Raises ProtocolError.

    An enum class keeps every combination that was ever made, so the number of different ones is limited.
    """
    known = cls._value2member_map_
    if value not in known:
        named = 0
        for member in cls.__members__.values():
            named |= member.value
        if value & ~named:
            raise ProtocolError(f"{value} has bits that belong to no member of {cls.__qualname__}")
        if len(known) > len(cls.__members__) + _MAX_COMBINATIONS:
            raise ProtocolError(f"more than {_MAX_COMBINATIONS} combinations of {cls.__qualname__}")
    return cls(value)


def init_fields(cls: Any) -> list[str]:
    """The fields that the ``__init__`` of a dataclass takes. Raises MisuseError if ``__init__`` takes an InitVar."""
    for name, annotation in _hints(cls).items():
        if isinstance(annotation, dataclasses.InitVar):
            raise MisuseError(f"{cls.__qualname__}.{name} is an InitVar, which an instance does not have any more")
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _check(cls: Any, values: Mapping[str, Any]) -> None:
    checks = _checks(cls)
    for name, value in values.items():
        check = checks.get(name)
        if check is not None and not check(value):
            raise ProtocolError(f"{cls.__qualname__}.{name} is a {type(value).__qualname__}")


@functools.lru_cache(maxsize=1024)
def _checks(cls: Any) -> dict[str, Check]:
    return {name: _check_of(annotation, f"{cls.__qualname__}.{name}") for name, annotation in _hints(cls).items()}


def prepare(cls: Any) -> None:
    """Make the checks of a class now, if all names in its annotations are known. Else the first instance makes them."""
    with contextlib.suppress(MisuseError):
        _checks(cls)


@functools.lru_cache(maxsize=1024)
def _hints(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except Exception as error:
        raise MisuseError(f"the annotations of {cls.__qualname__} cannot be evaluated: {error}") from error


def _check_of(annotation: Any, where: str) -> Check:
    """A function that tells whether a value matches the annotation. Raises MisuseError if that cannot be checked."""
    of = functools.partial(_check_of, where=where)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return lambda value: True
    if annotation is None or annotation is type(None):
        return lambda value: value is None
    if origin is None and isinstance(annotation, typing.NewType):
        return of(annotation.__supertype__)
    if origin in (typing.Annotated, typing.ClassVar, typing.Final):
        return of(args[0]) if args else lambda value: True
    if origin in (typing.Union, types.UnionType):
        choices = [of(each) for each in args]
        return lambda value: any(check(value) for check in choices)
    if origin is typing.Literal:
        allowed = [(type(each), each) for each in args]
        return lambda value: any(type(value) is kind and value == each for kind, each in allowed)
    kind = annotation if origin is None else origin
    if kind is collections.abc.Callable:
        return callable
    if isinstance(kind, type):
        return _check_class(kind, [of(each) for each in args if each is not ...], args)
    raise MisuseError(f"{where} has the annotation {annotation!r}, which cannot be checked: use a class, or Any")


def _check_class(kind: type, parts: Sequence[Check], args: Sequence[Any]) -> Check:
    if kind is float:
        return lambda value: type(value) in (float, int)
    if kind is int:
        return lambda value: isinstance(value, int) and type(value) is not bool
    if kind is complex:
        return lambda value: type(value) in (complex, float, int)
    if not parts:
        return lambda value: isinstance(value, kind)
    if issubclass(kind, tuple) and ... not in args:
        return lambda value: (
            isinstance(value, kind)
            and len(value) == len(parts)
            and all(check(each) for check, each in zip(parts, value, strict=True))
        )
    if issubclass(kind, collections.abc.Mapping):
        key, item = parts
        return lambda value: (
            isinstance(value, kind) and all(key(each) for each in value) and all(item(each) for each in value.values())
        )
    if issubclass(kind, collections.abc.Collection) and len(parts) == 1:
        return lambda value: isinstance(value, kind) and all(parts[0](each) for each in value)
    return lambda value: isinstance(value, kind)  # such as RRef[Model], whose Model is on another worker
