"""Calls that may be repeated are repeated after a loss, and for no other reason."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError, OptionError, UnknownWorkerError, WorkerLostError
from backhaul.rpc import Retry
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Call, Result

runs: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    runs.clear()


def count(name: str) -> int:
    runs[name] += 1
    return runs[name]


def fail() -> None:
    runs["fail"] += 1
    raise ValueError("no")


def lose_another() -> None:
    runs["lose_another"] += 1
    raise WorkerLostError("worker 'worker7' is lost: it is in this test only", "worker7")


@pytest.mark.parametrize("retry", [1, Retry(1), Retry(3, within=20.0)])
@pytest.mark.parametrize("lost", [Call, Result])
def test_a_lost_call_is_repeated(lost: type[Any], retry: Any) -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as pair:
        pair[0].rpc_sync("worker1", count, args=("first",))
        faults.next("cut", lost)
        assert pair[0].rpc_sync("worker1", count, args=("call",), retry=retry) == (1 if lost is Call else 2)
        faults.next("cut", lost)
        # The cut Result may be the answer to a ping after the first loss: then the call is made once.
        made = pair[0].rpc_async("worker1", count, args=("future",), retry=retry).wait()
        assert made in ((1,) if lost is Call else (1, 2))


def test_without_retry_a_lost_call_is_not_repeated() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as pair:
        pair[0].rpc_sync("worker1", count, args=("first",))
        faults.next("cut", Result)
        with pytest.raises(WorkerLostError):
            pair[0].rpc_sync("worker1", count, args=("call",))
        assert runs["call"] == 1


def test_a_lost_call_is_repeated_at_most_as_often_as_given() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as pair:
        for call in (pair[0].rpc_sync, lambda *args, **kwargs: pair[0].rpc_async(*args, **kwargs).wait()):
            runs.clear()
            for _ in range(3):
                faults.next("cut", Call)
            with pytest.raises(WorkerLostError) as refusal:
                call("worker1", count, args=("call",), retry=2)
            assert refusal.value.worker == "worker1"
            assert call("worker1", count, args=("call",)) == 1


@pytest.mark.parametrize("function", [fail, lose_another])
def test_an_exception_of_the_function_is_not_retried(function: Any) -> None:
    with InProcessCluster(2) as pair:
        with pytest.raises((ValueError, WorkerLostError)):
            pair[0].rpc_sync("worker1", function, retry=5)
        with pytest.raises((ValueError, WorkerLostError)):
            pair[0].rpc_async("worker1", function, retry=5).wait()
        assert runs[function.__name__] == 2


def test_a_retry_waits_for_the_replacement() -> None:
    with InProcessCluster(3) as three:
        three[0].rpc_sync("worker2", count, args=("first",))
        three[2].shutdown(graceful=False)
        future = three[0].rpc_async("worker2", count, args=("future",), retry=5)
        values: list[int] = []
        thread = threading.Thread(
            target=lambda: values.append(three[0].rpc_sync("worker2", count, args=("call",), retry=5))
        )
        thread.start()
        assert not future.done()
        three.restart(2)
        assert future.wait() == 1
        thread.join(20)
        assert values == [1]
        assert asyncio.run(_awaited(three)) == 2


async def _awaited(three: InProcessCluster) -> int:
    result: int = await three[0].rpc_async("worker2", count, args=("call",), retry=5)
    return result


def test_a_retry_waits_no_longer_than_its_limit() -> None:
    with InProcessCluster(2) as pair:
        pair[1].shutdown(graceful=False)
        began = time.monotonic()
        with pytest.raises(WorkerLostError):
            pair[0].rpc_sync("worker1", count, args=("call",), retry=Retry(100, within=0.3))
        with pytest.raises(WorkerLostError):
            pair[0].rpc_async("worker1", count, args=("call",), retry=Retry(100, within=0.3)).wait()
        assert 0.6 <= time.monotonic() - began < 10


def test_a_worker_that_shuts_down_does_not_wait_for_its_retries() -> None:
    with InProcessCluster(2) as pair:
        pair[1].shutdown(graceful=False)
        future = pair[0].rpc_async("worker1", count, args=("call",), retry=Retry(100, within=60.0))
        pair[0].shutdown(graceful=False)
        with pytest.raises(WorkerLostError):
            future.wait()


def test_a_changed_argument_is_noticed() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as pair:
        pair[0].rpc_sync("worker1", count, args=("first",))
        x = torch.ones(3)
        pair[1].shutdown(graceful=False)
        future = pair[0].rpc_async("worker1", torch.sum, args=(x,), retry=2)
        x.add_(1)
        pair.restart(1)
        with pytest.raises(MisuseError, match="has been changed in place since it was made"):
            future.wait()


def test_a_retry_inside_a_context_is_refused() -> None:
    """The lost attempt may have recorded something, so the whole context must be repeated."""
    with InProcessCluster(2) as pair, pair[0].as_current():
        with dist_autograd.context():
            for call in (rpc.rpc_sync, rpc.rpc_async):
                with pytest.raises(MisuseError, match="repeat the whole `with context"):
                    call("worker1", torch.ones, args=(2,), retry=1)
        assert rpc.rpc_sync("worker1", torch.ones, args=(2,), retry=1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("retry", [-1, 1.5, "2", True, (1, 2)])
def test_an_invalid_number_of_retries_is_refused(retry: Any) -> None:
    with InProcessCluster(1) as alone, pytest.raises(OptionError, match="must be a whole number of repetitions"):
        alone[0].rpc_sync("worker0", count, args=("call",), retry=retry)


@pytest.mark.parametrize("within", [0, -1.0, True, "soon", float("nan")])
def test_an_invalid_time_limit_is_refused(within: Any) -> None:
    with pytest.raises(OptionError, match="must be a number of seconds"):
        Retry(1, within)


def test_misuse_is_raised_at_once() -> None:
    with InProcessCluster(1) as alone:
        with pytest.raises(UnknownWorkerError):
            alone[0].rpc_async("nobody", count, args=("call",), retry=3)
        alone[0].shutdown()
