"""Other drivers: one outside the group, for which Ray runs functions, and one that is an actor itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import parts
import pytest
import ray
import torch
from eventually import eventually

import backhaul.ray
from backhaul.errors import MisuseError, RpcTimeoutError, WorkerLostError
from backhaul.worker import current_or_none


@pytest.fixture
def workers(nodes: Any) -> Iterator[backhaul.ray.RayCluster]:
    with backhaul.ray.cluster(2, driver=False, restarts=1, on_rejoin=restore) as found:
        yield found


def restore(worker: backhaul.ray.RayWorker) -> None:
    worker.run(parts.keep, ("restored", True))


def test_a_driver_outside(workers: backhaul.ray.RayCluster) -> None:
    assert current_or_none() is None
    assert [worker.name for worker in workers] == ["worker0", "worker1"]
    assert workers.run(parts.name_here) == ["worker0", "worker1"]
    assert workers.run(parts.peer_sum, ("worker0", torch.ones(3))) == [3.0, 3.0]
    assert workers[1].run(os.getpid) == workers[1].pid
    with pytest.raises(MisuseError, match=r"not in the group of worker 'worker0' .*: run functions .* with run\(\)"):
        workers[0].rpc_sync(os.getpid)
    with pytest.raises(ValueError, match="spoiled"):
        workers.run(parts.fail, ("spoiled",))
    with pytest.raises(RpcTimeoutError, match=r"run\(\): worker 'worker0', 'worker1' had not returned after 0.2 s"):
        workers.run(parts.sleep, (3.0,), timeout=0.2)
    # Rank 0 is an ordinary worker, and may be lost.
    pid = workers[0].pid
    os.kill(pid, 9)
    with pytest.raises(WorkerLostError, match="worker 'worker0' is lost"):
        workers.run(parts.peer_sum, ("worker0", torch.ones(3)))
    eventually(lambda: workers[0].alive and workers[0].pid != pid, 200)
    eventually(lambda: workers[0].run(parts.fetch, ("restored",)))
    assert workers.run(parts.peer_sum, ("worker0", torch.ones(3))) == [3.0, 3.0]


def test_only_the_failure_that_is_raised_is_shown(
    workers: backhaul.ray.RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray prints each failure that nobody asks for, with its traceback."""
    from ray._private import worker

    printed: list[str] = []
    monkeypatch.setattr(worker.logger, "error", lambda text, *args: printed.append(text))
    for _ in range(3):
        with pytest.raises(ValueError, match="spoiled"):
            workers.run(parts.fail, ("spoiled",))
    gc.collect()
    workers.run(parts.name_here)
    gc.collect()
    assert printed == []


@ray.remote(num_cpus=0)
class Trial:
    """An actor that drives workers of its own, such as a trial of Ray Tune."""

    def run(self) -> tuple[float, list[str]]:
        with backhaul.ray.cluster(2) as workers:
            return workers[1].rpc_sync(parts.peer_sum, ("worker1", torch.ones(3))), [each.name for each in workers]


def test_a_driver_that_is_an_actor(nodes: Any) -> None:
    trial = Trial.remote()
    assert ray.get(trial.run.remote()) == (3.0, ["worker1", "worker2"])
    assert ray.get(trial.run.remote()) == (3.0, ["worker1", "worker2"])  # it has left the first group
    ray.kill(trial)
