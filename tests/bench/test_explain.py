"""Where a call's time goes: following its way through stamps, and a short real run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backhaul.bench import stages
from backhaul.bench.explain import (
    BETWEEN_PROCESSES,
    BETWEEN_THREADS,
    IN_BETWEEN,
    WORKS,
    Event,
    Events,
    History,
    Piece,
    Strayed,
    Thread,
    Way,
    follow,
    summarise,
)
from backhaul.bench.stages import SEAMS, Seam, SeamGone, install

MAIN = Thread("client", "main")
LEADER = Thread("client", "leader")
SERVER = Thread("server", "leader")
FREE = (0.0, 0.0)  # stamps that cost nothing


def event(name: str, begin: int, end: int) -> Event:
    return Event(next(place for place, seam in enumerate(SEAMS) if seam.name == name), begin, end)


def shown(way: Sequence[Piece]) -> list[tuple[int, str, str, float]]:
    return [(piece.leg, piece.where, piece.stage, piece.nanoseconds) for piece in way]


CALL: Events = {
    MAIN: [event("pack", 10, 20), event("write", 30, 40), event("read", 45, 145), event("unpack", 150, 160)],
    SERVER: [event("read", -50, 60), event("next", 65, 75), event("invoke", 80, 100), event("write", 110, 120)],
}


def test_the_way_of_a_call() -> None:
    assert shown(follow(CALL, MAIN, 0, 170, FREE)) == [
        (0, "client", IN_BETWEEN, 10),
        (0, "client", "pack the values", 10),
        (0, "client", IN_BETWEEN, 10),
        (0, "client", "write", 10),
        (1, "", BETWEEN_PROCESSES, 20),
        (1, "server", IN_BETWEEN, 5),
        (1, "server", "decode the frame", 10),
        (1, "server", IN_BETWEEN, 5),
        (1, "server", "the function itself", 20),
        (1, "server", IN_BETWEEN, 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 25),
        (2, "client", IN_BETWEEN, 5),
        (2, "client", "unpack the values", 10),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_the_parts_of_a_way_are_the_whole_of_it() -> None:
    assert sum(piece.nanoseconds for piece in follow(CALL, MAIN, 0, 170, FREE)) == 170


def test_a_write_that_ends_after_the_read_of_it_counts_up_to_there() -> None:
    events = {
        MAIN: [event("write", 10, 60), event("read", 70, 100)],
        SERVER: [event("read", 0, 40), event("write", 50, 90)],
    }
    assert shown(follow(events, MAIN, 0, 110, FREE)) == [
        (0, "client", IN_BETWEEN, 10),
        (0, "client", "write", 30),
        (1, "", BETWEEN_PROCESSES, 0),
        (1, "server", IN_BETWEEN, 10),
        (1, "server", "write", 40),
        (2, "", BETWEEN_PROCESSES, 10),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_a_read_of_what_is_there_is_no_wait() -> None:
    events = {MAIN: [event("read", 30, 35)], SERVER: [event("write", 10, 20)]}
    assert shown(follow(events, MAIN, 0, 50, FREE)) == [
        (0, "client", IN_BETWEEN, 30),
        (0, "client", "read", 5),
        (0, "client", IN_BETWEEN, 15),
    ]


def test_the_way_goes_through_another_thread_that_wakes_the_first() -> None:
    running = next(place for place, seam in enumerate(SEAMS) if seam.kind == "sleep")
    events = {
        MAIN: [event("write", 10, 20), Event(running, 30, 100)],
        LEADER: [event("read", 0, 70), event("report", 80, 90)],
        SERVER: [event("read", 0, 40), event("write", 50, 60)],
    }
    assert shown(follow(events, MAIN, 0, 105, FREE)) == [
        (0, "client", IN_BETWEEN, 10),
        (0, "client", "write", 10),
        (1, "", BETWEEN_PROCESSES, 20),
        (1, "server", IN_BETWEEN, 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 10),
        (2, "client", IN_BETWEEN, 10),
        (2, "client", "report", 10),
        (3, "", BETWEEN_THREADS, 10),
        (3, "client", IN_BETWEEN, 5),
    ]


def test_time_belongs_to_the_innermost_seam() -> None:
    events = {MAIN: [event("emit", 10, 90), event("encode", 20, 30), event("write", 40, 60)]}
    assert shown(follow(events, MAIN, 0, 100, FREE)) == [
        (0, "client", IN_BETWEEN, 10),
        (0, "client", "give gradients away", 10),
        (0, "client", "encode the frame", 10),
        (0, "client", "give gradients away", 10),
        (0, "client", "write", 20),
        (0, "client", "give gradients away", 30),
        (0, "client", IN_BETWEEN, 10),
    ]


def test_what_stamps_cost_is_taken_off_their_own_stage_and_what_follows() -> None:
    way = follow({MAIN: [event("pack", 10, 30)]}, MAIN, 0, 100, (1.0, 4.0))
    assert [piece.nanoseconds for piece in way] == [10, 19, 66]


def test_a_way_that_ends_nowhere() -> None:
    events = {MAIN: [event("read", 10, 50)], SERVER: [event("write", 30, 40)]}
    with pytest.raises(Strayed):
        follow(events, MAIN, 0, 100, FREE)


def test_the_summary_is_of_the_usual_way() -> None:
    from torch import tensor

    client, server = [], []
    windows = []
    for number in range(5):
        start = 1000 * number
        windows.append((start, start + 170))
        client += [(each.seam, start + each.begin, start + each.end) for each in CALL[MAIN]]
        if number != 3:  # this one has got its reply by other means
            server += [(each.seam, start + each.begin, start + each.end) for each in CALL[SERVER]]
    history = History({"client": {"main": tensor(client)}, "server": {"leader": tensor(server)}})

    found = summarise("call", history.ways(MAIN, windows, FREE), 150e-9)

    assert (found.repetitions, found.alike) == (5, 4)
    assert found.total == pytest.approx(170e-9)
    assert found.remainder == pytest.approx(0)
    assert found.covered == pytest.approx(115 / 170)
    assert [(stage.where, stage.name) for stage in found.stages][:2] == [
        ("client", IN_BETWEEN),
        ("client", "pack the values"),
    ]


def test_nothing_can_be_said_of_ways_that_end_nowhere() -> None:
    with pytest.raises(Strayed, match="call: no repetition could be followed"):
        summarise("call", [Way([], 100)], 1.0)


def test_a_seam_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SEAMS", (Seam("backhaul.wire.values:Codec", "squeeze", "squeeze the values"),))
    with pytest.raises(SeamGone, match=r"backhaul\.wire\.values:Codec has no 'squeeze' any more"):
        install()


def test_a_stamp_costs_less_than_a_few_microseconds() -> None:
    inside, outside = stages.cost()
    assert 0 <= inside < 5000
    assert 0 < outside < 5000


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
    ("client", "plan"),
    ("client", "torch's engine"),
    ("client", "give gradients away"),
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
    # None is its own tree: nothing packs or unpacks it.
    "no-op": [each for each in CALLED if each not in (("server", "pack the values"), ("client", "unpack the values"))],
    "echo 1 KiB": CALLED,
    "echo 16 MiB": [*CALLED, ("client", "copy into shared memory"), ("server", "copy into shared memory")],
    "hop, forward": [*CALLED, *RECORDED],
    "hop, backward": DIFFERENTIATED,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """What a short run prints, and its works by their names."""
    path = tmp_path_factory.mktemp("explain") / "explain.json"
    command = [sys.executable, "-m", "backhaul", "bench", "--explain", "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, {work["work"]: work for work in json.loads(Path(path).read_text())["works"]}


def test_every_work_is_there(ran: tuple[str, dict[str, dict[str, Any]]]) -> None:
    text, works = ran
    assert list(works) == list(EXPECTED) == [part for name, work in WORKS.items() for part in work.names(name)]
    assert [line.split("  ")[0] for line in text.splitlines() if line.rstrip().endswith("share")] == list(EXPECTED)


@pytest.mark.slow  # by the clock: other work on the machine would decide
@pytest.mark.parametrize("work", EXPECTED)
def test_the_stages_are_all_there_and_are_the_whole(ran: tuple[str, dict[str, dict[str, Any]]], work: str) -> None:
    text, works = ran
    found = works[work]
    stages = found["stages"]

    assert set(EXPECTED[work]) <= {(stage["where"], stage["name"]) for stage in stages}, text
    assert all(stage["seconds"] > 0 for stage in stages)
    assert sum(stage["seconds"] for stage in stages) + found["remainder"] == pytest.approx(found["total"])
    assert abs(found["remainder"]) < 0.3 * found["total"], text
    assert found["covered"] >= 0.7, text
    assert found["alike"] >= found["repetitions"] / 5, text
