"""After an error of a GPU, threads that wait for their turn get the error too. They do not wait forever."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from broken_gpu import BreakingDriver

from backhaul.autograd.gradients import _Lending
from backhaul.devices.driver import DriverError
from backhaul.devices.handover import Baton, Streams
from backhaul.optim.claims import Claims


@pytest.fixture
def driver() -> BreakingDriver:
    return BreakingDriver()


def lending(driver: BreakingDriver) -> tuple[Callable[[], AbstractContextManager[None]], Callable[[], int]]:
    made, leaf = _Lending(), torch.zeros(1)
    made._baton = Baton(driver, {0})
    return lambda: made.of([leaf], lambda: None), lambda: len(made._lent)


def claims(driver: BreakingDriver) -> tuple[Callable[[], AbstractContextManager[None]], Callable[[], int]]:
    made, leaf = Claims(), torch.zeros(1)
    made.baton = Baton(driver, {0})
    return lambda: made.on([leaf]), lambda: len(made)


@pytest.mark.parametrize("kind", [lending, claims])
def test_a_turn_ends_with_an_error(
    driver: BreakingDriver,
    kind: Callable[[BreakingDriver], tuple[Callable[[], AbstractContextManager[None]], Callable[[], int]]],
) -> None:
    turn, held = kind(driver)
    with turn():
        assert held() == 1
    with pytest.raises(DriverError), turn():  # it breaks during the turn
        driver.broken = True
    assert held() == 0
    reached = False
    with pytest.raises(DriverError), turn():  # it was broken before
        reached = True
    assert not reached
    assert held() == 0


def test_streams_tell_every_thread_that_must_wait(driver: BreakingDriver) -> None:
    streams = Streams((0,), driver)
    streams._fresh[0].add((5, 0, 1))  # another stream has left word
    driver.broken = True
    for _ in range(2):
        with pytest.raises(DriverError):
            streams.catch_up()
    driver.broken = False
    streams.catch_up()
    assert streams._only == {0: (0, 0, 1)}
