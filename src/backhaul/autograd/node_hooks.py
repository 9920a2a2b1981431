"""Hooks on the `AccumulateGrad` node of a leaf, where libraries put them to see a gradient once it is in ``.grad``, or
to change it before.

Torch tells nobody whether a node has hooks. But each hook goes into a dict that Python makes, here, so it is known
whether there are any at all; only then are nodes asked, in a roundabout way.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

# Of the process: torch knows nodes and hooks, and no worker.
_dicts: weakref.WeakValueDictionary[int, OrderedDict[int, Any]] = weakref.WeakValueDictionary()
_seen: list[bool] = []  # not empty once there has been one: quicker to look at than the dicts
_register_hook: Any = torch.autograd.Function._register_hook


def _notice(backward_hooks: OrderedDict[int, Any] | None, hook: Any) -> tuple[OrderedDict[int, Any], Any]:
    """What torch calls for each hook: the dict to put it into, if the node has one; returns that and a handle."""
    if hook is _question:  # it is not put there: the engine may be going through them on another thread
        hooks: OrderedDict[int, Any] = OrderedDict() if backward_hooks is None else backward_hooks
        return hooks, hooks
    hooks, handle = _register_hook(backward_hooks, hook)
    _seen.append(True)
    del _seen[1:]
    _dicts[id(hooks)] = hooks
    return hooks, handle


def _question(*_: Any) -> None:
    """Given as a hook, it asks which others there are."""


# The only place where Python learns of such hooks; torch has one for the process.
torch.autograd.Function._register_hook = staticmethod(_notice)  # type: ignore[method-assign]


def are_there() -> bool:
    """Whether some node, somewhere, has hooks."""
    return bool(_seen) and any(list(_dicts.values()))


def on(node: Any) -> bool:
    """Whether this node has hooks that run before or after it."""
    return bool(node.register_hook(_question)) or bool(node.register_prehook(_question))
