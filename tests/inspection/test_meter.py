"""The meter: what it counts while someone asks for its figures, and that it switches off by itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import watched

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent.observing import Sent
from backhaul.inspection import meter as meter_module
from backhaul.inspection.meter import BOUNDS, OTHERS
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker


@pytest.fixture
def metered(pair: InProcessCluster) -> Iterator[InProcessCluster]:
    """Two workers with their meters on, and a connection."""
    replied = threading.Event()
    stop = pair[1].agent.observers.add(lambda event: replied.set() if type(event) is Sent and event.replies else None)
    pair[0].rpc_sync("worker1", int)
    assert replied.wait(watched.PATIENCE)  # else the end of this call would be counted
    stop()
    for worker in pair:
        worker.inspection.meter.figures()
    with pair[0].as_current():
        yield pair


def figures(worker: Worker) -> dict[str, Any]:
    found: dict[str, Any] = worker.inspection("meter", {})
    return found


def calls(worker: Worker, direction: str) -> dict[str, dict[str, Any]]:
    return {each["function"]: each for each in figures(worker)["calls"] if each["direction"] == direction}


def counts(worker: Worker, direction: str) -> dict[str, tuple[int, int]]:
    """The number of calls of each function, and the number of failures."""
    return {name: (each["count"], each["failed"]) for name, each in calls(worker, direction).items()}


def await_served(worker: Worker, name: str, count: int) -> None:
    """Wait for the counts: replies leave before the end of a request is counted."""
    watched.until(worker, lambda: counts(worker, "served").get(name, (0, 0))[0] >= count)


def test_the_first_question_switches_the_meter_on(pair: InProcessCluster) -> None:
    pair[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    assert not pair[0].agent.observers
    first = figures(pair[0])
    assert first["on"] is True
    assert first["calls"] == first["recent"] == []
    assert first["frames"] == {"sent": 0, "received": 0}
    assert pair[0].agent.observers
    assert not pair[1].agent.observers
    pair[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    assert counts(pair[0], "sent") == {"double": (1, 0)}


def test_both_ends_count_a_call_under_one_name(metered: InProcessCluster) -> None:
    x = torch.ones(2)
    for _ in range(3):
        rpc.rpc_sync("worker1", watched.double, (x,))
    rpc.rpc_async("worker1", watched.double_later, (x,)).wait()
    rpc.rpc_sync("worker1", watched.double_elsewhere, ("worker0", x))
    rpc.rpc_sync("worker1", torch.add, (x, x))
    for function in (watched.fail, watched.fail_later):
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("worker1", function, ("on purpose",))
    counter = rpc.remote("worker1", watched.Counter)
    assert counter.rpc_sync().add(5) == 5
    counter.to_here()
    expected = {
        "double": (3, 0),
        "double_later": (1, 0),
        "double_elsewhere": (1, 0),
        "add": (1, 0),
        "fail": (1, 1),
        "fail_later": (1, 1),
        "Counter": (1, 0),
        "method add": (1, 0),
        "to_here": (1, 0),
    }
    assert counts(metered[0], "sent") == expected
    await_served(metered[1], "to_here", 1)
    assert counts(metered[1], "served") == expected
    assert counts(metered[1], "sent") == counts(metered[0], "served") == {"double": (1, 0)}
    assert {each["peer"] for each in calls(metered[0], "sent").values()} == {"worker1"}
    assert {each["peer"] for each in calls(metered[1], "served").values()} == {"worker0"}


def test_the_buckets_hold_every_call(metered: InProcessCluster) -> None:
    for _ in range(5):
        rpc.rpc_sync("worker1", watched.double, (torch.ones(2),))
    found = calls(metered[0], "sent")["double"]
    assert len(found["buckets"]) == len(BOUNDS) + 1
    assert sum(found["buckets"]) == found["count"] == 5
    bounds = [*BOUNDS, math.inf]
    lowest = sum(count * bound for count, bound in zip(found["buckets"][1:], bounds, strict=False))
    highest = sum(count * bound for count, bound in zip(found["buckets"], bounds, strict=True) if count)
    assert lowest <= found["seconds"] <= highest


def test_a_call_that_waits_takes_as_long_as_it_waits(metered: InProcessCluster) -> None:
    """The time of a served call includes the call that it made, and is less than its caller's."""
    rpc.rpc_sync("worker1", watched.relay, ("worker0", watched.double, torch.ones(1)))
    await_served(metered[1], "relay", 1)
    inner = calls(metered[0], "served")["double"]["seconds"]
    nested = calls(metered[1], "sent")["double"]["seconds"]
    served = calls(metered[1], "served")["relay"]["seconds"]
    outer = calls(metered[0], "sent")["relay"]["seconds"]
    assert 0 < inner < nested < served < outer


def test_every_frame_is_counted_at_both_ends(metered: InProcessCluster) -> None:
    futures = [rpc.rpc_async("worker1", watched.double, (torch.ones(1),)) for _ in range(50)]
    torch.futures.wait_all(futures)
    watched.until(metered[1], lambda: figures(metered[1])["frames"]["sent"] == 50)
    mine, theirs = figures(metered[0])["frames"], figures(metered[1])["frames"]
    assert mine["sent"] == theirs["received"] == 50
    assert mine["received"] == theirs["sent"] == 50


