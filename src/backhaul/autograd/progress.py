"""Progress: what moves a backward pass forward on this worker.

A component whose gradients have come is run (`runner`). Its Recvs send gradients to other workers, or hand them to this
one, which runs the next component. After each run, a `Report` tells the starter of the pass what was consumed and what
was sent, so that its ledger says when the pass is over.

**Resolving.** A component with several candidates may need the pass to be resolved first. The worker sends `Resolve` to
the starter. From there, `TakePart` messages take the routes of the later gradients, with Reports of their own. At the
end `Resolved` goes to the workers that asked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import msgspec
import torch

from backhaul.agent.agent import Agent
from backhaul.agent.observing import RunBegan, RunEnded
from backhaul.autograd import functions
from backhaul.autograd.contexts import Contexts, gone
from backhaul.autograd.failures import Failures
from backhaul.autograd.functions import ROOT, Recv
from backhaul.autograd.graph import Component
from backhaul.autograd.local_pass import LocalPass
from backhaul.autograd.run import EngineRun, Mine, Outcome, Parcel, send_parcel
from backhaul.autograd.runner import Runner
from backhaul.autograd.started_pass import StartedPass
from backhaul.errors import BackhaulError, ContextError
from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Report, Resolve, Resolved, TakePart


class Progress:
    """One worker's part in passes, its own and those of other workers. Thread-safe."""

    def __init__(self, agent: Agent, contexts: Contexts, anchor: torch.Tensor) -> None:
        self.agent = agent
        self._observers = agent.observers
        self._me = agent.me
        self._lock = threading.Lock()
        self._started: dict[int, StartedPass] = {}  # passes that this worker has started; guarded by _lock
        self.failures = Failures(agent, contexts, self._started)
        self.fail = self.failures.fail
        self.check = self.failures.check
        self._runner = Runner(agent, anchor, self)

    # Running.

    def run(self, local: LocalPass, component: Component) -> None:
        """Run a component, and report. Does not raise: an error fails the pass."""
        devices = self.agent.devices
        if devices is None:
            self._run_and_report(local, component)
            if local.record.has_left:
                self._runner.store_left(local)
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
        try:
            if local.starter == self._me.id:
                send_parcel(self, self._observers, local, late)
            else:
                send_parcel(self, self._observers, local, late, consumed, emitted)
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

    def _run_all(self, local: LocalPass, components: Sequence[Component], *, may_wait: bool) -> None:
        """Run these components, none of them behind one that waits.

        ``may_wait``: the calling thread has nothing else to do, so it may wait. A thread that waits at a gate is in the
        middle of a run, and starts no other.
        """
        if not components:
            return
        for component in components[:-1]:
            self.agent.pool.run(partial(self.run, local, component))
        last = components[-1]
        if functions.thread.run is not None or (last.waits and not may_wait):
            self.agent.pool.run(partial(self.run, local, last))
        else:
            self.run(local, last)

    def runs(self) -> list[EngineRun]:
        """The current runs of torch's engine."""
        return self._runner.runs()

    def idle(self) -> bool:
        """Whether nothing runs here, and all passes that this worker started are over."""
        with self._lock:
            return not self._started and not self._runner.runs()

    # Reporting.

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
        if rank == local.starter and (rank in local.record.heard or rank in local.record.told):
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

    def _info(self, rank: int) -> WorkerInfo:
        return self.agent.membership.find(rank).info

    # Resolving.

    def _ask(self, started: StartedPass, rank: int) -> None:
        """Handle the request of a worker to resolve this pass."""
        begin, done = started.ask(rank)
        if done:
            self._tell_resolved(started.local, rank)
        elif begin:
            self._take_part(started.local, (ROOT,))

    def _ask_to_resolve(self, local: LocalPass) -> None:
        """Ask the starter to resolve the pass, because this worker has gradients that it cannot use before that."""
        started = self._started.get(local.backward.id)
        if started is not None:
            self._ask(started, self._me.id)
        elif local.starter != self._me.id:
            self.agent.post(local.starter, Resolve(local.backward))

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
