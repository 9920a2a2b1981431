"""References in messages made for a connection that has ended already: they arrive nowhere, and pin nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from backhaul import rpc
from backhaul.agent.serving import Served
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster

WITHIN = 10.0

entered = threading.Event()
gate = threading.Event()


@pytest.fixture(autouse=True)
def _closed_gate() -> Iterator[None]:
    entered.clear()
    gate.clear()
    yield
    gate.set()


def make_later() -> RRef[object]:
    entered.set()
    assert gate.wait(WITHIN)
    return RRef(object())


def who() -> str:
    return rpc.get_worker_info().name


def await_counts(workers: InProcessCluster, rank: int, **expected: int) -> None:
    deadline = time.monotonic() + WITHIN
    while {key: workers[rank].references.counts()[key] for key in expected} != expected:
        assert time.monotonic() < deadline, f"{workers[rank].references.counts()}, not {expected}"
        threading.Event().wait(0.002)


def cut(workers: InProcessCluster) -> list[Served]:
    """End worker0's connection to worker1, and return when worker1 has noticed: its ends of that."""
    (line,) = [line for line in workers[0].agent.calling() if line.peer.name == "worker1"]
    served = [line for line in workers[1].agent.serving.lines if line.peer.name == "worker0"]
    line.lose(rpc.WorkerLostError("cut by the test", "worker1"))
    for each in served:
        assert each.over.wait(WITHIN)
    return served


def test_a_reply_that_is_made_after_its_connection_has_ended(pair: InProcessCluster) -> None:
    future = pair[0].rpc_async("worker1", make_later)
    assert entered.wait(WITHIN)
    assert pair[0].rpc_sync("worker1", who) == "worker1", "the request has given away the lead"
    (served,) = cut(pair)
    with pytest.raises(rpc.WorkerLostError):
        future.wait()
    gate.set()
    deadline = time.monotonic() + WITHIN
    while served.calls_finished < served.calls_started:  # the reply has been made
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)
    await_counts(pair, 1, values=0, pinned=0)
    assert pair[0].rpc_sync("worker1", who) == "worker1"


def test_a_request_that_is_made_for_a_lost_line(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        value = RRef(object())
        (line,) = [
            line for line in (pair[0].rpc_sync("worker1", who), *pair[0].agent.calling()) if not isinstance(line, str)
        ]
        cut(pair)
        # The steps of a call that has found the line just before it was lost.
        agent = pair[0].agent
        frame = agent._call_frame(1 << 40, line, agent.pack(who, (value,), {}))
        with pytest.raises(rpc.WorkerLostError):
            line.ask(1 << 40, frame, "who", time.monotonic() + WITHIN, is_call=True)
        assert pair[0].references.counts()["pinned"] == 0
        del value, frame
    await_counts(pair, 0, values=0, pinned=0)
