"""What the machine of a dead worker knows about its end reaches the workers on other machines."""

from __future__ import annotations

import threading

import pytest
from mortal_group import PATIENCE, MortalGroup

from backhaul import rpc
from backhaul.agent.observing import Event, Over
from backhaul.worker import Worker


def who() -> str:
    return rpc.get_worker_info().name


def ends_seen_by(worker: Worker) -> tuple[threading.Event, list[Over]]:
    came, found = threading.Event(), []

    def observe(event: Event) -> None:
        if isinstance(event, Over):
            found.append(event)
            came.set()

    worker.agent.observers.add(observe)
    return came, found


def test_workers_on_other_machines_learn_of_an_end() -> None:
    group = MortalGroup(["here", "here", "elsewhere"])
    try:
        far = group.workers[2]
        came, found = ends_seen_by(far)
        with far.as_current():
            for to in ("worker0", "worker1"):
                assert rpc.rpc_sync(to, who) == to
        with group.workers[0].as_current():
            assert rpc.rpc_sync("worker1", who) == "worker1", "or it would not notice the end"
        group.kill(1)
        assert came.wait(PATIENCE), "the end was not reported"
        assert [(each.peer, each.reason, each.certain) for each in found] == [
            ("worker1", "its process has ended", True)
        ]
        with far.as_current():
            with pytest.raises(rpc.WorkerLostError, match="worker 'worker1' is lost: its process has ended"):
                rpc.rpc_sync("worker1", who)
            assert rpc.rpc_sync("worker0", who) == "worker0"
    finally:
        group.close()
