"""Puts the gradients of leaves into the context, in the way in which `AccumulateGrad` puts them into ``.grad``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import getrefcount
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from backhaul.compat import dtype_of_gradient
from backhaul.devices.streams import new_baton

Captured = Sequence[torch.Tensor | None]
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

_strided = torch.strided
_storage_users: Callable[[int], int] = torch._C._storage_Use_Count

_LOOK_AGAIN = 0.05


class _Lending:
    """Leaves whose ``.grad`` is lent to one pass. No lock is held during that time, since user hooks run in it."""

    def __init__(self) -> None:
        self._returned = threading.Condition()
        self._baton = new_baton()
        self._lent: dict[int, int] = {}  # id of a leaf -> the thread to which it is lent

    @contextmanager
    def of(self, leaves: Iterable[torch.Tensor], check: Callable[[], None]) -> Iterator[None]:
        """Wait for the leaves, then lend them to this thread for the block.

        Meanwhile ``check`` is called regularly; it raises if the wait has become useless. A thread may borrow a leaf
        again that it has already: a hook may run a pass itself.
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
            self._baton.take()
            try:
                yield
            finally:
                self._baton.leave()
        finally:  # also after an error of a GPU
            with self._returned:
                for leaf in new:
                    del self._lent[leaf]
                self._returned.notify_all()

    def _are_free(self, leaves: set[int], thread: int) -> bool:
        return all(self._lent.get(leaf, thread) == thread for leaf in leaves)


# Global to the process: ``.grad`` belongs to the leaf, and workers of one process may have leaves in common.
_lending = _Lending()


def store(into: dict[torch.Tensor, torch.Tensor], leaves: Sequence[torch.Tensor], captured: Captured) -> None:
    """Add the captured gradients of these leaves to ``into``. Not thread-safe: the caller must serialise calls."""
    for place, leaf in enumerate(leaves):
        references = getrefcount(captured[place])
        gradient = captured[place]
        if gradient is None:
            continue
        before = into.get(leaf) if into else None
        if before is None:
            into[leaf] = _owned(gradient, leaf, references <= _REFERENCES)
        elif before.layout is not _strided:
            into[leaf] = _sum(before, gradient)
        else:
            before += gradient


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum, with a dense operand first: torch adds a sparse tensor to a dense one, but not the reverse."""
    return one + other if one.layout is torch.strided else other + one


def without_a_run(starts: Sequence[Any], values: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor] | None:
    """The gradients of leaves that were sent unchanged: exactly the gradients that came back. None if torch must
    run."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for start, value in zip(starts, values, strict=True):
        if type(start) is not GradientEdge or type(start.node) is not _AccumulateGrad:
            return None
        leaf: torch.Tensor = start.node.variable  # type: ignore[attr-defined]
        if leaf._backward_hooks or dtype_of_gradient(leaf) is not value.dtype or leaf.shape != value.shape:
            return None
        if getattr(leaf, "_post_accumulate_grad_hooks", None):
            return None
        before = found.get(leaf) if found else None
        found[leaf] = value if before is None else _sum(before, value)
    return found


def run_hooks(
    leaves: Sequence[torch.Tensor], captured: Captured, check: Callable[[], None]
) -> list[torch.Tensor | None]:
    """Run the post-accumulate hooks of leaves, with the gradient of this pass alone in ``.grad``. Returns the new
    gradients.

    Such hooks read ``.grad``, or step an optimizer with it. Afterwards ``.grad`` has its old value. One pass has a leaf
    at a time; a thread that waits for a leaf calls ``check``, which raises if its own pass is over.
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
    """A block in which ``.grad`` of these leaves is the given gradient, and may be changed. Afterwards it is restored.

    ``lent`` are leaves whose ``.grad`` may be memory that the block overwrites. One pass has a leaf at a time, as in
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


def _owned(gradient: torch.Tensor, leaf: torch.Tensor, free: bool) -> torch.Tensor:
    """The gradient in memory of its own, laid out as its leaf, which optimizers expect.

    ``free``: no other code has a reference to it, so it may be used as it is.
    """
    if type(gradient) is not torch.Tensor:
        gradient = gradient.clone()
        return _owned(gradient, leaf, free=True) if type(gradient) is torch.Tensor else gradient
    if gradient.layout is _strided is leaf.layout and gradient.stride() != leaf.stride():
        return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
    return gradient if free and _has_memory_alone(gradient) else gradient.clone()


def _has_memory_alone(gradient: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of a captured gradient."""
    layout = gradient.layout
    if layout is _strided:
        users = _storage_users(gradient.untyped_storage()._cdata)
        if users <= _USERS:
            return True
        # It may be a view of a tensor that only the view keeps alive, as the gradient of a `Linear`'s weight is.
        base = gradient._base
        return (
            users <= _USERS_OF_VIEW
            and base is not None
            and base._use_count() <= _USERS_OF_BASE  # type: ignore[attr-defined]
            and getrefcount(base) <= _REFERENCES_TO_BASE
        )
    if layout is torch.sparse_coo:  # as in torch, views of its parts do not count
        parts = gradient._indices(), gradient._values()
        return gradient._use_count() == 1 and all(part.is_contiguous() for part in parts)  # type: ignore[attr-defined]
    return False


def _count() -> tuple[int, int, int, int, int]:
    """The numbers of references that `store` finds when no other code holds a gradient."""
    captured: Captured = (torch.zeros(1), torch.zeros(2).view(1, 2))
    references = getrefcount(captured[0])
    gradient, view = captured
    assert gradient is not None
    assert view is not None
    base = view._base
    assert base is not None
    return (
        references,
        _storage_users(gradient.untyped_storage()._cdata),
        _storage_users(view.untyped_storage()._cdata),
        base._use_count(),  # type: ignore[attr-defined]
        getrefcount(base),
    )


_REFERENCES, _USERS, _USERS_OF_VIEW, _USERS_OF_BASE, _REFERENCES_TO_BASE = _count()
"""To a gradient, of its memory, of its memory if it is a view, of the base of a view, and to that base."""
