"""What the peers of a federation may name: functions and classes that were marked with `expose`.

In a federation, a name that a peer sends is looked up in a table and nowhere else: nothing is imported, and no
attribute is followed. So a peer cannot tell a name that does not exist from one that is not exposed.

Each worker has a `Table` for what `Worker.expose` marks. Below it is the `registry` of the process, for what the
decorator marks.

A mark is an entry of a table and not an attribute of the object, so a subclass does not inherit it.
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
    """Patterns for the names of the workers that may use it. ``*`` matches any text; no other character is special."""

    def is_for(self, peer: str) -> bool:
        return self.to == EVERYBODY or any(_matches(pattern, peer) for pattern in self.to)


def _matches(pattern: str, name: str) -> bool:
    parts = map(re.escape, pattern.split("*"))
    return re.fullmatch(".*".join(parts), name, re.DOTALL) is not None


class Table:
    """The exposed functions and classes by name, each with its peers. Thread-safe: an entry is replaced as a whole."""

    def __init__(self, below: Table | None = None) -> None:
        """Names that are not in this table are looked up in the table ``below``."""
        self._below = below
        self._entries: dict[str, Exposed] = {}  # "module:qualname" ->
        self._exceptions: dict[str, str] = {}  # "module.qualname" -> the key above, of exposed classes of exceptions

    def get(self, name: str) -> Exposed | None:
        """The entry of a name, for any peers. None if there is no entry."""
        found = self._entries.get(name)
        return found if found is not None or self._below is None else self._below.get(name)

    def exception(self, name: str) -> Exposed | None:
        """The entry of an exception class, by its `type_name`; None if there is none."""
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
"""What `expose` marks. The table belongs to the process and not to a worker: a decorator runs when its module is
imported. That happens once in a process, before there is a worker, and counts for all workers of the process."""


@overload
def expose(obj: T, *, to: str | Sequence[str] = "*") -> T: ...
@overload
def expose(obj: None = None, *, to: str | Sequence[str] = "*") -> Callable[[T], T]: ...
def expose(obj: Any = None, *, to: str | Sequence[str] = "*") -> Any:
    """Let the other workers of a federation call a function, or use a class. Returns the function or class unchanged.

    Use it as a decorator, ``@rpc.expose`` or ``@rpc.expose(to="bank-*")``, or as a call, ``rpc.expose(torch.matmul)``.
    Of torch's own operators, only those in `trust.operators` can be exposed, and peers may pass them only the arguments
    that are listed there. ``to`` is one name or a list of names, as in the certificates of the workers that may use it.
    In a name, ``*`` matches any text, and every other character matches itself. Exposing the same name again replaces
    the entry.

    If a class is exposed, peers may make instances of it. They may send instances if it is a dataclass, an enum or a
    named tuple. They may call the public methods that the class itself defines, on instances that they have references
    to. Subclasses are not exposed, and neither are the methods of base classes, unless those are exposed too.

    The mark counts for all workers of this process; `Worker.expose` marks for one worker. Outside a federation the mark
    changes nothing: there, peers may call everything that can be imported. Raises `MisuseError` for an object that
    cannot be exposed, and `OptionError` for an invalid ``to``. Thread-safe.
    """
    return registry.expose(obj, to)


def _patterns(to: Any) -> tuple[str, ...]:
    patterns = (to,) if isinstance(to, str) else tuple(to) if isinstance(to, list | tuple | set | frozenset) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise OptionError(f"expose(to={to!r}): give the name of a worker, or a list of names; 'bank-*' is a pattern")
    return EVERYBODY if "*" in patterns else patterns


def _name_for(obj: Any) -> str:
    """The name that a peer calls it by. Unlike `callables.name_of`, it works before the module has that attribute."""
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
        raise MisuseError(f"expose: {obj.__qualname__!r} has no name that a peer can send: define it at module level")
    return name


def type_name(kind: type) -> str:
    """The name of a type in messages about exceptions."""
    return f"{kind.__module__}.{kind.__qualname__}"


class PeerNames:
    """The functions and classes that one peer may name: the `Names` of a codec."""

    __slots__ = ("_limit", "_table", "peer")

    def __init__(self, peer: str, limit: int, table: Table = registry) -> None:
        """The result of an operator may have at most ``limit`` bytes."""
        self.peer = peer
        self._limit = limit
        self._table = table

    def name_of(self, obj: Any) -> str:
        """The name to send for a function or class of ours. The receiver decides whether it may be named there."""
        return callables.name_of(obj)

    def get(self, name: str) -> Any:
        """The function or class of that name; None if the peer may not name it, or if it does not exist."""
        entry = self._table.get(name)
        if entry is None or not entry.is_for(self.peer):
            return None
        if type(entry.target) is operators.Operator:
            return operators.Bounded(entry.target, self._limit)
        return entry.target

    def find(self, name: str) -> Any:
        """Like `get`, but raises `MisuseError` instead of returning None."""
        found = self.get(name)
        if found is None:
            raise MisuseError(
                f"{name!r:.200} is not exposed to worker {self.peer!r} here: mark a function or class that it may name "
                "with @rpc.expose"
            )
        return found

    def exception(self, name: str) -> type[Exception] | None:
        """The exception class of that `type_name`; None if an exception of the peer may not be raised here as one."""
        entry = self._table.exception(name)
        if entry is not None and entry.is_for(self.peer):
            kind: type[Exception] = entry.target
            return kind
        return _plain_exceptions().get(name)

    def method(self, value: Any, name: str) -> Callable[..., Any] | None:
        """The method of that name, bound to the value; None if the peer may not call it.

        The method comes from the class, or from an exposed base class. Attributes of the value do not count, because
        they could hide the method. ``getattr`` is not used, because it runs code of the class.
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
                return None  # it hides an exposed method, but is not exposed itself
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
    """Exceptions that any peer may cause here: those of Python and of this library that are made from one text."""
    found = [*vars(builtins).values(), *vars(errors).values()]
    kinds = {kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)}
    return {type_name(kind): kind for kind in kinds if _is_made_of_text(kind)}


def _is_made_of_text(kind: type[Exception]) -> bool:
    # An exception that ends an iteration would silently end a loop of the caller.
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return False
    try:
        return str(kind("text")) in ("text", "'text'")
    except TypeError:
        return False
