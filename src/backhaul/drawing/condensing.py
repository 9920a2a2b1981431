"""Condensing: a worker's graph, possibly with thousands of nodes, as a few boxes. Pure.

Torch's nodes do not know the module that made them, but a parameter that a node uses identifies it. A node belongs
to the module whose parameter it takes directly, or through nodes that only change the shape or type of a parameter,
such as the transposition of a weight. All other nodes are mere operations.

Nodes form one box if they belong to the same module, or are mere operations, and are connected by edges; but only if
they depend on the same Recvs and are equally many boxes away from the leaves. So nothing leads from a box back to
itself, not even through other workers. If that makes too many boxes, the rules are dropped one by one, finest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

MOST_BOXES = 30
"""The most boxes for one worker; one more box holds the rest of its nodes."""

MOST_ALIKE = 4
"""The most boxes of the same module side by side, such as those of micro-batches; more become one box."""

_MOST_NAMES = 12
_MOST_RANGES = 10
_MOST_LEAF_BOXES = 8

Owner = tuple[str, ...]
"""The path of a module: the class of the outermost module around it, with a number if there are several of that class,
and then the names of attributes that lead to it."""


class Operation(NamedTuple):
    """A node that torch runs. ``next`` are the positions of the nodes that it passes gradients to."""

    name: str
    next: Sequence[int]


class Leaf(NamedTuple):
    """A tensor that gets a gradient."""

    name: str
    """The name of a parameter inside its module, or ``""``."""
    owner: Owner | None
    shape: Sequence[int]
    elements: int


class Entry(NamedTuple):
    """A Recv: where the graph comes from another worker."""

    message: int


Node = Operation | Leaf | Entry


class Graph(NamedTuple):
    """The nodes of a worker, each after all nodes that it leads to."""

    nodes: Sequence[Node]
    exits: dict[int, Sequence[int]]
    """Where the graph leaves the worker: sources -> the positions of their first nodes."""
    classes: dict[Owner, str]
    """The class of each module."""


class Condensed(NamedTuple):
    """Boxes as plain data, and their connections. Edges point in the direction of the forward pass."""

    boxes: list[dict[str, Any]]
    edges: list[tuple[int, int]]
    entries: dict[int, list[int]]
    """Recvs, by message -> the boxes that use them."""
    exits: dict[int, list[int]]
    """Sources -> the boxes that they come from."""
    relays: list[tuple[int, int]]
    """Recvs that are sent on unchanged: message and source."""


def condense(graph: Graph, most: int = MOST_BOXES) -> Condensed:
    """The graph as at most ``most`` boxes, one for the rest, and the boxes of leaves."""
    for grouping in _groupings(graph, _tags(graph)):
        sizes = Counter(group for group in grouping.groups if group is not None)
        if len(sizes) <= most and grouping.alike <= MOST_ALIKE:
            return _boxes(graph, grouping.tags, grouping.groups)
    kept = {group for group, _ in sizes.most_common(most - 1)}
    groups = [group if group is None or group in kept else _REST for group in grouping.groups]
    return _boxes(graph, grouping.tags, groups)


_REST = "rest"
# Operations that do not change the identity of a parameter.
_VIEWS = {"Alias", "AsStrided", "Expand", "Flatten", "Permute", "Reshape", "ReshapeAlias", "Squeeze", "T", "Transpose"}
_SHAPING = _VIEWS | {"Clone", "Select", "Slice", "Split", "SplitWithSizes", "ToCopy", "Unbind", "UnsafeSplit"}
_SHAPING |= {"UnsafeView", "Unsqueeze", "View"}


class _Grouping(NamedTuple):
    groups: Sequence[Hashable]
    """The group of each node, None for those that are not operations."""
    tags: Sequence[Owner | None]
    """The modules to name groups by."""
    alike: int = 0
    """The most groups of the same module side by side."""


def _tags(graph: Graph) -> list[Owner | None]:
    """The module of each operation, or None."""
    tags: list[Owner | None] = []
    alone = _alone(graph)
    for node in graph.nodes:
        tag: Owner | None = None
        if isinstance(node, Leaf):
            tag = node.owner
        elif isinstance(node, Operation):
            owners = {tags[other] for other in node.next if alone[other]}
            tag = _common([owner for owner in owners if owner is not None])
        tags.append(tag)
    return tags


def _alone(graph: Graph) -> list[bool]:
    """For each node, whether it is a module's parameter, or such a parameter in another shape."""
    alone: list[bool] = []
    for node in graph.nodes:
        if isinstance(node, Operation):
            alone.append(node.name in _SHAPING and bool(node.next) and all(alone[other] for other in node.next))
        else:
            alone.append(isinstance(node, Leaf) and node.owner is not None)
    return alone


def _common(owners: Sequence[Owner]) -> Owner | None:
    """The innermost module that contains all of these; None if there is none."""
    if not owners:
        return None
    found = owners[0]
    for owner in owners[1:]:
        same = 0
        while same < min(len(found), len(owner)) and found[same] == owner[same]:
            same += 1
        found = found[:same]
    return found or None


