"""Training that continues from a checkpoint, on other workers than before, as if it had never stopped."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from training_runs import ALONE, SPREAD, Net, Placement, Run, assert_equal, uninterrupted

from backhaul import checkpoint
from backhaul.testing import InProcessCluster

BEFORE, AFTER = 3, 4
WITHIN = 10.0

PLACEMENTS: dict[str, tuple[int, Placement]] = {
    "three workers": (3, SPREAD),
    "two workers": (2, ("worker1", None, "worker0", "worker1")),
    "all local": (1, ALONE),
    "all on one worker": (2, ("worker1",) * 4),
    "one worker each": (5, ("worker1", "worker2", "worker3", "worker4")),
}


def placements(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, PLACEMENTS.values(), ids=PLACEMENTS)


def save_on(size: int, placement: Placement, path: Path, *, gather: bool = False) -> None:
    with InProcessCluster(size) as workers, workers[0].as_current():
        checkpoint.save(Run(placement).step(BEFORE).objects(), path, gather=gather)


def go_on(placement: Placement, path: Path, *, distributed: bool = True) -> Run:
    """A run that started with other numbers is loaded, and trained further."""
    run = Run(placement, seed=100, distributed=distributed).step(1)
    return run.take(checkpoint.load(path, run.objects())).step(AFTER)


@placements("after")
def test_a_checkpoint_of_three_workers_resumes_on_other_placements(
    after: tuple[int, Placement], tmp_path: Path
) -> None:
    save_on(3, SPREAD, tmp_path)
    size, placement = after
    with InProcessCluster(size) as workers, workers[0].as_current():
        assert_equal(go_on(placement, tmp_path).state(), uninterrupted(BEFORE + AFTER))


@placements("before")
def test_a_checkpoint_of_workers_resumes_in_one_process(before: tuple[int, Placement], tmp_path: Path) -> None:
    """Without any worker."""
    save_on(*before, tmp_path)
    assert_equal(go_on(ALONE, tmp_path, distributed=False).state(), uninterrupted(BEFORE + AFTER))


def test_a_checkpoint_of_one_process_resumes_on_workers(tmp_path: Path) -> None:
    checkpoint.save(Run(ALONE, distributed=False).step(BEFORE).objects(), tmp_path)
    with InProcessCluster(3) as workers, workers[0].as_current():
        assert_equal(go_on(SPREAD, tmp_path).state(), uninterrupted(BEFORE + AFTER))


def test_a_worker_may_load_what_another_worker_saved(tmp_path: Path) -> None:
    save_on(3, SPREAD, tmp_path)
    with InProcessCluster(3) as workers, workers[2].as_current():
        assert_equal(go_on(("worker0", None, "worker1", "worker2"), tmp_path).state(), uninterrupted(BEFORE + AFTER))


def test_a_gathered_checkpoint_resumes(tmp_path: Path) -> None:
    save_on(3, SPREAD, tmp_path, gather=True)
    with InProcessCluster(2) as workers, workers[0].as_current():
        assert_equal(go_on(("worker1", None, "worker0", "worker1"), tmp_path).state(), uninterrupted(BEFORE + AFTER))


@pytest.mark.parametrize("gather", [False, True])
def test_each_worker_has_a_file(gather: bool, tmp_path: Path) -> None:
    save_on(3, SPREAD, tmp_path, gather=gather)
    (data,) = tmp_path.glob("data-*")
    assert {file.name for file in data.iterdir()} == {"common.pt", "worker0.pt", "worker1.pt", "worker2.pt"}
    assert {file.name for file in tmp_path.iterdir()} == {"index.json", "lock", data.name}
    found = torch.load(data / "worker2.pt", weights_only=True)
    assert set(found) == {"model", "optimizer"}
    assert all(key.startswith("blocks.1.") for key in found["model"])
    assert set(found["optimizer"]) == {5, 6, 7, 8}  # by index among all parameters


@placements("before")
def test_read_gives_the_state_dicts_of_one_process(before: tuple[int, Placement], tmp_path: Path) -> None:
    save_on(*before, tmp_path)
    found = checkpoint.read(tmp_path)
    expected = uninterrupted(BEFORE)
    assert_equal(found, expected)
    assert list(found) == list(expected)
    assert list(found["model"]) == list(expected["model"])  # in the same order, too

    alone = Run(ALONE, seed=100, distributed=False)
    assert found["model"]._metadata == alone.model.state_dict()._metadata  # type: ignore[attr-defined]
    alone.model.load_state_dict(found["model"])
    alone.optimizer.load_state_dict(found["optimizer"])
    alone.scheduler.load_state_dict(found["scheduler"])
    assert_equal(alone.take(found).step(AFTER).state(), uninterrupted(BEFORE + AFTER))


def test_tensors_that_were_read_do_not_depend_on_the_files(tmp_path: Path) -> None:
    """The tensors can be changed, and stay when the files go."""
    run = Run(ALONE, distributed=False).step(1)
    checkpoint.save(run.objects(), tmp_path)
    found = checkpoint.read(tmp_path)
    for value in found["model"].values():
        value.zero_()
    found["optimizer"]["state"][0]["exp_avg"].zero_()
    assert_equal(checkpoint.read(tmp_path), run.state())


def test_the_rate_that_the_scheduler_has_just_set_is_saved(tmp_path: Path) -> None:
    """The workers do not know that rate yet, because no step has told them."""
    with InProcessCluster(3) as workers, workers[0].as_current():
        run = Run(SPREAD).step(1)
        run.optimizer.param_groups[1]["lr"] = 0.125
        checkpoint.save(run.objects(), tmp_path)
        assert [group["lr"] for group in checkpoint.read(tmp_path)["optimizer"]["param_groups"]] == [0.02, 0.125]
        run.optimizer.param_groups[1]["lr"] = 0.5
        checkpoint.load(tmp_path, run.objects())
        assert [group["lr"] for group in run.optimizer.param_groups] == [0.02, 0.125]
        assert_equal(run.optimizer.state_dict(), checkpoint.read(tmp_path)["optimizer"])


def test_a_part_of_a_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    """For example the model alone, for evaluation. The plain values are always loaded."""
    save_on(3, SPREAD, tmp_path)
    expected = uninterrupted(BEFORE)
    with InProcessCluster(2) as workers, workers[0].as_current():
        model = Net(("worker1", None, None, "worker1"), 100)
        values = checkpoint.load(tmp_path, {"model": model})
        assert_equal(dict(model.state_dict()), expected["model"])
    assert_equal(values, {"epoch": BEFORE, "generator": expected["generator"]})


def test_saving_leaves_the_objects_as_they_are(tmp_path: Path) -> None:
    with InProcessCluster(3) as workers, workers[0].as_current():
        run = Run(SPREAD).step(BEFORE)
        checkpoint.save(run.objects(), tmp_path)
        assert_equal(run.state(), uninterrupted(BEFORE))
        assert_equal(run.step(AFTER).state(), uninterrupted(BEFORE + AFTER))


def test_nothing_stays_on_the_workers(tmp_path: Path) -> None:
    with InProcessCluster(3) as workers, workers[0].as_current():
        run = Run(SPREAD).step(1)

        def held() -> list[int]:
            gc.collect()
            return [count for worker in workers for count in worker.references.counts().values()]

        before = held()
        for _ in range(2):
            checkpoint.save(run.objects(), tmp_path)
            checkpoint.load(tmp_path, run.objects())
        deadline = time.monotonic() + WITHIN
        # References are released by messages that nobody waits for; some may have been in flight before, too.
        while any(now > then for now, then in zip(held(), before, strict=True)):
            assert time.monotonic() < deadline, f"{held()} is more than {before}"
            threading.Event().wait(0.002)
