"""Failures: how a worker notices that a backward pass has failed, and how the workers of the context learn of it.

The worker that notices a failure wakes its own waiting threads, and tells the starter of the pass and all other workers
of the context (`Failed`). Each of them passes that on once.

A connection that ends fails the passes that depend on its peer. While a thread waits in a pass, it checks now and then
that the workers to which it has given work are alive (`Check`), and they pass that on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial

import msgspec

from backhaul.agent.agent import Agent
from backhaul.agent.line import Line
from backhaul.autograd.contexts import Contexts, Record
from backhaul.autograd.local_pass import LocalPass
from backhaul.autograd.started_pass import StartedPass
from backhaul.autograd.telling import reach, tell
from backhaul.errors import BackhaulError, NotInitializedError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.trust.checking import abridged
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Check, Failed, Pass

_log = logging.getLogger(__name__)


class Failures:
    """One worker's part in failing passes. Thread-safe."""

    def __init__(self, agent: Agent, contexts: Contexts, started: Mapping[int, StartedPass]) -> None:
        """``started``: the passes that this worker has started, by number."""
        self._agent = agent
        self._me = agent.me
        self._contexts = contexts
        self._started = started
        self._doubts = not agent.trust.believes

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
            self.tell_failed(starter, local.backward, error)
        reach(
            self._agent,
            others if starter == self._me.id else [starter, *others],
            lambda rank: self.tell_failed(rank, local.backward, error),
        )

    def on_failed(self, line: Line, envelope: Envelope, local: LocalPass) -> None:
        """Fail a pass that another worker says has failed."""
        message: Failed = envelope.message
        error = self._agent.execution.rebuild(envelope, line.peer)
        if not local.fail(error, self._me.name):
            return
        if local.starter == self._me.id:
            self.tell_failed(self._me.id, local.backward, error)
        if self._doubts:
            message = abridged(message)
        elif message.refs or envelope.tensors:  # the texts are enough for the other workers
            message = msgspec.structs.replace(message, tree=None, refs=())
        tell(self._agent, (local.record.workers() | local.partners) - {self._me.id, line.peer.id}, message)

    def tell_failed(self, rank: int, backward: Pass, error: BaseException) -> None:
        """Tell one worker that a pass has failed. Does not raise."""
        if rank == self._me.id:
            started = self._started.get(backward.id)
            if started is not None:
                started.fail(error)
            return
        try:
            self._agent.post_failure(rank, lambda *what: Failed(backward, *what), error)
        except BackhaulError as lost:
            _log.debug("= cannot tell rank %s that pass %s failed with %r: %s", rank, backward.id, error, lost)

    def lost(self, peer: WorkerInfo, error: WorkerLostError) -> None:
        """Fail the passes that depend on a peer whose connection has ended."""
        for record in self._contexts:
            with record.lock:
                passes = list(record.passes.values())
            for local in passes:
                if local.depends_on(peer.id) or local.starter == peer.id:
                    self._agent.pool.run(partial(self.fail, local, WorkerLostError(str(error), peer.name)))

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
                self.tell_failed(self._me.id, local.backward, error)

    def check(self, local: LocalPass) -> None:
        """Check that all workers of this pass are alive: ask each, since the agent watches peers that owe an answer."""
        local.round += 1
        self._check_helpers(local)

    def on_check(self, line: Line, envelope: Envelope) -> Frame:
        """Answer a `Check`, and pass it on to the workers that this one has given work of the pass."""
        message: Check = envelope.message
        record = self._contexts.get(message.backward.context)
        local = None if record is None else record.passes.get(message.backward.id)
        if local is not None and local.round < message.round:
            local.round = message.round
            self._agent.pool.run(partial(self._check_helpers, local))
        return self._agent.answer(message.id, None)

    def _check_helpers(self, local: LocalPass) -> None:
        for rank in filter(self._agent.is_connected, local.helpers):  # for the others, `lost` was called
            try:
                self._agent.ask_later(
                    self._agent.membership.find(rank).info,
                    lambda id: Check(id, local.backward, local.round),
                    "a sign of life",
                    math.inf,
                )
            except BackhaulError as error:
                self.fail(local, error)
