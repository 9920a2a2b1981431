"""What torch's engine must run, and in which order: a walk over the graph of one worker. It changes no state, except
that `put_gates_last` sets sequence numbers of nodes.

The **sources** of a pass on a worker are the Sends that take part, one for each sent tensor. On the worker that starts
the pass, the Send of its roots (`ROOT`) is a source too. Two sources are in one **component** when they reach a common
node. Each component is one run of torch's engine, so that every node in it is run once, with the sum of all its
gradients, as in one process.

A common leaf does not join two components, since its gradient can be added up in parts. It does join them if it has
hooks, which must see the sum, or a layout whose gradients torch does not add up in ``.grad``. Sources that reach
tensors of one joint hook are also in one component (see `joint_hooks`), and so are all sources that reach a leaf whose
gradient several processes compute together (see `replicas`).

Why gates cannot deadlock
-------------------------
In a run with several sources each Send is a **gate**: when the engine reaches a gate, it waits there for gradients.
Gates come last (`put_gates_last`): the engine takes a gate only when no other node is ready, and then the gate that was
sent last.

Suppose gate g waits, and its gradient depends on a Recv r of the same worker. Then r arrived after g was sent. Has r
been run? If not, some source g' that reaches r has not been run. Then g' was sent after r arrived, so after g. But g is
the latest gate that has not been run. So r has been run, and this worker does not hold up what g waits for.

Between workers: of all gates that wait, take the one that was sent last, in any order that respects cause and effect.
If something holds up its gradient, it is a gate on another worker that has not been run and was sent after it. The gate
at which that worker waits was sent later still, which contradicts the choice. So nothing holds it up. The same argument
holds for a run that has not begun because its latest gate has no gradients yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from backhaul.autograd import joint_hooks, node_hooks
from backhaul.autograd.functions import ID_BITS, ROOT, Recv, RecvNode, SendNode
from backhaul.autograd.replicas import replicas

Node = Any
"""A node of torch's graph."""

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
SMALL = 64
"""Running a component of up to this many nodes costs less than the overhead of a run."""

MOST_FORESEEN = 4
"""A message lists at most this many sources that its tensors depend on, since they make the message longer."""
_MOST_NODES = 64

_ADDED_UP = {torch.strided, torch.sparse_coo}
"""Layouts whose gradients torch adds to an existing ``.grad``."""

_LIFT = 1 << ID_BITS
_COUNT = _LIFT - 1


class Component:
    """Sources that must be run together, and the nodes that they reach."""

    __slots__ = ("in_order", "leaves", "nodes", "recvs", "size", "sources", "started", "waits")

    def __init__(
        self,
        sources: Sequence[int],
        leaves: Sequence[Node],
        recvs: Mapping[Node, Collection[int]],
        size: int,
        nodes: Sequence[Node] = (),
        *,
        in_order: bool = False,
    ) -> None:
        self.sources = sources if len(sources) == 1 else sorted(sources, key=_order, reverse=True)
        """The sources in the order in which they run: the roots first, then the latest Send."""
        self.leaves = leaves
        self.recvs = recvs
        """The Recvs, each with the outputs that are reached."""
        self.size = size
        """The number of nodes."""
        self.nodes = nodes
        """All nodes but leaves and Recvs; empty if there is one source."""
        self.in_order = in_order
        """Whether the sources must run one by one, even if the gradients of all have arrived."""
        self.started = False
        self.waits = False
        """Whether gates of its run will wait."""


def together(components: Sequence[Component]) -> Component:
    """Several components merged into one, so that they are run together although they need not be."""
    return Component(
        [source for component in components for source in component.sources],
        list({leaf: None for component in components for leaf in component.leaves}),
        {node: outputs for component in components for node, outputs in component.recvs.items()},
        sum(component.size for component in components),
        [node for component in components for node in component.nodes],
        in_order=any(component.in_order for component in components),
    )


def _order(source: int) -> tuple[bool, int]:
    return source == ROOT, source


def plan(sources: Mapping[int, Node]) -> list[Component]:
    """The components of these sources, each given by its node. Linear in the graph."""
    if len(sources) == 1:
        ((source, start),) = sources.items()
        return [Component([source], *_walk(start))]
    owner: dict[Node, int] = {}
    leaves: dict[int, dict[Node, None]] = {source: {} for source in sources}
    recvs: dict[Node, set[int]] = {}
    sizes: dict[int, int] = {}
    groups = _Groups(sources)
    look = node_hooks.are_there()
    for source, start in sources.items():
        mine = leaves[source]
        before = len(owner)
        stack: list[Iterable[tuple[Node, int]]] = [[(start, 0)]]
        while stack:
            for node, output in stack.pop():
                other = owner.get(node)
                if other is None:
                    if node is None:
                        continue
                    owner[node] = source
                    kind = type(node)
                    if kind is _AccumulateGrad:
                        mine[node] = None
                    elif kind is RecvNode:
                        recvs[node] = {output}
                    else:
                        stack.append(node.next_functions)
                    continue
                if node in recvs:
                    recvs[node].add(output)
                if other != source:
                    if type(node) is _AccumulateGrad:
                        mine[node] = None
                        if not _wants_one_sum(node, look):
                            continue
                    groups.join(other, source)
        sizes[source] = len(owner) - before
    for hooked in joint_hooks.groups():
        joined = [owner[node] for node in hooked if node in owner]
        for other in joined[1:]:
            groups.join(joined[0], other)
    averaged: list[int] = []
    if (is_joint := replicas.is_joint()) is not None:
        averaged = [source for source, mine in leaves.items() if any(is_joint(leaf.variable) for leaf in mine)]
        for source in averaged:
            groups.join(averaged[0], source)
    members = groups.members()
    recvs_of: dict[int, dict[Node, set[int]]] = {first: {} for first in members}
    for node, outputs in recvs.items():
        recvs_of[groups.find(owner[node])][node] = outputs
    nodes_of: dict[int, list[Node]] = {first: [] for first, group in members.items() if len(group) > 1}
    if nodes_of:
        for node, source in owner.items():
            nodes = nodes_of.get(groups.find(source))
            if nodes is not None and type(node) is not _AccumulateGrad and type(node) is not RecvNode:
                nodes.append(node)
    return [
        Component(
            group,
            list({leaf: None for source in group for leaf in leaves[source]}),
            recvs_of[first],
            sum(sizes[source] for source in group),
            nodes_of.get(first, ()),
            in_order=len(group) > 1 and not set(averaged).isdisjoint(group),
        )
        for first, group in members.items()
    ]


