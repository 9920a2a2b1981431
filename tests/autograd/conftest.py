"""Fixtures that several suites of autograd share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from acts import ACTS
from models import new_weights

from backhaul.testing import InProcessCluster


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Remove the acts of other tests, and fail if a worker's thread has an unexpected error."""
    new_weights()
    ACTS.clear()
    with caplog.at_level(logging.ERROR, logger="backhaul"):
        yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def five() -> Iterator[InProcessCluster]:
    with InProcessCluster(5) as workers:
        yield workers


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sources of each run of torch's engine."""
    from backhaul.autograd import runner

    seen: list[int] = []
    run = runner._run_backward

    def count(starts: Any, *args: Any, **options: Any) -> Any:
        seen.append(len(starts))
        return run(starts, *args, **options)

    monkeypatch.setattr(runner, "_run_backward", count)
    return seen
