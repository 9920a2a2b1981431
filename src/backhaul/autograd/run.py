"""EngineRun: one run of torch's engine over a component, on one thread. It is the `functions.Run` of Sends and Recvs.

A Recv emits its gradients as soon as they are complete, while the run goes on. If other Recvs of this run have the same
sender, their gradients are likely to follow at once, and a message for each would cost more than its content. So small
gradients are *held* until the last of them is there. They are not held for long: not while a gate waits, not beyond the
end of the run, and not beyond a tick or two of the watch thread. They are not held at all in a run that may wait for
other processes at its end (``hold=False``).

The last gradients of a small run wait for its end and carry its report (`Outcome.late`): one message instead of two. A
worker that is not the starter passes such a report on with its own. So the starter of a pass over a chain of workers
gets one report, at the end.

The starter may have received a tensor and sent it on unchanged. If the starter has said so (`Shortcut`), the gradient
goes straight to the worker that made the tensor. If that is this worker, the gradient stays here (``mine``). The
component that it starts is run next, or at once on another thread if this run may wait for something. If there is no
connection to that worker, one is made for later passes, and the gradient goes through the starter.
"""

from __future__ import annotations

import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from backhaul.agent.agent import Agent
from backhaul.agent.observing import GradientsSent, Observers, RecvReached
from backhaul.autograd.functions import Recv
from backhaul.autograd.graph import SMALL, Component
from backhaul.autograd.local_pass import LocalPass
from backhaul.errors import ContextError
from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Gradients, Pass, Shortcut
from backhaul.wire.subclasses import plain

_MAX_HELD_BYTES = 64 * 1024
_SMALL = 8 * 1024
_strided = torch.strided
_NO_SHORTCUTS: dict[Any, Any] = {}


Mine = dict[int, tuple[torch.Tensor | None]]
"""Gradients for this worker's own tensors, by source."""


