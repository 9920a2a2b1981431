"""The walk over one worker's graph, against the definition of components, leaves and reachability."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from graphs import LEAF, RECV, Graph, expected, ignore, leaf, met, of, outputs, received, recv_of, rooted, sent
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from backhaul.autograd import functions, graph
from backhaul.autograd.functions import ROOT, SendNode, send, start
from backhaul.autograd.graph import (
    MOST_FORESEEN,
    Component,
    Node,
    as_one,
    foresee,
    plan,
    put_gates_last,
    reach,
    together,
)


def variables(component: Component) -> set[int]:
    return {id(node.variable) for node in component.leaves}


def by_sources(components: Iterable[Component]) -> dict[tuple[int, ...], set[int]]:
    """The leaves of components, by their sources."""
    return {tuple(component.sources): variables(component) for component in components}


def is_as_defined(component: Component, edges: set[tuple[Node, int]]) -> None:
    """Check that a component has the leaves, Recvs and nodes that it reaches by definition."""
    assert set(component.leaves) == of(LEAF, edges)
    assert len(component.leaves) == len(of(LEAF, edges))
    assert {node: set(found) for node, found in component.recvs.items()} == outputs(edges)
    others = {node for node, _ in edges if node.name() not in (LEAF, RECV)}
    assert len(component.nodes) == len(set(component.nodes))
    if len(component.sources) > 1:
        assert set(component.nodes) == others
    assert not component.started
    assert not component.waits


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_have_the_components_of_the_definition(seed: int) -> None:
    for number in range(40):
        nodes = Graph(100 * seed + number).nodes
        wanted = expected(nodes)
        found = plan(nodes)
        assert {frozenset(component.sources) for component in found} == set(wanted)
        for component in found:
            is_as_defined(component, wanted[frozenset(component.sources)])
        # A leaf of several components counts in one of them, or in each.
        least = len({node for node, _ in met(nodes.values())})
        counted = [node for component in found for node in component.leaves]
        repeated = len(counted) - len(set(counted))
        assert sum(component.size for component in found) in (least, least + repeated)
        for source, node in nodes.items():
            (component,) = plan({source: node})
            assert component.sources == [source]
            is_as_defined(component, met([node]))
            assert component.size == len({node for node, _ in met([node])})


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_reach_the_recvs_of_the_definition(seed: int) -> None:
    """In whatever steps the nodes are asked for."""
    for number in range(40):
        draw = random.Random(number)
        nodes = Graph(100 * seed + number).nodes
        order = list(nodes)
        draw.shuffle(order)
        seen: set[Any] = set()
        found: dict[Node, set[int]] = {}
        known: list[Node] = []
        while order:
            step = [nodes[order.pop()] for _ in range(min(len(order), draw.randint(1, 3)))]
            known += step
            for node, new in reach(step, seen).items():
                assert len(new) == len(set(new))
                assert new
                assert not found.get(node, set()) & set(new)
                found.setdefault(node, set()).update(new)
            assert found == outputs(met(known))


def test_the_roots_come_first_and_then_the_latest_send() -> None:
    assert Component([3, ROOT, 12, 7], [], {}, 4).sources == [ROOT, 12, 7, 3]
    assert Component([7, 12], [], {}, 2).sources == [12, 7]


def test_one_source_is_one_component() -> None:
    a, b = leaf(), leaf()
    assert by_sources(plan({5: sent(5, a * b)})) == {(5,): {id(a), id(b)}}
    assert by_sources(plan({ROOT: rooted(a * 2, b * 2)})) == {(ROOT,): {id(a), id(b)}}


def test_a_leaf_that_is_sent_unchanged() -> None:
    a = leaf()
    assert by_sources(plan({5: sent(5, a)})) == {(5,): {id(a)}}
    assert by_sources(plan({5: sent(5, a), 6: sent(6, a)})) == {(5,): {id(a)}, (6,): {id(a)}}


def test_a_leaf_without_hooks_does_not_join() -> None:
    a, b = leaf(), leaf()
    found = plan({5: sent(5, a * 2), 6: sent(6, a * b), ROOT: rooted(b * 3)})
    assert by_sources(found) == {(5,): {id(a)}, (6,): {id(a), id(b)}, (ROOT,): {id(b)}}


@pytest.mark.parametrize("register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_a_leaf_with_hooks_joins(register: Callable[[Tensor, Any], Any]) -> None:
    a = leaf()
    register(a, ignore)
    assert by_sources(plan({5: sent(5, a * 2), 6: sent(6, a * 3)})) == {(6, 5): {id(a)}}


@pytest.mark.parametrize("register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_a_leaf_whose_hooks_were_removed_does_not_join(register: Callable[[Tensor, Any], Any]) -> None:
    a = leaf()
    register(a, ignore).remove()
    assert by_sources(plan({5: sent(5, a * 2), 6: sent(6, a * 3)})) == {(5,): {id(a)}, (6,): {id(a)}}


def test_a_common_node_joins() -> None:
    a = leaf()
    common = torch.sin(a)
    (component,) = plan({5: sent(5, common * 2), 6: sent(6, common), 7: sent(7, common + 1)})
    assert component.sources == [7, 6, 5]
    assert variables(component) == {id(a)}
    assert len(component.nodes) == 3 + 3  # the Sends; sin, mul and add


def test_a_common_recv_joins() -> None:
    """The gradients of the Recv are sent once, as a sum."""
    (x,) = received(1000)
    (component,) = plan({5: sent(5, x * 2), ROOT: rooted(x * 3)})
    assert component.sources == [ROOT, 5]
    assert not component.leaves
    assert component.recvs == {recv_of(x): {0}}
    assert recv_of(x) not in component.nodes


def test_two_outputs_of_one_recv_join() -> None:
    x, y, _ = received(1000, 3)
    (component,) = plan({5: sent(5, x), 6: sent(6, y)})
    assert component.sources == [6, 5]
    assert component.recvs == {recv_of(x): {0, 1}}


def test_outputs_of_a_recv_that_one_source_reaches() -> None:
    x, _, z = received(1000, 3)
    (component,) = plan({5: sent(5, x * z + x)})
    assert component.recvs == {recv_of(x): {0, 2}}


def test_the_anchor_of_recvs_is_no_leaf_and_does_not_join() -> None:
    (x,), (y,) = received(1000), received(1001)
    assert by_sources(plan({5: sent(5, x * 2), 6: sent(6, y)})) == {(5,): set(), (6,): set()}
    assert by_sources(plan({5: sent(5, x * 2)})) == {(5,): set()}


def test_a_root_that_was_received_has_no_leaves() -> None:
    (x,) = received(1000)
    for start_ in (rooted(x), recv_of(x)):
        (component,) = plan({ROOT: start_})
        assert not component.leaves
        assert component.recvs == {recv_of(x): {0}}
        assert by_sources(plan({ROOT: start_, 5: sent(5, leaf())})).keys() == {(ROOT,), (5,)}


def test_joining_is_transitive() -> None:
    a, b, c = leaf(), leaf(), leaf()
    x, y = a * 2, b * 2
    found = plan({5: sent(5, x), 6: sent(6, x * y), 7: sent(7, y), 8: sent(8, c)})
    assert by_sources(found) == {(7, 6, 5): {id(a), id(b)}, (8,): {id(c)}}


def test_components_that_are_joined_late() -> None:
    """The last source joins two components that earlier walks found."""
    x, y = leaf() * 2, leaf() * 2
    a, b = x * 3, y * 3
    found = plan({1: sent(1, a), 2: sent(2, b), 3: sent(3, x), 4: sent(4, y), 5: sent(5, a + b)})
    assert [component.sources for component in found] == [[5, 4, 3, 2, 1]]


def test_a_deep_graph() -> None:
    x = y = leaf()
    for _ in range(5_000):
        y = y + 1
    assert by_sources(plan({5: sent(5, y)})) == {(5,): {id(x)}}
    assert by_sources(plan({5: sent(5, y), 6: sent(6, y)})) == {(6, 5): {id(x)}}
    assert reach([sent(7, y)], set()) == {}


def test_inputs_without_grad_are_passed_over() -> None:
    a = leaf()
    mixed = torch.stack([a, torch.ones(2)])
    assert by_sources(plan({5: sent(5, mixed), 6: sent(6, mixed)})) == {(6, 5): {id(a)}}
    assert by_sources(plan({5: sent(5, mixed)})) == {(5,): {id(a)}}
    assert reach([sent(7, mixed)], set()) == {}


def test_reach_finds_each_output_once() -> None:
    (x, z), (y,) = received(1000, 2), received(1001)
    seen: set[Any] = set()
    assert reach([sent(5, x * 2), sent(6, x * 3)], seen) == {recv_of(x): [0]}
    assert reach([sent(7, x * 2)], seen) == {}
    assert reach([sent(8, x * y)], seen) == {recv_of(y): [0]}
    assert reach([sent(9, z)], seen) == {recv_of(x): [1]}
    assert reach([], seen) == {}
    assert reach([None], seen) == {}


def test_independent_components_can_be_joined() -> None:
    a, b = leaf(), leaf()
    (x,), common = received(1000), torch.sin(a)
    nodes = {5: sent(5, common), 6: sent(6, common * 2), 7: sent(7, x * b), 8: sent(8, a)}
    components = plan(nodes)
    assert len(components) == 3
    all_ = together(components)
    assert all_.sources == [8, 7, 6, 5]
    assert variables(all_) == {id(a), id(b)}
    assert len(all_.leaves) == 2
    assert all_.recvs == {recv_of(x): {0}}
    assert set(all_.nodes) == {node for component in components for node in component.nodes}
    assert all_.size == sum(component.size for component in components)
    assert not all_.started


def test_gates_come_last_and_everything_else_keeps_its_order() -> None:
    for seed in range(60):
        for component in plan(Graph(seed).nodes):
            sends = [node for node in component.nodes if type(node) is SendNode and node.source != ROOT]
            others = [node for node in component.nodes if type(node) is not SendNode]
            numbers = [node._sequence_nr() for node in others]
            put_gates_last(component)
            after = [node._sequence_nr() for node in others]
            gates = [node._sequence_nr() for node in sends]
            assert gates == [node.source for node in sends]
            assert not (gates and after) or max(gates) < min(after)
            assert sorted(range(len(others)), key=numbers.__getitem__) == sorted(
                range(len(others)), key=after.__getitem__
            )
            # A second pass over the same graph finds the numbers set already.
            put_gates_last(component)
            assert [node._sequence_nr() for node in others] == after


class Noted(torch.autograd.Function):
    """The identity. It notes its backward."""

    order: list[str]

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Noted.order.append(ctx.name)
        return gradient, None


def noted(x: Tensor, name: str) -> Tensor:
    result: Tensor = Noted.apply(x, name)  # type: ignore[no-untyped-call]
    return result


class NotedRun:
    """A run that has the gradients of all sources."""

    def take(self, source: int) -> Sequence[Tensor]:
        Noted.order.append(f"gate {source}")
        return [torch.ones(2)]

    def emit(self, node: Any, gradients: Sequence[Tensor | None]) -> None:
        Noted.order.append("recv")


def test_the_engine_turns_to_a_gate_when_nothing_else_is_ready() -> None:
    """Of several gates the engine turns to the latest first. A Recv comes before all other nodes."""
    Noted.order = []
    x = leaf()
    (y,) = received(1000)
    common = noted(x, "common")
    first, second, third = (noted(common, name) for name in ("first", "second", "third"))
    tops = {5: send(5, [first]), 6: send(6, [second])}
    tops[ROOT] = start([noted(noted(third, "before the end") * noted(y, "other"), "end")])
    (component,) = plan({source: top.grad_fn for source, top in tops.items()})
    assert component.sources == [ROOT, 6, 5]
    put_gates_last(component)
    functions.thread.run = NotedRun()
    try:
        torch.autograd.backward(list(tops.values()), [torch.zeros(())] * 3)
    finally:
        functions.thread.run = None
    order = ["gate 0", "end", "other", "recv", "before the end", "third", "gate 6", "second", "gate 5", "first"]
    assert Noted.order == [*order, "common"]
    assert x.grad is not None
    assert x.grad.eq(3).all()


def test_the_sender_foresees_the_recvs_that_a_tensor_depends_on() -> None:
    (x,), (y, z) = received(1000, reach=()), received(2000, 2, ((7,), (8, 9)))
    assert foresee(sent(1, leaf() * 2)) == ()
    assert foresee(sent(1, x)) == (1000,)
    assert set(foresee(sent(1, torch.sin(y) + leaf())) or ()) == {2000, 7}
    assert set(foresee(sent(1, x * z)) or ()) == {1000, 2001, 8, 9}


def test_a_dependency_unknown_to_the_sender_is_unknown_to_the_receiver() -> None:
    (x,), (y,) = received(1000, reach=()), received(1001)
    assert foresee(sent(1, x * y)) is None


def test_large_graphs_are_not_searched() -> None:
    (x,) = received(1000, reach=())
    for _ in range(100):
        x = x + 1
    assert foresee(sent(1, x)) is None


def test_no_more_sources_are_foreseen_than_a_message_has_room_for() -> None:
    (x,) = received(1000, reach=(tuple(range(MOST_FORESEEN - 1)),))
    (y,) = received(1001, reach=())
    assert len(foresee(sent(1, x)) or ()) == MOST_FORESEEN
    assert foresee(sent(1, x * y)) is None


@pytest.mark.parametrize("foreseen", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_planning_sources_as_one_component_equals_joining_their_plans(seed: int, foreseen: bool) -> None:
    """`as_one` gives the same as `plan` and `together`, also from what `foresee` has found."""
    sources = Graph(seed).nodes
    wanted = together(plan(sources))
    if foreseen:
        for node in sources.values():
            foresee(node)
    found = as_one(sources)
    assert found is not None
    assert found.sources == wanted.sources
    assert set(found.leaves) == set(wanted.leaves)
    assert found.recvs == wanted.recvs
    assert found.size == wanted.size
    assert not found.in_order


def test_sources_of_a_large_graph_are_not_planned_as_one_component() -> None:
    x = leaf()
    for _ in range(100):
        x = x + 1
    assert as_one({1: sent(1, x), 2: sent(2, leaf())}) is None


@pytest.mark.parametrize("seed", range(50))
def test_a_plan_from_what_was_foreseen_equals_one_that_walks(seed: int) -> None:
    sources = Graph(seed).nodes
    wanted = {tuple(each.sources): each for each in plan(sources)}
    for source, node in sources.items():
        if source != ROOT or seed % 2:
            foresee(node)
    found = {tuple(each.sources): each for each in plan(sources)}
    assert found.keys() == wanted.keys()
    for group, component in found.items():
        other = wanted[group]
        assert set(component.leaves) == set(other.leaves)
        assert component.recvs == other.recvs
        assert component.size >= other.size  # a leaf of several components may count in each
        assert set(component.nodes) == set(other.nodes)


def chain(number: int) -> torch.Tensor:
    (x,) = received(1000 + number, reach=())
    return x * leaf() * number


def test_foreseen_sources_that_share_nothing_are_planned_without_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    a = leaf()
    sources = {number: sent(number, chain(number) * a.sum()) for number in (5, 6, 7)}
    for node in sources.values():
        foresee(node)
    monkeypatch.setattr(graph, "_walk", None)
    assert {tuple(each.sources) for each in plan(sources)} == {(5,), (6,), (7,)}
    assert all(a.grad_fn is None and len(each.leaves) == 2 for each in plan(sources))
    together_ = as_one(sources)
    assert together_ is not None
    assert len(together_.leaves) == 4


def test_sources_that_were_not_foreseen_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends of a message that depends on no Recv are not foreseen. The first pass looks what they reach."""
    (x,), a = received(1000, reach=()), leaf()
    sources = {5: sent(5, a), 6: sent(6, a * 2), 7: sent(7, x), ROOT: rooted(leaf() * 3)}
    wanted = {(5,), (6,), (7,), (ROOT,)}
    assert {tuple(each.sources) for each in plan(sources)} == wanted
    del sources[ROOT]
    monkeypatch.setattr(graph, "_walk", None)
    assert {tuple(each.sources) for each in plan(sources)} == wanted - {(ROOT,)}


