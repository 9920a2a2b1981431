"""LocalPass: a pass at one worker, with the gradients that have arrived and the waiting threads. Drives `schedule`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from itertools import repeat
from operator import add, is_not
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from backhaul.agent.activity import Description
from backhaul.agent.agent import Agent
from backhaul.agent.listening import Listener
from backhaul.agent.observing import GateOpens, GateWaits
from backhaul.autograd import joint_hooks
from backhaul.autograd.contexts import Record
from backhaul.autograd.functions import ROOT, Recv, nothing_on, passes_on, rank_of
from backhaul.autograd.graph import Component, Node, put_gates_last
from backhaul.autograd.schedule import Candidate, Schedule, Source
from backhaul.devices.streams import use
from backhaul.errors import ContextError, RpcTimeoutError, fresh, kept
from backhaul.ids import WorkerInfo
from backhaul.trust.checking import Box, Charges
from backhaul.wire.messages import Pass, Shortcut

Gradients = Sequence[torch.Tensor | None]
"""The gradients of a Send's inputs: one gradient, except for the Send of the roots."""


Starts = tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]
"""The edges or tensors from which torch's engine starts, and their gradients."""

MOST_SHORTCUTS = 64
"""The most shortcuts in a message. Beyond them, gradients go through the starter, which has more."""


_OVER = ContextError("the autograd context of this backward pass has been left")

_NONES = repeat(None)
# `GradientEdge` from a plain tuple, without its Python constructor. Newer versions of torch have more fields.
_gradient_edge = partial(tuple.__new__, GradientEdge)
_ENDINGS = repeat((None,) * (len(GradientEdge._fields) - 2))


def _here(gradients: Gradients, agent: Agent) -> Gradients:
    """The gradients, ready on the current streams of the calling thread."""
    if agent.devices is not None:
        agent.devices.streams.catch_up()
        use([gradient for gradient in gradients if gradient is not None])
    return gradients


