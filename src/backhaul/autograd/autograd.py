"""Autograd: one worker's distributed autograd. Makes contexts, ends them, and notices when their initiators die."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from backhaul.agent.agent import Agent
from backhaul.agent.line import Line
from backhaul.autograd import entry
from backhaul.autograd.contexts import Contexts, Record, current_context, gone
from backhaul.autograd.engine import Engine
from backhaul.autograd.functions import rank_of
from backhaul.autograd.recording import Recorder
from backhaul.autograd.telling import tell
from backhaul.devices.streams import use
from backhaul.errors import BackhaulError, MisuseError, UnknownWorkerError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.refs.rref import RRef
from backhaul.remote_profile import backward as profiled
from backhaul.remote_profile.profilers import is_on as profiler_is_on
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Inquire, Leave

_log = logging.getLogger(__name__)

_INQUIRE_SECONDS = 4.0


def backward_here(rref: RRef[Any], retain_graph: bool) -> None:
    """Run a local backward from the value of a reference, on its owner."""
    value = rref.local_value()
    entry.require_tensor(value)
    value.backward(retain_graph=retain_graph)


class Autograd:
    """One worker's contexts and passes. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        self.me = agent.me
        self._believes = agent.trust.believes
        self.contexts = Contexts(
            agent.me,
            agent.options.limits,
            lambda peer, why: agent.permissions.over_quota(peer.name, "a context", why),
            secret=not agent.trust.shows,
        )
        self.engine = Engine(agent, self.contexts, anchor)
        self._failures = self.engine.failures
        self._agent = agent
        self._doubted: set[int] = set()  # contexts that a worker other than their initiator has declared over
        agent.execution.recording = Recorder(self.contexts, anchor)
        agent.register(Leave, self._on_leave)
        agent.register(Inquire, self._on_inquire)
        agent.on_connection_ended.append(self._on_connection_ended)
        agent.on_connected.append(self._on_connected)
        agent.fates.on_present.append(self._on_present)
        agent.fates.on_over.append(self._on_over)
        agent.idle_checks.append(self.engine.idle)

    def backward(
        self, context_id: int, roots: Any, retain_graph: bool, grad_tensors: Any, timeout: float | None, accumulate: str
    ) -> None:
        """See `backhaul.autograd.backward`."""
        into_grad, seconds = entry.into_grad(accumulate), entry.seconds(timeout)
        record = self.contexts.find(entry.check_id(context_id))
        chosen = entry.choose(entry.fetch(roots, record.id), grad_tensors)
        with profiled.recorded(self._agent) if profiler_is_on() else nullcontext():
            self.engine.backward(record, *chosen, retain_graph=bool(retain_graph), into_grad=into_grad, timeout=seconds)
        if not into_grad:
            record.unread = True

    def backward_of(self, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
        """See `RRef.backward`."""
        if context_id != -1:
            self.backward(context_id, rref, retain_graph, None, None, "context")
        elif rref.is_owner():
            backward_here(rref, retain_graph)
        else:
            self._agent.call(
                rref.owner(), backward_here, (rref, retain_graph), {}, self._agent.options.rpc_timeout or math.inf
            )

    def require(self, id: int) -> None:
        """Mark the gradients of a context as read. Raises `ContextError` if this worker has no such open context."""
        self.contexts.find(entry.check_id(id)).unread = False

    def require_read(self) -> None:
        """Raise `MisuseError` if the open context has unread gradients. Called before ``.grad`` is used."""
        id = current_context.get()
        record = None if id is None else self.contexts.get(id)
        if record is not None and record.unread:
            raise MisuseError(
                "this would use .grad, but the gradients of the backward pass are in the open autograd context: pass "
                "context_id to step(), clip_grad_norm_() and GradScaler; or call optimizer.accumulate(context_id) "
                'first, or backward with accumulate="grad"'
            )

    def gradients_here(self, id: int) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of a context for leaves of this worker; empty if this worker took no part in the context."""
        record = self.contexts.get(id)
        if record is None:
            return {}
        with record.lock:
            found = dict(record.gradients)
        if self._agent.devices is not None:
            self._agent.devices.streams.catch_up()
            use(list(found.values()))
        return found

    def put_gradients(self, id: int, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace gradients of a context for leaves of this worker. The context owns the given tensors from now on.

        Raises `ContextError` if the context is over.
        """
        record = self.contexts.find(id)
        with record.lock:
            if record.over:
                raise gone(id, self.me)
            record.gradients.update(gradients)

    def leave(self, id: int) -> None:
        """End a context here, and tell the workers that know of it, which pass it on."""
        record = self.contexts.end(id)
        if record is None:
            return
        self._free(record, gone(id, self.me))
        tell(self._agent, record.told - {self.me.id}, Leave(record.id), lazily=True)

    def _free(self, record: Record, error: BaseException) -> None:
        self._failures.abandon(record, error)
        with record.lock:
            record.sends.clear()
            record.unspent.clear()
            record.recvs.clear()
            record.gradients.clear()

    def _on_leave(self, line: Line, envelope: Envelope) -> None:
        id, sender = envelope.message.context, line.peer.id
        if self._believes or rank_of(id) == sender:
            self._end(id, sender, gone(id, self.me))
        elif self.contexts.get(id) is not None and id not in self._doubted:
            self._doubted.add(id)  # only the initiator's own word counts
            self._agent.pool.run(lambda: self._inquire(rank_of(id), (id,)))

    def _end(self, id: int, sender: int, error: BaseException) -> None:
        record = self.contexts.end(id)
        if record is None:
            return
        self._free(record, error)
        tell(self._agent, record.told - {self.me.id, sender, record.initiator}, Leave(id))

    def _on_inquire(self, line: Line, envelope: Envelope) -> Frame:
        message: Inquire = envelope.message
        for id in message.contexts:
            record = self.contexts.get(id)
            if record is not None:  # the worker that would tell the peer of the end may be dead
                record.told.add(line.peer.id)
        return self._agent.answer(message.id, [id for id in message.contexts if self.contexts.get(id) is None])

    def _on_connection_ended(self, connection: object, peer: WorkerInfo, error: WorkerLostError) -> None:
        self._failures.lost(peer, error)
        # The lost peer may have been the one that would tell this worker of the end of these contexts.
        suspects: dict[int, list[int]] = {}
        for record in self.contexts:
            if record.initiator != self.me.id and (record.initiator == peer.id or peer.id in record.workers()):
                suspects.setdefault(record.initiator, []).append(record.id)
        for initiator, ids in suspects.items():
            self._agent.pool.run(lambda initiator=initiator, ids=ids: self._inquire(initiator, ids))  # type: ignore[misc]

    def _on_connected(self, peer: WorkerInfo) -> None:
        """Ask again about contexts of a peer that were not over when this worker asked.

        The two ends of a connection notice its end at different times. If this worker notices first, and asks, the peer
        may send `Leave` on that connection afterwards. Then the peer connects again after the loss of the `Leave`.
        """
        ids = [record.id for record in self.contexts if record.asked and record.initiator == peer.id]
        if ids:
            self._agent.pool.run(lambda: self._inquire(peer.id, ids))

    def _on_present(self, peer: WorkerInfo) -> None:
        """A peer answers again. Its messages about the end of its contexts may have been lost, so ask."""
        ids = [record.id for record in self.contexts if record.initiator == peer.id]
        if ids:
            self._inquire(peer.id, ids)

    def _on_over(self, peer: WorkerInfo, reason: str) -> None:
        self._end_all([record.id for record in self.contexts if record.initiator == peer.id], peer)

    def _inquire(self, initiator: int, ids: Collection[int]) -> None:
        """Ask the initiator of these contexts which of them are over, and end those.

        If the initiator does not answer, the contexts stay until it does (`_on_present`) or is over (`_on_over`).
        """
        for id in ids:
            record = self.contexts.get(id)
            if record is not None:  # first: the initiator may connect again before its answer has been read
                record.asked = True
        try:
            info = self._agent.membership.find(initiator).info
        except UnknownWorkerError:
            self._end_all(ids, WorkerInfo(initiator, f"rank {initiator}"))
            return
        try:
            found = self._agent.insist(info, lambda id: Inquire(id, tuple(ids)), "contexts", _INQUIRE_SECONDS)
        except BackhaulError as error:
            _log.debug("= contexts of rank %s are kept: %s", initiator, error)
            if self._agent.link(info).fate.over:
                self._end_all(ids, info)
        else:
            self._end_all([id for id in ids if type(found) is not list or id in found], info)
        finally:
            self._doubted.difference_update(ids)

    def _end_all(self, ids: Collection[int], initiator: WorkerInfo) -> None:
        for id in ids:
            why = f"worker {initiator.name!r}, which opened autograd context {id}, is lost or has left the context"
            self._end(id, initiator.id, WorkerLostError(why, initiator.name))

    def close(self) -> None:
        for record in self.contexts:
            self.contexts.end(record.id)
            self._free(record, gone(record.id, self.me))

    def counts(self) -> dict[str, int]:
        """The numbers of contexts, passes and gates, for tests and tools."""
        passes = [local for record in self.contexts for local in list(record.passes.values())]
        return {
            "contexts": len(self.contexts),
            "passes": len(passes),
            "gates": sum(local.gates for local in passes),
        }
