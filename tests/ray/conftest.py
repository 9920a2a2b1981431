"""A real Ray on this machine, with two nodes. `make ray` runs these tests in an environment that has Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Since Ray 2.60, whether a cluster wants a token depends on whether this user has ever started another one.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.pop("RAY_AUTH_TOKEN", None)

try:
    import backhaul.ray  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(300))
            item.add_marker(pytest.mark.filterwarnings("default"))  # Ray warns about its own code


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """Ray's processes, with nodes that tests may add or kill. This process is connected to it."""
    import ray
    from eventually import NODE, patiently
    from ray.cluster_utils import Cluster

    here = str(Path(__file__).parent)
    # The workers import `parts`; they inherit this path from the processes of the nodes.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    # The default is 15: on a busy machine workers would hardly start.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    cluster = Cluster()
    try:
        patiently(lambda: cluster.add_node(**NODE, include_dashboard=False))
        patiently(lambda: cluster.add_node(**NODE))
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
