"""Processes that are killed while a checkpoint is saved: there is always one, and it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from dying import arm, data_directories, hold, kill_at_each_call, kill_at_random, load_held, save_held

from backhaul import checkpoint
from backhaul.errors import PartialError, WorkerLostError
from crew import Crew


def test_a_caller_that_is_killed_at_each_call_of_a_save() -> None:
    with Crew(1, group=False) as crew:
        deaths, came_through, left = crew[0].run(kill_at_each_call, 1, timeout=110)
    assert deaths > 100
    assert 5 < came_through < deaths - 50  # some before the swap, some after it
    assert left > 20


def test_a_caller_that_is_killed_at_any_time() -> None:
    with Crew(1, group=False) as crew:
        done = crew[0].run(kill_at_random, 40, 3, timeout=110)
    assert len(done) == 40
    assert 0 in done  # killed in its first save
    assert max(done) > 1


@pytest.mark.parametrize("when", ["before it writes", "while it writes"])
def test_a_worker_that_is_killed_during_a_save(when: str, tmp_path: Path) -> None:
    with Crew(3) as crew:
        crew[0].run(hold, 1, ["worker1", "worker2"])
        crew[0].run(save_held, tmp_path, 1)
        crew[0].run(arm, 1, when)
        with pytest.raises(PartialError, match=r"saving the checkpoint .* \(the one before stays\)") as caught:
            crew[0].run(save_held, tmp_path, 2)
        assert list(caught.value.errors) == ["worker2"]
        assert isinstance(caught.value.errors["worker2"], WorkerLostError)
        assert data_directories(tmp_path) == 1
        # Those who are left go on with the checkpoint.
        crew[0].run(hold, 5, ["worker1", "worker0"])
        assert crew[0].run(load_held, tmp_path) == (1, [1.0, 1.0])
        crew[0].run(save_held, tmp_path, 3)
    assert checkpoint.read(tmp_path)["number"] == 3


def test_a_caller_that_is_killed_when_the_workers_have_written(tmp_path: Path) -> None:
    with Crew(3) as crew:
        crew[0].run(hold, 1, ["worker1", "worker2"])
        crew[0].run(save_held, tmp_path, 1)
        with pytest.raises(EOFError):
            crew[0].run(save_held, tmp_path, 2, True)
        assert data_directories(tmp_path) == 2
        assert checkpoint.read(tmp_path)["number"] == 1
        crew[1].run(hold, 5, ["worker1", "worker2"])
        assert crew[1].run(load_held, tmp_path) == (1, [1.0, 1.0])
        crew[1].run(save_held, tmp_path, 3)
        assert data_directories(tmp_path) == 1
    assert checkpoint.read(tmp_path)["number"] == 3
