"""Ships what was typed into a notebook or an interpreter to the workers' ``__main__``.

A worker finds a function by module and name. Code typed into the driver's ``__main__``
is in no file, so the worker cannot import it. Before a call, the
driver sends that code to the workers, with everything it uses: other functions and classes of
``__main__``, imports, and values. `definitions` collects these, `Shipper` sends those that are new or
changed, and `apply` makes them on the worker.

Functions and classes travel as source if it is available (IPython keeps it; so does
``python -c``, and the interpreter since Python 3.13), so that tracebacks show it. A plain
function without source travels as byte code: the workers run the same Python.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import io
import linecache
import marshal
import os
import pickle
import re
import stat
import symtable
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, cast

from backhaul.errors import UnsendableError

_LARGEST_VALUE = 1 << 20

_ATOMS = {type(None), bool, int, float, complex, str, bytes}


class _Missing:
    """Stands for a name that is not bound."""


_MISSING = _Missing()

# Values of these types cannot change while their name is bound to the same object.
_IMMUTABLE = (*_ATOMS, ModuleType, FunctionType, type, _Missing)


@dataclass(frozen=True)
class Definition:
    """The meaning of one name of ``__main__``.

    ``body`` is a statement that binds the name (source), a function's byte code (code), or a
    pickle (value).
    """

    name: str
    kind: Literal["source", "code", "value"]
    body: str | bytes


def definitions(obj: Any, namespace: Mapping[str, Any]) -> list[Definition]:
    """What a worker needs to call ``obj``, from the ``__main__`` with this namespace. Each name precedes its users.

    Raises `UnsendableError` if ``obj`` is not available as source or code, or uses something that cannot be sent.
    """
    collection = _Collection(namespace, lambda name, value: False)
    collection.add(top_name(obj), user=None)
    return collection.definitions


def apply(definitions: list[Definition], namespace: dict[str, Any] | None = None) -> None:
    """Make the definitions in ``namespace``, by default that of this process's ``__main__``."""
    if namespace is None:
        namespace = sys.modules["__main__"].__dict__
    for definition in definitions:
        namespace[definition.name] = _MAKERS[definition.kind](definition, namespace)


def names_of_main(value: Any) -> set[str]:
    """The functions and classes of ``__main__`` that ``value`` is, holds, or has instances of.

    Looks into lists, tuples, sets, dicts and the instances of those classes. A lambda or
    a local function is left out: the call itself raises for those.
    """
    names: set[str] = set()
    seen: set[int] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind is FunctionType:
            if value.__module__ == "__main__" and "<" not in value.__qualname__:
                names.add(top_name(value))
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, set, frozenset)):
            if not set(map(type, value)) <= _ATOMS:
                stack += value
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        defined = value if _is_named(value) else kind
        if defined.__module__ == "__main__":
            if "<" not in defined.__qualname__:
                names.add(top_name(defined))
            if defined is kind:
                stack += getattr(value, "__dict__", {}).values()
    return names


def top_name(obj: Any) -> str:
    """The top-level name in its module that leads to ``obj``, a function, class or method."""
    return str(obj.__qualname__).partition(".")[0]


class Shipper:
    """Sends the definitions that a call needs and the workers do not have yet. Thread-safe.

    ``send`` gives definitions to every worker and returns when they have them, because a function
    may call the next one from worker to worker. ``at_home`` says whether the
    workers' own ``__main__`` already has a name with this value. Call the shipper with the contents of a
    call: the function and its arguments.
    """

    def __init__(
        self,
        send: Callable[[list[Definition]], None],
        namespace: Mapping[str, Any],
        at_home: Callable[[str, Any], bool] = lambda name, value: False,
    ) -> None:
        self._send = send
        self._namespace = namespace
        self._at_home = at_home
        self._sent: dict[str, Definition] = {}
        self._touched: dict[str, dict[str, Any]] = {}
        # Held while sending, so that a second call of the same function cannot overtake its
        # definition. No deadlock: the workers apply definitions without calling back.
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> None:
        for name in sorted(names_of_main(values)):
            if not self._is_unchanged(name):
                with self._lock:
                    self._ship(name)

    def sent(self) -> list[Definition]:
        """All definitions sent so far, for a worker that is about to join: others may call it at once."""
        with self._lock:
            return list(self._sent.values())

    def repeat(self, send: Callable[[list[Definition]], None]) -> None:
        """Call ``send`` with all definitions sent so far, for a new worker."""
        with self._lock:
            if self._sent:
                send(list(self._sent.values()))

    def _ship(self, name: str) -> None:
        collection = _Collection(self._namespace, self._at_home)
        collection.add(name, user=None)
        fresh = [item for item in collection.definitions if self._sent.get(item.name) != item]
        if fresh:
            self._send(fresh)
            for item in fresh:  # re-inserted, so that the order is that of the last sending
                self._sent.pop(item.name, None)
                self._sent[item.name] = item
        self._touched[name] = collection.touched

    def _is_unchanged(self, name: str) -> bool:
        """Whether nothing that ``name`` uses was rebound since; most calls then need no collecting.

        A value that may change in place is compared each time, by its pickle.
        """
        touched = self._touched.get(name)
        if touched is None:
            return False
        for used, value in touched.items():
            if self._namespace.get(used, _MISSING) is not value or not isinstance(value, _IMMUTABLE):
                return False
        return True


