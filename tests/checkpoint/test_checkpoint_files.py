"""The files of a checkpoint: the order of their creation and removal, concurrent saves, full disks."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backhaul import checkpoint
from backhaul.checkpoint.files import sync
from backhaul.checkpoint.portions import prepare
from backhaul.errors import BackhaulError, MisuseError, PartialError
from backhaul.nn import RemoteModule
from backhaul.testing import InProcessCluster
from crew import Crew

LEFT_DATA = "data-" + "ab" * 16
LEFT_INDEX = "index.json." + "cd" * 16 + ".tmp"


class Moment:
    """An object that runs a function when it is saved."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.act()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def names(path: Path) -> set[str]:
    """The contents of a checkpoint, with `data` for its data directory."""
    data = json.loads((path / "index.json").read_text())["data"]
    return {"data" if name == data else name for name in os.listdir(path)}


WHOLE = {"index.json", "lock", "data"}


def test_all_files_are_on_the_disk_before_the_swap(trio: InProcessCluster, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "new" / "checkpoint"
    events: list[tuple[str, str]] = []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))

    def note_replace(source: Any, target: Any) -> None:
        events.append(("swap", os.path.relpath(target, tmp_path)))
        replace(source, target)

    def note_mkdir(made: Any, *args: Any) -> None:
        mkdir(made, *args)
        events.append(("make", os.path.relpath(made, tmp_path)))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "mkdir", note_mkdir)
    with trio[0].as_current():
        model = nn.ModuleList([RemoteModule(f"worker{rank}", nn.Linear, (2, 2)) for rank in range(3)])
        checkpoint.save({"model": model, "epoch": 1}, path)
    monkeypatch.undo()

    data = os.path.relpath(next(path.glob("data-*")), tmp_path)
    here = "new/checkpoint"
    swap = events.index(("swap", f"{here}/index.json"))
    before, after = events[:swap], events[swap + 1 :]
    made = [name for kind, name in before if kind == "make"]
    assert made == ["new", here, data]
    assert before.index(("sync", ".")) > before.index(("make", "new"))
    assert before.index(("sync", "new")) > before.index(("make", here))
    for file in ("worker0.pt", "worker1.pt", "worker2.pt", "common.pt"):
        assert before.count(("sync", f"{data}/{file}")) == 1
    last = [name for kind, name in before if kind == "sync"][-3:]
    assert last[0] == data  # the names of the files
    assert last[1].startswith(f"{here}/index.json.")  # the next index
    assert last[2] == here  # its name, and that of the data directory
    assert after[0] == ("sync", here)


