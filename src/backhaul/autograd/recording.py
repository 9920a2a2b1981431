"""Recording: puts Send and Recv nodes into the graph as messages leave and arrive.

Every request that is made inside a context carries the context's id, so that the function runs in the context. Tensors
that require grad are recorded too, in requests and in replies, unless grad mode is off.

A message also lists what its tensors depend on (`graph.foresee`), so that its receiver knows which of its own Sends
take part in a pass. In a federation it does not: peers do not learn how others compute, and are not trusted to tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from backhaul.agent.recording import Tensors
from backhaul.autograd import mistakes
from backhaul.autograd.contexts import Contexts, Record, Send, current_context
from backhaul.autograd.functions import Reach, Recv, rank_of, receive, sends
from backhaul.autograd.graph import foresee
from backhaul.errors import ProtocolError
from backhaul.ids import WorkerInfo
from backhaul.trust.checking import like
from backhaul.wire.messages import Mark

_NO_CONTEXT = 0
"""The context of a mark without a context. Its ``reach`` lists the tensors that the sender has computed."""


class Recorder:
    """Records the messages of one worker. Implements `agent.recording.Recording`."""

    def __init__(self, contexts: Contexts, anchor: torch.Tensor) -> None:
        self._contexts = contexts
        self._anchor = anchor
        self._tells = not contexts.secret

    def asking(self, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        id = current_context.get()
        if id is None:
            return None, tensors
        record = self._contexts.get(id)
        if record is None:  # the function has outlived its caller's context
            return None, tensors
        record.told.add(to.id)
        if record.over:  # read after `told` was changed; a thread that ends the context does it in the reverse order
            return None, tensors
        if not torch.is_grad_enabled():
            return Mark(id, 0, False), _detached(tensors)
        return self._record(record, tensors, to)

    def answering(self, asked: Mark, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        if not asked.grad:
            return None, _detached(tensors)
        record = self._contexts.join(asked.context, to)
        if record is None:
            # The context is over. The caller gets tensors through which a backward pass raises, and not leaves, at
            # which it would silently end.
            count = sum(tensor.requires_grad for tensor in tensors)
            return (Mark(asked.context, self._contexts.new_id(count)) if count else None), tensors
        mark, tensors = self._record(record, tensors, to)
        return (mark if mark.message else None), tensors

    def leaving(self, tensors: Tensors) -> Mark | None:
        for tensor in tensors:
            if tensor.requires_grad:
                break
        else:
            return None
        computed = tuple(
            place
            for place, tensor in enumerate(tensors)
            if tensor.requires_grad and tensor.grad_fn is not None and type(tensor) is torch.Tensor
        )
        return Mark(_NO_CONTEXT, 1, True, (computed,)) if computed else None

    def received(self, mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
        if mark.context == _NO_CONTEXT:
            return _without_history(mark, tensors, sender)
        if rank_of(mark.message) != sender.id:
            raise ProtocolError(f"message id {mark.message} does not belong to its sender, worker {sender.name!r}")
        if len(tensors) == 1 and tensors[0].requires_grad:
            return self._receive(mark, [tensors[0].data], sender)
        places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if not places:
            raise ProtocolError(f"message {mark.message} is marked as recorded, but no tensor of it requires grad")
        outputs = self._receive(mark, _separate(tensors, places), sender)
        if len(places) == len(tensors):
            return outputs
        result = list(tensors)
        for place, output in zip(places, outputs, strict=True):
            result[place] = output
        return result

    def _receive(self, mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
        reach = mark.reach if self._tells else None
        if reach and len(reach) != len(tensors):
            raise ProtocolError(f"message {mark.message} has {len(tensors)} recorded tensors, but lists {len(reach)}")
        message, context = mark.message, mark.context
        node, outputs = receive(self._anchor, Recv(context, message, sender, reach), tensors)
        # The tensors get a Recv even after the context's end: the values are good, and a backward pass raises an error
        # that explains it.
        record = self._contexts.join(context, sender)
        if record is not None:
            if record.limit is not None:
                record.require_room(len(record.recvs) + 1)
            record.recvs[message] = node
        return outputs

    def enter(self, mark: Mark, sender: WorkerInfo) -> None:
        if self._contexts.join(mark.context, sender) is not None:
            current_context.set(mark.context)

    def _record(self, record: Record, tensors: Tensors, to: WorkerInfo) -> tuple[Mark, Tensors]:
        recorded = [tensor for tensor in tensors if tensor.requires_grad]
        if not recorded:
            return Mark(record.id), tensors
        if record.limit is not None:
            record.require_room(len(record.sends) + len(recorded))
        record.told.add(to.id)
        message = source = self._contexts.new_id(len(recorded))
        tells = self._tells
        made: dict[int, Send] = {}
        for tensor, output in zip(recorded, sends(message, recorded), strict=True):
            made[source] = Send(message, to, output.grad_fn, output, tensor.device, None if tells else like(tensor))
            source += 1
        record.add(made)
        reach: Reach | None = None
        if tells:
            reach = _foreseen(made.values()) if record.recvs else ()
        return Mark(record.id, message, True, reach), tensors


def _foreseen(sends: Iterable[Send]) -> Reach | None:
    """The sources on which these Sends depend; None if that is not known."""
    found: list[tuple[int, ...]] = []
    for each in sends:
        sources = foresee(each.node)
        if sources is None:
            return None
        found.append(sources)
    return tuple(found) if any(found) else ()


def _without_history(mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
    """The tensors of a message outside a context. Those that the sender has computed will warn of gradients."""
    if mark.reach is None or len(mark.reach) != 1 or any(not 0 <= place < len(tensors) for place in mark.reach[0]):
        raise ProtocolError("a message lists computed tensors that it does not have")
    for place in mark.reach[0]:
        if tensors[place].requires_grad:
            mistakes.warn_of_gradients(tensors[place], sender.name)
    return tensors


def _detached(tensors: Tensors) -> Tensors:
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def _separate(tensors: Tensors, places: list[int]) -> list[torch.Tensor]:
    """The tensors at these places as plain tensors that share no memory with other tensors of the message.

    Autograd would not know that they share memory, and an in-place operation on one would spoil the other's gradient.
    """
    found = tensors if len(places) == len(tensors) else [tensors[place] for place in places]
    if len(tensors) > 1:
        storages = [tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0 for tensor in tensors]
        if len(set(storages)) < len(storages):
            times = Counter(storages)
            found = [
                tensor.detach().clone() if times[storages[place]] > 1 and storages[place] else tensor
                for place, tensor in zip(places, found, strict=True)
            ]
    return [tensor.data for tensor in found]