class _Collection:
    """Walks from a name to everything it uses. ``touched`` are the names seen, with their values."""

    def __init__(self, namespace: Mapping[str, Any], at_home: Callable[[str, Any], bool]) -> None:
        self.definitions: list[Definition] = []
        self.touched: dict[str, Any] = {}
        self._namespace = namespace
        self._at_home = at_home

    def add(self, name: str, user: str | None) -> None:
        if name in self.touched:
            return
        value = self.touched[name] = self._namespace.get(name, _MISSING)
        # A missing name is a builtin, or a NameError that the function would raise here too.
        if value is _MISSING or self._at_home(name, value):
            return
        if isinstance(value, ModuleType):
            self.definitions.append(Definition(name, "source", f"import {value.__name__} as {name}"))
        elif is_defined_here(value):
            self._add_defined(name, value)
        else:
            self.definitions.append(Definition(name, "value", self._pickle(name, value, user)))

    def _add_defined(self, name: str, value: Any) -> None:
        source = _source(value, name)
        if source is not None:
            for used in sorted(_names_in_source(source)):
                self.add(used, user=name)
            self.definitions.append(Definition(name, "source", source))
        elif isinstance(value, FunctionType) and not value.__closure__:
            for used in sorted(_names_in_code(value.__code__)):
                self.add(used, user=name)
            parts = marshal.dumps(value.__code__), value.__defaults__, value.__kwdefaults__, value.__qualname__
            self.definitions.append(Definition(name, "code", self._pickle(name, parts, user=name)))
        else:
            raise UnsendableError(
                f"the workers do not have {name!r} of __main__, and its source is not available here to send; "
                f"put it into a file and import it"
            )

    def _pickle(self, name: str, value: Any, user: str | None) -> bytes:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self, name).dump(value)
        except UnsendableError:
            raise
        except Exception as error:
            raise self._unsendable(name, value, user, str(error)) from error
        if buffer.tell() > _LARGEST_VALUE:
            raise self._unsendable(name, value, user, f"it takes {buffer.tell()} bytes")
        return buffer.getvalue()

    def _unsendable(self, name: str, value: Any, user: str | None, why: str) -> UnsendableError:
        return UnsendableError(
            f"{user or name}() uses the global {name!r}, a {type(value).__name__}, which cannot be sent with it: "
            f"{why}. Pass it as an argument, or make it on the worker"
        )


class _Pickler(pickle.Pickler):
    """Finds the functions and classes of ``__main__`` that a value refers to."""

    def __init__(self, buffer: io.BytesIO, collection: _Collection, user: str) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._collection = collection
        self._user = user

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)) and obj.__module__ == "__main__":
            self._collection.add(top_name(obj), user=self._user)
        return NotImplemented


def is_defined_here(value: Any) -> bool:
    """Whether ``value`` comes from a def, class or lambda of ``__main__``, decorated or not."""
    return _is_named(value) and value.__module__ == "__main__"


def _is_named(value: Any) -> bool:
    """Whether ``value`` is a function, class or method, or a decorator's result that stands for one."""
    return isinstance(value, (FunctionType, MethodType, type)) or "__wrapped__" in getattr(value, "__dict__", ())


