"""Fixtures that several suites share."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from longest import LONG, LONGEST, starts_processes

# Fixtures import from the package when they run: the process that distributes the tests needs no torch.
if TYPE_CHECKING:
    from backhaul.testing import InProcessCluster

_GONE_WITHIN = 5.0

# Several processes of tests share the processors: with threads of torch beside them they would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores some signals for background jobs, nohup another, and all processes started here would inherit that.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def _name(path: Path) -> str:
    here = Path(__file__).parent
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare `make quick` the import of files that it leaves out."""
    if collection_path.suffix != ".py" or not _name(collection_path):
        return None
    left_out = ("not long" in config.option.markexpr and _name(collection_path) in LONG) or (
        "not processes" in config.option.markexpr and starts_processes(collection_path)
    )
    return True if left_out else None  # other plugins decide about the rest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of files that `make quick` leaves out, and have the longest files first."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    order = {}
    for path, of_path in itertools.groupby(items, key=lambda item: item.path):
        name = _name(path)
        marks = [pytest.mark.long] if name in LONG else []
        if name and starts_processes(path):
            marks.append(pytest.mark.processes)
        for item in of_path:
            order[item] = ranks.get(name, len(ranks))
            for mark in marks:
                item.add_marker(mark)
    items.sort(key=order.__getitem__)


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Freeze existing objects. Modules and tests are half a million, and hundreds of tests collect garbage."""
    gc.collect()
    gc.freeze()


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
    from backhaul.autograd import joint_hooks, node_hooks

    monkeypatch.setattr(joint_hooks, "_hooks", {})
    monkeypatch.setattr(node_hooks, "_seen", [])


@pytest.fixture(params=["memory", "sockets"])
def pair(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Two workers in this process, over each transport."""
    from backhaul.testing import InProcessCluster

    with InProcessCluster(2, sockets=request.param == "sockets") as workers:
        yield workers


@pytest.fixture
def trio() -> Iterator[InProcessCluster]:
    from backhaul.testing import InProcessCluster

    with InProcessCluster(3) as workers:
        yield workers
