"""Slurm's lists of nodes. `tests/clusters` compares random ones with the output of `scontrol`."""

from __future__ import annotations

import pytest

from backhaul.environments.nodelists import MOST, expand, first
from backhaul.errors import OptionError

LISTS: list[tuple[str, list[str]]] = [
    ("node1", ["node1"]),
    ("a,b", ["a", "b"]),
    ("node[1-3]", ["node1", "node2", "node3"]),
    ("node[1,3,5]", ["node1", "node3", "node5"]),
    ("node[1-2,7,9-10]", ["node1", "node2", "node7", "node9", "node10"]),
    # the lower end decides the padding
    ("node[08-11]", ["node08", "node09", "node10", "node11"]),
    ("node[8-11]", ["node8", "node9", "node10", "node11"]),
    ("node[001]", ["node001"]),
    ("node[098-101]", ["node098", "node099", "node100", "node101"]),
    # suffixes, and names that need no brackets
    ("n[1-2]-ib0", ["n1-ib0", "n2-ib0"]),
    ("n[1-2].cluster.example.org", ["n1.cluster.example.org", "n2.cluster.example.org"]),
    ("login-a,gpu[3-4]", ["login-a", "gpu3", "gpu4"]),
    # several brackets: the last one changes fastest
    ("rack[1-2]node[01-02]", ["rack1node01", "rack1node02", "rack2node01", "rack2node02"]),
    ("t[0-1][0-1]", ["t00", "t01", "t10", "t11"]),
    ("[1-2]x", ["1x", "2x"]),
    # order and repetition are kept
    ("b[2,1],a,a", ["b2", "b1", "a", "a"]),
]


@pytest.mark.parametrize(("text", "nodes"), LISTS)
def test_node_lists_are_expanded(text: str, nodes: list[str]) -> None:
    assert expand(text) == nodes
    assert first(text) == nodes[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a name is expected at character 1"),
        ("a,", "a name is expected at character 3"),
        (",a", "a name is expected at character 1"),
        ("a b", "a comma is expected at character 2"),
        ("a[1", "a comma is expected at character 2"),
        ("a]", "a comma is expected at character 2"),
        ("a[1[2]]", "a comma is expected at character 2"),
        ("a[]", "'' is not a range of numbers"),
        ("a[1,]", "'' is not a range of numbers"),
        ("a[x-y]", "'x-y' is not a range of numbers"),
        ("a[000x133]", "'000x133' is not a range of numbers"),
        ("a[1-2-3]", "'1-2-3' is not a range of numbers"),
        ("a[3-1]", "the range '3-1' ends before it begins"),
        ("a[0-99999999]", f"has more than {MOST} numbers"),
        ("a[1-300][1-300]", f"has more than {MOST} of them"),
        (f"a[{'9' * 5000}]", "is not a range of numbers"),
    ],
)
def test_invalid_node_lists_are_refused(text: str, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        expand(text)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 6000


def test_a_list_may_have_as_many_nodes_as_slurm_allows() -> None:
    assert len(expand("a[1-256][1-256]")) == MOST
