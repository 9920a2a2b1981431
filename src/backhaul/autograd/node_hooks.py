"""Hooks on the `AccumulateGrad` nodes of leaves.

Libraries put hooks there to see a gradient when it is in ``.grad``, or to change it before. Torch offers no way to ask
whether a node has hooks. But each hook goes into a dict that Python code makes. This module replaces that code, so it
knows whether there are hooks at all. Only then does it ask single nodes, by registering a fake hook
(`_question`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

# Global to the process: torch's nodes and hooks know no worker.
_dicts: weakref.WeakValueDictionary[int, OrderedDict[int, Any]] = weakref.WeakValueDictionary()
_seen: list[bool] = []  # not empty after the first hook: quicker to test than the dicts
_register_hook: Any = torch.autograd.Function._register_hook


def _notice(backward_hooks: OrderedDict[int, Any] | None, hook: Any) -> tuple[OrderedDict[int, Any], Any]:
    """Torch calls this for each hook, with the node's dict of hooks if it has one. Returns the dict and a handle."""
    if hook is _question:  # do not add it: the engine may iterate over the dict on another thread
        hooks: OrderedDict[int, Any] = OrderedDict() if backward_hooks is None else backward_hooks
        return hooks, hooks
    hooks, handle = _register_hook(backward_hooks, hook)
    _seen.append(True)
    del _seen[1:]
    _dicts[id(hooks)] = hooks
    return hooks, handle


def _question(*_: Any) -> None:
    """Registering this as a hook returns the node's dict of hooks, and adds nothing."""


# The only place where Python learns of such hooks; torch has one for the process.
torch.autograd.Function._register_hook = staticmethod(_notice)  # type: ignore[method-assign]


def are_there() -> bool:
    """Whether any node in this process has hooks."""
    return bool(_seen) and any(list(_dicts.values()))


def on(node: Any) -> bool:
    """Whether this node has hooks that run before or after it."""
    return bool(node.register_hook(_question)) or bool(node.register_prehook(_question))
