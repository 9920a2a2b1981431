"""Fixtures that all suites of optimizers share."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from backhaul.optim.claims import claims
from backhaul.testing import InProcessCluster

WITHIN = 10.0


@pytest.fixture
def workers(caplog: pytest.LogCaptureFixture) -> Iterator[InProcessCluster]:
    """Three workers; the first is current. At the end nothing is left on them, and nothing is claimed."""
    with (
        caplog.at_level(logging.ERROR, logger="backhaul"),
        InProcessCluster(3) as made,
        made[0].as_current(),
    ):
        yield made
        await_nothing_left(made)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def await_nothing_left(workers: InProcessCluster) -> None:
    deadline = time.monotonic() + WITHIN
    for look in itertools.count():
        if look % 100 == 10:  # not at once: it takes longer than most tests, and few leave cycles
            gc.collect()
        left = {worker.info.name: worker.references.counts() | worker.autograd.counts() for worker in workers}
        if not len(claims) and not any(any(counts.values()) for counts in left.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {left}, and {len(claims)} claims"
        threading.Event().wait(0.002)
