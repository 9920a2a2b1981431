"""The gradients of parameters of this worker: those of an autograd context, or ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not

import torch

from backhaul import current_worker
from backhaul.devices.streams import use

Gradients = Sequence[torch.Tensor | None]

_grad = attrgetter("grad")
_NONES = repeat(None)


def require(context_id: int | None) -> None:
    """Raise `ContextError` if there is no such context here.

    None stands for ``.grad``. Raises `MisuseError` for None if the open context has gradients that have not been read.
    """
    if context_id is None:
        current_worker.get().autograd.require_read()
    else:
        current_worker.get().autograd.require(context_id)


def gradients_of(params: Sequence[torch.Tensor], context_id: int | None) -> list[torch.Tensor | None]:
    """The gradient of each parameter, or None if it has none. ``context_id=None`` means ``.grad``."""
    if context_id is None:
        found = [param.grad for param in params]
        use([gradient for gradient in found if gradient is not None])
        return found
    kept = current_worker.get().autograd.gradients_here(context_id)
    return list(map(kept.get, params))


def replace(params: Sequence[torch.Tensor], gradients: Gradients, context_id: int) -> None:
    """Replace gradients in a context. None keeps the gradient of that parameter."""
    new = {param: gradient.detach() for param, gradient in zip(params, gradients, strict=True) if gradient is not None}
    if new:
        current_worker.get().autograd.put_gradients(context_id, new)


class as_grad:
    """A block in which ``.grad`` is the gradient of the context. Afterwards ``.grad`` has its old value.

    ``as`` gives whether the context has a gradient for any of the parameters; True without a context.
    """

    __slots__ = ("_before", "_context_id", "_params")

    def __init__(self, params: Sequence[torch.Tensor], context_id: int | None) -> None:
        self._params = params
        self._context_id = context_id
        self._before: Gradients = ()

    def __enter__(self) -> bool:
        if self._context_id is None:
            return True
        given = gradients_of(self._params, self._context_id)
        self._before = list(map(_grad, self._params))
        try:
            for param, gradient in zip(self._params, given, strict=True):
                param.grad = gradient
        except BaseException:
            self.__exit__()
            raise
        return any(map(is_not, given, _NONES))

    def __exit__(self, *_: object) -> None:
        if self._context_id is None:
            return
        for param, gradient in zip(self._params, self._before, strict=True):
            param.grad = gradient


@torch.no_grad()
def add_to_grad(params: Sequence[torch.Tensor], context_id: int) -> None:
    """Add the gradients of a context to ``.grad``, as a backward pass does."""
    for param, gradient in zip(params, gradients_of(params, context_id), strict=True):
        if gradient is None:
            continue
        if param.grad is None:
            param.grad = gradient.clone()  # the context may add to its own gradient later
        elif param.grad.layout is not torch.strided:
            param.grad = gradient + param.grad  # torch adds dense and sparse only in this order
        else:
            param.grad += gradient
