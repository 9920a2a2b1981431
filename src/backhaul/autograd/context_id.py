"""ContextId: the id of a context, and a handle to it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from backhaul import current_worker
from backhaul.agent.agent import Agent
from backhaul.autograd.contexts import Record
from backhaul.autograd.entry import Root
from backhaul.autograd.graph import Node
from backhaul.drawing.drawing import Drawing, LayoutName, check_path
from backhaul.drawing.picture import mentioned
from backhaul.errors import BackhaulError, OptionError, ProtocolError
from backhaul.wire.messages import Inspect

_PATIENCE = 3.0
"""Seconds within which all other workers of a context must send their parts of the drawing."""

Answer = dict[str, Any]


class ContextId(int):
    """The id of a context: an int, and a handle to the context on the current worker.

    It can be sent to other workers in the arguments of calls.
    """

    @classmethod
    def lift(cls, id: Any) -> ContextId:
        """The id that another worker has sent. Raises `ProtocolError` if it is not an int."""
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
        current_worker.get().autograd.backward(self, roots, retain_graph, grad_tensors, timeout, accumulate)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """See `backhaul.autograd.get_gradients`."""
        self._record().unread = False
        found: dict[torch.Tensor, torch.Tensor] = current_worker.get().autograd.gradients_here(self)
        return found

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

    def draw(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        roots: torch.Tensor | Sequence[torch.Tensor] | None = None,
        layout: LayoutName | None = None,
        timeout: float = _PATIENCE,
    ) -> Drawing:
        """Draw the graph that the workers of this context have recorded. A notebook displays the returned drawing.

        - ``path``: a file to write, .svg, .dot or .gv; .png and .pdf need Graphviz.
        - ``roots``: tensors of this worker, such as the loss, whose graph is drawn as well. The default is the roots of
          the latest backward pass: before a pass, Backhaul does not know where a received tensor is used.
        - ``layout``: ``"dot"`` for Graphviz, ``"own"`` for Backhaul's own; by default Graphviz if it is installed.
        - ``timeout`` in seconds: a worker that does not answer in time is drawn as silent.

        Raises `ContextError` after the context's end.
        """
        if path is not None:
            check_path(path)
        if isinstance(roots, torch.Tensor):
            roots = [roots]
        elif roots is not None and not all(isinstance(root, torch.Tensor) for root in roots):
            raise OptionError("roots must be a tensor of this worker, or a list of such tensors")
        self._record()
        drawing = Drawing(_gather(current_worker.get().agent, int(self), roots, timeout), layout)
        if path is not None:
            drawing.save(path)
        return drawing

    def _repr_svg_(self) -> str | None:
        """The drawing, for notebooks. None if there is no such context here: the notebook then shows the number."""
        try:
            return self.draw().svg
        except BackhaulError:
            return None

    def _record(self) -> Record:
        record: Record = current_worker.get().autograd.contexts.find(self)
        return record


def _gather(agent: Agent, id: int, roots: Sequence[torch.Tensor] | None, timeout: float) -> list[Answer]:
    """The parts of a context from all its workers. A worker that does not answer in time gets a part that says so."""
    deadline = time.monotonic() + timeout
    mine: Answer = agent.inspect("context", {"id": id} if roots is None else {"id": id, "roots": list(roots)})
    parts: dict[int, Answer] = {agent.me.id: mine}
    if not agent.trust.shows:  # peers do not show their graphs
        return [mine, *(_silent(rank, _name(mine, rank), "in a federation") for rank in mentioned(mine))]
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
    asked: dict[int, str] = {}

    def ask(part: Answer) -> None:
        for rank in mentioned(part):
            if rank not in parts and rank not in asked:
                asked[rank] = _name(part, rank)
                agent.pool.run(partial(_ask, agent, id, rank, asked[rank], deadline, answers))

    ask(mine)
    with agent.serving.pause(lambda: {"kind": "drawing", "ranks": sorted(asked.keys() - parts.keys())}):
        while asked.keys() - parts.keys():
            try:
                rank, part = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            parts[rank] = part
            ask(part)
    late = f"within {timeout:g} s"
    return [*parts.values(), *(_silent(rank, name, late) for rank, name in asked.items() if rank not in parts)]


def _ask(
    agent: Agent, id: int, rank: int, name: str, deadline: float, answers: queue.SimpleQueue[tuple[int, Answer]]
) -> None:
    try:
        info = agent.membership.find(rank).info
        seconds = max(0.0, deadline - time.monotonic())
        part = agent.insist(info, lambda number: Inspect(number, "context", {"id": id}), "its part", seconds)
    except BackhaulError as error:
        part = _silent(rank, name, str(error))
    answers.put((rank, part))


def _silent(rank: int, name: str, why: str) -> Answer:
    return {"rank": rank, "worker": name, "known": False, "error": why}


def _name(part: Answer, rank: int) -> str:
    return dict(part["workers"]).get(rank, f"rank {rank}") if "workers" in part else f"rank {rank}"
