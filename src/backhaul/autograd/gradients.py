"""Where the gradients of leaves go: into the context, as `AccumulateGrad` would put them into ``.grad``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch

Captured = Sequence[torch.Tensor | None]

_slot = threading.Lock()
"""Held while a leaf's ``.grad`` is lent to its hooks."""


def store(into: dict[torch.Tensor, torch.Tensor], leaves: Sequence[torch.Tensor], captured: Captured) -> None:
    """Add the captured gradients of these leaves to what is there. The caller serialises this for ``into``."""
    seen: set[int] = set()
    with torch.no_grad():
        for place, leaf in enumerate(leaves):
            gradient = captured[place]
            if gradient is None:
                continue
            before = into.get(leaf)
            if before is None:
                if id(gradient) in seen or not _is_ours(captured, place):
                    gradient = gradient.clone()
                seen.add(id(captured[place]))
                into[leaf] = _laid_out_as(gradient, leaf)
            elif before.layout is not torch.strided:
                into[leaf] = gradient + before  # a dense one and a sparse one can be added in this order only
            else:
                before += gradient


def run_hooks(leaves: Sequence[torch.Tensor], captured: Captured) -> list[torch.Tensor | None]:
    """Run the post-accumulate hooks of leaves with ``.grad`` as this pass alone makes it; what they leave there.

    Such hooks look at ``.grad`` (or step an optimizer with it). What was there before comes back.
    """
    result = list(captured)
    for place, leaf in enumerate(leaves):
        hooks = getattr(leaf, "_post_accumulate_grad_hooks", None)
        if not hooks or result[place] is None:
            continue
        with _slot:
            before, leaf.grad = leaf.grad, result[place]
            try:
                for hook in list(hooks.values()):
                    hook(leaf)
                result[place] = leaf.grad
            finally:
                leaf.grad = before
    return result


def _references(captured: Captured, place: int) -> int:
    return sys.getrefcount(captured[place])


def _is_ours(captured: Captured, place: int) -> bool:
    """Whether nobody else has a captured gradient, or a view of its memory."""
    gradient = captured[place]
    if gradient is None or gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    return _references(captured, place) <= _OUR_REFERENCES and (
        torch._C._storage_Use_Count(storage._cdata) <= _OUR_STORAGE
    )


def _laid_out_as(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient in the memory layout of its leaf, so that optimizers find what they are used to."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _count_ours() -> tuple[int, int]:
    """How many references there are to a gradient, and to its storage, in `_is_ours` if nobody else has one."""
    captured: Captured = (torch.zeros(1),)
    gradient = captured[0]
    assert gradient is not None
    storage = gradient.untyped_storage()
    return _references(captured, 0), torch._C._storage_Use_Count(storage._cdata)


_OUR_REFERENCES, _OUR_STORAGE = _count_ours()
