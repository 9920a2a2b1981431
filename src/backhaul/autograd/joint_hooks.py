"""Hooks over several tensors (`register_multi_grad_hook`): what they count belongs to one run of torch's engine.

In one process a pass is one run. Here the tensors of a hook may belong to different components. A hook that waits for
all its tensors (``mode="all"``) would count those of each run by themselves; so the sources that reach tensors of one
hook are run together. A hook for the first of its tensors (``"any"``) would be called in each run; so it is called in
the first run of a pass only. This module has torch tell it of such hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.autograd.graph import _MultiHandle

from backhaul.autograd.functions import thread

_REMEMBERED = 64

_hooks: weakref.WeakSet[Any] = weakref.WeakSet()
"""A function of each hook that waits for all its tensors. It lives as long as it can be called, and has their nodes."""

_init = _MultiHandle.__init__


def _notice(self: Any, handles: Sequence[Any]) -> None:
    _init(self, handles)  # type: ignore[arg-type]
    places = [(handle.hooks_dict_ref(), handle.id) for handle in handles]
    functions = [(hooks, id, hooks[id]) for hooks, id in places if hooks is not None and id in hooks]
    if len(functions) < 2:
        return
    if _nodes(functions[0][2]) is not None:
        _hooks.add(functions[0][2])
        return
    if "ran_hook" not in functions[0][2].__code__.co_freevars:
        return  # made in a way that this module does not know
    once = _once_a_pass(functions[0][2])
    for hooks, id, _ in functions:
        hooks[id] = once


_MultiHandle.__init__ = _notice  # type: ignore[method-assign]


def _nodes(hook: Any) -> list[Any] | None:
    """The graph nodes of the tensors of a hook, if it waits for all of them."""
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


def are_there() -> bool:
    """Whether there are hooks, anywhere, that wait for several tensors."""
    return bool(_hooks)


def groups() -> Iterator[list[Any]]:
    """The graph nodes of the tensors of each hook that waits for all of them."""
    for hook in list(_hooks) if _hooks else ():
        yield _nodes(hook) or []


def on_any(leaves: Sequence[Any]) -> bool:
    """Whether such a hook is over one of these nodes of leaves."""
    if not _hooks:
        return False
    nodes = set(leaves)
    return any(node in nodes for group in groups() for node in group)
