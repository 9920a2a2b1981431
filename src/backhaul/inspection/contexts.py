"""What one worker has recorded in an autograd context, as plain data for `drawing`.

A **part** is what `describe_context` returns::

    context, rank, worker, known    which worker's part of which context; not ``known``: the worker has no record of it
    initiator                       rank of the worker that made the context
    workers                         rank and name of each worker with which it exchanged messages of the context
    boxes, edges                    the graph: see `drawing.condensing`
    entries, exits, relays          the boxes that Recvs lead to and that Sends come from
    sends, recvs                    one item for each recorded tensor, with shape, type and bytes
    runs, waits, passes             finished parts of backward passes, with times in nanoseconds
    going                           ids of the passes in progress
    nodes, leaves, left_out         how much there is, and how much was skipped because there is too much
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from backhaul.agent.agent import Agent
from backhaul.autograd.contexts import Record
from backhaul.autograd.functions import ROOT, Recv, RecvNode, is_item
from backhaul.autograd.graph import plan
from backhaul.drawing.condensing import Entry, Graph, Leaf, Operation, Owner, condense
from backhaul.drawing.condensing import Node as Plain
from backhaul.errors import UnknownWorkerError

if TYPE_CHECKING:
    from backhaul.autograd.autograd import Autograd

_MOST_NODES = 50_000
_MOST_TENSORS = 2_000
_MOST_PASSES = 64
_DEEPEST = 64

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_SUFFIX = re.compile(r"Backward\d*$")

Node = Any
"""A node of torch's graph."""


def describe_context(
    agent: Agent, autograd: Autograd, id: int, roots: Sequence[torch.Tensor] | None = None
) -> dict[str, Any]:
    """This worker's part of a context.

    ``roots`` are tensors of this worker from which a backward pass may start; by default those of the latest pass.
    """
    part: dict[str, Any] = {"context": int(id), "rank": agent.me.id, "worker": agent.me.name, "known": False}
    record = autograd.contexts.get(int(id))
    if record is None:
        return part
    given = roots is not None
    if roots is None:
        roots = [root for reference in list(record.roots) if (root := reference()) is not None]
    with record.lock:
        passes = [local for local in record.passes.values() if not local.failed]
        ranks = record.told | record.heard
    sends, unspent, recvs = dict(record.sends), dict(record.unspent), dict(record.recvs)
    starts: dict[int, Sequence[Node]] = {
        source: [send.node] for source, send in itertools.islice(sends.items(), _MOST_TENSORS)
    }
    functions = [root.grad_fn for root in roots if root.grad_fn is not None]
    if functions:
        starts[ROOT] = functions
    walk = _Walk(record.id, starts)
    graph = Graph(walk.nodes, walk.exits, walk.classes)
    condensed = condense(graph)
    gates: dict[int, int] = {}
    if not walk.left_out:
        nodes = {source: send.node for source, send in unspent.items()}
        gates = _gates(nodes, functions if given or passes else ())
    leaves = [node for node in walk.nodes if isinstance(node, Leaf)]
    shown = list(itertools.islice(recvs.items(), _MOST_TENSORS))
    waiting = {source for local in passes for source in local.waiting}
    return {
        **part,
        "known": True,
        "initiator": record.initiator,
        "workers": _names(agent, {*ranks, record.initiator} - {agent.me.id}),
        "boxes": condensed.boxes,
        "edges": [list(edge) for edge in condensed.edges],
        "entries": [[message, boxes] for message, boxes in condensed.entries.items()],
        "exits": [[source, boxes] for source, boxes in condensed.exits.items()],
        "relays": [list(relay) for relay in condensed.relays],
        "sends": [
            {
                "source": source,
                "message": send.message,
                "to": send.to.id,
                "gate": gates.get(source, 0),
                "waiting": source in waiting,
                "spent": source not in unspent,
                **_size(_sent(send.node)),
            }
            for source, send in itertools.islice(sends.items(), _MOST_TENSORS)
        ],
        "recvs": [
            {"source": message + place, "message": message, "from": node.recv.sender.id, **_size(metadata)}
            for message, node in shown
            for place, metadata in enumerate(node._input_metadata)
        ],
        "rooted": bool(functions),
        **_passes(record),
        "going": [local.backward.id for local in passes],
        "nodes": len(walk.nodes),
        "leaves": {"count": len(leaves), "elements": sum(leaf.elements for leaf in leaves)},
        "left_out": {
            "nodes": walk.left_out,
            "sends": max(0, len(sends) - _MOST_TENSORS),
            "recvs": max(0, len(recvs) - _MOST_TENSORS),
        },
    }


