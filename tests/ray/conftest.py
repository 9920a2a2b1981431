"""A real Ray on this machine, with two nodes. `make ray` runs these tests in an environment that has Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    import backhaul.ray  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]

PATIENCE = 60.0
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(300))
            item.add_marker(pytest.mark.filterwarnings("default"))  # Ray warns of its own affairs


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """Ray's processes, with nodes that tests may add to or kill. This process is connected to it."""
    from ray.cluster_utils import Cluster

    import ray

    here = str(Path(__file__).parent)
    # The workers import `parts`; and they inherit this from the processes of the nodes.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def eventually(condition: Callable[[], Any], within: float = PATIENCE) -> Any:
    """The first true value of the condition; Ray has no event for what others hold."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return found


def living_actors() -> list[str]:
    from ray._private.state import actors

    return [each["ActorClassName"] for each in actors().values() if each["State"] != "DEAD"]


def placements() -> list[str]:
    import ray

    return [each["state"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
