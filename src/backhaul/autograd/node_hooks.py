"""Hooks on the `AccumulateGrad` node of a leaf, where libraries put them to see a gradient once it is in ``.grad``.

Torch tells nobody whether a node has hooks. But each hook goes into a dict that Python makes, here, so it is known
whether there are any at all; only then are nodes asked, in a roundabout way.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

_dicts: weakref.WeakValueDictionary[int, OrderedDict[int, Any]] = weakref.WeakValueDictionary()
_register_hook: Any = torch.autograd.Function._register_hook


def _notice(backward_hooks: OrderedDict[int, Any] | None, hook: Any) -> tuple[OrderedDict[int, Any], Any]:
    hooks, handle = _register_hook(backward_hooks, hook)
    _dicts[id(hooks)] = hooks
    return hooks, handle


torch.autograd.Function._register_hook = staticmethod(_notice)  # type: ignore[method-assign]


def are_there() -> bool:
    """Whether some node, somewhere, has hooks."""
    return bool(_dicts) and any(list(_dicts.values()))


def on(node: Any) -> bool:
    """Whether this node has hooks that run after it."""
    handle = node.register_hook(_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)


def _nothing(*_: Any) -> None:
    """Looks, for a moment, like a hook."""