def test_the_functions_are_bounded(metered: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "MOST_FUNCTIONS", 2)
    for function in (abs, bool, float, float, abs):
        rpc.rpc_sync("worker1", function, (1,))
    assert counts(metered[0], "sent") == {"abs": (2, 0), "bool": (1, 0), OTHERS: (2, 0)}


def test_a_call_that_ends_without_a_reply_is_a_failure(metered: InProcessCluster) -> None:
    gate = watched.new_gate("unanswered")
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_sync("worker1", watched.wait_at, (gate,), timeout=0.05)
    watched.open_gate(gate)
    assert counts(metered[0], "sent") == {"wait_at": (1, 1)}


# Passes.


def run_pass() -> None:
    """A pass with two runs here, one of which waits at a gate, and two at worker1."""
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", watched.double, (x,))
        z = rpc.rpc_sync("worker1", watched.double, (y * y,))
        dist_autograd.backward(context, [(z * y).sum()])


def test_the_time_of_a_pass_is_split(metered: InProcessCluster) -> None:
    run_pass()
    found = figures(metered[0])
    (recent,) = found["recent"]
    assert recent["started_here"]
    assert not recent["failed"]
    assert (len(recent["runs"]), len(recent["gates"])) == (2, 1)
    assert recent["waits"]
    passes = found["passes"]
    assert (passes["count"], passes["failed"]) == (1, 0)
    assert passes["seconds"] == pytest.approx(recent["ended"] - recent["began"], abs=1e-4)
    # Everything happened on the thread in backward(), so the parts do not overlap, and leave little over.
    split = [passes[name] for name in ("runs_seconds", "gate_seconds", "wait_seconds")]
    assert all(part > 0 for part in split)
    assert 0.5 * passes["seconds"] < sum(split) <= passes["seconds"]
    (gate,) = recent["gates"]
    assert passes["gate_seconds"] == pytest.approx(gate["ended"] - gate["began"], abs=1e-4)
    outer, inner = recent["runs"]
    assert outer["began"] <= gate["began"] <= gate["ended"] <= outer["ended"] <= inner["began"]
    for wait in recent["waits"]:
        assert recent["began"] <= wait["began"] <= wait["ended"] <= recent["ended"]
        assert not any(wait["began"] < run["began"] < wait["ended"] for run in recent["runs"])


def test_a_pass_at_a_worker_that_takes_part(metered: InProcessCluster) -> None:
    run_pass()
    found = figures(metered[1])
    (recent,) = found["recent"]
    assert not recent["started_here"]
    assert recent["backward"] == figures(metered[0])["recent"][0]["backward"]
    assert len(recent["runs"]) == 2
    assert recent["ended"] == pytest.approx(recent["runs"][-1]["ended"])
    assert found["passes"]["count"] == 0
    assert found["passes"]["runs_seconds"] > 0


def test_a_pass_that_fails(metered: InProcessCluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", watched.double, (x,))
        y.register_hook(lambda _: watched.fail("on purpose"))
        with pytest.raises(Exception, match="on purpose"):
            dist_autograd.backward(context, [y.sum()])
    found = figures(metered[0])
    assert found["recent"][0]["failed"]
    assert (found["passes"]["count"], found["passes"]["failed"]) == (1, 1)


def test_the_last_passes_are_kept(metered: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(meter_module._RECENT + 3):
        run_pass()
    found = figures(metered[0])
    assert len(found["recent"]) == meter_module._RECENT
    assert found["passes"]["count"] == meter_module._RECENT + 3
    began = [each["began"] for each in found["recent"]]
    assert began == sorted(began)


# On and off.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meters whose time is over at once."""
    monkeypatch.setattr(meter_module, "SECONDS_ON", 0.0)


@pytest.mark.usefixtures("impatient")
def test_an_event_long_after_the_last_question_switches_the_meter_off(trio: InProcessCluster) -> None:
    meter = trio[0].inspection.meter
    since = meter.figures()["since"]
    assert meter.on
    trio[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    assert not meter.on
    assert not trio[0].agent.observers
    assert meter.figures_if_on() is None
    again = meter.figures()
    assert again["since"] > since
    assert again["calls"] == []


@pytest.mark.usefixtures("impatient")
def test_the_meter_stays_on_while_it_is_held(trio: InProcessCluster) -> None:
    meter = trio[0].inspection.meter
    releases = [meter.hold(), meter.hold()]
    trio[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    for release in releases:
        assert meter.on
        trio[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
        release()
        release()
    assert counts(trio[0], "sent") == {"double": (3, 0)}
    trio[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    assert not meter.on


def test_the_meter_starts_no_thread(trio: InProcessCluster) -> None:
    before = set(threading.enumerate())
    trio[0].inspection.meter.figures()
    assert set(threading.enumerate()) == before


def test_calls_from_before_the_meter_was_on_do_no_harm(trio: InProcessCluster) -> None:
    gate = watched.new_gate("early")
    early = trio[0].rpc_async("worker1", watched.wait_at, (gate,))
    watched.await_visitor(gate)
    for worker in trio:
        worker.inspection.meter.figures()
    watched.open_gate(gate)
    early.wait()
    trio[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    assert counts(trio[0], "sent") == {"double": (1, 0)}
    await_served(trio[1], "double", 1)
    assert counts(trio[1], "served") == {"double": (1, 0)}


def test_the_figures_are_plain_data(metered: InProcessCluster) -> None:
    rpc.rpc_sync("worker1", watched.double, (torch.ones(1),))
    run_pass()
    found = figures(metered[0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found
