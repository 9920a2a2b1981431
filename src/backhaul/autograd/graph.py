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

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

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
_ANY_NUMBER = sys.maxsize - 1

_ADDED_UP = {torch.strided, torch.sparse_coo}
"""Layouts whose gradients torch adds to an existing ``.grad``."""

_SINKS = frozenset((_AccumulateGrad, RecvNode))
"""The types of the nodes at which a walk ends."""
_NO_NODES: frozenset[Node] = frozenset()

_variable = attrgetter("variable")

_LIFT = 1 << ID_BITS
_COUNT = _LIFT - 1


class Reached(NamedTuple):
    """What a source reaches."""

    leaves: Sequence[Node]
    recvs: Mapping[Node, Collection[int]]
    """The Recvs, each with the outputs that are reached."""
    nodes: Set[Node]
    """All other nodes, without the Send itself: it keeps this, and must not refer to itself."""
    size: int
    """The number of nodes, with the Send."""


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
        self.sources = sources if len(sources) == 1 else _in_order(sources)
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


def _in_order(sources: Iterable[int]) -> list[int]:
    found = sorted(sources, reverse=True)
    if found[-1] == ROOT:  # the lowest of all ids
        found.insert(0, found.pop())
    return found


def plan(sources: Mapping[int, Node]) -> list[Component]:
    """The components of these sources, each given by its node. Linear in the graph."""
    if len(sources) == 1:
        ((source, start),) = sources.items()
        return [_alone(source, getattr(start, "reached", None) or _walk(start))]
    apart = _plan_apart(sources)
    if apart is not None:
        return apart
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
                    if type(node) not in _SINKS:
                        stack.append(node.next_functions)
                    elif type(node) is RecvNode:
                        recvs[node] = {output}
                    else:
                        mine[node] = None
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
    joint = set(map(id, replicas.joint_among([leaf.variable for mine in leaves.values() for leaf in mine])))
    averaged = [source for source, mine in leaves.items() if any(id(leaf.variable) in joint for leaf in mine)]
    for source in averaged:
        groups.join(averaged[0], source)
    first_of = groups.firsts()
    members: dict[int, list[int]] = {}
    for source, first in first_of.items():
        members.setdefault(first, []).append(source)
    recvs_of: dict[int, dict[Node, set[int]]] = {first: {} for first in members}
    for node, outputs in recvs.items():
        recvs_of[first_of[owner[node]]][node] = outputs
    nodes_of: dict[int, list[Node]] = {first: [] for first, group in members.items() if len(group) > 1}
    if nodes_of:
        for node, source in owner.items():
            if type(node) not in _SINKS and first_of[source] in nodes_of:
                nodes_of[first_of[source]].append(node)
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
    starts = sources.values()
    known = _known(starts)
    leaves: Collection[Node]
    recvs: dict[Node, Any]
    if known is not None:
        nodes = frozenset().union(*[reached.nodes for reached in known])
        leaves = {leaf: None for reached in known for leaf in reached.leaves}
        recvs = _recvs_of(known)
        size = len(starts) + len(nodes) + len(leaves) + len(recvs)
        if size > SMALL:
            return None
    else:
        seen: set[Node] = {None, *starts}
        leaves = []
        recvs = {}
        todo = [start.next_functions for start in starts]
        see, follow = seen.add, todo.append
        most = SMALL + len(todo)
        for edges in islice(todo, most):  # it grows meanwhile
            for node, output in edges:
                if node not in seen:
                    see(node)
                    if type(node) not in _SINKS:
                        follow(node.next_functions)
                    elif type(node) is RecvNode:
                        recvs[node] = {output}
                    else:
                        leaves.append(node)
                elif node in recvs:
                    recvs[node].add(output)
        if len(todo) > most:
            return None
        size = len(seen) - 1
    if replicas.joint_among(list(map(_variable, leaves))):
        return None
    return Component(list(sources), list(leaves), recvs, size)


def _known(starts: Iterable[Node]) -> list[Reached] | None:
    """What these sources reach, as far as `foresee` or an earlier pass has looked; None if that is not known of all."""
    found: list[Reached] = []
    for start in starts:
        reached = getattr(start, "reached", None)
        if reached is None:
            return None
        found.append(reached)
    return found


