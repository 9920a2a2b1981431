"""Graphs of one worker for tests, and what must be found in them by definition."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from backhaul.autograd.functions import ROOT, Reach, Recv, receive, send, start
from backhaul.autograd.graph import Node
from backhaul.autograd.schedule import Source
from backhaul.ids import WorkerInfo

CONTEXT = 9
PEER = WorkerInfo(1, "worker1")
ANCHOR = torch.zeros((), requires_grad=True)
LEAF = "torch::autograd::AccumulateGrad"
RECV = "RecvRpcBackward"

_tops: deque[Tensor] = deque(maxlen=10_000)
"""The latest sent tensors. Before torch 2.12 the node of a Function dies with its tensor; contexts keep it too."""


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def received(message: int, count: int = 1, reach: Reach | None = None) -> Sequence[Tensor]:
    _, tensors = receive(ANCHOR, Recv(CONTEXT, message, PEER, reach), [torch.ones(2) for _ in range(count)])
    return tensors


def recv_of(tensor: Tensor) -> Node:
    """The Recv of a received tensor."""
    node: Node = tensor.grad_fn
    return node if node.name() == RECV else node.next_functions[0][0]


def sent(source: int, tensor: Tensor) -> Node:
    """The node of a tensor that was sent."""
    _tops.append(send(source, [tensor]))
    return _tops[-1].grad_fn


def rooted(*tensors: Tensor) -> Node:
    """The node of the roots."""
    _tops.append(start(tensors))
    return _tops[-1].grad_fn


def ignore(*_: object) -> None: ...


def met(starts: Iterable[Node]) -> set[tuple[Node, int]]:
    """By definition: the nodes that the engine reaches from these, with outputs. The walk ends at Recvs and leaves."""
    found: set[tuple[Node, int]] = set()
    new = [(start, 0) for start in starts]
    while new:
        edge = new.pop()
        if edge not in found and edge[0] is not None:
            found.add(edge)
            if edge[0].name() not in (LEAF, RECV):
                new += edge[0].next_functions
    return found


def of(name: str, edges: Iterable[tuple[Node, int]]) -> set[Node]:
    return {node for node, _ in edges if node.name() == name}


def outputs(edges: Iterable[tuple[Node, int]]) -> dict[Node, set[int]]:
    """The Recvs among these, with their outputs."""
    found: dict[Node, set[int]] = {}
    for node, output in edges:
        if node.name() == RECV:
            found.setdefault(node, set()).add(output)
    return found


def is_joint(node: Node) -> bool:
    """Whether all sources that reach this node must be run together."""
    if node.name() != LEAF:
        return True
    return bool(node.variable._backward_hooks or node.variable._post_accumulate_grad_hooks)


def expected(sources: Mapping[int, Node]) -> dict[frozenset[int], set[tuple[Node, int]]]:
    """By definition: the components, and the nodes that each reaches."""
    reached = {source: met([node]) for source, node in sources.items()}
    joints = {source: {node for node, _ in edges if is_joint(node)} for source, edges in reached.items()}
    groups: list[set[int]] = []
    for source in sources:
        joined = [group for group in groups if any(joints[source] & joints[other] for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append({source}.union(*joined))
    return {frozenset(group): set().union(*(reached[source] for source in group)) for group in groups}


class Graph:
    """A random graph of one worker: some leaves have hooks, some inputs came in messages, some results were sent."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.leaves = [leaf() for _ in range(draw.randint(1, 4))]
        for tensor in self.leaves:
            if draw.random() < 0.2:
                tensor.register_hook(ignore)  # type: ignore[no-untyped-call]
            elif draw.random() < 0.2:
                tensor.register_post_accumulate_grad_hook(ignore)  # type: ignore[no-untyped-call]
        tensors = list(self.leaves)
        for message in range(1000, 1000 + draw.randrange(4)):
            tensors += received(message, draw.randint(1, 3))
        for _ in range(draw.randint(2, 10)):
            inputs = draw.sample(tensors, min(len(tensors), draw.randint(1, 3)))
            stacked = torch.stack([*inputs, torch.ones(2)])
            made = draw.choice((lambda x: [x.sum(0)], lambda x: [x.mean(0)], lambda x: x.split(1)))(stacked)
            tensors += [tensor.reshape(-1)[:2] for tensor in made]
        self.sources: dict[int, Source] = {}
        for message in range(100, 100 + 10 * draw.randrange(6), 10):
            for place in range(draw.randint(1, 3)):
                self.sources[message + place] = Source(sent(message + place, draw.choice(tensors)), message)
        inner = [tensor for tensor in tensors if not tensor.is_leaf]
        if draw.random() < 0.7 or not self.sources:
            roots = draw.sample(inner, min(len(inner), draw.randint(1, 2)))
            # And of a message that does not say what it depends on: this worker alone cannot know what takes part.
            self.sources[ROOT] = Source(rooted(*roots, *received(999)), ROOT)

    @property
    def nodes(self) -> dict[int, Node]:
        return {source: candidate.node for source, candidate in self.sources.items()}
