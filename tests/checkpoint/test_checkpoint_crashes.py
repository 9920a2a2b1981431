"""Processes that are killed while a checkpoint is saved: there is always a whole checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dying import arm, data_directories, hold, kill_at_each_call, kill_at_random, load_held, save_held

from backhaul import checkpoint
from backhaul.errors import PartialError, WorkerLostError
from crew import Crew, Hand


@pytest.fixture(scope="module")
def hand() -> Iterator[Hand]:
    """A process that can be forked, since it has only one thread."""
    with Crew(1, group=False) as crew:
        yield crew[0]


def test_a_caller_that_is_killed_at_each_call_of_a_save(hand: Hand) -> None:
    deaths, came_through, left = hand.run(kill_at_each_call, 1, timeout=110)
    assert deaths > 100
    assert 5 < came_through < deaths - 50  # some before the swap, some after it
    assert left > 20


def test_a_caller_that_is_killed_at_any_time(hand: Hand) -> None:
    done = hand.run(kill_at_random, 40, 3, timeout=110)
    assert len(done) == 40
    assert 0 in done  # killed in its first save
    assert max(done) > 1


@pytest.mark.slow
def test_workers_and_a_caller_that_are_killed_during_saves(tmp_path: Path) -> None:
    """Workers die one after the other; the rest continue with the checkpoint."""
    with Crew(4) as crew:
        crew[0].run(hold, 1, ["worker2", "worker3"])
        crew[0].run(save_held, tmp_path, 1)

        for victim, when, left in (
            ("worker3", "before it writes", "worker1"),
            ("worker2", "while it writes", "worker0"),
        ):
            crew[0].run(arm, victim, when)
            with pytest.raises(PartialError, match=r"saving the checkpoint .* \(the previous one stays\)") as caught:
                crew[0].run(save_held, tmp_path, 2)
            assert list(caught.value.errors) == [victim]
            assert isinstance(caught.value.errors[victim], WorkerLostError)
            assert data_directories(tmp_path) == 1
            crew[0].run(hold, 5, ["worker2" if victim == "worker3" else "worker1", left])
            assert crew[0].run(load_held, tmp_path) == (1, [1.0, 1.0])

        crew[0].run(save_held, tmp_path, 3)
        with pytest.raises(EOFError):
            crew[0].run(save_held, tmp_path, 4, True)
        assert data_directories(tmp_path) == 2  # the workers' files are left over
        assert checkpoint.read(tmp_path)["number"] == 3
        crew[1].run(hold, 5, ["worker1", "worker1"])
        assert crew[1].run(load_held, tmp_path) == (3, [1.0, 1.0])
        crew[1].run(save_held, tmp_path, 5)
        assert data_directories(tmp_path) == 1
    assert checkpoint.read(tmp_path)["number"] == 5
