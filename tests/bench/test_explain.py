"""Where a call's time goes: the stamps of calls and passes, and a short real run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul import autograd
from backhaul.agent import observing
from backhaul.agent.observing import (
    Asked,
    Began,
    Came,
    Encoded,
    Ended,
    Invoked,
    LinkUp,
    Packed,
    PassBegan,
    PassEnded,
    Planned,
    Read,
    RecvReached,
    Resumes,
    Returned,
    RunBegan,
    RunEnded,
    Sent,
    Settled,
    Starts,
    Stored,
    TorchBegan,
    TorchEnded,
    Waits,
)
from backhaul.bench import stages
from backhaul.bench.explain import WORKS
from backhaul.bench.stages import KINDS
from backhaul.bench.ways import BETWEEN_PROCESSES
from backhaul.testing import InProcessCluster


def test_the_stamps_of_a_call() -> None:
    seen = {"worker0": stages.Stamps(), "worker1": stages.Stamps()}
    with InProcessCluster(2) as workers:
        workers[0].rpc_sync("worker1", max, args=(1, 2))
        for worker in workers:
            worker.agent.observers.add(seen[worker.info.name].observe)
        workers[0].rpc_sync("worker1", max, args=(1, 2))
        kinds = {name: [KINDS[number] for number, _, _ in each.take().tolist()] for name, each in seen.items()}

    assert kinds["worker0"] == [Asked, Packed, Encoded, Sent, Waits, Read, Came, Resumes, Settled]
    theirs = kinds["worker1"]
    first = theirs.index(Read)  # before it, the reply to the previous call may just have left
    assert theirs[first : first + 7] == [Read, Began, Invoked, Returned, Packed, Encoded, Ended]


@pytest.mark.usefixtures("no_hooks")
def test_the_stamps_of_a_pass() -> None:
    seen = stages.Stamps()
    with InProcessCluster(2) as workers, workers[0].as_current(), autograd.context() as context:
        loss = workers[0].rpc_sync("worker1", torch.neg, args=(torch.ones((), requires_grad=True),)) * 2
        workers[0].agent.observers.add(seen.observe)
        autograd.backward(context, [loss])
        me = threading.get_ident()
        kinds = [KINDS[number] for number, _, thread in seen.take().tolist() if thread == me]

    assert kinds[:8] == [PassBegan, Planned, RunBegan, TorchBegan, RecvReached, Encoded, Sent, TorchEnded]
    assert kinds[8:10] == [RunEnded, Waits]
    assert kinds[-2:] == [Resumes, PassEnded]
    came = kinds[kinds.index(Starts) :]
    assert came[:5] == [Starts, Planned, RunBegan, Stored, RunEnded]


def test_stamps_are_taken_once_and_only_of_events_with_a_stage() -> None:
    seen = stages.Stamps()
    seen.observe(Returned(at=7, thread=3, failed=False))
    seen.observe(LinkUp(peer="a", served=False))
    assert seen.take().tolist() == [[KINDS.index(Returned), 7, 3]]
    assert seen.take().tolist() == []


def test_a_stamp_costs_less_than_a_few_microseconds() -> None:
    before, after = stages.cost()
    assert 0 <= before < 5000
    assert 0 < after < 5000


def test_no_event_is_made_when_nothing_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an event that nobody observes")

    monkeypatch.setattr(observing.Observers, "emit", refuse)
    with InProcessCluster(2) as workers:
        assert workers[0].rpc_sync("worker1", max, args=(1, 2)) == 2


CALLED = [
    ("client", "pack the values"),
    ("client", "encode the frame"),
    ("client", "write"),
    ("", BETWEEN_PROCESSES),
    ("server", "decode the frame"),
    ("server", "unpack the values"),
    ("server", "the function itself"),
    ("server", "pack the values"),
    ("server", "encode the frame"),
    ("server", "write"),
    ("client", "decode the frame"),
    ("client", "unpack the values"),
]
RECORDED = [
    ("client", "record what is sent"),
    ("server", "record what has come"),
    ("server", "record what is sent"),
    ("client", "record what has come"),
]
DIFFERENTIATED = [
    ("client", "begin the pass"),
    ("client", "plan"),
    ("client", "torch's engine"),
    ("client", "encode the frame"),
    ("client", "write"),
    ("", BETWEEN_PROCESSES),
    ("server", "decode the frame"),
    ("server", "plan"),
    ("server", "torch's engine"),
    ("server", "write"),
    ("client", "decode the frame"),
    ("client", "keep the gradients"),
]
EXPECTED = {
    "no-op": [each for each in CALLED if each != ("server", "pack the values")],  # None is its own tree
    "echo 1 KiB": CALLED,
    "echo 16 MiB": CALLED,
    "hop, forward": [*CALLED, *RECORDED],
    "hop, backward": DIFFERENTIATED,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """The output of a short run, and its works by name."""
    path = tmp_path_factory.mktemp("explain") / "explain.json"
    command = [sys.executable, "-m", "backhaul", "bench", "--explain", "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, {work["work"]: work for work in json.loads(Path(path).read_text())["works"]}


def test_every_workload_is_explained(ran: tuple[str, dict[str, dict[str, Any]]]) -> None:
    text, works = ran
    assert list(works) == list(EXPECTED) == [part for name, work in WORKS.items() for part in work.names(name)]
    assert [line.split("  ")[0] for line in text.splitlines() if line.rstrip().endswith("share")] == list(EXPECTED)


@pytest.mark.slow  # by the clock: other work on the machine would decide
@pytest.mark.parametrize("work", EXPECTED)
def test_all_stages_are_there_and_add_up(ran: tuple[str, dict[str, dict[str, Any]]], work: str) -> None:
    text, works = ran
    found = works[work]
    stages = found["stages"]

    assert set(EXPECTED[work]) <= {(stage["where"], stage["name"]) for stage in stages}, text
    assert all(stage["seconds"] > 0 for stage in stages)
    assert sum(stage["seconds"] for stage in stages) + found["remainder"] == pytest.approx(found["total"])
    assert abs(found["remainder"]) < 0.3 * found["total"], text
    assert found["covered"] >= 0.7, text
    assert found["alike"] >= found["repetitions"] / 5, text