def _recvs_of(known: Iterable[Reached]) -> dict[Node, Collection[int]]:
    """All Recvs that any of these sources reach, with the outputs that are reached."""
    found: dict[Node, Collection[int]] = {}
    for reached in known:
        recvs = reached.recvs
        if found and not found.keys().isdisjoint(recvs):
            recvs = {node: {*found.get(node, ()), *outputs} for node, outputs in recvs.items()}
        found.update(recvs)
    return found


def _plan_apart(sources: Mapping[int, Node]) -> list[Component] | None:
    """`plan`, if no two sources need to be run together, and no Send reaches more nodes than `foresee` looks at.

    None if that is not so.
    """
    if joint_hooks.are_there():
        return None
    look = node_hooks.are_there()
    seen: set[Node] = set()
    seen_leaves: set[Node] = set()
    apart: set[Node] = set()  # those that need no sum
    found: list[Component] = []
    for source, start in sources.items():
        reached = getattr(start, "reached", None)
        if reached is None:
            reached = _walk(start) if source == ROOT else _look(start)
            if reached is None:
                return None
        leaves, recvs, nodes, _ = reached
        if not (seen.isdisjoint(nodes) and seen.isdisjoint(recvs)):
            return None
        seen.update(nodes, recvs)
        if leaves:
            if not seen_leaves.isdisjoint(leaves):
                for leaf in seen_leaves.intersection(leaves).difference(apart):
                    if _wants_one_sum(leaf, look):
                        return None
                    apart.add(leaf)
            seen_leaves.update(leaves)
        found.append(_alone(source, reached))
    return None if replicas.joint_among(list(map(_variable, seen_leaves))) else found


def _alone(source: int, reached: Any) -> Component:
    leaves, recvs, _, size = reached
    return Component([source], leaves, recvs, size)


def _walk(start: Node, most: int = _ANY_NUMBER) -> Reached | None:
    """What a source reaches. None if it reaches more than ``most`` nodes besides leaves and Recvs."""
    todo: list[Sequence[tuple[Node, int]]] = [((start, 0),)]
    apart = {None}  # what is no inner node
    if type(start) is SendNode:
        edges = start.next_functions
        node, output = edges[0]
        if type(node) in _SINKS and len(edges) == 1:  # often a leaf, or a received tensor, was sent as it was
            if type(node) is RecvNode:
                return Reached((), {node: {output}}, _NO_NODES, 2)
            return Reached((node,), {}, _NO_NODES, 2)
        apart.add(start)
        todo = [edges]
    leaves: list[Node] = []
    recvs: dict[Node, set[int]] = {}
    seen = set(apart)
    see, follow = seen.add, todo.append
    for edges in islice(todo, most + 1):  # it grows meanwhile
        for node, output in edges:
            if node not in seen:
                see(node)
                if type(node) not in _SINKS:
                    follow(node.next_functions)
                elif type(node) is RecvNode:
                    recvs[node] = {output}
                else:
                    leaves.append(node)
            elif node in recvs:
                recvs[node].add(output)
    if len(todo) > most + 1:
        return None
    return Reached(leaves, recvs, seen.difference(apart, leaves, recvs), len(seen) - 1)


def _look(send: Node) -> Reached | None:
    """What a Send reaches, kept for later passes. None if it reaches more than a few nodes."""
    reached = send.reached = _walk(send, _MOST_NODES)
    return reached


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
    during a pass. What the Send reaches is kept for `plan` and `as_one`. Large graphs are not searched: asking costs
    little compared with running them.
    """
    reached = _look(node)
    if reached is None:
        return None
    found: set[int] = set()
    for each, outputs in reached.recvs.items():
        recv: Recv = each.recv
        if recv.reach is None:
            return None
        for output in outputs:
            found.add(recv.message + output)
            if recv.reach:
                found.update(recv.reach[output])
    return None if len(found) > MOST_FORESEEN else tuple(found)


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

    def firsts(self) -> dict[int, int]:
        """For each source, the one that stands for its set."""
        return {source: self.find(source) for source in self._parent}
