"""Send and Recv: the nodes at which a graph leaves a worker, and enters one.

Both are nodes of torch's graph. Forward::

        worker A                          worker B
    x ──► SendRpc ─ ─ ─ message 7 ─ ─ ─► RecvRpc ──► x' ──► …

`SendRpc` has a sent tensor as its input and a dummy as its output. Each recorded tensor of a message has its own
`SendRpc`, since some of the tensors may get no gradient. `RecvRpc` has an *anchor* as its input, a leaf without other
use, and the received tensors as its outputs. If there are several, each has a node of its own after it (`_apart`). In
the backward pass, ``RecvRpc`` sends the gradients of its outputs to A. There torch runs ``SendRpc`` from its dummy; it
takes the gradients and passes them on to x's own nodes.

Torch's engine runs the ready node with the highest sequence number first. A Recv has the highest number of all, so it
sends as soon as its gradients are complete. A Send has a number below those of all other nodes of its run
(`graph.put_gates_last`), in the order of sending: see `graph` for why. A pass also starts from a Send, that of the
roots.
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
from backhaul.wire import modes

ID_BITS = 48
"""Ids of contexts, messages and passes are the rank of their maker, followed by a count of this many bits."""

ROOT = 0
"""The message id that stands for the roots of a pass."""

NOTHING = torch.zeros((), device="cpu")
"""The dummy gradient of a Send's output."""

# One for each GPU of the process; it never changes.
_on_gpus: dict[torch.device, torch.Tensor] = {}


def nothing_on(device: torch.device) -> torch.Tensor:
    """`NOTHING` on a device.

    Torch's engine runs a node on the stream that was current when its outputs were made, and the nodes that get its
    gradients wait for that stream. A node without outputs on a GPU has no stream. So the dummy of a tensor on a GPU is
    on that GPU.
    """
    if device.type == "cpu":
        return NOTHING
    found = _on_gpus.get(device)
    if found is None:
        found = _on_gpus[device] = torch.zeros((), device=device)
    return found


_FIRST = (1 << 62) - 1

Reach = tuple[tuple[int, ...], ...]
"""For each recorded tensor of a message: the sources that take part in a pass if it does; ``()`` if there are none."""


def rank_of(id: int) -> int:
    """The rank of the worker that made an id."""
    return id >> ID_BITS


class Recv(msgspec.Struct, frozen=True, gc=False):
    """The receiver's record of a message with recorded tensors."""

    context: int
    message: int
    sender: WorkerInfo
    reach: Reach | None = None
    """As in `wire.messages.Mark`."""


