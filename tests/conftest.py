"""Fixtures that several suites share."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul.autograd import joint_hooks, node_hooks
from backhaul.testing import InProcessCluster
from longest import LONG, LONGEST

_GONE_WITHIN = 5.0

# A shell ignores these signals for background jobs, and all processes started here inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


# Imports of modules that start processes.
_STARTERS = {"subprocess", "multiprocessing", "Crew", "cluster", "dropin_runs", "intruder", "training_runs"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of files that `make quick` leaves out, and have the longest files first."""
    here = Path(__file__).parent
    names = {item: item.path.relative_to(here).as_posix() for item in items if item.path.is_relative_to(here)}
    for item in items:
        if isinstance(item, pytest.Function) and _STARTERS & vars(item.module).keys():
            item.add_marker(pytest.mark.processes)
        if names.get(item) in LONG:
            item.add_marker(pytest.mark.long)
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(names.get(item, ""), len(ranks)))


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Check after each test that the threads of its workers are gone."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _GONE_WITHIN
    for thread in threading.enumerate():
        if thread.name.startswith("backhaul") and thread not in before:
            thread.join(max(0.0, deadline - time.monotonic()))
    left = [t.name for t in threading.enumerate() if t.name.startswith("backhaul") and t not in before]
    assert not left, f"threads that a test left behind: {left}"


@pytest.fixture
def no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as in a process without hooks: tensors of other tests may still have some, and a pass looks for those."""
    monkeypatch.setattr(joint_hooks, "_hooks", {})
    monkeypatch.setattr(node_hooks, "_seen", [])


@pytest.fixture(params=["memory", "sockets"])
def pair(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Two workers in this process, over each transport."""
    with InProcessCluster(2, sockets=request.param == "sockets") as workers:
        yield workers


@pytest.fixture
def trio() -> Iterator[InProcessCluster]:
    with InProcessCluster(3) as workers:
        yield workers