def _passes(record: Record) -> dict[str, Any]:
    """The finished passes, at least the latest."""
    return {
        "runs": [
            {
                "backward": run.backward,
                "sources": list(run.sources),
                "began": run.began,
                "nanoseconds": run.ended - run.began,
                "gates": list(run.sources[1:]) if run.waits else [],
                "failed": run.failed,
            }
            for run in record.runs()
        ],
        "waits": [
            {
                "backward": wait.backward,
                "source": wait.source,
                "began": wait.began,
                "nanoseconds": wait.ended - wait.began,
            }
            for wait in list(record.waited)
        ],
        "passes": [
            {
                "backward": each.backward,
                "began": each.began,
                "nanoseconds": each.ended - each.began,
                "error": each.error,
            }
            for each in list(record.passed)[-_MOST_PASSES:]
        ],
    }


def _names(agent: Agent, ranks: Iterable[int]) -> list[list[Any]]:
    names: list[list[Any]] = []
    for rank in sorted(ranks):
        try:
            names.append([rank, agent.membership.find(rank).name])
        except UnknownWorkerError:  # the worker has left the group
            names.append([rank, f"rank {rank}"])
    return names


def _gates(unspent: dict[int, Node], roots: Sequence[Node]) -> dict[int, int]:
    """The Sends at which a run may have to wait, with the number of Sends that run together."""
    sources: dict[int, Node] = dict(unspent)
    if roots:
        sources[ROOT] = _Roots(roots)
    return {
        source: len(component.sources)
        for component in (plan(sources) if sources else ())
        for source in component.sources[1:]
    }


class _Roots:
    """Stands for the Send of the roots, which is created when a pass begins."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.next_functions = tuple((node, 0) for node in nodes)


def _sent(send: Node) -> Any:
    """Torch's description of the tensor that was sent; None if there is none."""
    for node, output in send.next_functions:
        if node is not None:
            metadata = node._input_metadata
            return metadata[output] if output < len(metadata) else None
    return None


def _size(metadata: Any) -> dict[str, Any]:
    if metadata is None:
        return {"shape": None, "dtype": "", "bytes": 0}
    dtype: torch.dtype = metadata.dtype
    name = str(dtype).removeprefix("torch.")
    try:
        shape = [int(size) for size in metadata.shape]
    except (RuntimeError, TypeError, ValueError):  # a nested tensor
        return {"shape": None, "dtype": name, "bytes": 0}
    return {"shape": shape, "dtype": name, "bytes": math.prod(shape) * dtype.itemsize}


