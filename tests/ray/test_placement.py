"""Where Ray puts workers, and what the error says if there is no room."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray
from eventually import NODE, eventually, living_actors, patiently, placements

import backhaul.ray
from backhaul.errors import RpcTimeoutError
from backhaul.ray.placement import Node, missing, ranks


@pytest.mark.parametrize(
    ("nodes", "first", "found"),
    [
        ("aabb", None, [0, 1, 2, 3]),
        ("abab", None, [0, 2, 1, 3]),
        ("abab", "b", [1, 3, 0, 2]),
        ("abc", "elsewhere", [0, 1, 2]),
        ("", None, []),
    ],
)
def test_ranks(nodes: str, first: str | None, found: list[int]) -> None:
    assert ranks(list(nodes), first) == found


PAGE = Path(__file__).parents[2] / "docs" / "clusters-ray.md"
NODES = [
    Node("10.0.0.1", {"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}),
    Node("10.0.0.2", {"CPU": 4.0}, {"CPU": 4.0}),
]


def test_the_error_lists_what_is_missing() -> None:
    assert missing({"CPU": 2.0, "GPU": 1.0}, 3, "PACK", NODES, 30.0).splitlines() == [
        "Ray found no room for 3 workers within 30 s. Asked for: 3 times CPU 2, GPU 1, strategy 'PACK'; there is room "
        "for 0 now, and for 1 when nothing else runs",
        "  node 10.0.0.1: CPU 1 free of 4, GPU 1 free of 1",
        "  node 10.0.0.2: CPU 4 free of 4, GPU 0 free of 0",
        "  missing: CPU: 6 asked for, 5 free, 8 in the cluster",
        "  missing: GPU: 3 asked for, 1 free, 1 in the cluster",
        "Ask for less, end other jobs, add nodes, or give cluster() a longer timeout.",
    ]


@pytest.mark.parametrize(
    ("strategy", "n", "line"),
    [
        ("STRICT_SPREAD", 3, "  missing: nodes: STRICT_SPREAD puts each worker on its own node, but there are 2"),
        ("STRICT_PACK", 5, "  missing: one node with room for all workers, as STRICT_PACK requires"),
    ],
)
def test_the_error_names_what_a_strategy_lacks(strategy: str, n: int, line: str) -> None:
    assert line in missing({"CPU": 1.0}, n, strategy, NODES, 1.0).splitlines()


def test_the_error_of_the_page() -> None:
    shown = PAGE.read_text().partition("    Ray found no room ")[2].partition("\n\n")[0]
    lines = ["Ray found no room " + shown.splitlines()[0], *(line[4:] for line in shown.splitlines()[1:])]
    assert lines == missing({"CPU": 2.0, "GPU": 1.0}, 3, "PACK", NODES, 30.0).splitlines()[:-1]


def test_the_error_without_reported_free_resources() -> None:
    """Other versions of Ray may not report free resources."""
    assert "  node a: CPU 2" in missing({"CPU": 4.0}, 1, "PACK", [Node("a", {"CPU": 2.0})], 1.0).splitlines()


def test_no_room(nodes: Any) -> None:
    with pytest.raises(RpcTimeoutError) as caught:
        backhaul.ray.cluster(2, resources={"CPU": 1, "GPU": 1}, timeout=1.0)
    text = str(caught.value)
    assert text.startswith("Ray found no room for 2 workers within ")
    assert " s. Asked for: 2 times CPU 1, GPU 1, strategy 'PACK'; " in text
    assert "  missing: GPU: 2 asked for, 0 free, 0 in the cluster\n" in text
    assert text.count("CPU 2 free of 2, GPU 0 free of 0") == 2
    eventually(lambda: not living_actors() and not placements())


def test_the_error_counts_room_that_others_use(nodes: Any) -> None:
    with (
        backhaul.ray.cluster(3),
        pytest.raises(RpcTimeoutError, match=r"room for 1 now, and for 2 when nothing else runs"),
    ):
        backhaul.ray.cluster(2, driver=False, timeout=1.0)


@pytest.fixture
def idle(nodes: Any) -> None:
    """Ray has taken back what earlier tests used: `PACK` and `SPREAD` are wishes, and depend on what is free."""
    eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.mark.parametrize(
    ("strategy", "count"), [({}, 1), ({"strategy": "STRICT_PACK"}, 1), ({"strategy": "SPREAD"}, 2)], ids=str
)
def test_the_strategy_decides_on_which_nodes_the_workers_are(idle: None, strategy: dict[str, str], count: int) -> None:
    with backhaul.ray.cluster(2, **strategy) as workers:  # type: ignore[arg-type]
        assert len({worker.node for worker in workers}) == count
        assert workers.run(os.getpid) == [worker.pid for worker in workers]


def test_each_worker_on_a_node_of_its_own(idle: None) -> None:
    with backhaul.ray.cluster(2, strategy="STRICT_SPREAD") as workers:
        here = ray.get_runtime_context().get_node_id()
        assert workers[0].node == here != workers[1].node
    with pytest.raises(RpcTimeoutError, match="missing: nodes: STRICT_SPREAD puts each worker on its own node, but th"):
        backhaul.ray.cluster(3, strategy="STRICT_SPREAD", timeout=1.0)
    with pytest.raises(RpcTimeoutError, match="missing: one node with room for all workers, as STRICT_PACK requires"):
        backhaul.ray.cluster(3, strategy="STRICT_PACK", timeout=1.0)


def test_a_worker_has_the_gpu_that_ray_gave_it(nodes: Any) -> None:
    """Ray believes a node that claims to have GPUs."""
    node = patiently(lambda: nodes.add_node(**NODE, num_gpus=2))
    try:
        with backhaul.ray.cluster(2, resources={"CPU": 1, "GPU": 1}) as workers:
            assert {worker.node for worker in workers} == {node.node_id}
            assert sorted(workers.run(os.getenv, ("CUDA_VISIBLE_DEVICES",))) == ["0", "1"]
    finally:
        nodes.remove_node(node)
