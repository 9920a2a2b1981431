"""Differentiable RPC for PyTorch."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Imported eagerly, unlike the rest: a later import of the submodule would replace the function of the same name.
from backhaul.cluster import cluster

if TYPE_CHECKING:
    from backhaul import (
        autograd,
        checkpoint,
        errors,
        federation,
        functions,
        nn,
        optim,
        options,
        profiler,
        rpc,
        seeing,
        worker,
    )
    from backhaul import ray as ray
    from backhaul.options import RpcOptions
    from backhaul.security.tls import TLS
    from backhaul.worker import Worker

__version__ = "0.1.0.dev0"

__all__ = [
    "TLS",
    "RpcOptions",
    "Worker",
    "autograd",
    "checkpoint",
    "cluster",
    "errors",
    "federation",
    "functions",
    "nn",
    "optim",
    "options",
    "profiler",
    "rpc",
    "seeing",
    "worker",
]

_EXTRAS = ("ray",)
"""Modules that need an optional package. They are not in ``__all__``, so that ``import *`` works without it."""

_CLASSES = {"RpcOptions": "backhaul.options", "TLS": "backhaul.security.tls", "Worker": "backhaul.worker"}


def __getattr__(name: str) -> Any:
    """Import the rest at first use: most of it needs torch, and the launcher does not."""
    if name in _CLASSES:
        return getattr(_import(_CLASSES[name]), name)
    if name in __all__ or name in _EXTRAS:
        return _import(f"backhaul.{name}")
    raise AttributeError(f"module 'backhaul' has no attribute {name!r}")


def _import(name: str) -> ModuleType:
    """Import a module without garbage collections.

    Imports leave no garbage, but make enough objects to start a full collection. Behind torch, which has a million
    objects, that takes as long as all imports of this package together.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
