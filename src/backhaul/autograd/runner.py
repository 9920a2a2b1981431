"""Runner: runs the components of passes on this worker with torch's engine.

It decides whether torch must run at all, where a run starts, and where the gradients of leaves go. A run sends its
messages through `Progress`, which it knows as the `Protocol`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter

import torch

from backhaul.agent.agent import Agent
from backhaul.agent.observing import RecvReached, Stored, TorchBegan, TorchEnded
from backhaul.autograd import gradients, joint_hooks, node_hooks
from backhaul.autograd.contexts import current_context
from backhaul.autograd.functions import thread
from backhaul.autograd.graph import Component
from backhaul.autograd.local_pass import LocalPass, Starts
from backhaul.autograd.replicas import Replica, replicas
from backhaul.autograd.run import EngineRun, Mine, Outcome, Parcel, Protocol, destination, send_parcel
from backhaul.devices.streams import use
from backhaul.eager import compiles_autograd, without_compiled_autograd
from backhaul.errors import BackhaulError

_variable = attrgetter("variable")
_hooks_after = attrgetter("_post_accumulate_grad_hooks")
_has_gpus: Callable[[], bool] = torch.cuda.is_initialized
_run_backward: Callable[..., tuple[torch.Tensor | None, ...]] = torch.autograd.Variable._execution_engine.run_backward


@contextmanager
def on_one_thread() -> Iterator[None]:
    """A block in which torch's engine runs all nodes on the calling thread, including those on GPUs.

    Otherwise it has separate threads for GPUs, which do not know the run for which they work. Also, a gate must come
    last in its run. It would block the calling thread, to which a GPU thread may hand over nodes later.
    """
    if not torch._C._is_multithreading_enabled() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch._C._set_multithreading_enabled(True)


class Runner:
    """Runs components with torch's engine, and stores the gradients of leaves. Thread-safe."""

    def __init__(self, agent: Agent, anchor: torch.Tensor, protocol: Protocol) -> None:
        self._agent = agent
        self._observers = agent.observers
        self._believes = agent.trust.believes
        self._anchor = anchor
        self._protocol = protocol
        self._runs: set[EngineRun] = set()
        self._holding: set[EngineRun] = set()
        agent.watch.ticks.append(self._tick)

    def run(self, local: LocalPass, component: Component) -> Outcome:
        """Run a component. Raises what a backward function or a hook raises, and what the pass has failed with."""
        if not component.leaves and len(component.sources) == len(component.recvs) and not component.waits:
            passed_on = self._pass_on(local, component)
            if passed_on is not None:
                return passed_on
        leaves = list(map(_variable, component.leaves))
        joint = bool(replicas.joint_among(leaves))
        averaged = replicas.of(leaves) if joint else ()
        in_grad = (
            averaged
            or (node_hooks.are_there() and any(map(node_hooks.on, component.leaves)))
            or joint_hooks.on_any(component.leaves)
        )
        captures = not local.backward.into_grad and not in_grad
        starts: Starts | None = None
        if captures and not component.recvs and not component.waits:
            starts = local.starts(component)
            direct = gradients.without_a_run(*starts)
            if direct is not None:
                found = [direct.get(leaf) for leaf in leaves]
                starts = direct = None  # so that `found` has the only references, and needs no copies
                self._store(local, leaves, found)
                return Outcome()
        listener = local.listener
        if joint and listener is not None and listener.is_mine():
            self._agent.listeners.step_away(listener)  # the run may wait for other processes
        run = EngineRun(
            self._agent,
            local,
            component,
            self._protocol,
            self._held,
            joint=joint,
            carried=self._believes and local.starter != self._agent.me.id,
        )
        self._runs.add(run)
        before, thread.run = thread.run, run
        # Calls of the run belong to the context: a checkpointed segment may make a remote call again.
        token = current_context.set(local.record.id)
        try:
            if captures:
                starts = starts or local.starts(component)
                captured = self._run_engine(local, starts, (*leaves, self._anchor))
                starts = None
                run.flush()
                if leaves:
                    self._store(local, leaves, captured)
            elif in_grad and not local.backward.into_grad:
                self._run_in_grad(local, component, leaves, averaged)
                run.flush()
            else:
                self._run_engine(local, local.starts(component))
                run.flush()
                if self._agent.devices is not None:
                    local.filled += leaves
        finally:
            self._holding.discard(run)
            thread.run = before
            current_context.reset(token)
            self._runs.discard(run)
        return run.outcome

    def _pass_on(self, local: LocalPass, component: Component) -> Outcome | None:
        """Send back the gradients of tensors that were sent on unchanged. Returns None if torch must run."""
        if not self._believes or node_hooks.are_there():
            return None
        passed = local.passed_on(component)
        if passed is None:
            return None
        parcels: dict[int, Parcel] = {}
        mine: Mine = {}
        emitted: list[int] = []
        parcel: Parcel | None = None
        for recv, gradient in passed:
            self._protocol.require(local, recv)
            to, source = destination(self._agent, local, recv) if local.shortcuts else (recv.sender, recv.message)
            emitted.append(source)
            if to is None:
                mine[source] = (gradient,)
                continue
            if self._observers:
                self._observers.emit(RecvReached(backward=local.backward.id, peer=recv.sender.name))
            parcel = parcels.get(to.id)
            if parcel is None:
                local.giving_to(to.id)
                parcel = parcels[to.id] = Parcel(to)
                if local.shortcuts and to.id != local.starter:
                    parcel.shortcuts = local.onward(component.sources[0], recv if len(passed) == 1 else None)
            parcel.add((source,), (gradient,))
        if len(parcels) == 1 and not mine:
            return Outcome(emitted, parcel)  # it takes the report along
        if parcels and self._agent.devices is not None:
            self._agent.devices.streams.catch_up()
        for parcel in parcels.values():
            send_parcel(self._protocol, self._observers, local, parcel)
        return Outcome(emitted, None, mine)

    def _run_engine(
        self, local: LocalPass, starts: Starts, inputs: tuple[torch.Tensor, ...] = ()
    ) -> Sequence[torch.Tensor | None]:
        """Run torch's engine. Returns the gradients of ``inputs``; without inputs, gradients go into ``.grad``."""
        edges, values = starts
        if self._observers:
            self._observers.emit(TorchBegan(backward=local.backward.id))
        try:
            if self._agent.devices is not None:
                use(values)
            retain_graph = local.backward.retain_graph
            if _has_gpus() or compiles_autograd():
                with on_one_thread(), without_compiled_autograd():
                    return _run_backward(edges, values, retain_graph, False, inputs, True, accumulate_grad=not inputs)
            return _run_backward(edges, values, retain_graph, False, inputs, True, accumulate_grad=not inputs)
        finally:
            if self._observers:
                self._observers.emit(TorchEnded(backward=local.backward.id))

    def _run_in_grad(
        self, local: LocalPass, component: Component, leaves: list[torch.Tensor], averaged: Sequence[Replica]
    ) -> None:
        """Run a component so that gradients go into ``.grad``, where hooks or replicas expect them; then store them.

        DDP averages all of ``.grad``, including what earlier passes have added (``no_sync``), and may set ``.grad`` of
        parameters that this process has not used. So the context's gradients of all its parameters are put there first.
        Sharded modules leave the gradients of this pass in parameters that are not the leaves of the graph.
        """
        record = local.record
        for replica in averaged:
            replica.check()
        parameters = list({each: None for replica in averaged if replica.sums for each in replica.parameters})
        lent = {each for replica in averaged if replica.lends_memory for each in replica.parameters}
        apart = [replica for replica in averaged if not replica.sums]
        theirs = {*parameters, *(leaf for replica in apart for leaf in replica.leaves)}
        others = [leaf for leaf in leaves if leaf not in theirs]
        others += {each: None for replica in apart for each in replica.parameters}
        scratch = [leaf for replica in apart for leaf in replica.scratch]
        streams = None if self._agent.devices is None else self._agent.devices.streams
        with record.lock:
            given = {each: record.gradients.get(each) for each in parameters}
        if streams is not None:
            streams.catch_up()
        given.update(dict.fromkeys((*others, *scratch)))
        with gradients.in_place_of_grad(given, local.require_going, lent=lent):
            self._run_engine(local, local.starts(component))
            made = {each: each.grad for each in parameters}
            rest = [leaf.grad for leaf in others]
        with record.lock:
            if record.over or local.failed:
                return
            if streams is not None:
                streams.catch_up()
            for parameter, gradient in made.items():
                if gradient is not None:
                    record.gradients[parameter] = gradient.clone() if parameter in lent else gradient
            gradients.store(record.gradients, others, rest)
            if streams is not None:
                streams.leave_word()

    def _held(self, run: EngineRun) -> None:
        """Note that a run holds gradients back, so that a tick of the watch thread sends them soon."""
        self._holding.add(run)
        if self._agent.watch.asleep:
            self._agent.watch.wake()

    def _tick(self) -> bool:
        """Send gradients that were held for more than a tick. The watch thread calls this."""
        if not self._holding:
            return False
        for run in list(self._holding):
            run.ticks += 1
            if run.ticks > 1:
                self._holding.discard(run)
                self._agent.pool.run(partial(self._flush, run))
        if self._holding:
            self._agent.watch.hurry()
        return bool(self._holding)

    def _flush(self, run: EngineRun) -> None:
        streams = None if self._agent.devices is None else self._agent.devices.streams
        try:
            with nullcontext() if streams is None else streams.handling():
                run.flush()
        except BackhaulError as error:
            self._protocol.fail(run.local, error)

    def _store(self, local: LocalPass, leaves: list[torch.Tensor], captured: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients of a run into the context.

        If other workers wait for the report, which follows, they are only left there: see `store_left`.
        """
        if any(map(_hooks_after, leaves)):
            captured = gradients.run_hooks(leaves, captured, local.require_going)
        record = local.record
        streams = None if self._agent.devices is None else self._agent.devices.streams
        if streams is not None:
            use([gradient for gradient in captured if gradient is not None])
        with record.lock:
            if not record.over and not local.failed:
                if streams is None and local.starter != self._agent.me.id:
                    record.leave(leaves, captured)
                    return
                if streams is not None:
                    streams.catch_up()  # another thread may have added to a gradient since this run began
                gradients.store(record.gradients, leaves, captured)
                if streams is not None:
                    streams.leave_word()
        if self._observers:
            self._observers.emit(Stored(backward=local.backward.id))

    def store_left(self, local: LocalPass) -> None:
        """Store the gradients that runs have left."""
        record = local.record
        with record.lock:
            record.gradients  # noqa: B018 this stores them
        if self._observers:
            self._observers.emit(Stored(backward=local.backward.id))

    def runs(self) -> list[EngineRun]:
        """The current runs of torch's engine."""
        return list(self._runs)
