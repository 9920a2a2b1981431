"""What needs a GPU: marked ``cuda``, and skipped where there is none. ``make cuda`` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Called with all tests of the run, also with those of other folders."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.cuda)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU; `make cuda` runs these on one that has"))


@pytest.fixture(params=["device segments", "host memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Two workers of this process, over unix sockets with segments of device memory, and over plain messages."""
    sockets = request.param == "device segments"
    with InProcessCluster(2, sockets=sockets, options=RpcOptions(device_maps="same")) as workers:
        yield workers
