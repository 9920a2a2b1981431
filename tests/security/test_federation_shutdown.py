"""A member that never shuts down, or claims to be busy, cannot keep another from leaving at its timeout."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from liars import federation

from backhaul import rpc
from backhaul.worker import Worker

TIMEOUT = 1.0
SOON = 5.0


def leave(worker: Worker) -> tuple[float, BaseException | None]:
    """Shut down. Returns how long it took, and what it raised."""
    began = time.monotonic()
    try:
        worker.shutdown(timeout=TIMEOUT)
    except BaseException as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


def test_a_member_that_does_not_shut_down() -> None:
    with federation(3) as workers, ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(leave, worker) for worker in workers[:2]]:
            seconds, error = future.result(SOON)
            assert isinstance(error, rpc.RpcTimeoutError)
            assert seconds < TIMEOUT + SOON
        assert workers[0].closed
        assert workers[1].closed


@pytest.mark.parametrize("liar", [0, 2], ids=["the leader", "another member"])
def test_a_member_that_says_that_it_is_busy_for_ever(liar: int) -> None:
    with federation(3) as workers, ThreadPoolExecutor(3) as threads:
        workers[liar].agent.idle_checks.append(lambda: False)
        outcomes = [future.result(SOON) for future in [threads.submit(leave, worker) for worker in workers]]
        # A worker that is later than the others finds that they have left.
        assert all(isinstance(error, rpc.RpcTimeoutError | rpc.WorkerLostError) for _, error in outcomes)
        assert isinstance(outcomes[0][1], rpc.RpcTimeoutError)
        assert f"'worker{liar}'" in str(outcomes[0][1])
        assert all(worker.closed for worker in workers)


def test_a_member_that_stays_silent() -> None:
    """The member has joined, and now answers nothing."""
    with federation(2) as workers, ThreadPoolExecutor(1) as threads:
        with workers[0].as_current():
            workers[0].agent.is_reachable(workers[1].info, SOON)
        for line in list(workers[1].agent.serving.lines):
            line.channel.next = lambda: None  # type: ignore[method-assign]
        seconds, error = threads.submit(leave, workers[0]).result(2 * SOON)
        assert isinstance(error, rpc.RpcTimeoutError)
        assert "'worker1'" in str(error)
        assert seconds < TIMEOUT + SOON
