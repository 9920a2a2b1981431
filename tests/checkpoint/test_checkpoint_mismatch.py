"""Checkpoints that do not fit, or are damaged: a clear error, and nothing changes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_runs import ALONE, SPREAD, Run, assert_equal, block

from backhaul import checkpoint
from backhaul.errors import BackhaulError, MisuseError, PartialError
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer
from backhaul.testing import InProcessCluster


@pytest.fixture
def three() -> Iterator[InProcessCluster]:
    with InProcessCluster(3) as workers, workers[0].as_current():
        yield workers


@pytest.fixture
def saved(three: InProcessCluster, tmp_path: Path) -> Path:
    """A checkpoint of a run after two steps."""
    checkpoint.save(Run(SPREAD).step(2).objects(), tmp_path)
    return tmp_path


@pytest.fixture
def run(saved: Path) -> Run:
    """Another run, in the middle of training."""
    return Run(("worker2", None, "worker1", "worker0"), seed=50).step(1)


def assert_nothing_changes(run: Run, path: Path, objects: dict[str, Any], error: type[Exception], *says: str) -> None:
    before = run.state()
    with pytest.raises(error) as caught:
        checkpoint.load(path, objects)
    assert_equal(run.state(), before)
    for text in says:
        assert text in str(caught.value)


def data(path: Path) -> Path:
    (found,) = path.glob("data-*")
    return found


class More(nn.Module):
    """The same layers, and one more."""

    def __init__(self, model: nn.Module, worker: str) -> None:
        super().__init__()
        self.scale, self.seen, self.blocks = model.scale, model.seen, model.blocks
        self.more = RemoteModule(worker, nn.Linear, (2, 2))


def test_a_missing_key(saved: Path, run: Run) -> None:
    objects = {**run.objects(), "model": More(run.model, "worker1")}
    says = (
        "does not fit the objects, and nothing was loaded",
        "'model': the checkpoint has no 'more.weight', 'more.bias'",
    )
    assert_nothing_changes(run, saved, objects, MisuseError, *says)


def test_an_unexpected_key(saved: Path, run: Run) -> None:
    run.model.blocks[0] = RemoteModule("worker2", nn.Linear, (4, 6))
    objects = {"model": run.model}
    says = (
        "'model': the checkpoint has no 'blocks.0.weight', 'blocks.0.bias'",
        "'model': the module has no 'blocks.0.0.weight', 'blocks.0.0.bias', 'blocks.0.1.weight'",
    )
    assert_nothing_changes(run, saved, objects, MisuseError, *says)


def test_another_shape(saved: Path, run: Run) -> None:
    run.model.blocks[2] = RemoteModule("worker1", block, (5, 7, 0))
    says = "'model': 'blocks.2.0.weight' has shape [6, 5] in the checkpoint and [7, 5] in the module"
    assert_nothing_changes(run, saved, {"model": run.model, "optimizer": run.optimizer}, MisuseError, says)


def test_another_number_of_parameters(saved: Path, run: Run) -> None:
    parameters = parameter_rrefs(run.model)
    fewer = DistributedOptimizer(torch.optim.Adam, parameters[:-1])
    says = "'optimizer': the checkpoint has 17 parameters and the optimizer 16"
    assert_nothing_changes(run, saved, {**run.objects(), "optimizer": fewer}, MisuseError, says)


def test_other_groups(saved: Path, run: Run) -> None:
    one = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(run.model))
    says = "'optimizer': the parameter groups of the checkpoint have 3 + 14 parameters, those of the optimizer 17"
    assert_nothing_changes(run, saved, {**run.objects(), "optimizer": one}, MisuseError, says)


@pytest.mark.parametrize("distributed", [True, False])
def test_parameters_in_another_order(distributed: bool, saved: Path, run: Run) -> None:
    found: list[Any] = parameter_rrefs(run.model)
    if not distributed:
        found = list(Run(ALONE, distributed=False).model.parameters())
    groups: list[dict[str, Any]] = [{"params": found[:3]}, {"params": found[3:][::-1]}]
    other: Any = DistributedOptimizer(torch.optim.Adam, groups) if distributed else torch.optim.Adam(groups)
    says = "'optimizer': parameter 3 has shape [6] in the checkpoint and [3] in the optimizer"
    assert_nothing_changes(run, saved, {**run.objects(), "optimizer": other}, MisuseError, says)


def test_an_object_that_the_checkpoint_does_not_have(saved: Path, run: Run) -> None:
    objects = {**run.objects(), "teacher": RemoteModule("worker1", nn.Linear, (1, 1)), "best": 0.5}
    says = (
        "there is no 'teacher' in the checkpoint; it has 'model', 'optimizer', 'scheduler', 'epoch', 'generator'",
        "there is no 'best' in the checkpoint",
    )
    assert_nothing_changes(run, saved, objects, MisuseError, *says)


def test_another_kind_of_object(saved: Path, run: Run) -> None:
    objects = {"model": run.optimizer, "optimizer": run.scheduler, "scheduler": 3, "epoch": run.model}
    says = (
        "'model' is a model in the checkpoint but an optimizer here",
        "'optimizer' is an optimizer in the checkpoint but another object with a state here",
        "'scheduler' is another object with a state in the checkpoint but a plain value here",
        "'epoch' is a plain value in the checkpoint but a model here",
    )
    assert_nothing_changes(run, saved, objects, MisuseError, *says)


def test_no_checkpoint(saved: Path, run: Run) -> None:
    for path in (saved / "nowhere", data(saved), saved / "lock"):
        says = f"there is no checkpoint here: no index.json in this directory: {str(path)!r}"
        assert_nothing_changes(run, path, run.objects(), FileNotFoundError, says)
        with pytest.raises(FileNotFoundError, match="there is no checkpoint here"):
            checkpoint.read(path)


@pytest.mark.parametrize("name", ["worker0.pt", "worker1.pt", "worker2.pt", "common.pt"])
def test_a_missing_file(name: str, saved: Path, run: Run) -> None:
    """No worker sees the file: neither those that need it, nor the caller."""
    (data(saved) / name).unlink()
    assert_nothing_changes(run, saved, run.objects(), BackhaulError, name, "No such file or directory")
    with pytest.raises(BackhaulError, match=rf"is incomplete(.|\n)*{name}"):
        checkpoint.read(saved)


@pytest.mark.parametrize("name", ["worker0.pt", "worker1.pt", "worker2.pt", "common.pt"])
@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_file(name: str, length: int, saved: Path, run: Run) -> None:
    file = data(saved) / name
    size = file.stat().st_size
    os.truncate(file, length % size)
    says = f"the file should have {size} bytes but has {length % size}"
    assert_nothing_changes(run, saved, run.objects(), BackhaulError, name, says)
    with pytest.raises(BackhaulError, match=says):
        checkpoint.read(saved)


def test_the_workers_that_need_a_missing_file_are_named(saved: Path, run: Run) -> None:
    (data(saved) / "worker2.pt").unlink()  # block 1, which is local in the other run
    needs = "worker 'worker0' needs the file 'worker2.pt' of the checkpoint but does not see it: FileNotFoundError"
    assert_nothing_changes(run, saved, {"model": run.model}, BackhaulError, needs)


def test_a_file_that_a_remote_worker_needs_and_no_worker_sees(saved: Path, three: InProcessCluster) -> None:
    (data(saved) / "worker2.pt").unlink()
    run = Run(SPREAD, seed=50)
    says = ("worker 'worker2' needs the file 'worker2.pt'", "This worker, 'worker0', does not see it either: [Errno 2]")
    assert_nothing_changes(run, saved, {"model": run.model}, BackhaulError, *says)


@pytest.mark.parametrize("name", ["worker1.pt", "common.pt"])
def test_a_file_with_other_bytes(name: str, saved: Path, run: Run) -> None:
    file = data(saved) / name
    file.write_bytes(b"\x5a" * file.stat().st_size)
    assert_nothing_changes(run, saved, run.objects(), BackhaulError, str(file), "is damaged")
    with pytest.raises(BackhaulError, match="is damaged"):
        checkpoint.read(saved)


def resized(path: Path, name: str) -> None:
    """Update the index to a file's actual size."""
    index = json.loads((path / "index.json").read_text())
    index["files"][name] = (data(path) / name).stat().st_size
    (path / "index.json").write_text(json.dumps(index))


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