def test_the_old_checkpoint_stays_until_the_swap(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        model = RemoteModule("worker1", nn.Linear, (2, 2))
        checkpoint.save({"model": model, "epoch": 1}, tmp_path)

        def look() -> int:
            epoch: int = checkpoint.read(tmp_path)["epoch"]
            assert checkpoint.load(tmp_path, {"model": model})["epoch"] == epoch
            assert len(list(tmp_path.glob("data-*"))) == 2  # the next one is being written
            return epoch

        checkpoint.save({"model": model, "epoch": 2, "look": Moment(look)}, tmp_path)
        assert checkpoint.read(tmp_path)["look"] == {"found": 1}
        assert checkpoint.read(tmp_path)["epoch"] == 2
        assert names(tmp_path) == WHOLE


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(trio: InProcessCluster, tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError("not today")

    with trio[0].as_current():
        model = RemoteModule("worker1", nn.Linear, (2, 2))
        with pytest.raises(LookupError, match="not today"):
            checkpoint.save({"model": model, "fail": Moment(fail)}, tmp_path)
        assert os.listdir(tmp_path) == ["lock"]
        checkpoint.save({"model": model, "epoch": 1}, tmp_path)
        with pytest.raises(LookupError, match="not today"):
            checkpoint.save({"model": model, "fail": Moment(fail)}, tmp_path)
        assert checkpoint.read(tmp_path)["epoch"] == 1
        assert names(tmp_path) == WHOLE


def test_left_overs_go_with_the_next_save(tmp_path: Path) -> None:
    checkpoint.save({"epoch": 1}, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.pt").write_text("kept")
    (tmp_path / LEFT_DATA / "deep").mkdir(parents=True)
    (tmp_path / LEFT_DATA / "worker0.pt").write_text("half")
    (tmp_path / ("data-" + "ef" * 16)).symlink_to(elsewhere)
    (tmp_path / LEFT_INDEX).write_text('{"format": "backhaul')
    not_ours = {"notes.txt", "data-mine", "index.json.bak", "elsewhere"}
    for name in not_ours - {"elsewhere"}:
        (tmp_path / name).write_text("mine")
    checkpoint.save({"epoch": 2}, tmp_path)
    assert names(tmp_path) == WHOLE | not_ours
    assert (elsewhere / "kept.pt").read_text() == "kept"
    assert checkpoint.read(tmp_path) == {"epoch": 2}


def test_left_overs_go_before_their_space_is_needed(tmp_path: Path) -> None:
    (tmp_path / LEFT_DATA).mkdir()
    checkpoint.save({"look": Moment(lambda: (tmp_path / LEFT_DATA).exists())}, tmp_path)
    assert checkpoint.read(tmp_path) == {"look": {"found": False}}


def test_a_second_save_at_the_same_time_is_refused(tmp_path: Path) -> None:
    """From another thread, or from the same one; the first save is not disturbed."""
    errors = []

    def second() -> None:
        try:
            checkpoint.save({"epoch": 99}, tmp_path)
        except MisuseError as error:
            errors.append(str(error))

    def first() -> None:
        second()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    checkpoint.save({"epoch": 1, "first": Moment(first)}, tmp_path)
    assert checkpoint.read(tmp_path) == {"epoch": 1, "first": {"found": None}}
    says = (
        f"another process is saving to {str(tmp_path)!r} at this moment; let one worker save at a time, "
        "or save elsewhere"
    )
    assert errors == [says, says]
    second()  # the lock is free again
    assert checkpoint.read(tmp_path) == {"epoch": 99}


def save_epoch(path: Path, epoch: int) -> None:
    checkpoint.save({"epoch": epoch}, path)


def test_a_second_save_by_another_process_is_refused(tmp_path: Path) -> None:
    with Crew(1, group=False) as crew:

        def first() -> None:
            with pytest.raises(MisuseError, match="another process is saving to"):
                crew[0].run(save_epoch, tmp_path, 99)

        checkpoint.save({"epoch": 1, "first": Moment(first)}, tmp_path)
        assert checkpoint.read(tmp_path)["epoch"] == 1
        crew[0].run(save_epoch, tmp_path, 99)
    assert checkpoint.read(tmp_path)["epoch"] == 99


def test_a_lock_does_not_stay_with_a_forked_child(tmp_path: Path) -> None:
    """For example a data loader's process that started during the save and lives on."""
    started: list[subprocess.Popen[bytes]] = []

    def fork() -> None:
        (lock,) = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd) == str(tmp_path / "lock")]
        started.append(subprocess.Popen(["sleep", "60"], pass_fds=[lock]))

    checkpoint.save({"epoch": 1, "fork": Moment(fork)}, tmp_path)
    try:
        checkpoint.save({"epoch": 2}, tmp_path)
    finally:
        started[0].kill()
        started[0].wait()


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the descriptor that listed the directory
        return ""


def test_reading_while_somebody_saves_over_and_over(trio: InProcessCluster, tmp_path: Path) -> None:
    """A read always returns one whole checkpoint."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def save(epoch: int) -> None:
        values = torch.full((1000,), float(epoch))
        model = nn.Linear(1000, 1, bias=False)
        model.load_state_dict({"weight": values[None]})
        checkpoint.save({"model": model, "epoch": epoch, "values": values}, tmp_path)

    def keep_saving() -> None:
        epoch = 0
        while not stop.is_set():
            epoch += 1
            try:
                save(epoch)
            except BaseException as error:
                errors.append(error)
                return

    save(0)
    thread = threading.Thread(target=keep_saving)
    thread.start()
    seen = set()
    try:
        with trio[0].as_current():
            model = RemoteModule("worker1", nn.Linear, (1000, 1, False))
            for _ in range(20):
                found = checkpoint.read(tmp_path)
                assert bool((found["values"] == found["epoch"]).all())
                assert bool((found["model"]["weight"] == found["epoch"]).all())
                values = checkpoint.load(tmp_path, {"model": model})
                assert bool((values["values"] == values["epoch"]).all())
                assert bool((model.state_dict()["weight"] == values["epoch"]).all())
                seen |= {found["epoch"], values["epoch"]}
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert len(seen) > 2


@pytest.mark.parametrize("times", [1, 3, 1000])
def test_files_that_are_replaced_when_they_should_be_read(times: int, trio: InProcessCluster, tmp_path: Path) -> None:
    """The files go just before the worker reads them. Then the new ones are read, unless that never ends."""
    with trio[0].as_current():
        model = RemoteModule("worker1", nn.Linear, (2, 2))
        checkpoint.save({"model": model, "epoch": 0}, tmp_path)
        epochs: list[int] = []

        def replace(_: Any, function: Any, *__: Any) -> None:
            if function is prepare and len(epochs) < times:
                epochs.append(len(epochs) + 1)
                checkpoint.save({"model": nn.Linear(2, 2), "epoch": epochs[-1]}, tmp_path)

        trio[0].before_call.append(replace)
        if times < 10:
            assert checkpoint.load(tmp_path, {"model": model})["epoch"] == times
            assert torch.equal(model.state_dict()["weight"], checkpoint.read(tmp_path)["model"]["weight"])
        else:
            with pytest.raises(BackhaulError, match="is replaced faster than it can be read"):
                checkpoint.load(tmp_path, {"model": model})


def test_paths_may_be_strings_or_path_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save({"epoch": 1}, "a/b")
    checkpoint.save({"epoch": 2}, Path("a"))
    assert checkpoint.read(tmp_path / "a" / "b") == {"epoch": 1}
    assert checkpoint.read("a") == checkpoint.load("a/", {}) == {"epoch": 2}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MisuseError, match=r"'.*/file' is a file; a checkpoint is a directory"):
        checkpoint.save({"epoch": 1}, "file")


def test_a_file_system_that_does_not_sync_directories() -> None:
    descriptor = os.open("/proc", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync("/proc")


def test_a_copy_is_a_checkpoint_too(tmp_path: Path) -> None:
    """The copy may be read-only."""
    checkpoint.save({"epoch": 1}, tmp_path / "one")
    subprocess.run(["cp", "-r", tmp_path / "one", tmp_path / "two"], check=True)
    (tmp_path / "two" / "lock").unlink()
    subprocess.run(["chmod", "-R", "a-w", tmp_path / "two"], check=True)
    assert checkpoint.read(tmp_path / "two") == {"epoch": 1}


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def lift_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


MODEL: list[nn.Module] = []


def make_model() -> None:
    MODEL[:] = [nn.ModuleList([nn.Linear(300, 300), RemoteModule("worker1", nn.Linear, (300, 300))])]


def save_model(path: Path, epoch: int, gather: bool = False) -> None:
    checkpoint.save({"model": MODEL[0], "epoch": epoch}, path, gather=gather)


@pytest.mark.parametrize("full", [0, 1], ids=["on the caller", "on a worker"])
def test_a_file_that_cannot_be_written(full: int, tmp_path: Path) -> None:
    with Crew(2) as crew:
        crew[0].run(make_model)
        crew[0].run(save_model, tmp_path, 1)
        crew[full].run(limit_files)
        with pytest.raises(PartialError, match=r"saving the checkpoint .* \(the previous one stays\)") as caught:
            crew[0].run(save_model, tmp_path, 2)
        (error,) = caught.value.errors.items()
        assert error[0] == f"worker{full}"
        assert isinstance(error[1], OSError)
        assert error[1].errno == errno.EFBIG
        assert str(error[1].filename).endswith(f"/worker{full}.pt")
        assert checkpoint.read(tmp_path)["epoch"] == 1
        assert names(tmp_path) == WHOLE
        if full == 0:
            with pytest.raises(OSError, match=r"File too large: '.*/worker0.pt'"):
                crew[0].run(save_model, tmp_path, 3, True)
            crew[full].run(lift_limit)
        crew[0].run(save_model, tmp_path, 4, True)  # gathered, so the worker's disk does not matter
    assert checkpoint.read(tmp_path)["epoch"] == 4


@contextmanager
def mounted(directory: Path, size: str) -> Iterator[Path]:
    """A separate small disk."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a disk")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_left_over_that_cannot_be_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save({"epoch": 1}, tmp_path)
    with mounted(tmp_path / LEFT_DATA, "1m"):
        checkpoint.save({"epoch": 2}, tmp_path)
        assert checkpoint.read(tmp_path) == {"epoch": 2}
        assert "cannot remove an unused file in the checkpoint" in caplog.text
        assert "Device or resource busy" in caplog.text
    checkpoint.save({"epoch": 3}, tmp_path)
    assert names(tmp_path) == WHOLE


def test_a_full_disk(tmp_path: Path) -> None:
    """The disk may fill up at any point."""
    with mounted(tmp_path / "disk", "2m") as disk:
        path = disk / "checkpoint"
        model = nn.Linear(150, 300)
        checkpoint.save({"model": model, "epoch": -1}, path)
        ballast = disk / "ballast"
        failures = 0
        for free in range(0, 400_000, 12_000):
            ballast.write_bytes(b"")
            statistics = os.statvfs(disk)
            ballast.write_bytes(bytes(max(0, statistics.f_bavail * statistics.f_frsize - free)))
            failed = False
            try:
                checkpoint.save({"model": model, "epoch": free}, path)
            except OSError as error:
                failed = error.errno == errno.ENOSPC
                failures += 1
            found = checkpoint.read(path)["epoch"]
            assert found < free if failed else found == free
            assert names(path) == WHOLE
        assert 5 < failures < 30