class Parcel:
    """Gradients for one worker that are not sent yet."""

    __slots__ = ("absent", "nbytes", "shortcuts", "sources", "tensors", "to")

    def __init__(self, to: WorkerInfo) -> None:
        self.to = to
        self.sources: list[int] = []
        self.absent: set[int] = set()
        """The places of those of the sources that get no gradient."""
        self.tensors: list[torch.Tensor] = []
        self.shortcuts: tuple[Shortcut, ...] = ()
        self.nbytes = 0

    def add_outputs(
        self, first: int, outputs: Collection[int], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[int]:
        """Add the gradients of these outputs of a Recv, whose first tensor is ``first``. Returns their sources."""
        sources: Sequence[int] = range(first, first + len(gradients))
        if len(outputs) != len(gradients):
            places = sorted(outputs)
            sources = [sources[place] for place in places]
            gradients = [gradients[place] for place in places]
        self.add(sources, gradients)
        return sources

    def add(self, sources: Iterable[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradient of each of these sources."""
        self.sources += sources
        for gradient in gradients:
            if gradient is None:
                self.absent.add(len(self.tensors) + len(self.absent))
                continue
            if type(gradient) is not torch.Tensor:
                gradient = plain(gradient)
            if gradient.layout is _strided:
                size = gradient.nbytes
                if size <= _SMALL and not gradient.is_contiguous():
                    # The gradient of a sum, for example, is one expanded number. Describing its strides costs more.
                    gradient = gradient.contiguous()
                self.nbytes += size
            self.tensors.append(gradient)

    def message(self, backward: Pass, consumed: tuple[int, ...] = (), emitted: tuple[int, ...] = ()) -> Gradients:
        sources, absent = self.sources, self.absent
        places: Iterable[int] = range(len(sources))
        if absent:
            places = [place for place in places if place not in absent]
        return Gradients(backward, tuple(sources), tuple(places), consumed, emitted, (), self.shortcuts)


class _Held:
    """The gradients that a run with several Recvs holds back."""

    __slots__ = ("left", "lock", "most", "parcels")

    def __init__(self, left: dict[int, int], most: int) -> None:
        self.lock = threading.Lock()
        # Guarded by `lock`:
        self.left = left
        """The number of Recvs that are not reached yet, by the rank that gets their gradients."""
        self.parcels: dict[int, Parcel] = {}
        self.most = most
        """A parcel with more bytes is not held."""


class Outcome(NamedTuple):
    """The result of a run."""

    emitted: Sequence[int] = ()
    """The tensors for which it has emitted gradients."""
    late: Parcel | None = None
    """The last of these gradients. They are not sent yet: the report goes with them."""
    mine: Mine | None = None


def destination(agent: Agent, local: LocalPass, recv: Recv) -> tuple[WorkerInfo | None, int]:
    """The worker to which the gradients of a Recv go, and the first of its tensors to which they belong.

    The worker is None if a shortcut leads back to this worker.
    """
    shortcut = local.shortcuts.pop(recv.message, None)
    if shortcut is None or agent.execution.edges is not None:  # a gradient must not bypass an edge
        return recv.sender, recv.message
    if shortcut.to == agent.me.id:
        return None, shortcut.message
    if agent.devices is not None:  # this worker may have no device map for it, but has one for the starter
        return recv.sender, recv.message
    to = agent.connected(shortcut.to)
    if to is None:
        agent.connecting.reach_out(shortcut.to)
        return recv.sender, recv.message
    return to, shortcut.message


class Protocol(typing.Protocol):
    """The interface of `Progress` to runs. It exchanges messages with other workers."""

    def require(self, local: LocalPass, recv: Recv) -> None:
        """Raise unless a Recv can be part of this pass."""

    def check(self, local: LocalPass) -> None:
        """Check that all workers of this pass are alive."""

    def send(self, local: LocalPass, rank: int, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message of a pass."""

    def hand_over(self, local: LocalPass, gradients: Mine) -> None:
        """Give gradients for this worker itself to other threads, in the middle of a run."""

    def fail(self, local: LocalPass, error: BaseException) -> None:
        """Fail the pass."""


def send_parcel(
    protocol: Protocol,
    observers: Observers,
    local: LocalPass,
    parcel: Parcel,
    consumed: Sequence[int] = (),
    emitted: Sequence[int] = (),
) -> None:
    """Send gradients, with the report of their run if it is given."""
    message = parcel.message(local.backward, tuple(consumed), tuple(emitted))
    if observers:
        observers.emit(GradientsSent(backward=local.backward.id, peer=parcel.to.name, sources=message.sources))
    protocol.send(local, parcel.to.id, message, parcel.tensors)


class EngineRun:
    """See the module's docstring."""

    ticks = 0
    """How many ticks of the watch thread have found gradients held."""
    _late: Parcel | None = None
    _mine: Mine | None = None
    _held: _Held | None = None

    def __init__(
        self,
        agent: Agent,
        local: LocalPass,
        component: Component,
        protocol: Protocol,
        held: Callable[[EngineRun], None],
        *,
        joint: bool = False,
        carried: bool = True,
    ) -> None:
        """``joint``: at its end the run may wait for other processes.

        ``carried``: other workers than the starter may be given the report of this run.
        """
        self.local = local
        self.backward = local.backward.id
        self.sources = component.sources
        self.thread = threading.get_ident()
        self.began = time.monotonic()
        self.emitted: list[int] = []
        self._agent = agent
        self._protocol = protocol
        self._on_held = held
        waits = component.waits
        self._waits = joint or waits
        """Whether this run may wait for something that depends on its own gradients."""
        recvs = component.recvs
        self._recvs = dict(recvs)  # those that the run has not reached yet
        self._rides = not joint and not waits and component.size <= SMALL
        self._carried = carried
        self._to: dict[Any, tuple[WorkerInfo | None, int]] = (
            {node: destination(agent, local, node.recv) for node in recvs} if local.shortcuts else _NO_SHORTCUTS
        )
        if len(recvs) > 1:
            to = [self._to[node][0] if self._to else node.recv.sender for node in recvs]
            self._held = _Held(Counter(each.id for each in to if each is not None), -1 if joint else _MAX_HELD_BYTES)

    def take(self, source: int) -> Sequence[torch.Tensor | None]:
        if self._held is not None and not self.local.has(source):
            self.flush()
        return self.local.take(source, self._agent, lambda: self._protocol.check(self.local))

    def emit(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        recv: Recv = node.recv
        if self._agent.observers:
            self._agent.observers.emit(RecvReached(backward=self.local.backward.id, peer=recv.sender.name))
        outputs = self._recvs.pop(node, None)
        if outputs is None:  # the Recv is not part of this run, or is reached twice
            raise ContextError(
                "a local backward() inside a distributed one has reached a tensor from worker "
                f"{recv.sender.name!r}, and cannot send gradients there. If it comes from a torch.utils.checkpoint "
                "around a remote call, give the checkpoint use_reentrant=False"
            )
        self._protocol.require(self.local, recv)
        to: WorkerInfo | None
        to, first = self._to[node] if self._to else (recv.sender, recv.message)
        if to is None:
            self._keep(first, gradients[0])
            return
        rank = to.id
        self.local.giving_to(rank)
        held = self._held
        if held is None:
            parcel = Parcel(to)
            self.emitted += parcel.add_outputs(first, outputs, gradients)
            self._note_streams()
            self._post(parcel, recv)
            return
        with held.lock:
            before = held.parcels.get(rank)
            parcel = before or held.parcels.setdefault(rank, Parcel(to))
            self.emitted += parcel.add_outputs(first, outputs, gradients)
            self._note_streams()
            left = held.left[rank] = held.left[rank] - 1
            full = not left or parcel.nbytes > held.most
            if full:
                del held.parcels[rank]
        if full:
            self._post(parcel)
        elif before is None:
            self._on_held(self)

    def _note_streams(self) -> None:
        """Note the streams of a Recv. Held and late gradients leave on those of a later Recv, or of another thread."""
        if self._agent.devices is not None:
            self._agent.devices.streams.leave_word()

    def _keep(self, source: int, gradient: torch.Tensor | None) -> None:
        """Keep a gradient for this worker. It is a copy, as if it had come in a message."""
        kept = None if gradient is None else plain(gradient).clone()
        self.emitted.append(source)
        if self._agent.devices is not None:
            if kept is not None:  # the tensor may have come back to a device other than the one it left
                kept = kept.to(self.local.record.sends[source].device)
            self._agent.devices.streams.leave_word()
        if self._waits:
            self._protocol.hand_over(self.local, {source: (kept,)})
        elif self._mine is None:
            self._mine = {source: (kept,)}
        else:
            self._mine[source] = (kept,)

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.emitted, self._late, self._mine)

    def flush(self) -> None:
        """Send the held gradients."""
        held = self._held
        if held is None or not held.parcels:
            return
        with held.lock:
            parcels, held.parcels = held.parcels, {}
        for parcel in parcels.values():
            self._post(parcel)

    def _post(self, parcel: Parcel, recv: Recv | None = None) -> None:
        """Send gradients, or let them wait for the report. ``recv`` is their Recv, if it is the only one of the run."""
        if self._agent.devices is not None and recv is None:
            self._agent.devices.streams.catch_up()  # the gradients may come from Recvs with other streams
        to_starter = parcel.to.id == self.local.starter
        if not to_starter and self.local.shortcuts:
            parcel.shortcuts = self.local.onward(self.sources[0], recv)
        rides = self._rides and not self._recvs and not self._mine and parcel.nbytes <= _MAX_HELD_BYTES
        # A single gradient leaves for the starter at once, so that the rest of this run and the starter's work overlap.
        if rides and (self._held is not None if to_starter else self._carried):
            self._late = parcel
            return
        send_parcel(self._protocol, self._agent.observers, self.local, parcel)
