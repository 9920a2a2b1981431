"""Activity: what the threads of a worker do and wait for, as a person or a tool sees it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from awaiting import await_events
from backhaul import rpc
from backhaul.agent.activity import Activity
from backhaul.errors import WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.testing import InProcessCluster
from backhaul.wire.decoder import Envelope
from backhaul.worker import Worker

began, go = threading.Event(), threading.Event()

PEER = WorkerInfo(1, "worker1")


def stand_still() -> None:
    began.set()
    assert go.wait(30)


@pytest.fixture
def pair() -> Iterator[list[Worker]]:
    began.clear()
    go.clear()
    with InProcessCluster(2) as workers:
        try:
            yield workers
        finally:
            go.set()


def waits(worker: Worker, count: int) -> dict[int, list[dict[str, Any]]]:
    """What the threads of a worker wait for, once ``count`` of them wait."""
    activity = worker.agent.activity
    assert await_events(worker, lambda: len(activity.all_waits()) == count, 30)
    found = activity.all_waits()
    return {thread: [wait.describe() for wait in each] for thread, each in found.items()}


def start(worker: Worker, do: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        with worker.as_current():
            do()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_thread_that_waits_for_its_call_is_seen_until_the_reply_has_come(pair: list[Worker]) -> None:
    thread = start(pair[0], lambda: rpc.rpc_sync("worker1", stand_still))
    assert began.wait(30)
    found = waits(pair[0], 1)
    assert list(found) == [thread.ident]
    (wait,) = found[thread.ident or 0]
    assert (wait["kind"], wait["peer"]) == ("reply", "worker1")
    assert "stand_still" in wait["what"]
    (handling,) = pair[1].agent.activity.handling().values()
    assert handling.peer.name == "worker0"
    go.set()
    thread.join()
    waits(pair[0], 0)
    waits(pair[1], 0)
    assert pair[1].agent.activity.handling() == {}


def test_a_thread_that_was_interrupted_does_not_wait_any_more(pair: list[Worker]) -> None:
    def interrupt() -> None:
        assert began.wait(30)
        waits(pair[0], 1)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pair[0].as_current(), pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("worker1", stand_still)
    other.join()
    assert pair[0].agent.calling()[0].outstanding == 1
    assert pair[0].agent.activity.all_waits() == {}


def test_several_threads_that_wait_for_one_future_are_all_seen(pair: list[Worker]) -> None:
    with pair[0].as_current():
        future = rpc.rpc_async("worker1", stand_still)
    threads = [start(pair[0], future.wait) for _ in range(3)]
    found = waits(pair[0], 3)
    assert set(found) == {thread.ident for thread in threads}
    assert len({wait["call"] for (wait,) in found.values()}) == 1
    go.set()
    for thread in threads:
        thread.join()
    waits(pair[0], 0)


def test_a_thread_counts_as_waiting_until_the_cause_of_its_peer_s_loss_is_known(pair: list[Worker]) -> None:
    """The launcher may take a while to tell."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            rpc.rpc_sync("worker1", stand_still)
        except WorkerLostError as error:
            raised.append(error)

    thread = start(pair[0], call)
    assert began.wait(30)
    waits(pair[0], 1)
    (line,) = pair[0].agent.calling()
    told: list[Callable[[], None]] = []
    line._explain = lambda peer, lost, then: told.append(lambda: then(lost))  # type: ignore[method-assign]
    line.lose(WorkerLostError("worker 'worker1' is lost: a test", "worker1"))
    assert list(waits(pair[0], 1)) == [thread.ident]
    assert not raised
    told[0]()
    thread.join()
    assert len(raised) == 1
    waits(pair[0], 0)


def test_a_thread_reports_its_outer_request_under_its_inner_one() -> None:
    activity = Activity()
    note = activity.new_note()
    assert activity.handled_by(threading.get_ident()) is None
    assert activity.handling() == {}
    note.handles = (PEER, Envelope("outer", []), 1.0)
    note.handles = (PEER, Envelope("inner", []), 2.0, note.handles)
    found = activity.handled_by(threading.get_ident())
    assert found is not None
    assert (found.message, found.since) == ("inner", 2.0)
    assert found.before is not None
    assert (found.before.message, found.before.before) == ("outer", None)
    assert activity.handling() == {threading.get_ident(): found}


def test_notes_of_threads_that_have_ended_are_forgotten() -> None:
    activity = Activity()
    mine = activity.new_note()
    together = threading.Barrier(101)

    def note() -> None:
        activity.new_note()
        together.wait(30)

    for _ in range(4):
        threads = [threading.Thread(target=note) for _ in range(100)]
        for thread in threads:
            thread.start()
        together.wait(30)
        for thread in threads:
            thread.join()
    assert len(activity._notes) < 300
    assert activity._notes[threading.get_ident()] is mine


def test_the_innermost_wait_of_a_thread_comes_first() -> None:
    activity = Activity()
    with activity.waits(lambda: {"kind": "outer"}), activity.waits(lambda: {"kind": "inner"}):
        (found,) = activity.all_waits().values()
        assert [wait.describe()["kind"] for wait in found] == ["inner", "outer"]
    assert activity.all_waits() == {}
