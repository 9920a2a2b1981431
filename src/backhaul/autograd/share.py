"""Share: one worker's share of one pass, with the threads that wait in it. Drives `part`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import torch

from backhaul.agent.serving import Serving
from backhaul.autograd.contexts import Record
from backhaul.autograd.functions import ROOT
from backhaul.autograd.graph import Component, Node
from backhaul.autograd.part import Part
from backhaul.errors import RpcTimeoutError, fresh, kept
from backhaul.wire.messages import Pass

Gradients = Sequence[torch.Tensor | None]


class Share:
    """Thread-safe."""

    def __init__(self, backward: Pass, record: Record, root: torch.Tensor | None = None) -> None:
        """``root`` is the output of the Send of the roots, where the pass is started."""
        self.backward = backward
        self.record = record
        self._root = root
        self.deadline = math.inf
        self.check_every = math.inf
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._part: Part | None = None
        self._box: dict[int, Gradients] = {}  # have arrived, and are to be consumed
        self._waiting: dict[int, int] = {}  # messages that gates wait for -> rank of who is to send them
        self._gave_to: set[int] = set()  # ranks that have got work of this pass from here
        self._asked = False
        self._error: BaseException | None = None
        self.round = 0

    def arrive(self, source: int, gradients: Gradients) -> tuple[Component | None, bool]:
        """Gradients are here: what can be run now, and whether the pass is to be resolved first."""
        with self._changed:
            if self._error is not None:
                return None, False
            self._box[source] = gradients
            part = self._planned()
            component = part.arrive(source, (self.output(source).grad_fn,))
            ask = part.must_resolve and not self._asked
            self._asked = self._asked or ask
            self._changed.notify_all()
        return component, ask

    def output(self, source: int) -> torch.Tensor:
        """The dummy output of a source."""
        if source == ROOT and self._root is not None:
            return self._root
        return self.record.sends[source].output

    def take_part(self, sources: Sequence[int]) -> list[Node]:
        """Recvs that are newly known to take part, since these sources do."""
        with self._changed:
            return [] if self._error is not None else self._planned().take_part(sources)

    def resolve(self) -> list[Component]:
        """All that takes part is known: what can be run now."""
        with self._changed:
            return [] if self._error is not None else self._planned().resolve()

    def take(self, message: int, serving: Serving, check: Callable[[], None]) -> Gradients:
        """The gradients of a message, when they have come. Raises what the pass has failed with.

        Calls ``check`` every ``check_every`` seconds, and raises `RpcTimeoutError` at the deadline.
        """
        with self._changed:
            if message in self._box or self._error is not None:
                return self._take(message)
            self._waiting[message] = self.record.sends[message].to.id
        with serving.pause():
            while True:
                timeout = min(self.deadline - time.monotonic(), self.check_every, threading.TIMEOUT_MAX)
                with self._changed:
                    if self._changed.wait_for(lambda: message in self._box or self._error is not None, timeout):
                        del self._waiting[message]
                        return self._take(message)
                if time.monotonic() >= self.deadline:
                    raise RpcTimeoutError(
                        f"backward ran for more than its timeout: the gradients of message {message} have not come "
                        f"back from worker {self.record.sends[message].to.name!r}"
                    )
                check()

    def _take(self, message: int) -> Gradients:
        if self._error is not None:
            raise fresh(self._error)
        return self._box.pop(message)

    def giving_to(self, rank: int) -> None:
        """A worker is about to get work of this pass from here. Raises what the pass has failed with."""
        with self._changed:
            if self._error is not None:
                raise fresh(self._error)
            self._gave_to.add(rank)

    def fail(self, error: BaseException, worker: str) -> bool:
        """The pass is over, and whoever waits in it is to raise. False if it was over already."""
        with self._changed:
            if self._error is not None:
                return False
            self._error = kept(error, worker)
            self._box.clear()
            self._part = None
            self._changed.notify_all()
        with self.record.lock:
            self.record.aborted.add(self.backward.id)
        return True

    def depends_on(self, rank: int) -> bool:
        """Whether the pass cannot end well without that worker, as far as is known here."""
        with self._changed:
            return self._error is None and (rank in self._gave_to or rank in self._waiting.values())

    @property
    def helpers(self) -> set[int]:
        """Ranks that have got work of this pass from here, or are waited for."""
        with self._changed:
            return self._gave_to | set(self._waiting.values())

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def gates(self) -> int:
        """How many threads wait."""
        return len(self._waiting)

    def _planned(self) -> Part:
        if self._part is None:
            sources: dict[int, Sequence[Node]] = {
                message: (send.node,) for message, send in list(self.record.sends.items())
            }
            if self._root is not None:
                sources[ROOT] = (self._root.grad_fn,)
            self._part = Part(sources, needs_leaves=not self.backward.into_grad)
        return self._part