class LocalPass:
    """One worker's part of a pass. Thread-safe."""

    deadline = math.inf
    check_every = math.inf
    round = 0
    listener: Listener | None = None
    """The thread of `backward`, at the worker that started the pass, when it has begun to listen."""
    _changed: threading.Condition | None = None  # made when a thread first waits
    # Guarded by _lock:
    _schedule: Schedule | None = None
    _carried: tuple[list[int], list[int]] | None = None  # what other workers have consumed and emitted
    _asked = False
    _error: BaseException | None = None

    def __init__(
        self, backward: Pass, record: Record, root: torch.Tensor | None = None, charges: Charges | None = None
    ) -> None:
        """``root`` is the output of the Send of the roots, at the worker that starts the pass.

        If there are ``charges``, waiting gradients are charged to the peers that sent them.
        """
        self.backward = backward
        self.starter = rank_of(backward.id)
        self.record = record
        self._root = root
        self.filled: list[torch.Tensor] = []
        """The leaves of this worker whose ``.grad`` the pass has changed; filled only if there are GPUs."""
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._charged = None if charges is None else Box(charges)
        # Gradients that have arrived and are not consumed yet:
        self._box: dict[int, Gradients] = {} if self._charged is None else self._charged
        self._waiting: dict[int, int] = {}  # sources that gates wait for -> the rank that will send their gradients
        self._gave_to: set[int] = set()  # ranks to which this worker has given work of this pass
        self._got_from: set[int] = set()  # ranks that have given work of this pass to this worker
        self.shortcuts: dict[int, Shortcut] = {}
        """The shortcuts that this worker knows and has not used, by source."""
        self._passed: dict[int, int] = {}  # at the starter: the destination of a shortcut -> its source

    def arrive(self, gradients: Mapping[int, Gradients], peer: int | None = None) -> tuple[list[Component], bool]:
        """Add gradients of a peer, or of the roots. Returns what can run now, and whether to ask to resolve the pass.

        Raises `QuotaError` if too many gradients of that peer wait.
        """
        with self._lock:
            if self._error is not None:
                return [], False
            if self._charged is not None and peer is not None:
                self._charged.charge(gradients, peer)
            self._box.update(gradients)
            schedule = self._schedule or self._plan()
            if not schedule.sources >= gradients.keys():
                self._revive(schedule, gradients)
            components = schedule.arrive(gradients, self._source)
            for component in components:
                if len(component.sources) > 1:
                    self._prepare(component, schedule)
            ask = schedule.must_resolve and not self._asked
            if ask:
                self._asked = True
            if self._changed is not None or self._waiting:
                self._notify()
        return components, ask

    def _revive(self, schedule: Schedule, sources: Iterable[int]) -> None:
        """Make spent Sends candidates again, for a second pass over a graph that was not retained.

        Torch allows such a pass if the first one had nothing to free.
        """
        unspent = self.record.unspent
        known = schedule.sources
        for source in sources:
            if source not in known and source not in unspent:
                schedule.revive(dict(self.record.sends))
                return

    def _prepare(self, component: Component, schedule: Schedule) -> None:
        """Decide whether a component of several sources waits."""
        component.waits = component.in_order or schedule.waits(component)
        if component.waits:
            put_gates_last(component)
        component.nodes = ()

    def _source(self, source: int) -> Candidate:
        if source == ROOT:
            return Source(self.output(ROOT).grad_fn, ROOT)
        return self.record.sends[source]

    def _edges(self, source: int) -> Sequence[tuple[Any, int]]:
        """The edges of a source to what its gradients are for."""
        node: Any = self.record.sends[source].node if source != ROOT else self.output(ROOT).grad_fn
        return node.next_functions  # type: ignore[no-any-return]

    def output(self, source: int) -> torch.Tensor:
        """The dummy output of a source."""
        if source == ROOT and self._root is not None:
            return self._root
        return self.record.sends[source].output

    def passed_on(self, component: Component) -> list[tuple[Recv, torch.Tensor]] | None:
        """Take the gradients of a component that is just received tensors, sent on unchanged. They go back unchanged.

        There must be as many Recvs as sources. Returns None if torch's engine must run, for example for a hook.
        """
        found: list[tuple[Recv, torch.Tensor]] = []
        box = self._box
        with self._lock:
            for source in component.sources:
                gradients = box.get(source, ())
                edges = self._edges(source)
                if len(gradients) != 1 or gradients[0] is None or len(edges) != 1:
                    return None
                node = edges[0][0]
                # Each source leads to a Recv, and all Recvs are reached, so no two sources lead to the same one.
                if node not in component.recvs or not passes_on(node):
                    return None
                found.append((node.recv, gradients[0]))
            for source in component.sources:
                del box[source]
        return found

    def find_shortcuts(self, me: int) -> None:
        """At the starter: find the tensors that were sent on unchanged, and the workers that can get their gradients.

        A tensor must be alone in its message, both when it came and when it was sent on, since the gradients of one
        message arrive together.
        """
        sends = self.record.sends
        with self._lock:
            passed = [] if self._schedule is None else self._schedule.passed_on()
            for source, node in passed:
                send = sends[source]
                recv: Recv = node.recv
                following = sends.get(source + 1)
                if (
                    send.message == source
                    and (following is None or following.message != source)
                    and send.node.next_functions[0][0] is node  # the tensor was alone in its message when it came
                    and me not in (send.to.id, recv.sender.id)
                    and recv.context == self.backward.context
                    and passes_on(node)
                ):
                    self.shortcuts[source] = Shortcut(source, recv.sender.id, recv.message)
                    self._passed[recv.message] = source
                    # That worker will get its work from others, but its report comes to the starter, which must notice
                    # its loss.
                    self._gave_to.add(recv.sender.id)

    def onward(self, source: int, recv: Recv | None) -> tuple[Shortcut, ...]:
        """The shortcuts for a message with gradients, which this worker sends because those of ``source`` came.

        ``recv`` is the Recv of the gradients, if there is only one. From there on, gradients only reach tensors that
        the starter sent earlier, so later shortcuts are left out.
        """
        found = list(self.shortcuts.values())
        if rank_of(source) != self.starter:
            source = recv.message if recv is not None and recv.sender.id == self.starter else ROOT
        if source != ROOT:
            found = [each for each in found if each.source < source]
        if len(found) > MOST_SHORTCUTS:
            found = nlargest(MOST_SHORTCUTS, found, key=lambda each: each.source)
        return tuple(found)

    def reported(self, emitted: Iterable[int]) -> None:
        """At the starter: note that gradients were sent for these. If a shortcut led to one, its source is spent."""
        if self._passed and not self.backward.retain_graph:
            self.record.spend(self._passed[each] for each in emitted if each in self._passed)

    def carry(self, consumed: Iterable[int], emitted: Iterable[int]) -> None:
        """Keep the report of another worker, which came with gradients. This worker's next report includes it."""
        with self._lock:
            if self._carried is None:
                self._carried = [], []
            self._carried[0].extend(consumed)
            self._carried[1].extend(emitted)

    def take_carried(self, consumed: list[int], emitted: list[int]) -> None:
        """Add the reports that this worker carries for others to its own report."""
        if self._carried is None:
            return
        with self._lock:
            carried, self._carried = self._carried, None
        if carried is not None:
            consumed += carried[0]
            emitted += carried[1]

    def starts(self, component: Component) -> Starts:
        """The starts for the run of a component. Raises what the pass has failed with.

        Usually a run starts right behind the Sends. The Sends themselves are run only to wait, to pass on that there is
        no gradient, or because hooks over several tensors do not count a tensor at which a run starts.
        """
        sources = component.sources
        if not component.waits and not joint_hooks.are_there():
            box = self._box
            values: list[Any] = []
            edges: list[tuple[Any, ...]] = []
            with self._lock:
                if self._error is not None:
                    raise fresh(self._error)
                for source in sources:
                    values += box[source]
                    edges += self._edges(source)
                if all(map(is_not, values, _NONES)):
                    for source in sources:
                        del box[source]
                    return tuple(map(_gradient_edge, map(add, edges, _ENDINGS))), tuple(values)
        outputs = tuple(map(self.output, sources))
        return outputs, tuple(nothing_on(output.device) for output in outputs)

    def take_part(self, sources: Sequence[int]) -> dict[Node, list[int]]:
        """Note that these sources take part. Returns the Recvs, with outputs, that they reach for the first time."""
        with self._lock:
            if self._error is not None:
                return {}
            schedule = self._schedule or self._plan()
            self._revive(schedule, sources)
            return schedule.take_part(sources)

    def resolve(self) -> list[Component]:
        """All sources that take part are known. Returns the components that can be run now."""
        with self._lock:
            if self._error is not None:
                return []
            schedule = self._schedule or self._plan()
            components = schedule.resolve()
            for component in components:
                if len(component.sources) > 1:
                    self._prepare(component, schedule)
            return components

    def take(self, source: int, agent: Agent, check: Callable[[], None]) -> Gradients:
        """Wait for the gradients of a source, and take them. Raises what the pass has failed with.

        Calls ``check`` every ``check_every`` seconds. Raises `RpcTimeoutError` at the deadline.
        """
        with self._lock:
            if source in self._box or self._error is not None:
                return _here(self._take(source), agent)
            to = self.record.sends[source].to
            self._waiting[source] = to.id
            listener = self.listener
            if listener is None or not listener.is_mine():
                self._changed = self._changed or threading.Condition(self._lock)
                listener = None
        began = time.perf_counter_ns()
        observers = agent.observers
        if observers:
            observers.emit(GateWaits(backward=self.backward.id, source=source))
        with agent.serving.pause(partial(self._describe, source, to)):
            while True:
                timeout = min(self.deadline - time.monotonic(), self.check_every, threading.TIMEOUT_MAX)
                self._wait_for(source, agent, listener, timeout)
                with self._lock:
                    if source in self._box or self._error is not None:
                        del self._waiting[source]
                        self.record.note_wait(self.backward.id, source, began)
                        if observers:
                            observers.emit(GateOpens(backward=self.backward.id, source=source))
                        return _here(self._take(source), agent)
                now = time.monotonic()
                if now >= self.deadline:
                    self.record.note_wait(self.backward.id, source, began)
                    raise RpcTimeoutError(
                        "backward ran for more than its timeout: the gradients of a tensor that was sent to worker "
                        f"{to.name!r} have not come back"
                    )
                check()

    def _describe(self, source: int, to: WorkerInfo) -> Description:
        return {
            "kind": "gate",
            "peer": to.name,
            "context": self.backward.context,
            "backward": self.backward.id,
            "source": source,
        }

    def _wait_for(self, source: int, agent: Agent, listener: Listener | None, timeout: float) -> None:
        """Wait at a gate. The thread of `backward` reads messages meanwhile. Other threads wait to be notified."""

        def done() -> bool:
            return source in self._box or self._error is not None

        if listener is None:
            with self._lock:
                if self._changed is not None:
                    self._changed.wait_for(done, timeout)
            return
        end = time.monotonic() + timeout
        while not done() and (left := end - time.monotonic()) > 0:
            agent.listeners.wait(listener, done, left)
            agent.listeners.hear(listener)

    def _notify(self) -> None:
        """Wake the threads that wait at gates. The caller holds ``_lock``."""
        if self._changed is not None:
            self._changed.notify_all()
        if self.listener is not None and self._waiting:
            self.listener.wake()

    def _take(self, source: int) -> Gradients:
        if self._error is not None:
            raise fresh(self._error)
        return self._box.pop(source)

    def giving_to(self, rank: int) -> None:
        """Note that this worker is about to give work of this pass to another. Raises what the pass has failed with."""
        if rank in self._gave_to and self._error is None:
            return
        with self._lock:
            if self._error is not None:
                raise fresh(self._error)
            self._gave_to.add(rank)

    def require_going(self) -> None:
        """Raise what the pass has failed with, or `RpcTimeoutError` after its deadline."""
        if self._error is not None:
            raise fresh(self._error)
        if time.monotonic() >= self.deadline:
            raise RpcTimeoutError("backward ran for more than its timeout: another pass is using the .grad of a leaf")

    def got_from(self, rank: int) -> None:
        """Note that a worker has given work of this pass to this one."""
        self._got_from.add(rank)

    def has(self, source: int) -> bool:
        """Whether the gradients of a source are here."""
        return source in self._box

    def fail(self, error: BaseException, worker: str) -> bool:
        """End the pass with an error, which waiting threads raise. Returns False if it was over already."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = kept(error, worker)
            self._box.clear()
            self._schedule = None
            self._notify()
        with self.record.lock:
            if not self.record.is_over(self.backward.id):
                self.record.aborted.add(self.backward.id)
        return True

    def end(self) -> bool:
        """End the pass because its context is over. Returns False if threads wait in it; then call `fail`."""
        with self._lock:
            if self._waiting:
                return False
            if self._error is None:
                self._error = _OVER
                self._box.clear()
                self._schedule = None
            return True

    def depends_on(self, rank: int) -> bool:
        """Whether the pass needs that worker to succeed, as far as this worker knows."""
        with self._lock:
            return self._error is None and (
                rank in self._gave_to or rank in self._got_from or rank in self._waiting.values()
            )

    @property
    def partners(self) -> set[int]:
        """Ranks that have got work of this pass from here, or have given some."""
        with self._lock:
            return self._gave_to | self._got_from

    @property
    def helpers(self) -> set[int]:
        """The ranks to which this worker has given work, or for which it waits."""
        with self._lock:
            return self._gave_to | set(self._waiting.values())

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def missing(self) -> dict[int, int]:
        """Sources that runs need to begin -> the rank of the worker that will send their gradients."""
        with self._lock:
            sources = [] if self._schedule is None else self._schedule.missing
        return {source: self.record.sends[source].to.id for source in sources if source in self.record.sends}

    @property
    def gates(self) -> int:
        """The number of threads that wait at gates."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[int]:
        """The sources for which gates wait now."""
        with self._lock:
            return list(self._waiting)

    def _plan(self) -> Schedule:
        sources: dict[int, Candidate] = dict(self.record.unspent)
        if self._root is not None:
            sources[ROOT] = self._source(ROOT)
        self._schedule = Schedule(sources)
        return self._schedule
