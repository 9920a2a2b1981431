"""Fixtures that all suites of optimizers share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from optim_models import await_nothing_left

from backhaul.testing import InProcessCluster


@pytest.fixture
def workers(caplog: pytest.LogCaptureFixture) -> Iterator[InProcessCluster]:
    """Three workers; the first is current. After the test they must have nothing left, and no claims."""
    with (
        caplog.at_level(logging.ERROR, logger="backhaul"),
        InProcessCluster(3) as made,
        made[0].as_current(),
    ):
        yield made
        await_nothing_left(made)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
