"""Tests that need a GPU are marked ``cuda``, and skipped without one. ``make cuda`` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing import share_device_memory

from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pytest calls this with all tests of the run, including those of other folders."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.cuda)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU; `make cuda` runs these on one that has"))


WAYS: dict[str, dict[str, Any]] = {
    "device segments": {"sockets": True},
    "sockets": {"sockets": True, "pool": 0},
    "messages": {"sockets": False},
}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Two workers of this process: with segments of device memory, with sockets alone, and with plain messages."""
    way = dict(WAYS[request.param])
    pool = {"device_pool_bytes": way.pop("pool")} if "pool" in way else {}
    with InProcessCluster(2, options=RpcOptions(device_maps="same", **pool), **way) as workers:
        if request.param == "device segments":
            share_device_memory(workers)
        yield workers
