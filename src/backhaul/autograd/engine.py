"""Engine: starts backward passes, and handles the messages of passes that other workers send.

A pass proceeds as follows::

    backward()      runs from the roots ──► Recv.backward ──► Gradients to the sender of each message
    Gradients       runs from that Send ──► Recv.backward ──► Gradients to …          (and so on)
    each run        ──► Report to the worker that started the pass, whose ledger says when the pass is over

`progress` says what moves a pass forward on this worker, and `failures` what ends it early. `runner` runs torch.
A message is checked before it changes a pass. In a federation the sender may lie about everything but its name.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns

import torch

from backhaul.agent.agent import Agent
from backhaul.agent.line import Line
from backhaul.agent.observing import GradientsCame, PassBegan, PassEnded, Planned
from backhaul.autograd import functions, joint_hooks, node_hooks
from backhaul.autograd.contexts import Contexts, Record, Send, gone
from backhaul.autograd.functions import ROOT, rank_of
from backhaul.autograd.local_pass import LocalPass
from backhaul.autograd.progress import Progress
from backhaul.autograd.started_pass import StartedPass
from backhaul.devices.streams import use
from backhaul.edges.compression import devices_of, expanded
from backhaul.errors import ContextError, ProtocolError, QuotaError, RpcTimeoutError
from backhaul.trust.checking import Charges, Like, checked_all, is_sorted
from backhaul.wire.decoder import Envelope
from backhaul.wire.landing import Later
from backhaul.wire.messages import Check, Failed, Gradients, Pass, Report, Resolve, Resolved, TakePart

_log = logging.getLogger(__name__)

_MAX_PASSES = 256


def _gradients(
    message: Gradients, envelope: Envelope, sends: Mapping[int, Send], limit: int
) -> dict[int, tuple[torch.Tensor | None]]:
    """The gradients of a message, by source. They are removed from the envelope, so that the caller holds the only
    references, and can store them without a copy.
    """
    sources = message.sources
    if type(envelope.tensors) is Later:
        devices = [sends[sources[place]].device for place in message.present]
        envelope.tensors.land(devices_of(message.coded, devices) if message.coded else devices)
    if message.coded:
        envelope.tensors[:] = expanded(message.coded, envelope.tensors, limit)
    found: dict[int, tuple[torch.Tensor | None]]
    if len(message.present) == len(sources) == len(envelope.tensors):
        found = dict(zip(sources, zip(envelope.tensors), strict=True))
    else:
        found = dict.fromkeys(sources, (None,))
        for place, gradient in zip(message.present, envelope.tensors, strict=True):
            found[sources[place]] = (gradient,)
    envelope.tensors.clear()
    return found


def _like(sends: Mapping[int, Send], source: int) -> Like | None:
    return sends[source].like


def _moved(
    found: Mapping[int, tuple[torch.Tensor | None]], sends: Mapping[int, Send]
) -> dict[int, tuple[torch.Tensor | None]]:
    """The gradients, each on the device of the tensor that was sent."""
    return {
        source: (None if gradient is None else gradient.to(sends[source].device),)
        for source, (gradient,) in found.items()
    }


class Engine(Progress):
    """One worker's side of backward passes, both its own and those of other workers. Thread-safe."""

    def __init__(self, agent: Agent, contexts: Contexts, anchor: torch.Tensor) -> None:
        super().__init__(agent, contexts, anchor)
        self._contexts = contexts
        self._doubts = not agent.trust.believes
        self._charges = Charges(agent.options.message_limit) if self._doubts else None
        patience = agent.options.unresponsive_after
        self._check_every = math.inf if patience is None else patience / 4
        for message, handler in (
            (Gradients, self._on_gradients),
            (TakePart, self._on_take_part),
            (Resolve, self._on_resolve),
            (Resolved, self._on_resolved),
            (Report, self._on_report),
            (Failed, self.failures.on_failed),
        ):
            agent.register(message, partial(self._handle, handler))
        agent.register(Check, self.failures.on_check)

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
            floor = id
            for other, before in self._started.items():
                if before.local.record is record and other < floor:
                    floor = other
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
                self.failures.tell_failed(to, backward, error)
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
        sends, peer = local.record.sends, line.peer.id
        for source in message.sources:
            send = sends.get(source)
            # The starter may have sent the tensor on. Then a shortcut leads here from any worker.
            if send is None or (send.to.id != peer and (self._doubts or send.to.id != local.starter)):
                raise ProtocolError(f"gradients for tensor {source}, which was not sent to {line.peer.name!r}")
        if message.shortcuts:
            if self._doubts:
                raise ProtocolError("gradients with shortcuts, which a federation does not allow")
            local.shortcuts.update((each.source, each) for each in message.shortcuts)
        local.got_from(peer)
        if self._observers:
            came = GradientsCame(backward=local.backward.id, peer=line.peer.name, sources=message.sources)
            self._observers.emit(came)
        if message.consumed:
            if local.starter == self._me.id or self._doubts:
                self._on_reported(line, Report(message.backward, False, message.consumed, message.emitted))
            else:
                local.carry(message.consumed, message.emitted)
        on_devices = type(envelope.tensors) is Later
        limit = self.agent.options.message_limit if message.coded else 0
        found = _gradients(message, envelope, sends, limit)
        if self.agent.devices is not None:
            if not on_devices:  # they came by a shortcut from a worker without a GPU
                found = _moved(found, sends)
            self.agent.devices.streams.leave_word()  # another thread may use them
        if self._doubts:
            found = checked_all(found, partial(_like, sends))
        components, ask = local.arrive(found, peer)
        del found  # so that the pass has the only references, and can store a gradient without a copy
        if self._observers:
            self._observers.emit(Planned(backward=local.backward.id))
        if ask:
            self._ask_to_resolve(local)
        # A thread that listens for this pass must go on listening.
        listener = local.listener
        self._run_all(local, components, may_wait=listener is None or not listener.is_mine())

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