class Run(Protocol):
    """The interface of a run of torch's engine to the Sends and Recvs in it: see `run`."""

    @property
    def backward(self) -> int:
        """The id of the pass."""

    def take(self, source: int) -> Sequence[torch.Tensor | None]: ...
    def emit(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None: ...


class _ThreadState(threading.local):
    run: Run | None = None


thread = _ThreadState()
"""The run on this thread, if any."""


class SendRpc(torch.autograd.Function):
    """The sender's end of a recorded tensor, or the start of a pass from all its roots."""

    @staticmethod
    def forward(ctx: Any, source: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.materialize_grads = False
        ctx.source = source
        for tensor in tensors:
            if tensor.is_cuda:
                return nothing_on(tensor.device).data
        return NOTHING.data  # a new tensor over the same memory

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[Any, ...]:
        if thread.run is None:
            raise ContextError("only distributed autograd can run a Send: use backhaul.autograd.backward")
        return None, *thread.run.take(ctx.source)


class RecvRpc(torch.autograd.Function):
    """The receiver's end of the recorded tensors of a message."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, recv: Recv, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        # The tensors are passed in a sequence, so that torch does not take them for inputs: an input that is returned
        # unchanged could not be modified in place.
        ctx.materialize_grads = False
        ctx.recv = recv
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        run = thread.run
        if run is None:
            recv: Recv = ctx.recv
            raise ContextError(
                f"a tensor from worker {recv.sender.name!r} in autograd context {recv.context} is part of this graph, "
                "and a local backward() ends there. Use backhaul.autograd.backward(context_id, [loss])"
            )
        run.emit(ctx, gradients)
        return None, None, None


class RecvItem(torch.autograd.Function):
    """The identity, for one of several tensors of a message, if `_lift` cannot differentiate it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, tensor: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.materialize_grads = False
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


SendNode: Any = SendRpc._backward_cls
RecvNode: Any = RecvRpc._backward_cls
"""The types of their graph nodes."""

_lift: Any = torch.ops.aten.lift.default
"""The identity, as an operation of torch. It returns the tensor itself, with one more node in its history.

Torch runs that node without Python. For complex tensors there is no such operation.
"""

_ItemNode: Any = RecvItem._backward_cls
# The type of the node of `_lift`, which torch does not export.
_LiftNode: Any = type(_lift(torch.zeros((), requires_grad=True)).grad_fn)

# `apply` without its functorch layer, which is not needed here.
_apply_send: Any = super(torch.autograd.Function, SendRpc).apply
_apply_recv: Any = super(torch.autograd.Function, RecvRpc).apply
_apply_item: Any = super(torch.autograd.Function, RecvItem).apply


def start(roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """The dummy output of a Send that stands for the roots of a pass. Torch runs it like other Sends, but first."""
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


def sends(first: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The dummy output of a Send for each of these tensors. ``first`` is the source of the first one."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return sends(first, tensors)
    uses = _first_uses(tensors)
    outputs: list[torch.Tensor] = []
    for source, tensor in enumerate(tensors, first):
        outputs.append(_apply_send(source, tensor))
        if type(tensor.grad_fn) is RecvNode:
            _notice_hooks(tensor)
    del uses
    return outputs


def _notice_hooks(tensor: torch.Tensor) -> None:
    """Attach a dict of hooks to a received tensor that is sent on unchanged, so that `passes_on` can see its hooks.

    Torch keeps the hooks of a tensor in a dict that it makes for the first hook, and gives no notice of that.
    """
    node: Any = tensor.grad_fn
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    node.hooks = hooks
    node.output = weakref.ref(tensor)


def passes_on(node: Any) -> bool:
    """Whether a gradient for this Recv's output, which was sent on, can go back without torch's engine."""
    hooks = getattr(node, "hooks", None)
    if hooks is None or hooks:
        return False
    output = node.output()
    return output is None or not output.retains_grad


def _first_uses(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make torch create the graph nodes of leaves and views, and keep them alive as long as the result.

    Torch creates the node of a leaf at its first use, and the node of a view again after its base was changed in place.
    It does so under a lock of the tensor, inside which it may wait for Python's GIL. An autograd Function waits for
    that lock while it holds the GIL, so two threads could deadlock. Operations such as those below wait for the lock
    without the GIL. A Function that finds the node created needs nothing else under the lock.
    """
    found = [tensor for tensor in tensors if tensor.is_leaf or (tensor._version and tensor._is_view())]
    return found and [each.view_as(each) if each.layout is torch.strided else each.clone() for each in found]


def receive(anchor: torch.Tensor, recv: Recv, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
    """The node of a Recv, and the tensors with that node as their history. Their gradients go back to the sender."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return receive(anchor, recv, tensors)
    outputs: Sequence[torch.Tensor] = _apply_recv(anchor, recv, tensors)
    node: Any = outputs[0].grad_fn
    node._set_sequence_nr(_FIRST)
    if len(outputs) > 1:
        outputs = _apart(outputs)
    return node, outputs


def _apart(outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Give each output of a Recv a node of its own, to which hooks on that tensor attach.

    Torch would call hooks on an output of ``RecvRpc`` with None whenever another output has a gradient.
    """
    if modes.are_on():
        with modes.off():
            return _apart(outputs)
    return [_apply_item(output, [output.data]) if output.is_complex() else _lift(output) for output in outputs]


def is_item(node: Any) -> bool:
    """Whether a node stands between a Recv and one of the several tensors of its message."""
    return type(node) in (_LiftNode, _ItemNode) and type(node.next_functions[0][0]) is RecvNode
