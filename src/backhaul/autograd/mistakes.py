"""Finds code that looks like training and trains nothing: gradients that end at a tensor from another worker.

Torch allows all of it, since a received tensor can be a leaf on purpose. Backhaul reports three mistakes:

- A gradient reaches a tensor that another worker computed for a call outside a context. The tensor warns.
- A local pass towards certain tensors (``torch.autograd.grad``, ``backward(inputs=...)``), which were sent to workers
  that the pass does not reach. It raises.
- The step of a torch optimizer finds no ``.grad`` at all, while the open context has gradients. It raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import hooks

from backhaul.autograd.contexts import Record, current_context, everywhere
from backhaul.autograd.functions import Recv
from backhaul.autograd.graph import Node, reach
from backhaul.errors import ContextError, MisuseError

Edge = tuple[Node, int]

_not_saved: Callable[[Any], Any] = hooks.unserializable_hook
"""Marks a hook that is not saved with its tensor, so that ``torch.save`` does not warn about it."""


def warn_of_gradients(tensor: torch.Tensor, worker: str) -> None:
    """Make a tensor, which ``worker`` computed for a call outside a context, warn when a gradient reaches it."""

    def warn(_: torch.Tensor) -> None:
        warnings.warn(
            f"a gradient ends at a tensor that worker {worker!r} computed: the call was made outside an autograd "
            "context, so the tensors that it was computed from get no gradient. Put the forward pass and the backward "
            "pass inside `with backhaul.autograd.context() as context_id:`, and write "
            "backhaul.autograd.backward(context_id, [loss]). If you want the gradient to end there, use "
            "tensor.detach()",
            stacklevel=2,
        )

    tensor.register_hook(_not_saved(warn))  # type: ignore[no-untyped-call]


def _check(roots: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Raise `ContextError` if a pass from these roots would miss gradients of these inputs."""
    received = reach([_edge(root)[0] for root in roots], set())
    if not received:
        return
    targets = {_edge(each) for each in inputs}
    for node, outputs in received.items():
        for record in _records(node):
            if any(_reaches(send, targets) for send in _sends(record, node.recv, outputs)):
                recv: Recv = node.recv
                raise ContextError(
                    "torch.autograd.grad() and backward(inputs=...) do not go through other workers: the gradient of "
                    f"an input that worker {recv.sender.name!r} used would be incomplete. Use "
                    "backhaul.autograd.backward(context_id, [loss]), then get_gradients(context_id) for leaves, and "
                    "retain_grad() or a hook for other tensors"
                )


def _edge(value: Any) -> Edge:
    edge = value if isinstance(value, GradientEdge) else get_gradient_edge(value)
    return edge.node, edge.output_nr


def _records(node: Any) -> Iterator[Record]:
    recv: Recv = node.recv
    for contexts in list(everywhere):
        record = contexts.get(recv.context)
        if record is not None and record.recvs.get(recv.message) is node:
            yield record


def _sends(record: Record, recv: Recv, outputs: Sequence[int]) -> Iterator[Node]:
    """The Sends of this worker that these tensors of a message depend on; all Sends if that is not known."""
    if recv.reach is None:
        yield from [send.node for send in list(record.sends.values())]
    elif recv.reach:
        for source in {source for output in outputs for source in recv.reach[output]}:
            send = record.sends.get(source)
            if send is not None:
                yield send.node


def _reaches(start: Node, targets: set[Edge]) -> bool:
    seen: set[Any] = {None}
    stack: list[Iterable[Edge]] = [start.next_functions]
    while stack:
        for edge in stack.pop():
            if edge in targets:
                return True
            if edge[0] not in seen:
                seen.add(edge[0])
                stack.append(edge[0].next_functions)
    return False


_run: Any = torch.autograd._engine_run_backward


def _run_checked(outputs: Any, *args: Any, **options: Any) -> Any:
    """Replaces the function that `torch.autograd.grad` and ``backward`` both call. ``args[3]`` are the inputs."""
    inputs = args[3] if len(args) > 3 else ()
    if inputs and any(map(len, everywhere)):
        _check([each for each in outputs if isinstance(each, GradientEdge) or each.requires_grad], inputs)
    return _run(outputs, *args, **options)


# Both of torch's functions call it by this name. With no context open in the process, it costs one look.
torch.autograd._engine_run_backward = _run_checked  # type: ignore[assignment]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Torch calls this before a step of any optimizer. Raises `MisuseError` for a step that would change nothing."""
    id = current_context.get()
    if id is None:
        return
    for contexts in list(everywhere):
        record = contexts.get(id)
        if record is None or not record.unread:
            continue
        params = [each for group in optimizer.param_groups for each in group["params"]]
        if any(not isinstance(each, torch.Tensor) or each.grad is not None for each in params):
            return
        with record.lock:
            would_change_nothing = not record.gradients.keys().isdisjoint(params)
        if would_change_nothing:
            raise MisuseError(
                f"{type(optimizer).__name__}.step() would change nothing: no parameter has a .grad, and the gradients "
                "of the backward pass are in the open autograd context. Use backhaul.optim.DistributedOptimizer and "
                'step(context_id), or call backward with accumulate="grad"'
            )


step_hook: int = register_optimizer_step_pre_hook(_before_step).id
"""The id of this hook in torch's dict of hooks for all optimizers."""