def test_a_large_source_is_not_looked_at_twice_as_far() -> None:
    x = leaf()
    for _ in range(100):
        x = x + 1
    sources = {5: sent(5, x), 6: sent(6, leaf())}
    assert {tuple(each.sources): each.size for each in plan(sources)} == {(5,): 102, (6,): 2}
    assert sources[5].reached is None


def test_foreseen_sources_that_share_a_node_or_a_leaf_with_hooks_are_run_together() -> None:
    (x,), a = received(1000, reach=()), leaf()
    for sources in (
        {5: sent(5, x * 2), 6: sent(6, x * 3)},  # a Recv
        {5: sent(5, (y := a * 2) + 1), 6: sent(6, y + 2)},  # another node
    ):
        for node in sources.values():
            foresee(node)
        assert [component.sources for component in plan(sources)] == [[6, 5]]
    sources = {5: sent(5, a * 2), 6: sent(6, a * 3)}
    for node in sources.values():
        foresee(node)
    assert [component.sources for component in plan(sources)] == [[5], [6]]
    handle = a.register_hook(lambda gradient: None)
    assert [component.sources for component in plan(sources)] == [[6, 5]]
    handle.remove()


def test_foreseen_sources_with_leaves_of_one_hook_are_run_together() -> None:
    a, b = leaf(), leaf()
    sources = {5: sent(5, a * 2), 6: sent(6, b * 3)}
    for node in sources.values():
        foresee(node)
    assert [component.sources for component in plan(sources)] == [[5], [6]]
    handle = register_multi_grad_hook([a, b], ignore)
    assert [component.sources for component in plan(sources)] == [[6, 5]]
    handle.remove()


def test_what_was_foreseen_does_not_keep_a_graph() -> None:
    """A Send that referred to itself would never be freed."""
    a = leaf()
    freed = weakref.ref(a)
    gc.disable()
    try:
        output = send(5, [a * 2])
        foresee(output.grad_fn)
        del a, output
        assert freed() is None
    finally:
        gc.enable()
