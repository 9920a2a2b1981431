"""The interpreter's switch interval: short while a worker serves, longer with many threads, never against the user."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backhaul.agent.interpreter import FEW, SHORT, SwitchInterval, switch_interval
from backhaul.testing import InProcessCluster

LONG = 0.005
MANY = 6 * FEW
PATIENCE = 60.0


interval = sys.getswitchinterval


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=2e-6)  # the interpreter cuts it off after the microseconds


def expected() -> float:
    return min(LONG, SHORT * max(1.0, threading.active_count() / FEW))


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Restore Python's own interval before each test."""
    found = sys.getswitchinterval()
    sys.setswitchinterval(LONG)
    yield
    sys.setswitchinterval(found)


@contextmanager
def crowd(size: int) -> Iterator[None]:
    """More threads in this process."""
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(size)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_it_is_short_while_a_user_is_in_a_hurry() -> None:
    each = SwitchInterval()
    each.hurry()
    each.hurry()
    assert interval() == near(expected())
    assert interval() < LONG
    each.rest()
    assert interval() == near(expected())
    each.rest()
    assert interval() == near(LONG)


def test_it_grows_with_the_threads_of_the_process() -> None:
    """All threads that wait for the interpreter ask for it in each interval."""
    each = SwitchInterval()
    each.hurry()
    alone = interval()
    with crowd(MANY):
        assert interval() == near(alone)
        each.adapt()
        assert interval() == near(expected())
        assert interval() > max(alone, 5 * SHORT)
    each.adapt()
    assert interval() == near(alone)
    with crowd(3 * MANY):
        each.adapt()
        assert interval() == near(LONG), "it is never longer than without us"
    each.rest()
    assert interval() == near(LONG)


def test_it_stays_where_it_is_when_nobody_is_in_a_hurry() -> None:
    SwitchInterval().adapt()
    assert interval() == near(LONG)


@pytest.mark.parametrize("seconds", [0.0001, 0.02])
def test_the_value_of_the_user_stays(seconds: float) -> None:
    each = SwitchInterval()
    each.hurry()
    sys.setswitchinterval(seconds)
    with crowd(MANY):
        each.adapt()
        assert interval() == near(seconds)
    each.rest()
    assert interval() == near(seconds)


def test_a_shorter_value_stays() -> None:
    sys.setswitchinterval(0.0001)
    each = SwitchInterval()
    each.hurry()
    assert interval() == near(0.0001)
    each.rest()
    assert interval() == near(0.0001)


def test_a_worker_that_serves_follows_the_number_of_threads() -> None:
    assert not switch_interval._users, "another test has left a worker behind"
    with InProcessCluster(2) as workers, crowd(MANY):
        deadline = time.monotonic() + PATIENCE
        while not 5 * SHORT < interval() < LONG:
            assert workers[0].rpc_sync("worker1", os.getpid) == os.getpid()
            assert time.monotonic() < deadline, interval()
    assert interval() == near(LONG)
