"""The contents of ``torch.distributed.autograd``, private names included, over `backhaul.autograd`."""

from __future__ import annotations

from typing import Any

from backhaul import current_worker as _current_worker
from backhaul.autograd import backward as _backward
from backhaul.autograd import context as _ours
from backhaul.autograd import get_gradients
from backhaul.autograd.context_id import ContextId
from backhaul.autograd.contexts import Together
from backhaul.autograd.contexts import current_context as _context
from backhaul.autograd.functions import ID_BITS, RecvNode, SendNode, is_item
from backhaul.errors import BackhaulError, ContextError, MisuseError, RemoteTraceback

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]

# Torch's module has no worker: these are contexts of whichever is current.
_opened: dict[int, _ours] = {}


def is_available() -> bool:
    return True


def backward(context_id: int, roots: Any = None, retain_graph: bool = False, **options: Any) -> None:
    """See `backhaul.autograd.backward`. As in torch, an exception of a backward function becomes a RuntimeError."""
    try:
        _backward(context_id, roots, retain_graph, **options)
    except BackhaulError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "incompatible function arguments" in str(error):
            raise
        raise RuntimeError(f"Error on Node {_rank_of(error)}: {error}") from error


def _rank_of(error: Exception) -> int:
    """The rank of the worker on which an exception was raised."""
    worker = _current_worker.get()
    cause = error.__cause__
    rank: int = worker.get_worker_info(cause.worker if isinstance(cause, RemoteTraceback) and cause.worker else None).id
    return rank


class Node:
    """A node of a context's graph in torch's form: torch's names, and one node for each message."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        return _NAMES.get(type(self._node)) or str(self._node.name())

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple(_edge(node, output) for node, output in self._node.next_functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, Node) else other)

    def __hash__(self) -> int:
        return hash(self._node)


_NAMES = {
    SendNode: "torch::distributed::autograd::SendRpcBackward",
    Together: "torch::distributed::autograd::SendRpcBackward",
    RecvNode: "torch::distributed::autograd::RecvRpcBackward",
}


def _edge(node: Any, output: int) -> tuple[Any, int]:
    if is_item(node):
        node, output = node.next_functions[0]
    return (None if node is None else Node(node)), output


class DistAutogradContext:
    """A context, as this worker knows it."""

    def __init__(self, id: int) -> None:
        self._id = ContextId(id)

    def _context_id(self) -> int:
        return int(self._id)

    def _send_functions(self) -> dict[int, Any]:
        return {id: Node(node) for id, node in self._id.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        return {id: Node(node) for id, node in self._id.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        return self._id.workers


class context:
    """See `backhaul.autograd.context`."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(self, *_: object) -> None:
        _release_context(self.autograd_context._context_id())


def _init(rank: int) -> None:
    """Does nothing: `init_rpc` prepares contexts."""


def _new_context() -> DistAutogradContext:
    opened = _ours()
    id = opened.__enter__()
    _opened[id] = opened
    return DistAutogradContext(id)


def _release_context(id: int) -> None:
    opened = _opened.pop(id, None)
    if opened is None:
        _retrieve_context(id)
        _current_worker.get().autograd.leave(id)
    else:
        opened.__exit__(None, None, None)


def _current_context() -> DistAutogradContext:
    id = _context.get()
    if id is None:
        raise MisuseError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return _retrieve_context(id)


def _retrieve_context(id: int) -> DistAutogradContext:
    _current_worker.get().autograd.require(id)
    return DistAutogradContext(id)


def _is_valid_context(id: int) -> None:
    try:
        _retrieve_context(id)
    except ContextError as error:
        raise RuntimeError(f"{id} is not a valid context id: {error}") from None


def _get_max_id() -> int:
    """The highest id that a context of this worker can have."""
    rank: int = _current_worker.get().info.id
    return ((rank + 1) << ID_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    counts = _current_worker.get().autograd.counts()
    return {
        "num_current_backward_passes": str(counts["passes"]),
        "num_autograd_contexts": str(counts["contexts"]),
    }
