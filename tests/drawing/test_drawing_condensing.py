"""Condensing: which nodes become one box, over tables of small graphs."""

from __future__ import annotations

from collections import Counter

import pytest

from backhaul.drawing.condensing import (
    MOST_BOXES,
    Condensed,
    Entry,
    Graph,
    Leaf,
    Node,
    Operation,
    Owner,
    condense,
)

FC1, FC2 = ("Net", "fc1"), ("Net", "fc2")
CLASSES: dict[Owner, str] = {("Net",): "Net", FC1: "Linear", FC2: "Linear"}


def parameter(name: str, owner: Owner) -> Leaf:
    return Leaf(name, owner, (2, 2), 4)


def linear(nodes: list[Node], owner: Owner, x: int | None, *, bias: bool = True) -> int:
    """The nodes of a linear layer, as torch makes them; returns the position of its output."""
    nodes.append(parameter("weight", owner))
    nodes.append(Operation("T", [len(nodes) - 1]))
    inputs = [len(nodes) - 1] + ([] if x is None else [x])
    if bias:
        nodes.append(parameter("bias", owner))
        inputs.append(len(nodes) - 1)
    nodes.append(Operation("Addmm" if bias else "Mm", inputs))
    return len(nodes) - 1


def then(nodes: list[Node], name: str, *inputs: int) -> int:
    nodes.append(Operation(name, inputs))
    return len(nodes) - 1


def condensed(nodes: list[Node], *exits: int, most: int = MOST_BOXES) -> Condensed:
    return condense(Graph(nodes, {100 + place: [exit] for place, exit in enumerate(exits)}, CLASSES), most)


def titles(found: Condensed) -> list[str]:
    return [box["label"] or "+".join(name for name, _ in box["operations"]) for box in found.boxes]


@pytest.mark.parametrize("bias", [True, False])
def test_the_nodes_of_a_layer_are_one_box_with_its_parameters(bias: bool) -> None:
    nodes: list[Node] = [Entry(7)]
    found = condensed(nodes, linear(nodes, FC1, 0, bias=bias))
    (box,) = found.boxes
    assert (box["kind"], box["label"], box["class"], box["nodes"]) == ("module", "fc1", "Linear", 2)
    assert box["leaves"] == [["fc1.weight", [2, 2]], ["fc1.bias", [2, 2]]][: 1 + bias]
    assert (box["leaf_count"], box["elements"]) == (1 + bias, 4 * (1 + bias))
    assert found.entries == {7: [0]}
    assert found.exits == {100: [0]}


def test_layers_and_what_is_between_them() -> None:
    nodes: list[Node] = [Entry(7)]
    found = condensed(nodes, linear(nodes, FC2, then(nodes, "Relu", then(nodes, "Mul", linear(nodes, FC1, 0)))))
    assert titles(found) == ["fc1", "Mul+Relu", "fc2"]
    assert found.edges == [(0, 1), (1, 2)]


def test_a_layer_whose_input_needs_no_gradient_does_not_swallow_what_follows() -> None:
    nodes: list[Node] = []
    found = condensed(nodes, then(nodes, "Relu", linear(nodes, FC1, None)))
    assert titles(found) == ["fc1", "Relu"]


def test_a_layer_that_is_used_twice_is_drawn_twice() -> None:
    nodes: list[Node] = [Entry(7), parameter("weight", FC1)]
    first = then(nodes, "Mm", 0, then(nodes, "T", 1))
    second = then(nodes, "Mm", then(nodes, "Relu", first), then(nodes, "T", 1))
    found = condensed(nodes, second)
    assert titles(found) == ["fc1", "Relu", "fc1"]
    assert [box["leaf_count"] for box in found.boxes] == [1, 0, 1]


def test_an_operation_on_parameters_of_two_modules_belongs_to_what_is_around_them() -> None:
    nodes: list[Node] = [parameter("weight", FC1), parameter("weight", FC2)]
    (box,) = condensed(nodes, then(nodes, "Mul", 0, 1)).boxes
    assert (box["label"], box["class"]) == ("Net", "")


