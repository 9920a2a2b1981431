"""Functions, classes and methods <-> ``"module:qualname"``.

A callable travels as its name and is looked up again where it runs, so both sides must
be able to import it. The sender's `name_of` checks that the name leads back to the same object.
The receiver's `find` follows the name.

A name is refused if it could lead anywhere unexpected: each part must be an identifier, and only the last part
may start with two underscores (``__add__``), if it names something callable.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from backhaul.errors import MisuseError, UnsendableError

MAX_NAME = 512
_CACHED = 4096

# id -> the name that led to the object of that id. It is only a hint, so it keeps no object alive. A stale hint does no
# harm: a name is used only if it leads to the same object at that moment.
_hints: dict[int, tuple[str, str, Callable[[Any], Any]]] = {}


def name_of(obj: Any) -> str:
    """The name by which `find` gets `obj` on any worker that can import it. Thread-safe.

    Raises UnsendableError, which says what to do, for lambdas, local functions, and any
    object that its module does not hold under its name.
    """
    hint = _hints.get(id(obj))
    if hint is not None:
        name, module, get = hint
        try:
            if get(sys.modules.get(module)) is obj:
                return name
        except AttributeError:
            pass  # it has moved: look for it below
    name = _name_of(obj)
    if len(_hints) >= _CACHED:
        _hints.clear()
    module, _, get, _ = _split(name)
    _hints[id(obj)] = name, module, get
    return name


def find(name: str) -> Any:
    """The object that `name` names on this worker. It is looked up each time, so that a redefinition is seen.

    Raises MisuseError if the module or the attribute is not here. Thread-safe.
    """
    module_name, parts, get, is_special = _split(name)
    module = sys.modules.get(module_name)
    # Another thread may be importing the module at this moment. Until that ends, some of its names are missing.
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        module = _import(module_name, name)
    try:
        found = get(module)
    except Exception:
        found = _follow(module, parts, name)
    if is_special and not callable(found):
        raise MisuseError(f"{name!r} does not name something that can be called")
    return found


def _follow(found: Any, parts: tuple[str, ...], name: str) -> Any:
    """The same as one look along all parts, but the error says which part is missing."""
    for part in parts:
        try:
            found = getattr(found, part)
        except Exception as error:
            raise MisuseError(
                f"there is no {name!r} on this worker: {found!r} has no attribute {part!r}. The RPC pickler does "
                "not serialize code: define it at module level, in a module that is the same on both workers"
            ) from error
    return found


@functools.lru_cache(maxsize=_CACHED)
def _split(name: str) -> tuple[str, tuple[str, ...], Callable[[Any], Any], bool]:
    """The module and the path of a name, what follows the path, and whether it leads to ``__such_a_name``.

    Raises MisuseError if the name is not safe to follow.
    """
    module, colon, qualname = name.partition(":")
    parts = tuple(qualname.split("."))
    if (
        len(name) > MAX_NAME
        or not colon
        or not all(map(str.isidentifier, module.split(".")))
        or not all(map(str.isidentifier, parts))
        or any(part.startswith("__") for part in parts[:-1])
    ):
        raise MisuseError(f"{name[:MAX_NAME]!r} is not the name of a function or class: 'module:qualname'")
    return module, parts, operator.attrgetter(qualname), parts[-1].startswith("__")


def _import(module: str, name: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the module's own code raises
        raise MisuseError(
            f"{name!r} is not available on this worker: importing {module!r} failed ({error}). Put it in a "
            "module that both workers can import"
        ) from error


def _name_of(obj: Any) -> str:
    rebound = ""
    for name in _candidates(obj):
        if len(name) > MAX_NAME:
            continue
        try:
            found = find(name)
        except MisuseError:
            continue
        if _is_same(found, obj):
            return name
        rebound = name
    raise UnsendableError(_advice(obj, rebound))


def _is_same(found: Any, obj: Any) -> bool:
    if found is obj:
        return True
    # Each access to a class method makes a new object. Two of them are equal if class and function are the same.
    method = isinstance(obj, (types.MethodType, types.BuiltinMethodType))
    return method and isinstance(getattr(obj, "__self__", None), type) and bool(found == obj)


def _candidates(obj: Any) -> Iterable[str]:
    """Names that may lead to `obj`, the best first."""
    if isinstance(obj, torch._ops.OpOverload):
        operator = obj.overloadpacket._qualified_op_name.replace("::", ".")
        return (f"torch:ops.{operator}.{obj._overloadname}",)
    if isinstance(obj, torch._ops.OpOverloadPacket):
        return (f"torch:ops.{obj._qualified_op_name.replace('::', '.')}",)
    if isinstance(obj, torch.jit.ScriptFunction):
        return _script_candidates(obj)
    return _python_candidates(obj)


def _python_candidates(obj: Any) -> Iterator[str]:
    name = getattr(obj, "__name__", None)
    owner = getattr(obj, "__self__", None)
    if not isinstance(owner, type):
        owner = getattr(obj, "__objclass__", None)
    if isinstance(owner, type):  # a class method, or a method of a builtin type
        if issubclass(torch.Tensor, owner) and owner is not object:
            yield f"torch:Tensor.{name}"
        yield f"{owner.__module__}:{owner.__qualname__}.{name}"
    module = getattr(obj, "__module__", None)
    if isinstance(module, str):
        if module.startswith("torch") and isinstance(obj, types.BuiltinFunctionType):
            yield from _operator_candidates(module, obj.__name__)
        yield f"{module}:{getattr(obj, '__qualname__', name)}"
        yield f"{module}:{name}"
        if hasattr(obj, "_torchdynamo_orig_callable"):
            # The result of torch.compile(f) has f's name, but its module usually holds it under another one.
            yield from (f"{module}:{other}" for other in _names_of(obj, module))


def _names_of(obj: Any, module: str) -> list[str]:
    """The names under which a module holds this object."""
    held = getattr(sys.modules.get(module), "__dict__", {})
    return [name for name, value in list(held.items()) if value is obj]


def _operator_candidates(module: str, name: str) -> Iterator[str]:
    """Names for an operator of torch, whose own name differs from its place: torch.linalg.inv is called linalg_inv."""
    yield f"torch:{name}"
    space = module.rpartition(".")[2].lstrip("_")
    yield f"torch.{space}:{name.lstrip('_').removeprefix(f'{space}_')}"
    yield f"torch.nn.functional:{name}"


def _script_candidates(function: Any) -> Iterator[str]:
    path, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    module = ".".join(part for part in path.split(".") if not part.startswith("___torch_mangle"))
    yield f"{module or '__main__'}:{name}"
    # A traced function does not know its module, so look for a module that holds it.
    for module, holder in list(sys.modules.items()):
        if getattr(holder, "__dict__", {}).get(name) is function:
            yield f"{module}:{name}"


def _advice(obj: Any, rebound: str) -> str:
    qualname = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or repr(obj)
    if "<lambda>" in qualname:
        return f"the lambda {qualname!r} has no name to look up: define a function at module level instead"
    if "<locals>" in qualname:
        return (
            f"{qualname!r} is local to a function: define it at module level, and pass what it closes over "
            "as an argument"
        )
    if isinstance(obj, types.MethodType):
        kind = type(obj.__self__).__name__
        return f"{qualname!r} is bound to a {kind}: pass the function of the class, and the object as argument"
    if rebound:
        module, _, path = rebound.partition(":")
        return (
            f"{path!r} in module {module!r} is now another object than the one given (did a decorator or a "
            f"redefinition replace it?): pass {module}.{path} itself"
        )
    kind = type(obj).__name__
    return f"{qualname!r} ({kind}) has no name to look up: pass a function or class of a module"
