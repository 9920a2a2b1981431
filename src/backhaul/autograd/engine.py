"""Engine: exchanges the messages of backward passes with other workers. `runner` runs this worker's part with torch.

A pass proceeds as follows::

    backward()      runs from the roots ──► Recv.backward ──► Gradients to the sender of each message
    Gradients       runs from that Send ──► Recv.backward ──► Gradients to …          (and so on)
    each run        ──► Report to the worker that started the pass, whose ledger says when the pass is over

A component with several candidates may need the pass to be resolved first. The worker sends `Resolve` to the starter.
From there, `TakePart` messages take the routes of the later gradients, with Reports of their own. At the end `Resolved`
goes to the workers that asked.

A failure on any worker fails the whole pass. The worker that notices it tells the starter and all workers of the
context (`Failed`, which each of them passes on once), so that no thread keeps waiting.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import msgspec
import torch

from backhaul.agent.agent import Agent
from backhaul.agent.line import Line
from backhaul.agent.observing import (
    GradientsCame,
    GradientsSent,
    PassBegan,
    PassEnded,
    Planned,
    RunBegan,
    RunEnded,
)
from backhaul.autograd import functions, joint_hooks, node_hooks
from backhaul.autograd.contexts import Contexts, Record, gone
from backhaul.autograd.functions import ROOT, Recv, rank_of
from backhaul.autograd.graph import Component
from backhaul.autograd.local_pass import LocalPass
from backhaul.autograd.run import EngineRun, Mine, Outcome, Parcel
from backhaul.autograd.runner import Runner
from backhaul.autograd.started_pass import StartedPass
from backhaul.devices.streams import use
from backhaul.edges.compression import devices_of, expanded
from backhaul.errors import (
    BackhaulError,
    ContextError,
    NotInitializedError,
    ProtocolError,
    QuotaError,
    RpcTimeoutError,
    WorkerLostError,
)
from backhaul.ids import WorkerInfo
from backhaul.trust.checking import Charges, abridged, checked_all, is_sorted
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.landing import Later
from backhaul.wire.messages import (
    Check,
    Failed,
    Gradients,
    Pass,
    Report,
    Resolve,
    Resolved,
    TakePart,
)

_log = logging.getLogger(__name__)

_MAX_PASSES = 256


def _gradients(
    message: Gradients, envelope: Envelope, expected: Callable[[int], torch.device], limit: int
) -> dict[int, tuple[torch.Tensor | None]]:
    """The gradients of a message, by source. They are removed from the envelope, so that the caller holds the only
    references, and can store them without a copy.
    """
    found: dict[int, tuple[torch.Tensor | None]] = dict.fromkeys(message.sources, (None,))
    if type(envelope.tensors) is Later:
        devices = [expected(message.sources[place]) for place in message.present]
        envelope.tensors.land(devices_of(message.coded, devices) if message.coded else devices)
    if message.coded:
        envelope.tensors[:] = expanded(message.coded, envelope.tensors, limit)
    for place, gradient in zip(message.present, envelope.tensors, strict=True):
        found[message.sources[place]] = (gradient,)
    envelope.tensors.clear()
    return found


def _on(device: torch.device, gradients: tuple[torch.Tensor | None]) -> tuple[torch.Tensor | None]:
    (gradient,) = gradients
    return (None if gradient is None else gradient.to(device),)


class Engine:
    """One worker's side of backward passes, both its own and those of other workers. Thread-safe."""

    def __init__(self, agent: Agent, contexts: Contexts, anchor: torch.Tensor) -> None:
        self.agent = agent
        self._observers = agent.observers
        self._me = agent.me
        self._contexts = contexts
        self._doubts = not agent.trust.believes
        self._charges = Charges(agent.options.message_limit) if self._doubts else None
        self._runner = Runner(agent, anchor, self)
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._started: dict[int, StartedPass] = {}  # passes that this worker has started
        patience = agent.options.unresponsive_after
        self._check_every = math.inf if patience is None else patience / 4
        for message, handler in (
            (Gradients, self._on_gradients),
            (TakePart, self._on_take_part),
            (Resolve, self._on_resolve),
            (Resolved, self._on_resolved),
            (Report, self._on_report),
            (Failed, self._on_failed),
        ):
            agent.register(message, partial(self._handle, handler))
        agent.register(Check, self._on_check)

    def backward(
        self,
        record: Record,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        into_grad: bool,
        timeout: float,
    ) -> None:
        """Run a pass from these roots, with these gradients. Returns when it is over on all workers.

        Raises what the pass has failed with, or `RpcTimeoutError` after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        started = self._begin(record, functions.start(roots), retain_graph, into_grad, deadline)
        local = started.local
        record.roots = list(map(weakref.ref, roots))
        began = perf_counter_ns()
        failure: BaseException | None = None
        if self._observers:
            self._observers.emit(PassBegan(context=record.id, backward=local.backward.id))
        try:
            with self.agent.listeners.listen(local.backward.id, record.workers) as listener:
                started.listener = local.listener = listener
                components, ask = local.arrive({ROOT: gradients})
                self._find_shortcuts(local)
                if self._observers:
                    self._observers.emit(Planned(backward=local.backward.id))
                if ask:
                    self._ask(started, self._me.id)
                for component in components:
                    self.run(local, component)
                with self.agent.serving.pause(started.describe):
                    if not started.wait(
                        self.agent,
                        listener,
                        deadline,
                        partial(self.run, local),
                        self._check_every,
                        lambda: self.check(local),
                    ):
                        busy = ", ".join(f"rank {rank}" for rank in started.busy)
                        raise RpcTimeoutError(
                            f"backward ran for more than its timeout of {timeout:g} s"
                            + (f": {busy} has gradients to work on" if busy else "")
                        )
            self._make_ready(local)
        except BaseException as error:
            failure = error
            self.fail(local, error)
            self.agent.listeners.read_later(record.workers())
            raise
        finally:
            started.listener = local.listener = None
            record.note_pass(local.backward.id, began, failure)
            failure = None  # it refers to this frame, which would be a reference cycle
            if self._observers:
                self._observers.emit(PassEnded(context=record.id, backward=local.backward.id, failed=local.failed))
            with self._lock:
                del self._started[local.backward.id]
            with record.lock:
                record.passes.pop(local.backward.id, None)

    def _make_ready(self, local: LocalPass) -> None:
        """After the pass, make ``.grad`` ready on the current streams of the calling thread."""
        if self.agent.devices is not None:
            self.agent.devices.streams.catch_up()
            use([leaf.grad for leaf in local.filled if leaf.grad is not None])

    def _begin(
        self, record: Record, root: torch.Tensor, retain_graph: bool, into_grad: bool, deadline: float
    ) -> StartedPass:
        with self._lock:
            id = self._contexts.new_id()
            floor = min([id, *(other for other, r in self._started.items() if r.local.record is record)])
            local = LocalPass(Pass(id, record.id, floor, retain_graph, into_grad), record, root, self._charges)
            local.deadline, local.check_every = deadline, self._check_every
            started = self._started[id] = StartedPass(local, doubts=self._doubts)
        with record.lock:
            over = record.over
            if not over:
                record.raise_floor(self._me.id, floor)
                record.passes[id] = local
        if over:
            with self._lock:
                del self._started[id]
            raise gone(record.id, self._me)
        return started

    def _find_shortcuts(self, local: LocalPass) -> None:
        """Find the gradients of a pass that starts here that need not come through this worker."""
        if self._doubts or self.agent.execution.edges is not None or node_hooks.are_there() or joint_hooks.are_there():
            return
        if local.record.sends:
            local.find_shortcuts(self._me.id)

    def run(self, local: LocalPass, component: Component) -> None:
        """Run a component, and report. Does not raise: an error fails the pass."""
        devices = self.agent.devices
        if devices is None:
            self._run_and_report(local, component)
            return
        listener = local.listener
        if listener is None or not listener.is_mine():
            with devices.streams.handling():
                self._run_and_report(local, component)
            return
        # This is the user's thread, with the streams that the user has chosen.
        devices.streams.catch_up()
        self._run_and_report(local, component)
        devices.streams.leave_word()

    def _run_and_report(self, local: LocalPass, component: Component) -> None:
        """Run a component and the components that it starts on this worker, and report once."""
        consumed: list[int] = []
        emitted: list[int] = []
        late: Parcel | None = None
        following: Component | None = component
        while following is not None:
            consumed += following.sources
            outcome = self._run_observed(local, following) if self._observers else self._run_one(local, following)
            if outcome is None:
                return
            emitted += outcome.emitted
            late = outcome.late
            try:
                following = self._follow(local, outcome.mine) if outcome.mine else None
            except BaseException as error:
                self.fail(local, error)
                return
        local.take_carried(consumed, emitted)
        if late is None:
            self._report(local, False, consumed, emitted)
            return
        if self.agent.devices is not None:
            self.agent.devices.streams.catch_up()  # torch ran the Recvs on the streams of their forward pass
        if local.starter == self._me.id:
            message = late.message(local.backward)
        else:
            message = late.message(local.backward, tuple(consumed), tuple(emitted))
        if self._observers:
            self._observers.emit(GradientsSent(backward=local.backward.id, peer=late.to.name, sources=message.sources))
        try:
            self.send(local, late.to.id, message, late.tensors)
        except BackhaulError as error:
            self.fail(local, error)
        else:
            if local.starter == self._me.id:
                self._report(local, False, consumed, emitted)

    def _run_observed(self, local: LocalPass, component: Component) -> Outcome | None:
        sources = tuple(component.sources)
        self._observers.emit(RunBegan(context=local.backward.context, backward=local.backward.id, sources=sources))
        outcome = self._run_one(local, component)
        self._observers.emit(RunEnded(backward=local.backward.id, sources=sources))
        return outcome

    def _run_one(self, local: LocalPass, component: Component) -> Outcome | None:
        """Run a component. Returns None if the run has failed, and so the pass."""
        began = perf_counter_ns()
        try:
            outcome = self._runner.run(local, component)
        except BaseException as error:
            self.fail(local, error)
            return None
        finally:
            component.leaves, component.recvs = (), {}
            local.record.ran.append(
                (local.backward.id, component.sources, began, perf_counter_ns(), component.waits, local.failed)
            )
        if not local.backward.retain_graph:
            local.record.spend(component.sources)
        if self.agent.devices is not None:  # before another thread or worker learns that the run is over
            self.agent.devices.streams.leave_word()
        return outcome

    def _follow(self, local: LocalPass, gradients: Mine) -> Component | None:
        """Use gradients of a run for this worker itself. Returns the component for the calling thread to run next."""
        if self.agent.devices is not None:
            self.agent.devices.streams.catch_up()
        components, ask = local.arrive(gradients)
        if ask:
            self._ask_to_resolve(local)
        for component in components[:-1]:
            self.agent.pool.run(partial(self.run, local, component))
        return components[-1] if components else None

    def hand_over(self, local: LocalPass, gradients: Mine) -> None:
        """Use such gradients in the middle of a run. Other threads run the components."""
        component = self._follow(local, gradients)
        if component is not None:
            self.agent.pool.run(partial(self.run, local, component))

    def require(self, local: LocalPass, recv: Recv) -> None:
        """Raise unless a Recv can be part of this pass."""
        if recv.context != local.backward.context:
            raise ContextError(
                f"a tensor from worker {recv.sender.name!r} was received in autograd context {recv.context}, and this "
                f"backward pass is of context {local.backward.context}: gradients cannot go back across contexts. Send "
                "or fetch the value again inside this context, or detach() it"
            )
        if local.record.over:
            raise gone(recv.context, self._me)

    def _report(self, local: LocalPass, resolving: bool, consumed: Iterable[int], emitted: Iterable[int]) -> None:
        """Tell the starter of the pass that a run, or a step of resolving, is over."""
        report = Report(local.backward, resolving, tuple(consumed), tuple(emitted))
        if local.starter == self._me.id:
            self._take_report(report)
            return
        try:
            self.send(local, local.starter, report)
        except BackhaulError as error:
            self.fail(local, error)

    def send(self, local: LocalPass, rank: int, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message of a pass. The starter's thread waits for messages of workers that share tensors with it."""
        edges = self.agent.execution.edges
        if edges is not None and tensors and (crossing := edges.to(self._info(rank).name)) is not None:
            leaving = crossing.gradients(tensors)
            tensors, coded = leaving.wired(leaving.tensors)
            message = msgspec.structs.replace(message, coded=coded)
        if rank == local.starter and rank in local.record.workers():
            self.agent.post_awaited(rank, message, tensors)
        else:
            self.agent.post(rank, message, tensors)

    def _take_report(self, report: Report) -> None:
        started = self._started.get(report.backward.id)
        if started is None:
            return
        if not report.resolving:
            started.local.reported(report.emitted)
        askers = started.report(report.resolving, report.consumed, report.emitted)
        # This worker comes last, because what it runs then may wait for what the others run.
        for rank in sorted(askers, key=lambda rank: rank == self._me.id):
            self._tell_resolved(started.local, rank)

    def _ask(self, started: StartedPass, rank: int) -> None:
        """Handle the request of a worker to resolve this pass."""
        begin, done = started.ask(rank)
        if done:
            self._tell_resolved(started.local, rank)
        elif begin:
            self._take_part(started.local, (ROOT,))

    def _tell_resolved(self, local: LocalPass, rank: int) -> None:
        if rank == self._me.id:
            self._run_all(local, self._resolve(local), may_wait=False)
        else:
            self.agent.post(rank, Resolved(local.backward))

    def _resolve(self, local: LocalPass) -> list[Component]:
        """The components that this worker can run after resolving. The thread of `backward` gets the roots."""
        started = self._started.get(local.backward.id)
        mine: list[Component] = []
        for component in local.resolve():
            if started is not None and component.sources[0] == ROOT:
                started.give(component)
            else:
                mine.append(component)
        return mine

    def _run_all(self, local: LocalPass, components: Sequence[Component], *, may_wait: bool) -> None:
        """Run these components, none of them behind one that waits.

        ``may_wait``: the calling thread has nothing else to do, so it may wait. A thread that waits at a gate is in the
        middle of a run, and starts no other.
        """
        inside = functions.thread.run is not None
        for number, component in enumerate(components, 1):
            last = number == len(components)
            if inside or (component.waits and not may_wait) or not last:
                self.agent.pool.run(partial(self.run, local, component))
            else:
                self.run(local, component)

    def _take_part(self, local: LocalPass, sources: Sequence[int]) -> None:
        """One step of resolving: tell the senders of the Recvs that these sources reach."""
        reached: dict[WorkerInfo, list[int]] = {}
        for node, outputs in local.take_part(sources).items():
            recv: Recv = node.recv
            self.require(local, recv)
            reached.setdefault(recv.sender, []).extend(recv.message + output for output in outputs)
        for sender, theirs in reached.items():
            local.giving_to(sender.id)
            self.agent.post(sender, TakePart(local.backward, tuple(theirs)))
        self._report(local, True, sources, [source for theirs in reached.values() for source in theirs])

    def fail(self, local: LocalPass, error: BaseException) -> None:
        """Fail the pass: wake the waiting threads, and tell the starter and all other workers."""
        if isinstance(error, NotInitializedError):  # for other workers, this means that this worker is gone
            name = self._me.name
            error = WorkerLostError(f"worker {name!r} has left the group in the middle of a backward pass", name)
        if not local.fail(error, self._me.name):
            return
        starter = local.starter
        others = (local.record.workers() | local.partners) - {self._me.id, starter}
        if starter == self._me.id:
            self._tell_failed(starter, local.backward, error)
        self.reach(
            others if starter == self._me.id else [starter, *others],
            lambda rank: self._tell_failed(rank, local.backward, error),
        )

    def reach(self, ranks: Iterable[int], tell: Callable[[int], None]) -> None:
        """Call ``tell(rank)`` for all ranks. Does not wait for new connections."""
        for rank in sorted(ranks, key=self.agent.is_connected, reverse=True):
            if self.agent.is_connected(rank):
                tell(rank)
            else:
                self.agent.pool.run(partial(tell, rank))

    def _tell_failed(self, rank: int, backward: Pass, error: BaseException) -> None:
        if rank == self._me.id:
            started = self._started.get(backward.id)
            if started is not None:
                started.fail(error)
            return
        try:
            self.agent.post_failure(rank, lambda *what: Failed(backward, *what), error)
        except BackhaulError as lost:
            _log.debug("= cannot tell rank %s that pass %s failed with %r: %s", rank, backward.id, error, lost)

    def tell(self, ranks: Iterable[int], message: Any, *, lazily: bool = False) -> None:
        """Send a one-way message to those of the workers that can be reached. ``lazily``: it is not urgent."""
        post = self.agent.post_lazily if lazily else self.agent.post

        def tell(rank: int) -> None:
            try:
                post(rank, message)
            except BackhaulError as error:
                _log.debug("= %s was not sent to rank %s: %s", type(message).__name__, rank, error)

        self.reach(ranks, tell)

    def lost(self, peer: WorkerInfo, error: WorkerLostError) -> None:
        """Fail the passes that depend on a peer whose connection has ended."""
        for record in self._contexts:
            with record.lock:
                passes = list(record.passes.values())
            for local in passes:
                if local.depends_on(peer.id) or local.starter == peer.id:
                    self.agent.pool.run(partial(self.fail, local, WorkerLostError(str(error), peer.name)))

    def abandon(self, record: Record, error: BaseException) -> None:
        """Wake the threads that wait in a context that is over."""
        with record.lock:
            passes = list(record.passes.values())
            record.passes.clear()
        for local in passes:
            mine = local.starter == self._me.id
            if not mine and local.end():
                continue
            if local.fail(error, self._me.name) and mine:
                self._tell_failed(self._me.id, local.backward, error)

    def runs(self) -> list[EngineRun]:
        """The current runs of torch's engine."""
        return self._runner.runs()

    def idle(self) -> bool:
        """Whether nothing runs here, and all passes that this worker started are over."""
        with self._lock:
            return not self._started and not self._runner.runs()

    def _handle(self, handler: Callable[[Line, Envelope, LocalPass], None], line: Line, envelope: Envelope) -> None:
        """Handle a message of a pass. An error fails the pass."""
        backward: Pass = envelope.message.backward
        local: LocalPass | None = None
        try:
            record = self._contexts.get(backward.context)
            if record is None:
                if not isinstance(envelope.message, Report | Failed):
                    raise gone(backward.context, self._me)
                return
            local = self._local_pass(record, backward, line.peer.id)
            if local is not None:
                handler(line, envelope, local)
        except Exception as error:
            if self._doubts and isinstance(error, ProtocolError | QuotaError):
                what = f"a {type(envelope.message).__name__}"
                self.agent.permissions.note(line.peer.name, what, error, size=envelope.size)
            if local is None:
                # In a federation the sender may have invented the pass. So the sender is told, and must pass it on.
                to = line.peer.id if self._doubts else rank_of(backward.id)
                self._tell_failed(to, backward, error)
            else:
                self.fail(local, error)

    def _local_pass(self, record: Record, backward: Pass, sender: int) -> LocalPass | None:
        """This worker's part of the pass in a message of ``sender``. It is made if needed; None if the pass is over."""
        starter = rank_of(backward.id)
        with record.lock:
            local = record.passes.get(backward.id)
            if local is not None:
                return local
            if record.over or starter == self._me.id or backward.id in record.aborted or record.is_over(backward.id):
                return None
            # The floor says which passes are over. In a federation only the starter itself is believed on that.
            ended = record.raise_floor(starter, 0 if self._doubts and sender != starter else backward.floor)
            full = self._doubts and len(record.passes) >= _MAX_PASSES
            if not full:
                local = record.passes[backward.id] = LocalPass(backward, record, None, self._charges)
        for old in ended:  # if a thread still waits in it, the pass has failed, and the message about that is late
            old.fail(ContextError("this backward pass is over: it failed on another worker"), self._me.name)
        if full:
            raise QuotaError(f"one context already has {_MAX_PASSES} backward passes")
        return local

    def _on_gradients(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        message: Gradients = envelope.message
        if self._doubts and not is_sorted(message.present, len(message.sources)):
            raise ProtocolError("gradients whose places are not in order")
        for source in message.sources:
            send = local.record.sends.get(source)
            # The starter may have sent the tensor on. Then a shortcut leads here from any worker.
            if send is None or (send.to.id != line.peer.id and (self._doubts or send.to.id != local.starter)):
                raise ProtocolError(f"gradients for tensor {source}, which was not sent to {line.peer.name!r}")
        if message.shortcuts:
            if self._doubts:
                raise ProtocolError("gradients with shortcuts, which a federation does not allow")
            local.shortcuts.update((each.source, each) for each in message.shortcuts)
        local.got_from(line.peer.id)
        if self._observers:
            came = GradientsCame(backward=local.backward.id, peer=line.peer.name, sources=message.sources)
            self._observers.emit(came)
        if message.consumed:
            if local.starter == self._me.id or self._doubts:
                self._on_reported(line, Report(message.backward, False, message.consumed, message.emitted))
            else:
                local.carry(message.consumed, message.emitted)
        sends = local.record.sends
        on_devices = type(envelope.tensors) is Later
        limit = self.agent.options.message_limit if message.coded else 0
        found = _gradients(message, envelope, lambda source: sends[source].device, limit)
        if self.agent.devices is not None:
            if not on_devices:  # they came by a shortcut from a worker without a GPU
                found = {source: _on(sends[source].device, found[source]) for source in found}
            self.agent.devices.streams.leave_word()  # another thread may use them
        if self._doubts:
            found = checked_all(found, lambda source: sends[source].like)
        components, ask = local.arrive(found, line.peer.id)
        del found  # so that the pass has the only references, and can store a gradient without a copy
        if self._observers:
            self._observers.emit(Planned(backward=local.backward.id))
        if ask:
            self._ask_to_resolve(local)
        # A thread that listens for this pass must go on listening.
        listener = local.listener
        self._run_all(local, components, may_wait=listener is None or not listener.is_mine())

    def _ask_to_resolve(self, local: LocalPass) -> None:
        """Ask the starter to resolve the pass, because this worker has gradients that it cannot use before that."""
        started = self._started.get(local.backward.id)
        if started is not None:
            self._ask(started, self._me.id)
        elif local.starter != self._me.id:
            self.agent.post(local.starter, Resolve(local.backward))

    def _on_take_part(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        for source in envelope.message.sources:
            send = local.record.sends.get(source)
            if send is None or send.to.id != line.peer.id:
                raise ProtocolError(f"a TakePart for tensor {source}, which was not sent to {line.peer.name!r}")
        local.got_from(line.peer.id)
        self._take_part(local, envelope.message.sources)

    def _on_resolve(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        started = self._started.get(local.backward.id)
        if started is not None:
            self._ask(started, line.peer.id)

    def _on_resolved(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        if local.starter != line.peer.id:
            raise ProtocolError(f"worker {line.peer.name!r} sent a Resolved, which only the starter of a pass may send")
        self._run_all(local, self._resolve(local), may_wait=True)

    def _on_report(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        self._on_reported(line, envelope.message)

    def _on_reported(self, line: Line, message: Report) -> None:
        if self._doubts and any(each == ROOT or rank_of(each) != line.peer.id for each in message.consumed):
            raise ProtocolError(f"worker {line.peer.name!r} reports work of other workers")
        self._take_report(message)

    def _on_failed(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        message: Failed = envelope.message
        error = self.agent.execution.rebuild(envelope, line.peer)
        if not local.fail(error, self._me.name):
            return
        if local.starter == self._me.id:
            self._tell_failed(self._me.id, local.backward, error)
        if self._doubts:
            message = abridged(message)
        elif message.refs or envelope.tensors:  # the texts are enough for the other workers
            message = msgspec.structs.replace(message, tree=None, refs=())
        self.tell((local.record.workers() | local.partners) - {self._me.id, line.peer.id}, message)

    def _on_check(self, line: Line, envelope: Envelope) -> Frame:
        message: Check = envelope.message
        record = self._contexts.get(message.backward.context)
        local = None if record is None else record.passes.get(message.backward.id)
        if local is not None and local.round < message.round:
            local.round = message.round
            self.agent.pool.run(partial(self._check_helpers, local))
        return self.agent.answer(message.id, None)

    def check(self, local: LocalPass) -> None:
        """Check that all workers of this pass are alive: ask each, since the agent watches peers that owe an answer."""
        local.round += 1
        self._check_helpers(local)

    def _check_helpers(self, local: LocalPass) -> None:
        for rank in filter(self.agent.is_connected, local.helpers):  # for the others, `lost` was called
            try:
                self.agent.ask_later(
                    self._info(rank), lambda id: Check(id, local.backward, local.round), "a sign of life", math.inf
                )
            except BackhaulError as error:
                self.fail(local, error)

    def _info(self, rank: int) -> WorkerInfo:
        return self.agent.membership.find(rank).info