class _Walk:
    """The nodes that a worker's Sends and roots reach, each after all nodes that it leads to."""

    def __init__(self, context: int, starts: dict[int, Sequence[Node]]) -> None:
        self.nodes: list[Plain] = []
        self.left_out = 0
        """The number of edges that lead to skipped nodes."""
        self._context = context
        self._places: dict[Node, int | None] = {None: None}
        self._variables: list[tuple[int, torch.Tensor]] = []
        self.exits: dict[int, Sequence[int]] = {}
        for source, nodes in starts.items():
            first = nodes if source == ROOT else [next for node in nodes for next, _ in node.next_functions]
            for node in first:
                self._visit(node)
            places = [self._places.get(node) for node in first]
            self.exits[source] = [place for place in places if place is not None]
        self.classes = self._name_parameters()

    def _visit(self, start: Node) -> None:
        places = self._places
        stack: list[tuple[Node, bool]] = [(start, False)]
        while stack:
            node, done = stack.pop()
            if done:
                found = [places.get(next) for next, _ in node.next_functions]
                self._add(node, Operation(_name(node), [place for place in found if place is not None]))
                continue
            if node in places:
                continue
            kind = type(node)
            if len(places) > _MOST_NODES:
                self.left_out += 1
            elif kind is _AccumulateGrad:
                leaf: torch.Tensor = node.variable
                self._variables.append((len(self.nodes), leaf))
                self._add(node, Leaf("", None, _shape(leaf), leaf.numel()))
            elif kind is RecvNode:
                recv: Recv = node.recv
                mine = recv.context == self._context
                self._add(node, Entry(recv.message) if mine else Operation(f"Recv of context {recv.context}", ()))
            elif is_item(node):
                recv_node = node.next_functions[0][0]
                if recv_node in places:
                    places[node] = places[recv_node]
                else:
                    stack += [(node, False), (recv_node, False)]
            else:
                places[node] = None  # until the node is done
                stack.append((node, True))
                stack += [(next, False) for next, _ in node.next_functions if next not in places]

    def _add(self, node: Node, plain: Plain) -> None:
        self._places[node] = len(self.nodes)
        self.nodes.append(plain)

    def _name_parameters(self) -> dict[Owner, str]:
        """Name the leaves that are parameters of modules; returns the classes of these modules."""
        wanted = {id(leaf): place for place, leaf in self._variables if isinstance(leaf, nn.Parameter)}
        if not wanted:
            return {}
        modules = _modules(wanted.keys())
        parents: dict[int, tuple[nn.Module, str]] = {}
        found: list[tuple[nn.Module, str, int]] = []
        for module in modules:
            for name, child in list(module._modules.items()):
                if child is not None:
                    parents.setdefault(id(child), (module, name))
            for name, parameter in list(module._parameters.items()):
                if (place := wanted.pop(id(parameter), None)) is not None:
                    found.append((module, name, place))
        classes: dict[Owner, str] = {}
        roots: dict[int, str] = {}
        for module, name, place in found:
            way = _way(module, parents)
            root = way[0][0]
            outermost = roots.get(id(root))
            if outermost is None:
                kind = type(root).__name__
                same = sum(other.split(" ")[0] == kind for other in roots.values())
                outermost = roots[id(root)] = kind if not same else f"{kind} {same + 1}"
            owner = (outermost, *(name for _, name in way[1:]))
            for depth, (each, _) in enumerate(way, 1):
                classes[owner[:depth]] = type(each).__name__
            leaf = self.nodes[place]
            if isinstance(leaf, Leaf):
                self.nodes[place] = leaf._replace(name=name, owner=owner)
        return classes


# A cache. Modules belong to no worker: the garbage collector finds those of the process.
_seen: list[weakref.ref[nn.Module]] = []


def _modules(parameters: Set[int]) -> list[nn.Module]:
    """The modules of this process. They are registered nowhere, but the garbage collector knows them.

    Walking all its objects takes tens of milliseconds, so the modules of the last walk are reused if they contain these
    ``parameters``, which are given by their ids.
    """
    global _seen
    known = [module for reference in _seen if (module := reference()) is not None]
    if parameters <= {id(parameter) for module in known for parameter in list(module._parameters.values())}:
        return known
    found: list[nn.Module] = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    found = [each for each in found if "_parameters" in vars(each) and "_modules" in vars(each)]
    _seen = list(map(weakref.ref, found))
    return found


def _way(module: nn.Module, parents: dict[int, tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    """The modules around this one, and itself, outermost first, each with its name in the one before."""
    way: list[tuple[nn.Module, str]] = []
    while id(module) in parents and len(way) < _DEEPEST:
        around, name = parents[id(module)]
        way.insert(0, (module, name))
        module = around
    return [(module, ""), *way]


def _shape(tensor: torch.Tensor) -> list[int]:
    try:
        return [int(size) for size in tensor.shape]
    except (RuntimeError, TypeError, ValueError):  # a nested tensor
        return []


def _name(node: Node) -> str:
    name: str = node.name().rpartition("::")[2]
    return _SUFFIX.sub("", name) or name
