"""Fixtures for the tests of modules on workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from networks import await_that

from backhaul.testing import InProcessCluster
from backhaul.worker import Worker


@pytest.fixture
def three() -> Iterator[InProcessCluster]:
    """Three workers; this thread acts as worker0. After the test they have nothing left, unless the test keeps it."""
    with InProcessCluster(3) as workers, workers[0].as_current():
        yield workers


def left(workers: InProcessCluster) -> dict[str, dict[str, int]]:
    def counts(worker: Worker) -> dict[str, int]:
        return {**worker.references.counts(), **worker.autograd.counts()}

    return {worker.info.name: found for worker in workers if any((found := counts(worker)).values())}


@pytest.fixture
def nothing_left(three: InProcessCluster) -> Iterator[None]:
    """After the test there are no values, references, contexts or passes on any worker."""
    yield

    try:
        await_that(lambda: not left(three), "nothing is left", 0.5)
    except AssertionError:
        gc.collect()  # slow; needed only for exceptions that a test has caught
        await_that(lambda: not left(three), f"nothing is left, but there was {left(three)}")
