"""What torch's engine is to run, and in which order: a walk over the graph of one worker. Pure.

The **sources** of a pass on a worker are the Sends that take part, by the ids of their messages, and where it was
started the Send of its roots (`ROOT`). Two sources are in one **component** when they reach a common node. Each
component is one run of torch's engine, so that every node of it is run once, with the sum of all its gradients, as in
one process. A leaf does not join components, since adding to its gradient can be done in parts, unless it has hooks,
which must see the sum.

Why gates cannot deadlock
-------------------------
In a run with several sources each Send is a **gate**: when the engine comes to it, it waits for its gradients.
Gates come last (`put_gates_last`): the engine turns to one when no other node is ready, and then to the one that
was sent last.

Say gate g waits, and its gradient depends on a Recv r of the same worker: r came after g was sent. Has r been
run? If not, some source g' that reaches r has not been. Then g' was sent after r came, so after g; but g
is the latest gate that has not been run. So r has been run, and what g waits for is not held up here.

Between workers: take the gate, among all that wait, that was sent last in any order that respects cause and
effect. What holds its gradient up is a gate that has not been run, elsewhere, that was sent after it; and the
gate at which that worker waits was sent later still. So there is none. The same holds for a run that has not begun
because the latest of its gates has no gradients yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from backhaul.autograd.functions import ID_BITS, ROOT, RecvNode, SendNode

Node = Any
"""A node of torch's graph."""

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_LIFT = 1 << ID_BITS


class Component:
    """Sources that have to be run together, and the leaves that they reach."""

    __slots__ = ("leaves", "nodes", "sources", "started")

    def __init__(self, sources: Sequence[int], leaves: Sequence[Node], nodes: Sequence[Node]) -> None:
        self.sources = sorted(sources, key=_order, reverse=True)
        """As they are to be run: the roots first, then the latest Send."""
        self.leaves = leaves
        self.nodes = nodes
        """All others; only if there are several sources."""
        self.started = False


def _order(source: int) -> tuple[bool, int]:
    return source == ROOT, source


def plan(sources: Mapping[int, Sequence[Node]]) -> list[Component]:
    """The components of these sources, each given by the nodes that it starts from. Linear in the graph."""
    if len(sources) == 1:
        ((source, starts),) = sources.items()
        return [Component([source], _leaves(starts), ())]
    owner: dict[Node, int] = {}
    leaves: dict[int, dict[Node, None]] = {source: {} for source in sources}
    groups = _Groups(sources)
    for source, starts in sources.items():
        mine = leaves[source]
        stack: list[Iterable[tuple[Node, int]]] = [[(start, 0) for start in starts]]
        while stack:
            for node, _ in stack.pop():
                if node is None:
                    continue
                other = owner.get(node)
                if other is None:
                    owner[node] = source
                    kind = type(node)
                    if kind is _AccumulateGrad:
                        mine[node] = None
                    elif kind is not RecvNode:
                        stack.append(node.next_functions)
                elif other != source:
                    if type(node) is _AccumulateGrad:
                        mine[node] = None
                        if not _has_hooks(node.variable):
                            continue
                    groups.join(other, source)
    members = groups.members()
    nodes: dict[int, list[Node]] = {first: [] for first, group in members.items() if len(group) > 1}
    if nodes:
        for node, source in owner.items():
            first = groups.find(source)
            if first in nodes and type(node) is not _AccumulateGrad and type(node) is not RecvNode:
                nodes[first].append(node)
    return [
        Component(group, list({leaf: None for source in group for leaf in leaves[source]}), nodes.get(first, ()))
        for first, group in members.items()
    ]


def _leaves(starts: Sequence[Node]) -> list[Node]:
    """The leaves that one source reaches. The same walk, for the usual case."""
    seen: set[Node] = set()
    leaves = []
    stack: list[Iterable[tuple[Node, int]]] = [[(start, 0) for start in starts]]
    while stack:
        for node, _ in stack.pop():
            if node is not None and node not in seen:
                seen.add(node)
                kind = type(node)
                if kind is _AccumulateGrad:
                    leaves.append(node)
                elif kind is not RecvNode:
                    stack.append(node.next_functions)
    return leaves


def reach(starts: Iterable[Node], seen: set[Node]) -> list[Node]:
    """The Recvs that can be reached from these nodes and are not in ``seen``, to which all nodes met are added."""
    found = []
    stack: list[Iterable[tuple[Node, int]]] = [[(start, 0) for start in starts]]
    while stack:
        for node, _ in stack.pop():
            if node is not None and node not in seen:
                seen.add(node)
                if type(node) is RecvNode:
                    found.append(node)
                else:
                    stack.append(node.next_functions)
    return found


def put_gates_last(component: Component) -> None:
    """Lift the sequence numbers of all nodes above those of Sends. Their own order stays."""
    for node in component.nodes:
        number = node._sequence_nr()
        if number < _LIFT and type(node) is not SendNode:
            node._set_sequence_nr(number + _LIFT)


def _has_hooks(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None))


class _Groups:
    """Disjoint sets of sources."""

    def __init__(self, sources: Iterable[int]) -> None:
        self._parent = {source: source for source in sources}

    def find(self, source: int) -> int:
        parent = self._parent
        while parent[source] != source:
            parent[source] = parent[parent[source]]
            source = parent[source]
        return source

    def join(self, one: int, other: int) -> None:
        self._parent[self.find(one)] = self.find(other)

    def members(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for source in self._parent:
            found.setdefault(self.find(source), []).append(source)
        return found
