"""Shared by the tests of the end of passes: models with and without gates, and conditions to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from acts import chain, fork, work
from models import WITHIN
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.testing import InProcessCluster

GONE = "Could not find autograd context with id"


def await_idle(workers: InProcessCluster) -> None:
    """Return when no gate waits and nothing runs on any worker; fail if that takes too long."""
    deadline = time.monotonic() + WITHIN
    while any(worker.autograd.counts()["gates"] or not worker.autograd.engine.idle() for worker in workers):
        assert time.monotonic() < deadline, [worker.autograd.counts() for worker in workers]
        threading.Event().wait(0.001)


def await_gates(worker: Any, count: int) -> None:
    deadline = time.monotonic() + WITHIN
    while worker.autograd.counts()["gates"] != count:
        assert time.monotonic() < deadline, worker.autograd.counts()
        threading.Event().wait(0.001)


def later(work: Callable[[], Any]) -> Future[Any]:
    """Run the function on a new thread. Returns a future of its result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def backward_later(workers: InProcessCluster, rank: int, ctx: int, loss: Tensor, **options: Any) -> Future[Any]:
    def run() -> None:
        with workers[rank].as_current():
            dist_autograd.backward(ctx, [loss], **options)

    return later(run)


def nothing_is_left(workers: InProcessCluster, *ranks: int) -> None:
    """Return when these workers have no contexts, passes and gates; fail if that takes too long."""
    deadline = time.monotonic() + WITHIN
    for worker in (workers[rank] for rank in ranks):
        while any(worker.autograd.counts().values()) or not worker.autograd.engine.idle():
            assert time.monotonic() < deadline, (worker, worker.autograd.counts())
            threading.Event().wait(0.001)


def chain_of_two(x: Tensor) -> Tensor:
    return chain([("worker1", "a"), ("worker2", "b")], x)


def remote_fork(x: Tensor) -> Tensor:
    y: Tensor = rpc.rpc_sync("worker1", fork, args=("y", [("worker2", "b"), ("worker3", "c")], x))
    return y


def local_fork(x: Tensor) -> Tensor:
    return fork("y", [("worker1", "b"), ("worker2", "c")], x)


def backward_via(ctx: int, to: str, x: Tensor) -> None:
    dist_autograd.backward(ctx, [rpc.rpc_sync(to, work, args=("b", x)).sum()])


def times_out(ctx: int, loss: Tensor, seconds: float = 0.3, **options: Any) -> None:
    start = time.monotonic()
    with pytest.raises(rpc.RpcTimeoutError, match="timeout"):
        dist_autograd.backward(ctx, [loss], timeout=seconds, **options)
    assert seconds <= time.monotonic() - start < seconds + 1.5
