"""Resume: training continues after workers are lost, and exactly so if everything is restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul import checkpoint, rpc
from backhaul.errors import MisuseError, OptionError, WorkerLostError
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Call

STEPS = 8
ADAM = {"lr": 0.05}


def layer(inputs: int, outputs: int) -> nn.Module:
    """Uses random numbers of its own process in each step."""
    torch.manual_seed(inputs)
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(0.2))


def build() -> dict[str, Any]:
    model = nn.Sequential(
        RemoteModule("worker1", layer, (4, 6)), nn.Linear(6, 5), RemoteModule("worker2", layer, (5, 1))
    )
    torch.manual_seed(0)
    nn.init.normal_(model[1].weight)
    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), **ADAM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": 0}


def train(objects: dict[str, Any], number: int) -> float:
    x = torch.randn(8, 4)
    with dist_autograd.context() as context:
        loss = (objects["model"](x) - x.sum(1, keepdim=True)).square().mean()
        dist_autograd.backward(context, [loss])
        objects["optimizer"].step(context)
    objects["scheduler"].step()
    objects["seen"] += len(x)
    return loss.item()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run in which nothing fails."""
    with InProcessCluster(3) as three, three[0].as_current():
        torch.manual_seed(7)
        resume = checkpoint.Resume(tmp_path_factory.mktemp("run"), build, every=3)
        losses = resume.run(train, STEPS)
        assert resume.losses == []
    assert len(losses) == STEPS
    return losses


class Killing:
    """A training step in which workers are lost, each once: before, during or after the step."""

    def __init__(self, three: InProcessCluster, *when: tuple[int, int, str]) -> None:
        self._three = three
        self._when = list(when)
        self.steps: list[int] = []
        self.killed = threading.Event()

    def __call__(self, objects: dict[str, Any], number: int) -> float:
        self.steps.append(number)
        self._kill(number, "before")
        if any(each[0] == number and each[2] == "within" for each in self._when):
            objects["model"](torch.randn(2, 4))  # random numbers that do not count
            self._kill(number, "within")
        loss = train(objects, number)
        self._kill(number, "after")
        return loss

    def _kill(self, number: int, where: str) -> None:
        for each in [each for each in self._when if each[0] == number and each[2] == where]:
            self._when.remove(each)
            self._three[each[1]].agent.close(0.0)  # without a word, like a killed worker
            self.killed.set()


def replace(three: InProcessCluster) -> Callable[[str], Any]:
    return lambda name: three.restart(int(name.removeprefix("worker")))


KILLS = {
    "one": [(4, 2, "within")],
    "in the first step": [(0, 1, "before")],
    "in the last step": [(STEPS - 1, 2, "before")],
    "while it saves": [(5, 1, "after")],
    "two at once": [(4, 1, "before"), (4, 2, "before")],
    "one after the other": [(1, 1, "within"), (3, 2, "before"), (6, 1, "after")],
}


@pytest.mark.parametrize("name", KILLS)
def test_the_losses_are_those_of_an_undisturbed_run(undisturbed: list[float], name: str, tmp_path: Path) -> None:
    with InProcessCluster(3) as three, three[0].as_current():
        torch.manual_seed(7)
        resume = checkpoint.Resume(tmp_path, build, every=3, replace=replace(three))
        step = Killing(three, *KILLS[name])
        assert resume.run(step, STEPS) == undisturbed
        assert len(step.steps) >= STEPS
        assert resume.losses
        assert all(isinstance(error, rpc.BackhaulError) for error in resume.losses)
    assert checkpoint.read(tmp_path)["seen"] == 8 * STEPS


def test_a_restarted_driver_continues_where_it_ended(undisturbed: list[float], tmp_path: Path) -> None:
    with InProcessCluster(3) as three, three[0].as_current():
        torch.manual_seed(7)
        checkpoint.Resume(tmp_path, build, every=3).run(train, 4)
    with InProcessCluster(3) as three, three[0].as_current():
        torch.manual_seed(99)
        assert checkpoint.Resume(tmp_path, build, every=3).run(train, STEPS) == undisturbed
        assert checkpoint.Resume(tmp_path, build).run(train, 2) == undisturbed[:2]


def test_a_broken_connection_is_recovered_from_too(undisturbed: list[float], tmp_path: Path) -> None:
    faults = Faults()
    with InProcessCluster(3, faults=faults) as three, three[0].as_current():
        torch.manual_seed(7)
        before = three[2]

        def step(objects: dict[str, Any], number: int) -> float:
            if number == 4 and not resume.losses:
                faults.next("cut", Call)
            return train(objects, number)

        resume = checkpoint.Resume(tmp_path, build, every=3, replace=replace(three))
        assert resume.run(step, STEPS) == undisturbed
        assert len(resume.losses) == 1
        assert three[2] is before  # it was there the whole time


def test_the_replacement_is_waited_for(undisturbed: list[float], tmp_path: Path) -> None:
    with InProcessCluster(3) as three, ThreadPoolExecutor(1) as threads, three[0].as_current():
        torch.manual_seed(7)
        step = Killing(three, (4, 2, "within"))
        restarted = []

        def restart(rank: int) -> None:
            assert step.killed.wait(20)
            three.restart(rank)

        with rpc.on_lost(lambda info, cause: restarted.append(threads.submit(restart, info.id))):
            assert checkpoint.Resume(tmp_path, build, every=3).run(step, STEPS) == undisturbed
        assert [each.result(20) for each in restarted] == [None]


