"""Where a call's time goes: following its way through stamps, and a short real run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
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
    Event,
    HandedOut,
    Invoked,
    LinkUp,
    Packed,
    PassBegan,
    PassEnded,
    Planned,
    Queued,
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
from backhaul.bench.explain import (
    BETWEEN_PROCESSES,
    BETWEEN_THREADS,
    WORKS,
    History,
    Piece,
    Stamp,
    Stamps,
    Strayed,
    Thread,
    Way,
    follow,
    summarise,
)
from backhaul.bench.stages import IN_BETWEEN, KINDS, OTHER_MESSAGES
from backhaul.testing import InProcessCluster

MAIN = Thread("client", 1)
READER = Thread("client", 2)
SERVER = Thread("server", 1)
FREE = (0.0, 0.0)  # stamps that cost nothing


def stamps(*pairs: tuple[type[Event], int]) -> list[Stamp]:
    return [Stamp(*pair) for pair in pairs]


def shown(way: Sequence[Piece]) -> list[tuple[int, str, str, float]]:
    return [(piece.leg, piece.where, piece.stage, piece.nanoseconds) for piece in way]


CALL: Stamps = {
    MAIN: stamps(
        (Asked, 5), (Packed, 20), (Encoded, 30), (Sent, 40), (Waits, 45), (Read, 145), (Came, 150), (Settled, 160)
    ),
    SERVER: stamps((Sent, -50), (Read, 60), (Began, 75), (Invoked, 80), (Returned, 100), (Ended, 110), (Sent, 120)),
}


def test_the_path_of_a_call_is_followed() -> None:
    assert shown(follow(CALL, MAIN, 0, 170, FREE)) == [
        (0, "client", IN_BETWEEN, 5),
        (0, "client", "pack the values", 15),
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 10),
        (1, "", BETWEEN_PROCESSES, 20),
        (1, "server", "decode the frame", 15),
        (1, "server", "unpack the values", 5),
        (1, "server", "the function itself", 20),
        (1, "server", "the agent", 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 25),
        (2, "client", "decode the frame", 5),
        (2, "client", "unpack the values", 10),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_the_pieces_of_a_path_add_up_to_the_whole() -> None:
    assert sum(piece.nanoseconds for piece in follow(CALL, MAIN, 0, 170, FREE)) == 170


def test_a_write_counts_up_to_the_read_of_its_bytes() -> None:
    events = {
        MAIN: stamps((Encoded, 10), (Sent, 60), (Read, 100)),
        SERVER: stamps((Sent, -10), (Read, 40), (Ended, 50), (Sent, 105), (Read, 200)),
    }
    assert shown(follow(events, MAIN, 0, 110, FREE)) == [
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 30),
        (1, "", BETWEEN_PROCESSES, 0),
        (1, "server", "the agent", 10),
        (1, "server", "write", 50),
        (2, "", BETWEEN_PROCESSES, 0),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_a_thread_that_loses_its_processor_after_a_write_still_gets_its_reply_from_the_other_process() -> None:
    events = {
        MAIN: stamps((Encoded, 10), (Sent, 80), (Waits, 85), (Read, 90)),
        SERVER: stamps((Read, 40), (Ended, 50), (Sent, 60)),
    }
    assert shown(follow(events, MAIN, 0, 100, FREE)) == [
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 30),
        (1, "", BETWEEN_PROCESSES, 0),
        (1, "server", "the agent", 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 30),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_a_read_of_available_bytes_is_not_a_wait() -> None:
    events = {MAIN: stamps((Encoded, 5), (Packed, 30), (Read, 35)), SERVER: stamps((Ended, 10), (Sent, 20))}
    assert shown(follow(events, MAIN, 0, 50, FREE)) == [
        (0, "client", "encode the frame", 5),
        (0, "client", "pack the values", 25),
        (0, "client", "read", 5),
        (0, "client", IN_BETWEEN, 15),
    ]


@pytest.mark.parametrize(
    ("reader", "goes_on"),
    [(stamps((Read, 70), (Came, 80), (Queued, 90)), Starts), (stamps((Read, 70), (Came, 90)), Resumes)],
)
def test_the_path_goes_through_a_thread_that_reads_for_the_caller(reader: list[Stamp], goes_on: type[Event]) -> None:
    events = {
        MAIN: stamps((Encoded, 10), (Sent, 20), (Waits, 30), (goes_on, 100)),
        READER: reader,
        SERVER: stamps((Read, 40), (Ended, 50), (Sent, 60)),
    }
    found = shown(follow(events, MAIN, 0, 105, FREE))
    assert found[:6] == [
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 10),
        (1, "", BETWEEN_PROCESSES, 20),
        (1, "server", "the agent", 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 10),
    ]
    assert sum(nanoseconds for leg, where, _, nanoseconds in found if (leg, where) == (2, "client")) == 20
    assert found[-2:] == [(3, "", BETWEEN_THREADS, 10), (3, "client", IN_BETWEEN, 5)]


def test_a_job_that_a_thread_queues_for_itself_is_not_a_wait() -> None:
    events = {MAIN: stamps((Queued, 10), (HandedOut, 15), (Starts, 20)), READER: stamps((Queued, 5), (Queued, 50))}
    assert {where for _, where, _, _ in shown(follow(events, MAIN, 0, 30, FREE))} == {"client"}


def test_a_message_that_stands_before_the_call_has_a_stage_of_its_own() -> None:
    events = {
        **CALL,
        SERVER: stamps(
            (Read, 60), (Began, 62), (Ended, 70), (Began, 75), (Invoked, 80), (Returned, 100), (Ended, 110), (Sent, 120)
        ),
    }
    way = shown(follow(events, MAIN, 0, 170, FREE))
    assert (1, "server", OTHER_MESSAGES, 8) in way
    assert sum(nanoseconds for *_, nanoseconds in way) == 170


def test_the_cost_of_a_stamp_is_subtracted_from_the_adjacent_stages() -> None:
    way = follow({MAIN: stamps((Packed, 10), (Encoded, 30))}, MAIN, 0, 100, (1.0, 4.0))
    assert [piece.nanoseconds for piece in way] == [9, 15, 66]


def test_a_path_that_cannot_be_followed_is_an_error() -> None:
    events = {MAIN: stamps((Waits, 10), (Read, 50)), SERVER: stamps((Ended, 30), (Sent, 40))}
    with pytest.raises(Strayed):
        follow(events, MAIN, 0, 100, FREE)


def test_the_summary_describes_the_most_common_path() -> None:
    rows: dict[Thread, list[tuple[int, int, int]]] = {MAIN: [], SERVER: []}
    windows = []
    for number in range(5):
        start = 1000 * number
        windows.append((start, start + 170))
        for thread, row in rows.items():
            if (thread, number) != (SERVER, 3):  # there the reply arrived in another way
                row += [(KINDS.index(each.kind), start + each.at, thread.id) for each in CALL[thread]]
    history = History({"client": torch.tensor(rows[MAIN]), "server": torch.tensor(rows[SERVER])})

    found = summarise("call", history.ways(MAIN, windows, FREE), 150e-9)

    assert (found.repetitions, found.alike) == (5, 4)
    assert found.total == pytest.approx(170e-9)
    assert found.remainder == pytest.approx(0)
    assert found.covered == pytest.approx(155 / 170)
    assert [(stage.where, stage.name) for stage in found.stages][:2] == [
        ("client", IN_BETWEEN),
        ("client", "pack the values"),
    ]


def test_a_workload_without_complete_paths_has_no_summary() -> None:
    with pytest.raises(Strayed, match="call: no repetition could be followed"):
        summarise("call", [Way([], 100)], 1.0)


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