def _groupings(graph: Graph, tags: Sequence[Owner | None]) -> Iterator[_Grouping]:
    """Ways to group the nodes, from many groups to few."""
    stages, behind = _stages(graph, tags), _behind(graph)
    for key in (lambda place: (tags[place], stages[place], behind[place]), lambda place: (tags[place], stages[place])):
        groups = _joined(graph, tags, key)
        alike = Counter((tags[place], stages[place]) for place in {group for group in groups if group is not None})
        yield _Grouping(groups, tags, max(alike.values(), default=0))
    yield _Grouping(_keyed(graph, tags, stages), tags)
    deepest = max((len(tag) for tag in tags if tag is not None), default=0)
    filled = _filled(graph, tags)
    yield _Grouping(_keyed(graph, filled, _stages(graph, filled)), filled)
    for depth in range(deepest, 0, -1):
        cut = [None if tag is None else tag[:depth] for tag in filled]
        ranges = _ranges(cut, depth)
        for fewer in (cut, ranges):
            yield _Grouping(_keyed(graph, fewer, _stages(graph, fewer)), fewer)
    yield _Grouping(_keyed(graph, cut if deepest else tags, [0] * len(tags)), cut if deepest else tags)


def _filled(graph: Graph, tags: Sequence[Owner | None]) -> list[Owner | None]:
    """Assign operations between two modules of one outer module to the first of the two, as between two layers."""
    ahead: list[set[str]] = [set() for _ in tags]  # the outermost modules that come next
    for place in range(len(tags) - 1, -1, -1):
        node, tag = graph.nodes[place], tags[place]
        if isinstance(node, Operation):
            for other in node.next:
                ahead[other] |= ahead[place] if tag is None else {tag[0]}
    filled = list(tags)
    for place, node in enumerate(graph.nodes):
        if isinstance(node, Operation) and filled[place] is None:
            before = {filled[other] for other in node.next}
            tag = before.pop() if len(before) == 1 else None
            if tag is not None and tag[0] in ahead[place]:
                filled[place] = tag
    return filled


