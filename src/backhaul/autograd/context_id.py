"""ContextId: the id of a context, which is also a handle to it."""

from __future__ import annotations

from typing import Any, Literal

import torch

from backhaul import current
from backhaul.autograd.contexts import Record
from backhaul.autograd.entry import Root
from backhaul.autograd.graph import Node
from backhaul.errors import ProtocolError


class ContextId(int):
    """The id of a context: an int, and a handle to the context on the current worker.

    It can be sent to other workers in the arguments of calls.
    """

    @classmethod
    def lift(cls, id: Any) -> ContextId:
        """One that another worker has sent."""
        if type(id) is not int:
            raise ProtocolError(f"{id!r:.50} is not the id of a context")
        return cls(id)

    def backward(
        self,
        roots: Root | list[Root] | tuple[Root, ...],
        *,
        retain_graph: bool = False,
        grad_tensors: Any = None,
        timeout: float | None = None,
        accumulate: Literal["context", "grad"] = "context",
    ) -> None:
        """See `backhaul.autograd.backward`."""
        current.worker().autograd.backward(self, roots, retain_graph, grad_tensors, timeout, accumulate)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """See `backhaul.autograd.get_gradients`."""
        record = self._record()
        with record.lock:
            return dict(record.gradients)

    @property
    def sends(self) -> dict[int, Node]:
        """The graph nodes of messages that this worker has sent, by message id."""
        return self._record().sent()

    @property
    def recvs(self) -> dict[int, Node]:
        """The graph nodes of messages that this worker has received, by message id."""
        return dict(self._record().recvs)

    @property
    def workers(self) -> set[int]:
        """Ranks of the workers to which this one has sent messages of the context."""
        return set(self._record().told)

    def _record(self) -> Record:
        record: Record = current.worker().autograd.contexts.find(self)
        return record