def as_one(sources: Mapping[int, Node]) -> Component | None:
    """All of these sources as one component, whether or not they must be run together; None if it would not be small.

    Use it when all gradients have arrived. The result equals `together` of what `plan` finds, and is quicker.
    """
    seen: set[Node] = {None}
    leaves: list[Node] = []
    recvs: dict[Node, set[int]] = {}
    stack: list[Iterable[tuple[Node, int]]] = [[(start, 0) for start in sources.values()]]
    while stack:
        for node, output in stack.pop():
            if node not in seen:
                seen.add(node)
                kind = type(node)
                if kind is _AccumulateGrad:
                    leaves.append(node)
                elif kind is RecvNode:
                    recvs[node] = {output}
                elif len(seen) > SMALL:
                    return None
                else:
                    stack.append(node.next_functions)
            elif node in recvs:
                recvs[node].add(output)
    is_joint = replicas.is_joint()
    if is_joint is not None and any(is_joint(leaf.variable) for leaf in leaves):
        return None
    return Component(list(sources), leaves, recvs, len(seen) - 1)


def _walk(start: Node) -> tuple[list[Node], dict[Node, set[int]], int]:
    """The leaves and Recvs that one source reaches, and the number of nodes: a quicker `plan` for the usual case."""
    seen: set[Node] = {None}
    leaves: list[Node] = []
    recvs: dict[Node, set[int]] = {}
    stack: list[Iterable[tuple[Node, int]]] = [[(start, 0)]]
    while stack:
        for node, output in stack.pop():
            if node not in seen:
                seen.add(node)
                kind = type(node)
                if kind is _AccumulateGrad:
                    leaves.append(node)
                elif kind is RecvNode:
                    recvs[node] = {output}
                else:
                    stack.append(node.next_functions)
            elif node in recvs:
                recvs[node].add(output)
    return leaves, recvs, len(seen) - 1


def reach(starts: Iterable[Node], seen: set[Any]) -> dict[Node, list[int]]:
    """The Recvs, each with its outputs, that can be reached and are not in ``seen``. Adds all visited nodes to it."""
    found: dict[Node, list[int]] = {}
    stack: list[Iterable[tuple[Node, int]]] = [[(start, 0) for start in starts]]
    while stack:
        for node, output in stack.pop():
            if type(node) is RecvNode:
                if (node, output) not in seen:
                    seen.add((node, output))
                    found.setdefault(node, []).append(output)
            elif node is not None and node not in seen:
                seen.add(node)
                stack.append(node.next_functions)
    return found


def foresee(node: Node) -> tuple[int, ...] | None:
    """The sources, of all workers, that take part in a pass if this Send does; None if that is not known.

    What a node depends on never changes. So this is computed when the Send is made, and its receiver need not ask
    during a pass. Large graphs are not searched: asking costs little compared with running them.
    """
    found: set[int] = set()
    seen: set[Any] = {None}
    stack: list[Iterable[tuple[Node, int]]] = [node.next_functions]
    while stack:
        for node, output in stack.pop():
            if type(node) is RecvNode:
                recv: Recv = node.recv
                if recv.reach is None:
                    return None
                found.add(recv.message + output)
                if recv.reach:
                    found.update(recv.reach[output])
                if len(found) > MOST_FORESEEN:
                    return None
            elif node not in seen:
                seen.add(node)
                if len(seen) > _MOST_NODES:
                    return None
                stack.append(node.next_functions)
    return tuple(found)


def put_gates_last(component: Component) -> None:
    """Raise the sequence numbers of all other nodes above those of Sends. The order among them stays."""
    for node in component.nodes:
        if type(node) is SendNode:
            if node.source != ROOT:
                node._set_sequence_nr(node.source & _COUNT)
            continue
        number = node._sequence_nr()
        if number < _LIFT:
            node._set_sequence_nr(number + _LIFT)


def _wants_one_sum(node: Node, look: bool) -> bool:
    """Whether the gradient of a leaf must arrive as one sum. ``look``: some node has hooks, so ask this one."""
    leaf = node.variable
    return bool(
        leaf._backward_hooks
        or getattr(leaf, "_post_accumulate_grad_hooks", None)
        or leaf.layout not in _ADDED_UP
        or (look and node_hooks.on(node))
    )


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