def test_nodes_that_depend_on_different_recvs_get_different_boxes() -> None:
    """The second Recv may depend on a Send of the first box. In one box, an arrow would lead back to it."""
    nodes: list[Node] = [Entry(7), Entry(8)]
    first = then(nodes, "Tanh", 0)
    found = condensed(nodes, first, then(nodes, "Add", first, then(nodes, "Sin", 1)))
    assert titles(found) == ["Tanh", "Sin", "Add"]
    assert found.exits == {100: [0], 101: [2]}
    assert found.entries == {7: [0], 8: [1]}


def test_leaves_without_a_module_are_drawn_with_what_uses_them() -> None:
    nodes: list[Node] = [Leaf("", None, (3,), 3), Leaf("", None, (4,), 4), Leaf("", None, (5,), 5)]
    found = condensed(nodes, then(nodes, "Mul", 0, 1), 2)
    assert [(box["kind"], box["leaf_count"], box["elements"]) for box in found.boxes] == [
        ("operations", 0, 0),
        ("leaves", 2, 7),
        ("leaves", 1, 5),
    ]
    assert found.edges == [(1, 0)]
    assert found.exits == {100: [0], 101: [2]}


def test_a_parameter_that_is_sent_itself_keeps_its_name() -> None:
    (box,) = condensed([parameter("weight", FC1)], 0).boxes
    assert box["leaves"] == [["fc1.weight", [2, 2]]]


def test_a_tensor_that_is_sent_on_unchanged_is_a_relay() -> None:
    found = condensed([Entry(7)], 0)
    assert (found.boxes, found.relays) == ([], [(7, 100)])


def test_micro_batches_are_drawn_as_one_box() -> None:
    nodes: list[Node] = []
    ends = []
    for message in range(12):
        nodes.append(Entry(message))
        ends.append(then(nodes, "Relu", linear(nodes, FC1, len(nodes) - 1)))
    found = condensed(nodes, *ends)
    assert titles(found) == ["fc1", "Relu"]
    assert [box["nodes"] for box in found.boxes] == [24, 12]
    assert found.entries == {message: [0] for message in range(12)}


def stack(nodes: list[Node], layers: int) -> int:
    nodes.append(Entry(7))
    at = 0
    for layer in range(layers):
        at = linear(nodes, ("Net", str(layer), "fc1"), at)
        at = linear(nodes, ("Net", str(layer), "fc2"), then(nodes, "Relu", at))
    return at


def test_many_layers_are_drawn_as_ranges_in_order() -> None:
    nodes: list[Node] = []
    found = condensed(nodes, stack(nodes, 60))
    assert titles(found) == [f"{first}-{first + 5}" for first in range(0, 60, 6)]
    assert found.edges == [(place, place + 1) for place in range(9)]
    assert [box["leaf_count"] for box in found.boxes] == [24] * 10


@pytest.mark.parametrize(
    ("layers", "drawn"),
    [
        (2, ["0.fc1", "Relu", "0.fc2", "1.fc1", "Relu", "1.fc2"]),
        (12, [f"{layer}.{part}" for layer in range(12) for part in ("fc1", "fc2")]),
        (20, [str(layer) for layer in range(20)]),
    ],
)
def test_more_layers_are_drawn_with_fewer_details(layers: int, drawn: list[str]) -> None:
    nodes: list[Node] = []
    assert titles(condensed(nodes, stack(nodes, layers))) == drawn


@pytest.mark.parametrize("most", [2, 5, MOST_BOXES])
def test_the_number_of_boxes_never_exceeds_its_limit(most: int) -> None:
    """Unrelated modules: the rest can only be described by its size."""
    nodes: list[Node] = []
    ends = []
    for number in range(100):
        end = linear(nodes, (f"Net {number}",), None)
        for _ in range(number % 7):
            end = then(nodes, "Relu", end)
        ends.append(end)
    found = condensed(nodes, *ends, most=most)
    assert len(found.boxes) <= most
    assert sum(box["nodes"] for box in found.boxes) == sum(isinstance(node, Operation) for node in nodes)
    assert Counter(box["kind"] for box in found.boxes)["more"] == 1
    assert all(0 <= end < len(found.boxes) for edge in found.edges for end in edge)


def test_an_empty_graph() -> None:
    assert condense(Graph([], {}, {})) == Condensed([], [], {}, {}, [])
