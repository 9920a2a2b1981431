"""After the block nothing is left: no process, no actor, no placement group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import parts
import pytest
from eventually import eventually, living_actors, placements

import backhaul.ray
from backhaul import rpc
from backhaul.worker import current_or_none
from processes import assert_gone


def assert_nothing_left(pids: list[int]) -> None:
    assert_gone(pids)
    eventually(lambda: not living_actors() and not placements())


def test_the_end_of_the_block(nodes: Any) -> None:
    with backhaul.ray.cluster(2) as workers:
        pids = [worker.pid for worker in workers]
        under_way = workers[0].rpc_async(parts.sleep, (0.5,))
    assert under_way.done()  # close() waited for it
    assert current_or_none() is None
    assert not any(worker.alive for worker in workers)
    assert_nothing_left(pids)
    workers.close()


def test_a_body_that_raises(nodes: Any) -> None:
    pids: list[int] = []

    def body() -> None:
        with backhaul.ray.cluster(2) as workers:
            pids.extend(worker.pid for worker in workers)
            workers[0].rpc_async(parts.sleep, (1000,))
            raise ValueError("spoiled")

    with pytest.raises(ValueError, match="spoiled"):
        body()
    assert len(pids) == 2
    assert current_or_none() is None
    assert_nothing_left(pids)


def test_a_worker_that_does_not_start(nodes: Any, tmp_path: Path) -> None:
    """As on a node without the package."""
    (tmp_path / "backhaul.py").write_text("raise ModuleNotFoundError('not installed on this node')")
    with pytest.raises(rpc.WorkerLostError, match=r"(?s)worker 'worker1' is lost; Ray says: .*not installed"):
        backhaul.ray.cluster(1, env={"PYTHONPATH": str(tmp_path)})
    assert current_or_none() is None
    assert_nothing_left([])


DRIVER = """
import signal, sys
import ray, backhaul.ray
ray.init(address=sys.argv[1], log_to_driver=False)
with backhaul.ray.cluster(2) as workers:
    print(*[worker.pid for worker in workers], flush=True)
    signal.pause()
"""


def test_a_driver_that_is_killed(nodes: Any, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    with subprocess.Popen([sys.executable, script, nodes.address], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert len(living_actors()) == 2
        os.kill(driver.pid, signal.SIGKILL)
    assert_nothing_left(pids)
