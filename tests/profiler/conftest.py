"""A module's tests share their workers: the first profile of a process takes seconds to start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

_GONE_WITHIN = 5.0


@pytest.fixture(scope="module", autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Check after each module that the threads of its workers are gone."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _GONE_WITHIN
    mine = [each for each in threading.enumerate() if each.name.startswith("backhaul") and each not in before]
    for thread in mine:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in mine if thread.is_alive()]
    assert not left, f"threads that the tests left behind: {left}"