def replaced(path: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a file, and update its size in the index."""
    content = torch.load(data(path) / name, weights_only=True)
    torch.save(change(content) or content, data(path) / name)
    resized(path, name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("model", "blocks.0.0.bias"), "it has no 'blocks.0.0.bias' of 'model'"),
        (
            lambda content: content["model"].update({"blocks.0.0.bias": torch.zeros(2)}),
            "'blocks.0.0.bias' of 'model' is float32 of shape [2] there but float32 of shape [6] in the index",
        ),
        (
            lambda content: content["model"].update({"blocks.0.0.bias": 7}),
            "'blocks.0.0.bias' of 'model' is no tensor there but float32 of shape [6] in the index",
        ),
        (
            lambda content: content["model"].update({"blocks.0.0.bias": torch.zeros(6, dtype=torch.int64)}),
            "'blocks.0.0.bias' of 'model' is int64 of shape [6] there",
        ),
        (without("optimizer", 1), "it has no 1 of 'optimizer'"),
        (without("optimizer"), "it has no 1 of 'optimizer'"),
        (lambda content: {**content, "model": 3}, "it has no 'blocks.0.0.weight' of 'model'"),
        (lambda content: [1, 2], "it holds no dict"),
    ],
)
def test_a_file_that_is_not_what_the_index_says(change: Any, says: str, saved: Path, run: Run) -> None:
    replaced(saved, "worker1.pt", change)
    assert_nothing_changes(run, saved, run.objects(), PartialError, "nothing has been changed", "worker1.pt'", says)
    with pytest.raises(BackhaulError, match=re.escape(says)):
        checkpoint.read(saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("values"), "some of its values are missing"),
        (without("states", "scheduler"), "some of its states are missing"),
        (lambda content: {**content, "metadata": 3}, "some of its metadata are missing"),
        (without("optimizers", "optimizer", "groups"), "KeyError('groups')"),
        (lambda content: content["optimizers"].update(optimizer=3), "TypeError"),
        (without("optimizers", "optimizer", "groups", 1), "the groups of 'optimizer' differ from the index"),
    ],
)
def test_a_common_file_that_is_not_what_the_index_says(change: Any, says: str, saved: Path, run: Run) -> None:
    replaced(saved, "common.pt", change)
    assert_nothing_changes(run, saved, run.objects(), BackhaulError, "'common.pt' is damaged", says)
    with pytest.raises(BackhaulError, match=re.escape(says)):
        checkpoint.read(saved)


class Trap:
    """A pickle that runs code when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_would_run_something(saved: Path, run: Run, tmp_path: Path) -> None:
    for name in ("worker1.pt", "common.pt"):
        torch.save({"model": Trap(tmp_path / "sprung")}, data(saved) / name)
        resized(saved, name)
        assert_nothing_changes(run, saved, run.objects(), BackhaulError, name, "is damaged")
        with pytest.raises(BackhaulError, match="is damaged"):
            checkpoint.read(saved)
        assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", 2, "it has version 2, but this Backhaul reads version 1"),
        ("format", "something", "it is not the index of a checkpoint"),
        ("data", "../elsewhere", "'../elsewhere' is not the name of a data directory"),
        ("files", {"common.pt": 1, "/etc/passwd": 1}, "'/etc/passwd' is not the name of a file in the data directory"),
        ("objects", 3, "it is damaged"),
    ],
)
def test_an_index_that_cannot_be_used(key: str, value: Any, says: str, saved: Path, run: Run) -> None:
    index = json.loads((saved / "index.json").read_text())
    (saved / "index.json").write_text(json.dumps({**index, key: value}))
    assert_nothing_changes(run, saved, run.objects(), BackhaulError, str(saved / "index.json"), "is unusable", says)
    with pytest.raises(BackhaulError, match=re.escape(says)):
        checkpoint.read(saved)
    # Nor is it overwritten: it may belong to someone else.
    content = (saved / "index.json").read_bytes()
    with pytest.raises(MisuseError, match=r"index.json' is unusable: .* To save here, remove it first"):
        checkpoint.save(run.objects(), saved)
    assert (saved / "index.json").read_bytes() == content
    assert data(saved).exists()


