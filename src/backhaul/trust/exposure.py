"""What a federation's peers may name: functions and classes that were marked with `expose`.

In federation a name that a peer sends is looked up in a table, and nowhere else: nothing is imported, and no attribute
is followed. So there is no difference between what does not exist and what is not exposed.

Each worker has a `Table`, for what `Worker.expose` marks. Below it is the `registry` of the process, for what the
decorator marks: see there.

The mark is an entry of a table and no attribute of the object: a subclass does not inherit it.
"""

from __future__ import annotations

import builtins
import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, overload

from backhaul import errors
from backhaul.errors import MisuseError, OptionError, UnsendableError
from backhaul.trust import operators
from backhaul.wire import built, callables
from backhaul.wire.objects import is_named_tuple

T = TypeVar("T", bound=Callable[..., Any])

EVERYBODY = ("*",)


class Exposed(NamedTuple):
    """An entry of the table."""

    target: Any
    to: tuple[str, ...]
    """Patterns of names, of the workers that may use it: ``*`` stands for anything, and nothing else is special."""

    def is_for(self, peer: str) -> bool:
        return self.to == EVERYBODY or any(_matches(pattern, peer) for pattern in self.to)


def _matches(pattern: str, name: str) -> bool:
    parts = map(re.escape, pattern.split("*"))
    return re.fullmatch(".*".join(parts), name, re.DOTALL) is not None


class Table:
    """What is exposed, by name, and to which peers. Thread-safe: an entry is replaced as a whole."""

    def __init__(self, below: Table | None = None) -> None:
        """Names that are not in this table are looked up in the one ``below``."""
        self._below = below
        self._entries: dict[str, Exposed] = {}  # "module:qualname" ->
        self._exceptions: dict[str, str] = {}  # "module.qualname" -> the key above, of exposed classes of exceptions

    def get(self, name: str) -> Exposed | None:
        """The entry of a name, for whichever peer it is."""
        found = self._entries.get(name)
        return found if found is not None or self._below is None else self._below.get(name)

    def exception(self, name: str) -> Exposed | None:
        """The entry of a class of exceptions, by its `type_name`."""
        key = self._exceptions.get(name)
        if key is not None:
            return self._entries.get(key)
        return None if self._below is None else self._below.exception(name)

    def expose(self, obj: Any, to: str | Sequence[str] = "*") -> Any:
        """Add an entry; as a decorator if ``obj`` is None. See `backhaul.rpc.expose`."""
        patterns = _patterns(to)
        if obj is None:
            return lambda found: self._add(found, patterns)
        return self._add(obj, patterns)

    def _add(self, obj: T, to: tuple[str, ...]) -> T:
        name = _name_for(obj)
        self._entries[name] = Exposed(operators.find(obj) or obj, to)
        if isinstance(obj, type) and (dataclasses.is_dataclass(obj) or is_named_tuple(obj)):
            built.prepare(obj)
        if isinstance(obj, type) and issubclass(obj, Exception):
            self._exceptions[type_name(obj)] = name
        return obj


registry = Table()
"""What `expose` marks. It is of the process and not of a worker: a decorator runs when its module is imported, which
happens once in a process, before there is a worker, and for all workers that the process will ever have."""


@overload
def expose(obj: T, *, to: str | Sequence[str] = "*") -> T: ...
@overload
def expose(obj: None = None, *, to: str | Sequence[str] = "*") -> Callable[[T], T]: ...
def expose(obj: Any = None, *, to: str | Sequence[str] = "*") -> Any:
    """Let the other workers of a federation call a function, or use a class. Returns it as it is.

    As a decorator, ``@rpc.expose`` or ``@rpc.expose(to="bank-*")``, or as a call, ``rpc.expose(torch.matmul)``. Of
    torch's own operators, those in `trust.operators` can be exposed; peers may give them what is listed there.
    ``to`` are the names of the workers that may, as in their certificates: one or several, in which ``*`` stands for
    anything, and all other characters for themselves. To expose the same name again replaces the entry.

    Of a class that is exposed, peers may make instances, send instances if it is a dataclass, an enum or a named tuple,
    and call the public methods that are written in it, on instances that they have references to. Its subclasses are
    not exposed, nor are methods of its bases, unless these are exposed, too.

    It holds for all workers of this process; `Worker.expose` is for one of them. Outside a federation it changes
    nothing: there peers may call whatever can be imported.
    """
    return registry.expose(obj, to)


