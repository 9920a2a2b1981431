"""Distributed autograd: one backward pass over all workers that took part in a forward pass.

The names and meanings are those of ``torch.distributed.autograd``::

    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)

Gradients belong to the context, and stay on the worker of their leaf. All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import Token
from typing import Literal

import torch

from backhaul import current_worker as _current_worker
from backhaul.autograd.context_id import ContextId
from backhaul.autograd.contexts import current_context as _context
from backhaul.autograd.entry import Root
from backhaul.eager import eager
from backhaul.errors import ContextError

__all__ = ["ContextId", "backward", "context", "get_gradients"]


class context:
    """A context manager that records the calls inside its block. ``as`` gives the context's id.

    At the end of the block all workers forget what they have recorded, and the gradients.
    """

    @eager
    def __enter__(self) -> ContextId:
        if _context.get() is not None:
            raise ContextError(
                "Already have an autograd context id for this thread. Contexts cannot be nested, and a remote function "
                "runs in its caller's context: remove the inner context, or open it on another thread"
            )
        self._autograd = _current_worker.get().autograd
        self._id = self._autograd.contexts.new().id
        self._token: Token[int | None] = _context.set(self._id)
        return ContextId(self._id)

    @eager
    def __exit__(self, *_: object) -> None:
        _context.reset(self._token)
        self._autograd.leave(self._id)


@eager
def backward(
    context_id: int,
    roots: Root | Sequence[Root] | None = None,
    retain_graph: bool = False,
    *,
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    timeout: float | None = None,
    accumulate: Literal["context", "grad"] = "context",
) -> None:
    """Compute the gradients of the roots with respect to all leaves, on all workers. Returns when all are computed.

    - ``roots`` are tensors of this worker, or RRefs to tensors. Roots that do not require grad are skipped.
    - ``retain_graph``: keep the graph, for another pass over it.
    - ``grad_tensors``: a gradient for each root; None, or no list at all, means 1 and is for scalars only.
    - ``timeout`` in seconds; None or 0 means no limit.
    - ``accumulate="grad"`` adds the gradients to the leaves' ``.grad`` on each worker, for ordinary optimizers,
      instead of keeping them in the context for `get_gradients`.

    Raises what a backward function raised on any worker, with the traceback from there as the cause; `WorkerLostError`
    if a worker that takes part is lost; `RpcTimeoutError`; `ContextError` if there is no such context here.
    """
    _current_worker.get().autograd.backward(context_id, roots, retain_graph, grad_tensors, timeout, accumulate)


@eager
def get_gradients(context_id: int) -> Mapping[torch.Tensor, torch.Tensor]:
    """The gradients that passes of this context have accumulated for the leaves of this worker."""
    return ContextId(context_id).gradients()
