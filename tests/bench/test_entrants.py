"""A system that raises, dies or hangs in some work: its row says so, and everything else continues."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from backhaul.bench import compare, footprint
from backhaul.bench.compare import Plan, Result
from backhaul.bench.entrants import NOT_THERE, Entrant, Fault, entrants_of
from backhaul.bench.footprint import Times
from backhaul.bench.launched import NotLaunched
from backhaul.bench.orders import Order
from backhaul.bench.ports import BACKHAUL, MEMCPY, PORTS, CopyPort
from backhaul.bench.systems import Limits
from backhaul.bench.workloads import WORKLOADS, Figure, Samples, Workload

LIMITS = Limits(trial=0.5, trial_imports=0.0, run=1.0)
TIMES = Times(start_ups=0, rests=0, launches=0, idle_seconds=0.0)


# All faults happen in one process that has no peers. Functions of this module, because other processes import them.


def is_victim(port: Any) -> bool:
    return isinstance(port, CopyPort)


def do_well(port: Any, order: Order) -> Samples:
    return Samples([1.0] * order.repetitions, 0.0)


def do_well_once(port: Any, order: Order) -> Samples:
    done = vars(do_well_once)
    if is_victim(port) and done.setdefault("times", 0):
        raise ValueError("not twice")
    done["times"] = 1
    return do_well(port, order)


def die(port: Any, order: Order) -> Samples:
    if is_victim(port):
        os._exit(3)
    return do_well(port, order)


def hang(port: Any, order: Order) -> Samples:
    if is_victim(port):
        time.sleep(60)
    return do_well(port, order)


def raise_in_trial(port: Any) -> str | None:
    if is_victim(port):
        raise KeyError("trial")
    return None


def find_flaw(port: Any) -> str | None:
    return None if is_victim(port) else "wrong gradients"


def take_long(port: Any) -> None:
    time.sleep(LIMITS.trial + 0.5)


def find_nothing(port: Any) -> str | None:
    return None


def work(name: str, **more: Any) -> Workload:
    return Workload(
        **{
            "run": do_well,
            "repetitions": 1,
            "figures": (Figure(name),),
            "systems": (BACKHAUL, MEMCPY),
            "name": name,
            **more,
        }
    )


WORK = [
    work("slow to prepare", prepare=take_long, trial=find_nothing),
    work("trial raises", trial=raise_in_trial),
    work("dies", run=die),
    work("hangs", run=hang),
    work("is wrong", trial=find_flaw),
    work("goes well"),
    work("raises later", run=do_well_once),  # after those for which the process is started afresh
]


@pytest.fixture(scope="module")
def result() -> Result:
    with pytest.MonkeyPatch.context() as patch:
        for workload in WORK:
            patch.setitem(WORKLOADS, workload.name, workload)
        names = tuple(workload.name for workload in WORK)
        return compare.run(Plan(rounds=2, seconds=60.0, times=TIMES, names=names, limits=LIMITS))


@pytest.mark.long
def test_a_row_notes_what_went_wrong(result: Result) -> None:
    assert {row.figure.name: row.notes for row in result.rows} == {
        "slow to prepare": {},
        "trial raises": {MEMCPY: "raises KeyError"},
        "dies": {MEMCPY: "dies"},
        "hangs": {MEMCPY: "hangs"},
        "is wrong": {BACKHAUL: "wrong gradients"},
        "goes well": {},
        "raises later": {MEMCPY: "raises ValueError"},
    }


@pytest.mark.long
def test_all_other_rows_and_systems_go_on(result: Result) -> None:
    for row in result.rows:
        assert {*row.rounds, *row.notes} == {BACKHAUL, MEMCPY}
        assert all(rounds == [1.0, 1.0] for rounds in row.rounds.values())


@pytest.mark.long
def test_faults_of_backhaul_are_listed_separately(result: Result) -> None:
    assert len(result.faults) == 5
    assert [(fault.work, fault.brief) for fault in result.failed] == [("is wrong", "wrong gradients")]


@pytest.mark.long
def test_a_failure_has_its_traceback(result: Result) -> None:
    (fault,) = (fault for fault in result.faults if fault.work == "trial raises")
    assert "raise_in_trial" in fault.text


def test_a_system_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[Fault] = []
    workload = work("any")
    monkeypatch.setattr("backhaul.bench.entrants.System", NeverStarts)
    with Entrant(MEMCPY, [workload], faults.append, LIMITS) as entrant:
        found = entrant.measure(workload, 1)

    assert isinstance(found, Fault)
    assert found.brief == NOT_THERE
    assert [(fault.work, fault.brief) for fault in faults] == [("the start", "hangs")]


class NeverStarts:
    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> NeverStarts:
        from backhaul.bench.systems import SystemFailed

        raise SystemFailed("nobody answers", "hangs")


def test_workloads_with_several_servers_get_their_own_processes() -> None:
    names = ("no-op", "two clients", "chain of 4 over 3", "fan-out of 8 over 4", "3 trainers")
    workloads = [WORKLOADS[name] for name in names]
    found = entrants_of(list(PORTS), workloads, lambda fault: None, LIMITS)

    assert [entrant.name for entrant in found] == ["backhaul", "torch", "ping-pong", "backhaul", "torch"]
    narrow, wide = found[0], found[3]
    assert [narrow.does(workload) for workload in workloads] == [True, True, False, False, False]
    assert [wide.does(workload) for workload in workloads] == [False, False, True, True, True]
    assert narrow.roles == ("server", "client", "second-client")
    assert wide.roles == ("server", "client", "server-2", "server-3", "server-4")


def test_workers_that_a_launcher_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(launcher: str, seconds: float) -> Any:
        raise NotLaunched("it is broken")

    monkeypatch.setattr("backhaul.bench.launched.rest_of", fail)
    faults: list[Fault] = []
    rows = footprint.measure(
        ["idle, launched"], [BACKHAUL], TIMES._replace(launches=2), lambda text: None, faults.append
    )

    assert [row.notes for row in rows] == [{BACKHAUL: "does not rest"}] * 4
    assert [fault.text for fault in faults] == [
        "backhaul: cluster(2): it is broken",
        "backhaul: backhaul run -n 3: it is broken",
    ]
