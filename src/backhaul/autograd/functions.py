"""Send and Recv: where a graph leaves a worker, and where it enters one.

Both are real nodes of torch's graph. Forward::

        worker A                          worker B
    x ──► SendRpc ─ ─ ─ message 7 ─ ─ ─► RecvRpc ──► x' ──► …

`SendRpc` has a sent tensor as its input and a dummy as its output; each recorded tensor of a message has one of its
own, since not all of them may get gradients. `RecvRpc` has an *anchor* as its input, a leaf of no other use, and the
received tensors as its outputs, with a `RecvItem` in between if there are several. Backward, ``RecvRpc`` sends the
gradients of its outputs to A; ``SendRpc`` is run on A from its dummy, takes them and passes them on to x's own nodes.

Torch's engine pops the ready node with the highest sequence number first. A Recv has the highest there are,
so it sends as soon as its gradients are complete. A Send has one below those of all other nodes of its run
(`graph.put_gates_last`), in the order of sending: see `graph` for why. A pass starts from a Send as well, of the roots.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from backhaul.errors import ContextError
from backhaul.ids import WorkerInfo

ID_BITS = 48
"""Ids of contexts, messages and passes have the rank of who made them above this many bits of a count."""

ROOT = 0
"""Stands for the id of a message where the roots of a pass are meant."""

NOTHING = torch.zeros((), device="cpu")
"""Stands for the gradient of a Send's output."""

# One for each GPU of the process; it never changes.
_on_gpus: dict[torch.device, torch.Tensor] = {}


def nothing_on(device: torch.device) -> torch.Tensor:
    """`NOTHING` on a device.

    Torch's engine runs a node on the stream that was current when its outputs were made, and the nodes that get its
    gradients wait for that stream. A node without outputs on a GPU has none. So the dummy of a tensor on a GPU is there
    as well.
    """
    if device.type == "cpu":
        return NOTHING
    found = _on_gpus.get(device)
    if found is None:
        found = _on_gpus[device] = torch.zeros((), device=device)
    return found


_FIRST = (1 << 62) - 1

Reach = tuple[tuple[int, ...], ...]
"""For each recorded tensor of a message the sources that take part in a pass if it does; ``()`` if there are none."""


def rank_of(id: int) -> int:
    """The rank of the worker that made an id."""
    return id >> ID_BITS


class Recv(msgspec.Struct, frozen=True, gc=False):
    """A message with recorded tensors, at its receiver."""

    context: int
    message: int
    sender: WorkerInfo
    reach: Reach | None = None
    """As in `wire.messages.Mark`."""


class Run(Protocol):
    """What Send and Recv ask of the run of torch's engine that they are in: see `engine`."""

    @property
    def backward(self) -> int:
        """The id of the pass."""

    def take(self, source: int) -> Sequence[torch.Tensor | None]: ...
    def emit(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None: ...


class _ThreadState(threading.local):
    run: Run | None = None


thread = _ThreadState()
"""The run that this thread is in, if any."""


class SendRpc(torch.autograd.Function):
    """The sender's end of a recorded tensor; or the start of a pass, of all its roots."""

    @staticmethod
    def forward(ctx: Any, source: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.materialize_grads = False
        ctx.source = source
        for tensor in tensors:
            if tensor.is_cuda:
                return nothing_on(tensor.device).data
        return NOTHING.data  # a tensor of its own, over the same memory

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[Any, ...]:
        if thread.run is None:
            raise ContextError("a Send is run by distributed autograd only: see backhaul.autograd.backward")
        return None, *thread.run.take(ctx.source)


class RecvRpc(torch.autograd.Function):
    """The receiver's end of the recorded tensors of a message."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, recv: Recv, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        # The tensors are no inputs: inputs that are returned as they are could not be changed in place.
        ctx.materialize_grads = False
        ctx.recv = recv
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        run = thread.run
        if run is None:
            recv: Recv = ctx.recv
            raise ContextError(
                f"a tensor that came from worker {recv.sender.name!r} in autograd context {recv.context} is part of "
                "this graph: a local backward() ends there. Use backhaul.autograd.backward(context_id, [loss])"
            )
        run.emit(ctx, gradients)
        return None, None, None


class RecvItem(torch.autograd.Function):
    """One of several tensors of a message: an identity, for hooks on it.

    Hooks on an output of ``RecvRpc`` would be called whenever one of the others has a gradient, with None.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, tensor: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.materialize_grads = False
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


SendNode: Any = SendRpc._backward_cls
RecvNode: Any = RecvRpc._backward_cls
RecvItemNode: Any = RecvItem._backward_cls
"""The types of their graph nodes."""

# What `apply` comes down to without functorch, which has nothing to do here.
_apply_send: Any = super(torch.autograd.Function, SendRpc).apply
_apply_recv: Any = super(torch.autograd.Function, RecvRpc).apply
_apply_item: Any = super(torch.autograd.Function, RecvItem).apply


def start(roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """The dummy output of a Send that stands for the roots of a pass: it is run as the others are, and first."""
    output = send(ROOT, roots)
    output.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[union-attr]
    return output


def send(source: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The dummy output of a Send."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return send(source, tensors)
    uses = _first_uses(tensors)
    output: torch.Tensor = _apply_send(source, *tensors)
    del uses
    if len(tensors) == 1 and type(tensors[0].grad_fn) is RecvNode:
        _notice_hooks(tensors[0])
    return output


def _notice_hooks(tensor: torch.Tensor) -> None:
    """A tensor is sent on as it has come: keep hold of the hooks on it, so that it is known whether there are any.

    Torch puts hooks of a tensor into a dict, which it makes for the first one, and tells nobody of.
    """
    node: Any = tensor.grad_fn
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    node.hooks = hooks
    node.output = weakref.ref(tensor)


def passes_on(node: Any) -> bool:
    """Whether a gradient that comes to this Recv's output, which was sent on, can go back without torch's engine."""
    hooks = getattr(node, "hooks", None)
    if hooks is None or hooks:
        return False
    output = node.output()
    return output is None or not output.retains_grad


def _first_uses(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Have the graph nodes of leaves and views made, and kept as long as what is returned.

    Torch makes the node of a leaf when it is used and has none, and that of a view anew after its base was changed in
    place: under a lock of the tensor's, where an operation waits for the interpreter. A Function waits for the lock
    while it has the interpreter. On two threads that is for ever. Operations, as these, wait for the lock without it;
    and who finds the node made wants nothing else under the lock.
    """
    found = [tensor for tensor in tensors if tensor.is_leaf or (tensor._version and tensor._is_view())]
    return [each.view_as(each) if each.layout is torch.strided else each.clone() for each in found]


def receive(anchor: torch.Tensor, recv: Recv, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
    """The node of a Recv, and the tensors with it as their history: their gradients go back to the sender."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return receive(anchor, recv, tensors)
    outputs: Sequence[torch.Tensor] = _apply_recv(anchor, recv, tensors if len(tensors) == 1 else _aliases(tensors))
    node: Any = outputs[0].grad_fn
    node._set_sequence_nr(_FIRST)
    if len(outputs) > 1:
        outputs = [_apply_item(output, [tensor]) for output, tensor in zip(outputs, tensors, strict=True)]
    return node, outputs


def _aliases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.data for tensor in tensors]
