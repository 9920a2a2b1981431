"""Workers of a Ray cluster that die, and their replacements."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import parts
import pytest
import ray
import torch
from eventually import NODE, eventually, patiently

import backhaul.ray
from backhaul import rpc
from backhaul.errors import WorkerLostError
from backhaul.worker import current


def test_a_killed_worker_is_lost(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), backhaul.ray.cluster(2) as workers:
        value = rpc.remote("worker2", list, args=([1],))
        assert value.to_here() == [1]
        # A call of the driver, and one of the other worker.
        waiting = [
            workers[1].rpc_async(parts.sleep, (100,)),
            workers[0].rpc_async(rpc.rpc_sync, ("worker2", parts.sleep, (100,))),
        ]
        eventually(lambda: current().agent.counts()[1].get(2, 0) >= 2)
        began = time.monotonic()
        os.kill(workers[1].pid, 9)
        for each in waiting:
            with pytest.raises(WorkerLostError, match="worker 'worker2'"):
                each.wait()
        assert time.monotonic() - began < 2.0
        eventually(lambda: not workers[1].alive)
        with pytest.raises(WorkerLostError, match="worker 'worker2'"):
            value.to_here()
        with pytest.raises(WorkerLostError, match="worker 'worker2'"):
            workers[1].rpc_sync(os.getpid)
        assert workers[0].rpc_sync(os.getpid) == workers[0].pid
        assert "the actor is dead because its worker process has died" in repr(workers[1])
    assert "worker 'worker2' is lost: it has ended; Ray says: the actor is dead" in caplog.text


def test_a_worker_comes_back_as_a_new_incarnation(nodes: Any, tmp_path: Path) -> None:
    """The replacement has its name and rank; `on_rejoin` restores its part; references to the old values raise."""
    torch.save(torch.full((2,), 7.0), tmp_path / "part.pt")
    restored: list[str] = []
    joined: list[str] = []

    def restore(worker: backhaul.ray.RayWorker) -> None:
        worker.rpc_sync(parts.keep, ("part", torch.load(tmp_path / "part.pt")))
        restored.append(worker.name)

    with backhaul.ray.cluster(2, restarts=1, on_rejoin=restore) as workers:
        rpc.on_joined(lambda worker: joined.append(worker.name))
        victim = workers[0]
        pid, incarnation = victim.pid, current().agent.membership.find("worker1").incarnation
        victim.rpc_sync(parts.keep, ("part", "something else"))
        old = rpc.remote("worker1", parts.fetch, args=("part",))
        assert old.to_here() == "something else"
        os.kill(pid, 9)
        again = rpc.rpc_sync("worker1", os.getpid, retry=rpc.Retry(1, within=200))
        eventually(lambda: restored, 200)
        assert again == victim.pid != pid
        assert (restored, joined, victim.info.id) == (["worker1"], ["worker1"], 1)
        assert current().agent.membership.find("worker1").incarnation != incarnation
        assert victim.rpc_sync(parts.fetch, ("part",)).tolist() == [7.0, 7.0]
        assert workers[1].rpc_sync(rpc.rpc_sync, ("worker1", parts.name_here)) == "worker1"
        with pytest.raises(WorkerLostError, match="has its place and none of its values"):
            old.to_here()
        # One more time than allowed.
        os.kill(victim.pid, 9)
        eventually(lambda: not victim.alive)
        with pytest.raises(WorkerLostError, match="worker 'worker1'"):
            victim.rpc_sync(os.getpid)
        # A restart by hand always works.
        assert workers.restart("worker1") is victim
        assert victim.rpc_sync(os.getpid) == victim.pid
        assert restored == ["worker1", "worker1"]


def test_an_exception_of_on_rejoin_is_raised_at_the_end(nodes: Any) -> None:
    def spoil(worker: backhaul.ray.RayWorker) -> None:
        raise ValueError(f"no part for {worker.name}")

    def body() -> None:
        with backhaul.ray.cluster(1, restarts=1, on_rejoin=spoil) as workers:
            pid = workers[0].pid
            os.kill(pid, 9)
            assert rpc.rpc_sync("worker1", os.getpid, retry=rpc.Retry(1, within=200)) != pid
            eventually(lambda: workers._failures, 200)

    with pytest.raises(ValueError, match="no part for worker1"):
        body()


def test_a_node_that_dies(nodes: Any) -> None:
    """The node's workers are lost at once; Ray finds another node for them, once it is sure that theirs is dead."""
    doomed = patiently(lambda: nodes.add_node(**NODE, resources={"here": 2}))
    with backhaul.ray.cluster(2, resources={"CPU": 1, "here": 1}, restarts=1) as workers:
        assert {worker.node for worker in workers} == {doomed.node_id}
        pids = [worker.pid for worker in workers]
        waiting = [worker.rpc_async(parts.sleep, (100,)) for worker in workers]
        other = patiently(lambda: nodes.add_node(**NODE, resources={"here": 2}))
        try:
            nodes.remove_node(doomed, allow_graceful=False)
            for each in waiting:  # the processes end a second or two after they lose their raylet
                with pytest.raises(WorkerLostError, match=r"worker 'worker[12]'"):
                    each.wait()
            eventually(lambda: all(worker.alive and worker.node == other.node_id for worker in workers), 200)
            again = [rpc.rpc_sync(name, os.getpid, retry=rpc.Retry(1, within=200)) for name in ("worker1", "worker2")]
            assert again == [worker.pid for worker in workers]
            assert not set(again) & set(pids)
        finally:
            workers.close(graceful=False)
            nodes.remove_node(other)
    assert ray.is_initialized()