def test_a_worker_that_does_not_come_back(tmp_path: Path) -> None:
    with InProcessCluster(3) as three, three[0].as_current():
        resume = checkpoint.Resume(tmp_path, build, patience=0.3)
        with pytest.raises(WorkerLostError, match=r"worker 'worker2' did not come back within 0\.3 s") as refusal:
            resume.run(Killing(three, (1, 2, "before")), STEPS)
        assert refusal.value.__cause__ is resume.losses[0]


def test_a_worker_that_is_lost_again_and_again(tmp_path: Path) -> None:
    with InProcessCluster(3) as three, three[0].as_current():
        resume = checkpoint.Resume(tmp_path, build, every=3, replace=replace(three), most=2)

        def step(objects: dict[str, Any], number: int) -> float:
            if number == 4:
                three[2].agent.close(0.0)
            return train(objects, number)

        with pytest.raises(rpc.BackhaulError):
            resume.run(step, STEPS)
        assert len(resume.losses) == 2


def test_other_errors_are_raised(tmp_path: Path) -> None:
    def step(objects: dict[str, Any], number: int) -> float:
        rpc.rpc_sync("worker1", int, args=("x",))
        return 0.0

    with InProcessCluster(3) as three, three[0].as_current():
        resume = checkpoint.Resume(tmp_path, build)
        with pytest.raises(ValueError, match="invalid literal"):
            resume.run(step, 1)
        with pytest.raises(rpc.UnknownWorkerError):
            resume.run(lambda objects, number: rpc.rpc_sync("nobody", int), 1)
        assert resume.losses == []


def weights(objects: dict[str, Any]) -> list[torch.Tensor]:
    return [param.to_here().detach().clone() for param in parameter_rrefs(objects["model"])]


def test_only_lost_state_is_restored(tmp_path: Path) -> None:
    """worker2 has the values of the checkpoint; the others have those from when worker2 was lost."""
    with InProcessCluster(3) as three, three[0].as_current():
        found: dict[str, Any] = {}

        def step(objects: dict[str, Any], number: int) -> float:
            if number == 5 and "before" in found:
                found["after"] = weights(objects)
                found["objects"] = objects
            elif number == 5:
                found["before"] = weights(objects)
                found["rate"] = objects["optimizer"].param_groups[0]["lr"]
                objects["optimizer"].param_groups[0]["weight_decay"] = 0.25
                three[2].agent.close(0.0)
            steps.append(number)
            return train(objects, number)

        steps: list[int] = []
        resume = checkpoint.Resume(tmp_path, build, every=3, restore="lost", replace=replace(three))
        assert len(resume.run(step, 5)) == 5
        saved = list(checkpoint.read(tmp_path)["model"].values())
        assert len(resume.run(step, STEPS)) == STEPS
        assert steps == [0, 1, 2, 3, 4, 5, 5, 6, 7]
        before, after = found["before"], found["after"]
        assert len(before) == len(after) == 6
        assert all(map(torch.equal, before[:4], after[:4]))
        assert all(map(torch.equal, saved[4:], after[4:]))
        group = found["objects"]["optimizer"].param_groups[0]
        assert group["weight_decay"] == 0.25
        assert found["objects"]["seen"] == 8 * STEPS
        assert found["objects"]["scheduler"].last_epoch == STEPS


def test_surviving_workers_keep_their_optimizer_state(tmp_path: Path) -> None:
    with InProcessCluster(3) as three, three[0].as_current():
        counts: list[list[float]] = []

        def step(objects: dict[str, Any], number: int) -> float:
            state = objects["optimizer"].state_dict()["state"]
            counts.append([float(state[index]["step"]) if index in state else 0.0 for index in range(6)])
            if number == 5 and len(counts) == 6:
                three[2].agent.close(0.0)
            return train(objects, number)

        checkpoint.Resume(tmp_path, build, every=3, restore="lost", replace=replace(three)).run(step, STEPS)
        assert counts[5] == [5.0] * 6
        assert counts[6] == [5.0, 5.0, 5.0, 5.0, 3.0, 3.0]


def test_invalid_arguments_of_resume_are_refused(tmp_path: Path) -> None:
    for wrong in ({"every": 0}, {"every": 1.5}, {"restore": "some"}):
        with pytest.raises(OptionError, match="Resume: "):
            checkpoint.Resume(tmp_path, build, **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the name 'resume' is reserved"):
        checkpoint.Resume(tmp_path, lambda: {"resume": 1}).run(lambda objects, number: 0, 1)
    checkpoint.save({"epoch": 1}, tmp_path)
    with pytest.raises(MisuseError, match="was not saved by Resume"):
        checkpoint.Resume(tmp_path, lambda: {"epoch": 1}).run(lambda objects, number: 0, 1)


def test_without_workers(tmp_path: Path) -> None:
    plain = checkpoint.Resume(tmp_path, lambda: {"count": 0}, every=2)
    assert plain.run(lambda objects, number: number * 10, 3) == [0, 10, 20]
