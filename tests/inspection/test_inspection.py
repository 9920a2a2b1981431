"""A worker's report about itself: the figures of known calls, what its threads do, what went wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import watched

from awaiting import await_events
from backhaul import rpc
from backhaul.agent import accounts as accounts_module
from backhaul.agent.accounts import OTHERS, Accounts
from backhaul.ids import WorkerInfo
from backhaul.inspection.inspection import Inspection
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Call
from backhaul.worker import Worker


def peer(worker: Worker, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in worker.inspection.snapshot()["peers"] if each["name"] == name)
    return found


# Questions.


def test_the_error_for_an_unknown_topic_lists_all_topics(pair: InProcessCluster) -> None:
    inspection: Inspection = pair[0].inspection
    with pytest.raises(rpc.MisuseError, match=r"'nothing' is not a topic of inspection; there are .*meter, .*snapshot"):
        inspection("nothing", {})


def test_members(trio: InProcessCluster) -> None:
    found = trio[1].inspection("members", {})
    assert found["me"] == 1
    assert [(each["rank"], each["name"]) for each in found["members"]] == [
        (0, "worker0"),
        (1, "worker1"),
        (2, "worker2"),
    ]


# Calls and bytes.


def test_the_figures_of_known_calls(pair: InProcessCluster) -> None:
    for _ in range(3):
        pair[0].rpc_sync("worker1", watched.double, (torch.ones(4),))
    with pytest.raises(ValueError, match="on purpose"):
        pair[0].rpc_sync("worker1", watched.fail, ("on purpose",))
    mine = peer(pair[0], "worker1")
    watched.until(pair[1], lambda: peer(pair[1], "worker0")["sent"] == mine["received"])
    theirs = peer(pair[1], "worker0")
    assert (mine["calls_sent"], mine["calls_settled"], mine["outstanding"], mine["lines"]) == (4, 4, 0, 1)
    assert (theirs["calls_received"], theirs["calls_finished"], theirs["lines"]) == (4, 4, 1)
    assert mine["calls_received"] == theirs["calls_sent"] == 0
    assert mine["sent"] == theirs["received"] > 0
    assert mine["received"] > 0
    path = mine["path"]
    assert path in ("memory", "unix")
    assert mine["bytes"] == {path: {"sent": mine["sent"], "received": mine["received"]}}
    assert pair[0].inspection.snapshot()["calls"]["calls_sent"] == 4
    assert pair[0].inspection.snapshot()["errors"] == [{"direction": "sent", "kind": "ValueError", "count": 1}]
    assert pair[1].inspection.snapshot()["errors"] == [{"direction": "served", "kind": "ValueError", "count": 1}]


def test_bytes_in_segments_have_a_path_of_their_own() -> None:
    with InProcessCluster(2, sockets=True) as pair:
        for _ in range(4):
            pair[0].rpc_sync("worker1", watched.double, (torch.ones(1 << 20),))
        found = peer(pair[0], "worker1")
        assert found["bytes"]["segment"] == {"sent": found["shared"], "received": 0}
        assert found["shared"] >= 4 << 20


def test_bytes_on_devices_have_a_path_of_their_own() -> None:
    """The channel counts data on a GPU like any large frame; tests/cuda has the real thing."""
    with InProcessCluster(2, sockets=True) as pair:
        pair[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
        line = pair[0].agent.calling()[0]
        assert "device" not in peer(pair[0], "worker1")["bytes"]
        line.channel.on_devices += 4096
        assert peer(pair[0], "worker1")["bytes"]["device"] == {"sent": 4096, "received": 0}


def test_the_snapshot_has_running_and_awaited_calls(pair: InProcessCluster) -> None:
    gate = watched.new_gate(f"runs-{id(pair)}")
    future = pair[0].rpc_async("worker1", watched.wait_at, (gate,))
    watched.await_visitor(gate)
    assert peer(pair[0], "worker1")["outstanding"] == 1
    (running,) = pair[1].inspection.snapshot()["running"]
    assert (running["peer"], running["kind"], running["what"]) == ("worker0", "Call", "watched.wait_at")
    assert pair[1].inspection.snapshot()["threads"]["handling"] == 1
    watched.open_gate(gate)
    future.wait()
    assert peer(pair[0], "worker1")["outstanding"] == 0


def cut_by(faults: Faults, worker: Worker) -> None:
    """End the connection with the next call, and make another one."""
    faults.next("cut", Call)
    with pytest.raises(rpc.WorkerLostError):
        worker.rpc_sync("worker1", watched.double, (torch.ones(1),))
    worker.rpc_sync("worker1", watched.double, (torch.ones(1),))


def test_the_figures_outlive_a_connection(pair: InProcessCluster) -> None:
    ended = threading.Semaphore(0)
    pair[1].agent.on_connection_ended.append(lambda *_: ended.release())
    looks = []
    for _ in range(4):
        pair[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
        looks.append((peer(pair[0], "worker1"), peer(pair[1], "worker0")))
        pair[0].agent.cut_off(1)
        assert ended.acquire(timeout=watched.PATIENCE)
        looks.append((peer(pair[0], "worker1"), peer(pair[1], "worker0")))
    # Each cut ends up to two connections, so the last one may still be noticed.
    assert await_events(pair[1], lambda: peer(pair[1], "worker0")["lost"], watched.PATIENCE)
    looks.append((peer(pair[0], "worker1"), peer(pair[1], "worker0")))
    for before, after in itertools.pairwise(looks):
        for end in (0, 1):
            for name in ("calls_sent", "calls_settled", "calls_received", "calls_finished", "sent", "received", "lost"):
                assert before[end][name] <= after[end][name], name
    mine, theirs = looks[-1]
    assert mine["calls_sent"] == mine["calls_settled"] == 4
    assert theirs["calls_received"] == theirs["calls_finished"] == 4
    assert mine["sent"] >= 4 * looks[0][0]["sent"] > 0
    assert theirs["received"] >= 4 * looks[0][1]["received"] > 0
    path = mine["path"]
    assert mine["bytes"] == {path: {"sent": mine["sent"], "received": mine["received"]}}
    assert mine["lost"] > 0


def test_a_call_that_is_lost_with_its_connection_has_failed() -> None:
    faults = Faults(seed=0)
    with InProcessCluster(2, faults=faults) as pair:
        for _ in range(3):
            cut_by(faults, pair[0])
        found = peer(pair[0], "worker1")
        assert found["calls_sent"] == found["calls_settled"] == 6
        assert found["lost"] > 0
        errors = pair[0].inspection.snapshot()["errors"]
        assert errors == [{"direction": "sent", "kind": "WorkerLostError", "count": 3}]


def test_a_call_that_outlives_its_connection_is_counted_when_it_is_over() -> None:
    faults = Faults(seed=0)
    with InProcessCluster(2, faults=faults) as pair:
        ended = threading.Event()
        pair[1].agent.on_connection_ended.append(lambda *_: ended.set())
        gate = watched.new_gate("orphan")
        orphan = pair[0].rpc_async("worker1", watched.wait_at, (gate,))
        watched.await_visitor(gate)
        cut_by(faults, pair[0])
        with pytest.raises(rpc.WorkerLostError):
            orphan.wait()
        assert ended.wait(watched.PATIENCE)
        found = peer(pair[1], "worker0")
        assert (found["calls_received"], found["calls_finished"]) == (2, 1)
        watched.open_gate(gate)
        watched.until(pair[1], lambda: peer(pair[1], "worker0")["calls_finished"] == 2)
        assert peer(pair[1], "worker0")["calls_received"] == 2


def test_a_peer_that_leaves_is_not_lost(trio: InProcessCluster) -> None:
    trio[2].rpc_sync("worker0", watched.double, (torch.ones(1),))
    trio[2].shutdown(graceful=False)
    assert await_events(trio[0], lambda: not peer(trio[0], "worker2")["lines"], watched.PATIENCE)
    found = peer(trio[0], "worker2")
    assert (found["lines"], found["lost"], found["calls_received"]) == (0, 0, 1)


def test_the_kinds_of_errors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "MOST_KINDS", 2)
    accounts = Accounts()
    for error in (ValueError(), KeyError(), TypeError(), OSError(), ValueError()):
        accounts.count_error("sent", error)
    assert accounts.errors() == [
        {"direction": "sent", "kind": OTHERS, "count": 2},
        {"direction": "sent", "kind": "KeyError", "count": 1},
        {"direction": "sent", "kind": "ValueError", "count": 2},
    ]


def test_a_peer_that_cannot_be_reached() -> None:
    with InProcessCluster(2) as pair:
        pair[1].shutdown(graceful=False)
        with pytest.raises(rpc.WorkerLostError):
            pair[0].rpc_sync("worker1", int)
        errors = pair[0].inspection.snapshot()["errors"]
        assert errors == [{"direction": "connect", "kind": "WorkerLostError", "count": 1}]


def test_the_snapshot_says_when_a_peer_was_last_heard() -> None:
    with InProcessCluster(2) as pair:
        pair[0].rpc_sync("worker1", int)
        assert peer(pair[0], "worker1")["heard"] is None
        first = peer(pair[0], "worker1")["heard"]
        second = peer(pair[0], "worker1")["heard"]
        assert 0 <= first <= second
        pair[0].rpc_sync("worker1", int)
        assert peer(pair[0], "worker1")["heard"] < second
        assert peer(pair[0], "worker1")["silent"] == 0.0


# Threads.


def find_thread(worker: Worker, handles: str) -> dict[str, Any]:
    """The thread that handles a call of this function."""
    found: list[dict[str, Any]] = [
        thread
        for thread in worker.inspection("threads", {})
        if any(each["what"] == handles for each in thread["handles"])
    ]
    assert len(found) == 1, found
    return found[0]


def test_a_waiting_thread_names_its_peer_and_its_call() -> None:
    """worker0 has called worker1, which has called worker0, which does not answer."""
    with InProcessCluster(2) as pair:
        gate = watched.new_gate("stuck")
        future = pair[0].rpc_async("worker1", watched.relay, ("worker0", watched.wait_at, gate))
        watched.await_visitor(gate)
        # Both workers are in this process, and each has notes only about its own threads.
        relays = find_thread(pair[1], "watched.relay")
        (handled,) = relays["handles"]
        assert (handled["peer"], handled["kind"]) == ("worker0", "Call")
        (wait,) = relays["waits"]
        assert (wait["kind"], wait["peer"], wait["what"]) == ("reply", "worker0", "wait_at")
        assert wait["seconds_left"] > 0
        stack = [frame["function"] for frame in relays["stack"]]
        assert "relay" in stack
        stands = find_thread(pair[0], "watched.wait_at")
        assert stands["waits"] == []
        # The wait and its request have the same number.
        assert stands["handles"][0]["call"] == wait["call"]
        watched.open_gate(gate)
        assert future.wait() == gate
        assert not [thread for thread in pair[1].inspection("threads", {}) if thread["waits"] or thread["handles"]]


@pytest.mark.slow
def test_looking_at_threads_does_not_stop_the_process() -> None:
    """In CPython 3.11, an unguarded `sys._current_frames` deadlocks this program within seconds."""
    program = Path(__file__).parent / "looking_program.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr


# `rpc.debug_info`.


def test_debug_info_has_the_meter_if_it_is_on(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        assert rpc.debug_info()["meter"] is None
        pair[0].inspection.meter.figures()
        rpc.rpc_sync("worker1", watched.double, (torch.ones(1),))
        found = rpc.debug_info()
    assert found["worker"]["name"] == "worker0"
    (calls,) = found["meter"]["calls"]
    assert (calls["function"], calls["count"]) == ("double", 1)


def test_a_worker_is_told_apart_from_another_of_its_rank() -> None:
    """In a dynamic group another worker may get a rank."""
    accounts = Accounts()
    for info in (WorkerInfo(1, "first"), WorkerInfo(1, "second")):
        accounts.add(_Line(info))  # type: ignore[arg-type]
    assert [(each["name"], each["sent"]) for each in accounts.exchanges()] == [("first", 10), ("second", 10)]


class _Channel:
    path, sent, shared, on_devices, received = "memory", 10, 0, 0, 20


class _Line:
    """A closed line."""

    channel = _Channel()
    ended = final = True
    calls_sent = calls_settled = calls_started = calls_finished = outstanding = 0

    def __init__(self, peer: WorkerInfo) -> None:
        self.peer = peer