def _patterns(to: Any) -> tuple[str, ...]:
    patterns = (to,) if isinstance(to, str) else tuple(to) if isinstance(to, list | tuple | set | frozenset) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise OptionError(f"expose(to={to!r}): give the name of a worker, or a list of names; 'bank-*' is a pattern")
    return EVERYBODY if "*" in patterns else patterns


def _name_for(obj: Any) -> str:
    """The name that a peer will call it by: as `callables.name_of`, but at a time when its module has no such name."""
    if isinstance(obj, staticmethod | classmethod):
        raise MisuseError("expose: put @rpc.expose below @staticmethod; for a class method, expose the class")
    if not callable(obj):
        raise MisuseError(f"expose: {obj!r:.100} is neither a function nor a class")
    if not isinstance(obj, type | types.FunctionType):
        try:
            return callables.name_of(obj)
        except UnsendableError as error:
            raise MisuseError(f"expose: {error}") from None
    name = f"{obj.__module__}:{obj.__qualname__}"
    if "<" in name:
        raise MisuseError(f"expose: {obj.__qualname__!r} has no name to be called by: define it at module level")
    return name


def type_name(kind: type) -> str:
    """What messages about exceptions call a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


class PeerNames:
    """What one peer may name: the `Names` of a codec."""

    __slots__ = ("_limit", "_table", "peer")

    def __init__(self, peer: str, limit: int, table: Table = registry) -> None:
        """``limit`` is the most bytes that the result of an operator may have."""
        self.peer = peer
        self._limit = limit
        self._table = table

    def name_of(self, obj: Any) -> str:
        """The name to send for something of ours: who gets it decides whether it knows it."""
        return callables.name_of(obj)

    def get(self, name: str) -> Any:
        """What the peer means; None if it may not name it, whether there is such a thing or not."""
        entry = self._table.get(name)
        if entry is None or not entry.is_for(self.peer):
            return None
        if type(entry.target) is operators.Operator:
            return operators.Bounded(entry.target, self._limit)
        return entry.target

    def find(self, name: str) -> Any:
        """The same, and raises `MisuseError` for what it may not name."""
        found = self.get(name)
        if found is None:
            raise MisuseError(
                f"{name!r:.200} is not exposed to worker {self.peer!r} here: mark a function or class that it may name "
                "with @rpc.expose"
            )
        return found

    def exception(self, name: str) -> type[Exception] | None:
        """The class of an exception that the peer tells of, by its `type_name`, if it may be raised here."""
        entry = self._table.exception(name)
        if entry is not None and entry.is_for(self.peer):
            kind: type[Exception] = entry.target
            return kind
        return _plain_exceptions().get(name)

    def method(self, value: Any, name: str) -> Callable[..., Any] | None:
        """The method of a value that the peer may call by that name, bound to it.

        It is taken from where its class, or an exposed base, defines it: not from the value, whose attributes may hide
        it, and without ``getattr``, which runs code of the class.
        """
        if name.startswith("_") and name != "__call__":
            return None
        kind = type(value)
        if not self._has(kind):
            return None
        for base in kind.__mro__:
            found = vars(base).get(name)
            if found is None:
                continue
            if base is not kind and not self._has(base):
                return None  # what hides an exposed one is not exposed itself
            plain = found.__func__ if isinstance(found, staticmethod | classmethod) else found
            if type(plain) is not types.FunctionType:
                return None
            bound: Callable[..., Any] = found.__get__(value, kind)
            return bound
        return None

    def _has(self, kind: type) -> bool:
        entry = self._table.get(f"{kind.__module__}:{kind.__qualname__}")
        return entry is not None and entry.target is kind and entry.is_for(self.peer)


@cache
def _plain_exceptions() -> Mapping[str, type[Exception]]:
    """Exceptions that anybody may raise: builtin ones and ours, that are made of a text."""
    found = [*vars(builtins).values(), *vars(errors).values()]
    kinds = {kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)}
    return {type_name(kind): kind for kind in kinds if _is_made_of_text(kind)}


def _is_made_of_text(kind: type[Exception]) -> bool:
    # One that ends iterations would end a loop of the caller's, and say nothing.
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return False
    try:
        return str(kind("text")) in ("text", "'text'")
    except TypeError:
        return False
