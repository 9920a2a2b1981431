"""Hooks over several tensors (`register_multi_grad_hook`), which count their tensors within one run of torch's engine.

In one process a pass is one run. Here the tensors of a hook may belong to different components. A hook that waits for
all its tensors (``mode="all"``) would count the tensors of each run separately; so the sources that reach tensors of
one hook are run together. A hook for the first of its tensors (``"any"``) would be called in each run; so it is called
only in the first run of a pass. This module patches torch to learn of such hooks.

Torch also refuses to capture the gradient of a leaf that has such a hook, even a hook on this leaf alone: `on_any`
finds these leaves.

Torch never frees a hook over computed tensors, because the hook and the graph refer to each other. So a hook that was
made inside a context counts until the context ends. A hook on at least one leaf counts until it is removed, since the
leaf calls it in each pass. Of the other hooks, the latest few count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import _MultiHandle

from backhaul.autograd.contexts import current_context, is_known
from backhaul.autograd.functions import thread

_REMEMBERED = 64
_MOST_OF_NO_CONTEXT = 8

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

_OF_LEAVES, _OF_NO_CONTEXT = -1, -2

_Parts = tuple[weakref.ref[Any], ...]
"""The functions of one hook, one for each tensor. A function may be freed with its tensor, before the others."""

_hooks: dict[_Parts, int] = {}
"""Each hook that waits for all its tensors -> the context in which it was made. It is global, since torch's
hooks know no worker."""

_init = _MultiHandle.__init__


def _notice(self: Any, handles: Sequence[Any]) -> None:
    _init(self, handles)  # type: ignore[arg-type]
    places = [(handle.hooks_dict_ref(), handle.id) for handle in handles]
    functions = [(hooks, id, hooks[id]) for hooks, id in places if hooks is not None and id in hooks]
    if not functions or not hasattr(functions[0][2], "__code__"):
        return
    nodes = _nodes(functions[0][2])
    if nodes is not None:
        of_leaves = any(type(node) is _AccumulateGrad for node in nodes)
        if len(nodes) < 2 and not of_leaves:
            return  # one node is in one run anyway; a leaf counts, since torch wants it in a run that accumulates
        made_in = _OF_LEAVES if of_leaves else current_context.get() or _OF_NO_CONTEXT
        _hooks[tuple(weakref.ref(function) for _, _, function in functions)] = made_in
        if made_in == _OF_NO_CONTEXT:
            _forget_oldest()
        return
    if "ran_hook" not in functions[0][2].__code__.co_freevars:
        return  # a hook of a form that this module does not know
    once = _once_a_pass(functions[0][2])
    for hooks, id, _ in functions:
        hooks[id] = once


# Torch has no other place that learns of such hooks, and it has one for the process.
_MultiHandle.__init__ = _notice  # type: ignore[method-assign]


def _nodes(hook: Any) -> list[Any] | None:
    """The graph nodes of a hook's tensors; None if the hook does not wait for all of them."""
    names = hook.__code__.co_freevars
    return hook.__closure__[names.index("grad_fns")].cell_contents if "grad_fns" in names else None


def _once_a_pass(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    called: dict[int, object] = {}  # by the id of a pass

    def call(gradient: Any) -> None:
        run = thread.run
        if run is not None:
            mine = object()
            if called.setdefault(run.backward, mine) is not mine:
                return
            if len(called) > _REMEMBERED:
                del called[next(iter(called))]
        hook(gradient)

    return call


def _forget_oldest() -> None:
    others = [hook for hook, context in list(_hooks.items()) if context == _OF_NO_CONTEXT]
    for hook in others[:-_MOST_OF_NO_CONTEXT]:
        _hooks.pop(hook, None)


def are_there() -> bool:
    """Whether this process has hooks that wait for several tensors."""
    return bool(_hooks) and any(True for _ in groups())


def groups() -> Iterator[list[Any]]:
    """The graph nodes of the tensors of each hook that waits for all of them."""
    if not _hooks:
        return
    for parts, context in list(_hooks.items()):
        hook = next((function for part in parts if (function := part()) is not None), None)
        if hook is None or (context > 0 and not is_known(context)):
            _hooks.pop(parts, None)
        else:
            yield _nodes(hook) or []


def on_any(leaves: Sequence[Any]) -> bool:
    """Whether one of these leaf nodes has such a hook."""
    if not _hooks:
        return False
    nodes = set(leaves)
    return any(node in nodes for group in groups() for node in group)