def test_links_are_not_followed(saved: Path, run: Run) -> None:
    file = data(saved) / "worker1.pt"
    file.rename(saved / "elsewhere.pt")
    file.symlink_to(saved / "elsewhere.pt")
    assert_nothing_changes(
        run, saved, run.objects(), BackhaulError, "'worker1.pt'", "Too many levels of symbolic links"
    )


def test_a_directory_in_place_of_a_file_is_refused(saved: Path, run: Run) -> None:
    file = data(saved) / "worker1.pt"
    file.unlink()
    file.mkdir()
    assert_nothing_changes(run, saved, run.objects(), BackhaulError, "'worker1.pt'", "this is not a plain file")


def refuse(*_: Any) -> None:
    raise LookupError("not this one")


def hooked(inputs: int, outputs: int) -> nn.Module:
    module = nn.Linear(inputs, outputs)
    module.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
    return module


def test_a_module_that_fails_to_load(three: InProcessCluster, tmp_path: Path) -> None:
    """No check before the load can find this failure. The error says which workers have loaded and which have not."""
    saved = nn.ModuleList([RemoteModule("worker1", nn.Linear, (2, 2)), RemoteModule("worker2", nn.Linear, (2, 2))])
    checkpoint.save({"model": saved}, tmp_path)
    into = nn.ModuleList([RemoteModule("worker1", nn.Linear, (2, 2)), RemoteModule("worker2", hooked, (2, 2))])
    with pytest.raises(PartialError, match="loading the checkpoint") as caught:
        checkpoint.load(tmp_path, {"model": into})
    assert caught.value.done == ("worker0", "worker1")
    assert isinstance(caught.value.errors["worker2"], LookupError)