def _source(value: Any, name: str) -> str | None:
    """The statement that defined ``value``, made to stand alone; None if it is not available."""
    inner = inspect.unwrap(value)
    line: int | None
    if isinstance(inner, FunctionType):
        if inner.__code__.co_freevars:
            return None  # its source lacks the values it closes over
        line = inner.__code__.co_firstlineno
    else:
        line = getattr(inner, "__firstlineno__", None)
    for text, flags in _texts(inner):
        statement = _statement(text, inner.__name__, name, line)
        if statement is not None:
            lazy = flags & __future__.annotations.compiler_flag
            return ("from __future__ import annotations\n" if lazy else "") + statement
    return None


def _texts(value: Any) -> Iterator[tuple[str, int]]:
    """Texts that may contain the definition of ``value``, likeliest first, with their compiler flags."""
    for function in [value] if isinstance(value, FunctionType) else _methods(value):
        code = function.__code__
        try:
            lines, _ = inspect.findsource(function)
        except OSError:
            text = _program_text(code.co_filename)
            if text is not None:
                yield text, code.co_flags
        else:
            yield "".join(lines), code.co_flags
    if isinstance(value, type):
        # A class without methods of its own names no file. Texts that are in no file
        # (no modification time) were typed; the latest is at the end.
        for entry in reversed(list(linecache.cache.values())):
            if len(entry) == 4 and entry[1] is None:
                yield "".join(entry[2]), 0
        for filename in ("<string>", "<stdin>"):
            text = _program_text(filename)
            if text is not None:
                yield text, 0
        main_file = getattr(sys.modules["__main__"], "__file__", None)
        if main_file is not None:
            yield "".join(linecache.getlines(main_file)), 0


def _methods(value: Any) -> Iterator[FunctionType]:
    """The functions that a class got from its own class statement."""
    for member in vars(value).values() if isinstance(value, type) else ():
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        function = inspect.unwrap(function)
        if isinstance(function, FunctionType) and function.__module__ == value.__module__:
            yield function


def _program_text(filename: str) -> str | None:
    """The text of ``python -c`` or of a script on standard input, if it is still available."""
    if filename == "<string>" and sys.argv[:1] == ["-c"]:
        options = iter(sys.orig_argv[1:])
        for option in options:
            if re.fullmatch(r"-[a-zA-Z]*c", option):
                return next(options, None)
    if filename == "<stdin>":
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            return os.pread(0, status.st_size, 0).decode()
    return None


def _statement(text: str, defined_name: str, bound_name: str, line: int | None) -> str | None:
    """The last def or class of that name in ``text`` (or lambda bound to one), at ``line`` if known."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    found: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            matches = node.name == defined_name
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign) and defined_name == "<lambda>":
            matches = any(isinstance(target, ast.Name) and target.id == bound_name for target in node.targets)
            first = node.lineno
        else:
            continue
        if matches and (line is None or first == line):
            found = node
            found_first = first
    if found is None:
        return None
    lines = text.splitlines(keepends=True)[found_first - 1 : found.end_lineno]
    # Not textwrap.dedent: that would change strings inside the statement.
    return ("if True:\n" if found.col_offset else "") + "".join(lines)


def _names_in_source(source: str) -> set[str]:
    """The global names that the statement uses, when it runs and when the result is called."""
    names = set()
    tables = [symtable.symtable(source, "<definition>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_declared_global() or (
                symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
            ):
                names.add(symbol.get_name())
    return names


def _names_in_code(code: CodeType) -> set[str]:
    names = {item.argval for item in dis.get_instructions(code) if item.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in_code(constant)
    return names


def _make_source(definition: Definition, namespace: dict[str, Any]) -> Any:
    source = str(definition.body)
    filename = f"<{definition.name} of the driver's __main__>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    # With a namespace of its own: the statement may bind another name than the definition's.
    bound: dict[str, Any] = {}
    exec(compile(source, filename, "exec", dont_inherit=True), namespace, bound)
    bound.pop("annotations", None)
    return bound[definition.name] if definition.name in bound else bound.popitem()[1]


def _make_code(definition: Definition, namespace: dict[str, Any]) -> FunctionType:
    code, defaults, kwdefaults, qualname = pickle.loads(cast(bytes, definition.body))
    function = FunctionType(marshal.loads(code), namespace, argdefs=defaults)
    function.__kwdefaults__ = kwdefaults
    function.__qualname__ = qualname
    return function


def _make_value(definition: Definition, namespace: dict[str, Any]) -> Any:
    return pickle.loads(cast(bytes, definition.body))


_MAKERS: Mapping[str, Callable[[Definition, dict[str, Any]], Any]] = {
    "source": _make_source,
    "code": _make_code,
    "value": _make_value,
}
