"""Workers that do not see the caller's files: the tensors are sent.

The path of the checkpoint leads through ``/proc/self/cwd``, so it is another directory for each process, as it would be
on machines that share no file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_runs import SPREAD, Run, assert_equal, uninterrupted

from backhaul import checkpoint
from backhaul.errors import BackhaulError, PartialError
from backhaul.nn import RemoteModule
from crew import Crew

PATH = "/proc/self/cwd/checkpoint"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as workers:
        yield workers


@pytest.fixture
def apart(crew: Crew, tmp_path: Path) -> Crew:
    """Three processes, each in its own directory."""
    for rank, hand in enumerate(crew):
        (tmp_path / str(rank)).mkdir()
        hand.run(os.chdir, tmp_path / str(rank))
    return crew


def train_and_save(steps: int, gather: bool) -> None:
    checkpoint.save(Run(SPREAD).step(steps).objects(), PATH, gather=gather)


def go_on(placement: Any, steps: int) -> dict[str, Any]:
    run = Run(placement, seed=100)
    return run.take(checkpoint.load(PATH, run.objects())).step(steps).state()


def load_after_trouble(placement: Any) -> tuple[str, bool]:
    """The error of a load, and whether it changed nothing."""
    run = Run(placement, seed=100)
    before = run.state()
    with pytest.raises(BackhaulError) as caught:
        checkpoint.load(PATH, run.objects())
    assert_equal(run.state(), before)
    return str(caught.value), isinstance(caught.value, PartialError)


def test_state_is_gathered_and_sent_back(apart: Crew, tmp_path: Path) -> None:
    apart[0].run(train_and_save, 2, True)
    (data,) = (tmp_path / "0" / "checkpoint").glob("data-*")
    assert {file.name for file in data.iterdir()} == {"common.pt", "worker0.pt", "worker1.pt", "worker2.pt"}
    assert not os.listdir(tmp_path / "1")
    assert not os.listdir(tmp_path / "2")
    expected = apart[0].run(uninterrupted, 4)  # with the same number of threads
    assert_equal(apart[0].run(go_on, SPREAD, 2), expected)
    assert_equal(apart[0].run(go_on, ("worker2", None, "worker2", "worker0"), 2), expected)


def test_each_worker_reads_the_files_that_it_sees(apart: Crew, tmp_path: Path) -> None:
    """One worker sees the files, and one sees only some of them."""
    apart[0].run(train_and_save, 2, True)
    shutil.copytree(tmp_path / "0" / "checkpoint", tmp_path / "1" / "checkpoint")
    shutil.copytree(tmp_path / "0" / "checkpoint", tmp_path / "2" / "checkpoint")
    for file in ("worker0.pt", "worker2.pt"):
        (next((tmp_path / "2" / "checkpoint").glob("data-*")) / file).unlink()
    expected = apart[0].run(uninterrupted, 4)  # with the same number of threads
    assert_equal(apart[0].run(go_on, ("worker2", "worker1", "worker2", "worker2"), 2), expected)
    # A worker that sees the files needs no other worker.
    (data,) = (tmp_path / "0" / "checkpoint").glob("data-*")
    for file in ("worker1.pt", "worker2.pt"):
        (data / file).unlink()
    assert_equal(apart[0].run(go_on, ("worker1",) * 4, 2)["model"]["blocks.1.0.weight"].shape, torch.Size([5, 6]))


def test_without_gather_a_worker_says_that_it_does_not_see_the_directory(apart: Crew, tmp_path: Path) -> None:
    with pytest.raises(PartialError) as caught:
        apart[0].run(train_and_save, 1, False)
    assert sorted(caught.value.errors) == ["worker1", "worker2"]
    assert "worker 'worker1' does not see the directory '/proc/self/cwd/checkpoint/data-" in str(caught.value)
    assert "save to a file system that all workers share, or with gather=True" in str(caught.value)
    assert os.listdir(tmp_path / "0" / "checkpoint") == ["lock"]
    assert not os.listdir(tmp_path / "1")


def test_a_file_that_neither_worker_nor_caller_sees(apart: Crew, tmp_path: Path) -> None:
    apart[0].run(train_and_save, 1, True)
    (data,) = (tmp_path / "0" / "checkpoint").glob("data-*")
    (data / "worker2.pt").unlink()
    says, _ = apart[0].run(load_after_trouble, SPREAD)
    assert "worker 'worker2' needs the file 'worker2.pt' of the checkpoint but does not see it: FileNotFound" in says
    assert (
        "This worker, 'worker0', does not see it either: [Errno 2] No such file or directory: '/proc/self/cwd/" in says
    )


def test_a_file_that_is_damaged_where_it_is_seen(apart: Crew, tmp_path: Path) -> None:
    """The worker's own file is not replaced by the caller's, because the two should be the same."""
    apart[0].run(train_and_save, 1, True)
    shutil.copytree(tmp_path / "0" / "checkpoint", tmp_path / "2" / "checkpoint")
    (data,) = (tmp_path / "2" / "checkpoint").glob("data-*")
    size = (data / "worker2.pt").stat().st_size
    (data / "worker2.pt").write_bytes(bytes(size))
    says, partial = apart[0].run(load_after_trouble, SPREAD)
    assert partial
    assert "worker 'worker2' failed" in says
    assert "worker2.pt' is damaged" in says


def save_large(path: str) -> list[str]:
    """Each worker's tensors have a size that is noticeable."""
    model = nn.ModuleList([RemoteModule(f"worker{rank}", nn.Linear, (500, 500)) for rank in (1, 2)])
    checkpoint.save({"model": model}, path, gather=True)
    into = nn.ModuleList([RemoteModule(f"worker{rank}", nn.Linear, (500, 500)) for rank in (2, 1)])
    checkpoint.load(path, {"model": into})
    assert_equal(dict(into.state_dict()), dict(model.state_dict()))
    return list(into.state_dict())


def test_tensors_of_some_size(apart: Crew) -> None:
    assert apart[0].run(save_large, PATH) == ["0.weight", "0.bias", "1.weight", "1.bias"]
