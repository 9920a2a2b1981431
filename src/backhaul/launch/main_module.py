"""Gives a worker the driver's ``__main__``, so that functions of a script are callable there.

As in multiprocessing's spawn, the worker runs the driver's script again under the
name ``__mp_main__``, so the block below ``if __name__ == "__main__"`` does not run. If
a script has no such guard, running it again would start a cluster again. So
`stop_if_loading` ends the run right there, and everything defined above stays.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Literal

from backhaul.errors import MisuseError

LOADED_NAME = "__mp_main__"


@dataclass(frozen=True)
class MainModule:
    """Where to load ``__main__`` from: a module's ``name``, a ``path``, or neither."""

    name: str | None = None
    path: str | None = None


class LoadingStopped(BaseException):
    """The script has reached the line that starts the cluster. Not an Exception, so that no handler catches it."""


# The role of this process, for all threads. It never changes back: a worker that
# started a cluster would start clusters without end.
_role: Literal["driver", "loading", "worker"] = "driver"


def describe(main: ModuleType) -> MainModule:
    """How to load ``main`` again in another process.

    The result has neither a name nor a path for a notebook or an interpreter, whose ``__main__`` is not a file. The
    same holds for ``python -m package``: a ``__main__.py`` rarely has a guard, and a second load of unittest's would
    run the tests again.
    """
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return MainModule() if spec.name.rpartition(".")[2] == "__main__" else MainModule(name=spec.name)
    return MainModule(path=getattr(main, "__file__", None))


def load(main: MainModule) -> ModuleType:
    """Run the driver's ``__main__`` and install it as this process's.

    Raises whatever the script raises. Without name or path, ``__main__`` is empty.
    """
    global _role
    module = ModuleType(LOADED_NAME if main.name or main.path else "__main__")
    code = code_for(main, module)
    # Installed first, because the script may look itself up, as dataclasses and pickle do.
    sys.modules["__main__"] = sys.modules[LOADED_NAME] = module
    _role = "loading"
    try:
        exec(code, module.__dict__)
    except LoadingStopped:
        pass
    finally:
        _role = "worker"
    return module


def stop_if_loading() -> None:
    """End the script if a worker is running it. Called where a cluster starts.

    Raises `MisuseError` in a worker that has already run its script.
    """
    if _role == "loading":
        raise LoadingStopped
    if _role == "worker":
        raise MisuseError("a worker of a cluster cannot start a cluster of its own")


def code_for(main: MainModule, module: ModuleType) -> CodeType:
    """The code to run in ``module``, whose attributes then say where it comes from."""
    if main.name is not None:
        spec = importlib.util.find_spec(main.name)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {main.name!r}", name=main.name)
        module.__spec__ = spec
        module.__loader__ = spec.loader
        module.__package__ = spec.parent
        module.__file__ = spec.origin
        code: CodeType = spec.loader.get_code(main.name)  # type: ignore[attr-defined]
        return code
    if main.path is not None:
        module.__file__ = main.path
        with open(main.path, "rb") as file:
            return compile(file.read(), main.path, "exec", dont_inherit=True)
    return compile("", "<nothing>", "exec")
