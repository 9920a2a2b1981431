"""Where the gradients of leaves go: into the context, as `AccumulateGrad` would put them into ``.grad``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

Captured = Sequence[torch.Tensor | None]
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

_LOOK_AGAIN = 0.05


class _Lending:
    """Leaves whose ``.grad`` is lent to one pass. No lock is held meanwhile: hooks are the user's."""

    def __init__(self) -> None:
        self._returned = threading.Condition()
        self._lent: dict[int, int] = {}  # id of a leaf -> thread that has it

    @contextmanager
    def of(self, leaves: Iterable[torch.Tensor], check: Callable[[], None]) -> Iterator[None]:
        """Wait for leaves, calling ``check`` now and then, which raises if that is of no use any more.

        A thread that has a leaf already may have it once more: a hook runs a pass itself.
        """
        thread = threading.get_ident()
        wanted = {id(leaf) for leaf in leaves}
        while True:
            with self._returned:
                if self._returned.wait_for(lambda: self._are_free(wanted, thread), _LOOK_AGAIN):
                    new = wanted - self._lent.keys()
                    self._lent.update(dict.fromkeys(new, thread))
                    break
            check()
        try:
            yield
        finally:
            with self._returned:
                for leaf in new:
                    del self._lent[leaf]
                self._returned.notify_all()

    def _are_free(self, leaves: set[int], thread: int) -> bool:
        return all(self._lent.get(leaf, thread) == thread for leaf in leaves)


_lending = _Lending()


def store(into: dict[torch.Tensor, torch.Tensor], leaves: Sequence[torch.Tensor], captured: Captured) -> None:
    """Add the captured gradients of these leaves to what is there. The caller serialises this for ``into``."""
    seen: set[int] = set()
    for place, leaf in enumerate(leaves):
        ours = _is_ours(captured, place) and id(captured[place]) not in seen
        gradient = captured[place]
        if gradient is None:
            continue
        before = into.get(leaf)
        if before is None:
            seen.add(id(gradient))
            into[leaf] = _laid_out_as(gradient if ours else gradient.clone(), leaf)
        elif before.layout is not torch.strided:
            into[leaf] = gradient + before  # a dense one and a sparse one can be added in this order only
        else:
            before += gradient


def without_a_run(starts: Sequence[Any], values: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor] | None:
    """The gradients of leaves that were sent as they are: what came back for them. None if torch has to run."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for start, value in zip(starts, values, strict=True):
        if type(start) is not GradientEdge or type(start.node) is not _AccumulateGrad:
            return None
        leaf: torch.Tensor = start.node.variable  # type: ignore[attr-defined]
        if leaf._backward_hooks or leaf.dtype is not value.dtype or leaf.shape != value.shape:
            return None
        if getattr(leaf, "_post_accumulate_grad_hooks", None):
            return None
        before = found.get(leaf)
        found[leaf] = value if before is None else before + value
    return found


def run_hooks(
    leaves: Sequence[torch.Tensor], captured: Captured, check: Callable[[], None]
) -> list[torch.Tensor | None]:
    """Run the post-accumulate hooks of leaves with ``.grad`` as this pass alone makes it; what they leave there.

    Such hooks look at ``.grad`` (or step an optimizer with it). What was there before comes back. One pass has a leaf
    at a time; who waits for another calls ``check``, which raises if its own pass is over.
    """
    result = list(captured)
    for place, leaf in enumerate(leaves):
        hooks = getattr(leaf, "_post_accumulate_grad_hooks", None)
        if not hooks or result[place] is None:
            continue
        with _lending.of([leaf], check):
            before, leaf.grad = leaf.grad, result[place]
            try:
                for hook in list(hooks.values()):
                    hook(leaf)
                result[place] = leaf.grad
            finally:
                leaf.grad = before
    return result


@contextmanager
def in_place_of_grad(
    given: Mapping[torch.Tensor, torch.Tensor | None], check: Callable[[], None], *, lent: Container[torch.Tensor] = ()
) -> Iterator[None]:
    """Inside, ``.grad`` of these leaves is what is given, and may be changed. Afterwards it is what it was before.

    ``lent`` are leaves whose ``.grad`` may be memory that is written to meanwhile. One pass has a leaf at a time, as in
    `run_hooks`.
    """
    with _lending.of(given, check):
        before = {leaf: leaf.grad for leaf in given}
        for leaf, gradient in before.items():
            if gradient is not None and leaf in lent:
                before[leaf] = gradient.clone()
        try:
            for leaf, gradient in given.items():
                leaf.grad = gradient
            yield
        finally:
            for leaf, gradient in before.items():
                leaf.grad = gradient


def _is_ours(captured: Captured, place: int) -> bool:
    """Whether nobody else has a captured gradient, or a view of its memory."""
    references = sys.getrefcount(captured[place])
    gradient = captured[place]
    if gradient is None or references > _OUR_REFERENCES:
        return False
    layout = gradient.layout
    if layout is torch.sparse_coo:  # as torch: views of its parts do not count
        parts = gradient._indices(), gradient._values()
        return gradient._use_count() == 1 and all(part.is_contiguous() for part in parts)  # type: ignore[attr-defined]
    if layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) <= _OUR_STORAGE


def _laid_out_as(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient in the memory layout of its leaf, so that optimizers find what they are used to."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _count_ours() -> tuple[int, int]:
    """How many references there are in `_is_ours` to a gradient that nobody else has, and to its memory."""
    captured: Captured = (torch.zeros(1),)
    references = sys.getrefcount(captured[0])
    gradient = captured[0]
    assert gradient is not None
    return references, torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)


_OUR_REFERENCES, _OUR_STORAGE = _count_ours()
