"""A profile over real processes, also when one of them dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_reading import Reading

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.cluster import Cluster
from backhaul.errors import MisuseError, WorkerLostError
from backhaul.profiler import profile

SECONDS = 0.2


def work(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x @ x)
    return x


def pass_on(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", work, args=(x,))


def count(seconds: float) -> int:
    """Compute in Python."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
    return number


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with backhaul.cluster(2, output=False, env={"PYTHONPATH": os.path.dirname(__file__)}) as started:
        yield started


def test_a_profile_over_processes(workers: Cluster, tmp_path: Path) -> None:
    x = torch.rand(64, 64, requires_grad=True)
    rpc.rpc_sync("worker1", pass_on, args=(x,))
    with profile(workers=[workers[0], "worker2"]) as prof, dist_autograd.context() as context:
        value = rpc.rpc_sync("worker1", pass_on, args=(x * 2,))
        dist_autograd.backward(context, [value.sum()])
        slow = rpc.rpc_async("worker1", sleep, args=(SECONDS,))
        futures = [rpc.rpc_async("worker2", count, args=(SECONDS,)) for _ in range(4)]
        for future in (slow, *futures):
            future.wait()
    prof.export_chrome_trace(tmp_path / "trace.json")
    reading = Reading(tmp_path / "trace.json")
    assert sorted(reading.processes) == ["driver", "worker1", "worker2"]
    reading.assert_nested()
    pids = {name: about["pid"] for name, about in reading.about["workers"].items()}
    assert pids == {"driver": os.getpid(), "worker1": workers[0].pid, "worker2": workers[1].pid}
    calls = reading.slices("backhaul.call")
    arrows = {arrow.source: arrow for arrow in reading.arrows() if arrow.name == "call"}
    assert len([call for call in calls if call.args["is_call"]]) == 7
    for call in calls:
        assert arrows[call].target.process == call.args["peer"]
        assert call.holds(arrows[call].target)
    function = next(each for each in reading.slices("backhaul.function", "worker2") if each.name == "work")
    inside = [each for each in reading.slices("cpu_op", "worker2", "aten::mm") if function.holds(each)]
    assert len(inside) == 3
    assert {each.thread for each in inside} == {function.thread}
    reading.arrows("fwdbwd")
    gradients = [arrow for arrow in reading.arrows() if arrow.name == "gradients"]
    ways = {(arrow.source.process, arrow.target.process) for arrow in gradients}
    assert ways == {("driver", "worker1"), ("worker1", "worker2"), ("worker2", "worker1"), ("worker1", "driver")}

    summary = prof.summary()
    for each in summary.workers:
        assert sum(each.seconds.values()) == pytest.approx(each.wall, rel=0.05)
    # worker1 sleeps in a function, which counts as compute; worker2 has four threads that want one interpreter.
    assert summary["worker1"].seconds["compute"] > 0.9 * SECONDS
    print(summary)  # shown if the test fails
    assert summary["worker1"].seconds["interpreter"] < 0.1 * SECONDS
    assert summary["worker2"].seconds["interpreter"] > 0.5 * SECONDS
    assert summary["driver"].seconds["replies"] > 0.8 * SECONDS
    functions = [segment.seconds for segment in summary.chain.segments if segment.what in ("count", "sleep")]
    assert sum(functions) > 0.9 * SECONDS


def test_a_worker_that_dies_is_named_and_the_others_are_there(workers: Cluster) -> None:
    def block() -> profile:
        with profile(clock_rounds=2) as prof:
            rpc.rpc_sync("worker1", work, args=(torch.rand(8, 8),))
            os.kill(workers[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError):
                rpc.rpc_sync("worker2", sleep, args=(60,))
        return prof

    with pytest.warns(RuntimeWarning, match="lacks workers that were lost during it: worker 'worker2'"):
        prof = block()
    assert [each.worker for each in prof.summary().workers] == ["driver", "worker1"]
    assert prof.chrome_trace()["backhaul"]["lost"] == ["worker2"]
    assert {row.worker for row in prof.key_averages()} == {"driver", "worker1"}
    # A dead worker cannot be profiled any more.
    with pytest.raises(WorkerLostError, match="worker2"):
        profile(clock_rounds=1).__enter__()
    with profile(workers=["worker1"], clock_rounds=1):
        pass


def test_two_profiles_at_once(workers: Cluster) -> None:
    with profile(workers=["worker1"], clock_rounds=1):
        errors: list[Any] = []

        def other() -> None:
            try:
                rpc.rpc_sync("worker1", try_to_profile)
            except MisuseError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "worker 'worker1' is already being profiled by worker 'driver'" in errors[0]


def try_to_profile() -> None:
    with profile(workers=["driver"]):
        pass