def _ranges(tags: Sequence[Owner | None], depth: int) -> list[Owner | None]:
    """Modules with numbers for names, as in a `Sequential`, grouped in a few ranges."""
    numbers: dict[Owner, set[int]] = {}
    for tag in tags:
        if tag is not None and len(tag) == depth and tag[-1].isdecimal():
            numbers.setdefault(tag[:-1], set()).add(int(tag[-1]))
    names: dict[Owner, str] = {}
    for parent, found in numbers.items():
        ordered = sorted(found)
        step = -(-len(ordered) // _MOST_RANGES)
        for start in range(0, len(ordered), step):
            some = ordered[start : start + step]
            name = str(some[0]) if len(some) == 1 else f"{some[0]}-{some[-1]}"
            names.update({(*parent, str(number)): name for number in some})
    return [tag if tag is None or tag not in names else (*tag[:-1], names[tag]) for tag in tags]


def _stages(graph: Graph, tags: Sequence[Owner | None]) -> list[int]:
    """How many times the module changes on the longest path from the leaves to each node."""
    stages: list[int] = []
    for place, node in enumerate(graph.nodes):
        stage = 0
        if isinstance(node, Operation):
            for other in node.next:
                changes = isinstance(graph.nodes[other], Operation) and tags[other] != tags[place]
                stage = max(stage, stages[other] + changes)
        stages.append(stage)
    return stages


def _behind(graph: Graph) -> list[int]:
    """The Recvs that each node depends on, as bits."""
    bits: dict[int, int] = {}
    found: list[int] = []
    for node in graph.nodes:
        mask = 0
        if isinstance(node, Entry):
            mask = bits.setdefault(node.message, 1 << len(bits))
        elif isinstance(node, Operation):
            for other in node.next:
                mask |= found[other]
        found.append(mask)
    return found


def _joined(graph: Graph, tags: Sequence[Owner | None], key: Callable[[int], Hashable]) -> list[int | None]:
    """Groups of operations that are connected and have the same key. What leads only to parameters joins its user."""
    nodes = graph.nodes
    parent = list(range(len(nodes)))

    def find(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    keys = [key(place) for place in range(len(nodes))]
    taken: set[int] = set()
    alone = _alone(graph)
    for place, node in enumerate(nodes):
        if isinstance(node, Operation):
            for other in node.next:
                if not isinstance(nodes[other], Operation):
                    continue
                lends = alone[other] and not alone[place] and tags[other] == tags[place] and other not in taken
                if lends:
                    taken.add(other)
                if lends or keys[other] == keys[place]:
                    parent[find(other)] = find(place)
    return [find(place) if isinstance(node, Operation) else None for place, node in enumerate(nodes)]


def _keyed(graph: Graph, tags: Sequence[Owner | None], stages: Sequence[int]) -> list[Hashable]:
    """Groups of operations of the same module and stage. What only reshapes a parameter joins its user."""
    alone = _alone(graph)
    users: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        if isinstance(node, Operation):
            for other in node.next:
                if alone[other] and tags[other] == tags[place]:
                    users.setdefault(other, place)
    groups: list[Hashable] = [None] * len(tags)
    for place in range(len(tags) - 1, -1, -1):
        if isinstance(graph.nodes[place], Operation):
            user = users.get(place)
            groups[place] = (tags[place], stages[place]) if user is None else groups[user]
    return groups


def _boxes(graph: Graph, tags: Sequence[Owner | None], groups: Sequence[Hashable]) -> Condensed:
    nodes = graph.nodes
    members: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(place)
    # In the order in which the forward pass reaches their ends.
    ordered = sorted(members, key=lambda group: members[group][-1])
    number = {group: at for at, group in enumerate(ordered)}
    boxes = [_box(graph, tags, members[group], group == _REST) for group in ordered]
    edges: dict[tuple[int, int], None] = {}
    entries: dict[int, dict[int, None]] = {node.message: {} for node in nodes if isinstance(node, Entry)}
    loose: dict[int, dict[int, None]] = {}  # leaves that are in no box of a module -> the boxes that use them
    for place, node in enumerate(nodes):
        if not isinstance(node, Operation):
            continue
        at = number[groups[place]]
        for other in node.next:
            target = nodes[other]
            if isinstance(target, Operation):
                if number[groups[other]] != at:
                    edges[number[groups[other]], at] = None
            elif isinstance(target, Entry):
                entries[target.message][at] = None
            elif boxes[at]["kind"] == "more" or (target.owner is not None and boxes[at]["kind"] == "module"):
                boxes[at]["leaves"].append(other)
            else:
                loose.setdefault(other, {})[at] = None
    exits: dict[int, list[int]] = {}
    relays: list[tuple[int, int]] = []
    sent: dict[int, list[int]] = {}  # leaves that are themselves sent or roots -> sources
    for source, starts in graph.exits.items():
        exits[source] = []
        for start in starts:
            node = nodes[start]
            if isinstance(node, Operation):
                exits[source].append(number[groups[start]])
            elif isinstance(node, Entry):
                relays.append((node.message, source))
            else:
                sent.setdefault(start, []).append(source)
    for leaves in _by_use(loose, sent):
        users = {user: None for leaf in leaves for user in loose.get(leaf, ())}
        sources = [source for leaf in leaves for source in sent.get(leaf, ())]
        at = len(boxes)
        boxes.append({"kind": "leaves", "label": "", "class": "", "operations": [], "nodes": 0, "leaves": leaves})
        edges.update({(at, user): None for user in users})
        for source in sources:
            exits[source].append(at)
    for box in boxes:
        box.update(_leaves(graph, sorted(set(box["leaves"]))))
    return Condensed(
        boxes,
        list(edges),
        {message: list(users) for message, users in entries.items()},
        {source: sorted(set(starts)) for source, starts in exits.items()},
        relays,
    )


def _by_use(loose: dict[int, dict[int, None]], sent: dict[int, list[int]]) -> list[list[int]]:
    """Leaves that are drawn together: those used by the same boxes and messages, or coarser groups if too many."""
    keys: list[Callable[[int], Hashable]] = [
        lambda leaf: (tuple(loose.get(leaf, ())), tuple(sent.get(leaf, ()))),
        lambda leaf: (tuple(loose.get(leaf, ())), leaf in sent),
        lambda leaf: leaf in sent,
    ]
    for key in keys:
        found: dict[Hashable, list[int]] = {}
        for leaf in sorted({*loose, *sent}):
            found.setdefault(key(leaf), []).append(leaf)
        if len(found) <= _MOST_LEAF_BOXES:
            break
    return list(found.values())


def _box(graph: Graph, tags: Sequence[Owner | None], places: Sequence[int], rest: bool) -> dict[str, Any]:
    owners = {tags[place] for place in places}
    found = _common([owner for owner in owners if owner is not None]) if None not in owners and not rest else None
    names = Counter(graph.nodes[place].name for place in places)  # type: ignore[union-attr]
    box: dict[str, Any] = {
        "kind": "more" if rest else "operations" if found is None else "module",
        "label": "",
        "class": "",
        "operations": names.most_common(_MOST_NAMES),
        "kinds": len(names),
        "nodes": len(places),
        "leaves": [],
    }
    if found is not None:
        box["label"] = ".".join(found[1:]) or found[0]
        first = (*found[:-1], found[-1].partition("-")[0])
        box["class"] = graph.classes.get(found) or graph.classes.get(first, "") if len(found) > 1 else ""
        box["of"] = found[0]
    return box


def _leaves(graph: Graph, places: Sequence[int]) -> dict[str, Any]:
    """The description of the leaves of a box."""
    leaves = [leaf for place in places if isinstance(leaf := graph.nodes[place], Leaf)]
    return {
        "leaves": [[_name(leaf), list(leaf.shape)] for leaf in leaves[:_MOST_NAMES]],
        "leaf_count": len(leaves),
        "elements": sum(leaf.elements for leaf in leaves),
    }


def _name(leaf: Leaf) -> str:
    return ".".join([*(leaf.owner or ())[1:], leaf.name]) if leaf.name else ""
