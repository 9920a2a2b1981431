"""Calls over slow links, or to a peer that does not read: small calls pass large ones, and deadlines hold."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from callees import identity

from backhaul import rpc
from backhaul.errors import QuotaError, RpcTimeoutError, WorkerLostError
from backhaul.options import Quotas
from backhaul.worker import Worker
from crew import Crew
from slow_link import slow_cluster

PATIENCE = 60.0
MEGABIT = 125_000


def numel(tensor: torch.Tensor) -> int:
    return tensor.numel()


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


async def ones_later(count: int) -> torch.Tensor:
    await asyncio.sleep(0)
    return torch.ones(count)


begun: list[int] = []


def counted_ones(count: int) -> torch.Tensor:
    begun.append(count)
    return torch.ones(count)


async def nothing() -> None:
    await asyncio.sleep(0)


kept: list[torch.Tensor] = []


async def kept_later() -> torch.Tensor:
    await asyncio.sleep(0)
    return kept[0]


@rpc.expose
def exposed_ones(count: int) -> torch.Tensor:
    return torch.ones(count)


@rpc.expose
async def exposed_slowly(count: int) -> torch.Tensor:
    await asyncio.sleep(0.3)
    return torch.ones(count)


# What the processes of a crew run.

asked: list[Any] = []


def ask(times: int, count: int) -> None:
    asked.extend(rpc.rpc_async("worker0", ones, (count,), timeout=PATIENCE) for _ in range(times))


def take_all() -> list[int]:
    return [future.wait().numel() for future in asked]


def call_often(times: int) -> None:
    for number in range(times):
        assert rpc.rpc_sync("worker0", identity, (number,)) == number


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def threads() -> int:
    return threading.active_count()


# The tests.


def timed(call: Callable[[], Any]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def is_congested(worker: Worker, to: str) -> bool:
    return any(
        line._unflushed for line in [*worker.agent.calling(), *worker.agent.serving.lines] if line.peer.name == to
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_slow_link_is_alive_and_small_calls_pass_large_ones() -> None:
    """1 MiB at 4 Mbit/s takes 2 s, four times as long as a peer may be silent."""
    big = torch.arange(1 << 18, dtype=torch.float32)
    with slow_cluster(2, 4 * MEGABIT, unresponsive_after=0.5) as workers, ThreadPoolExecutor(1) as pool:
        caller = workers[0]
        caller.rpc_sync("worker1", identity, (1,))
        sending = pool.submit(caller.rpc_sync, "worker1", numel, (big,), timeout=PATIENCE)
        until(lambda: is_congested(caller, "worker1"))
        took = []
        while not sending.done():
            took.append(timed(lambda: caller.rpc_sync("worker1", identity, (1,), timeout=PATIENCE)))
        assert sending.result(PATIENCE) == big.numel()
        assert len(took) > 3
        assert sorted(took)[len(took) // 2] < 1.0
        # The same in the other direction, with replies.
        future = caller.rpc_async("worker1", ones, (1 << 18,), timeout=PATIENCE)
        until(lambda: is_congested(workers[1], "worker0"))
        assert timed(lambda: caller.rpc_sync("worker1", identity, (1,), timeout=PATIENCE)) < 1.5
        assert not future.done()
        assert torch.equal(future.wait(), torch.ones(1 << 18))


def test_deadlines_hold_behind_a_large_send_and_the_connection_stays_good() -> None:
    big = torch.ones(1 << 20)
    with slow_cluster(2, 2 * MEGABIT) as workers, ThreadPoolExecutor(1) as pool:
        caller = workers[0]
        caller.rpc_sync("worker1", identity, (1,))
        line = caller.agent.calling()[0]
        sending = pool.submit(caller.rpc_sync, "worker1", numel, (big,), timeout=2.0)
        until(lambda: is_congested(caller, "worker1"))

        def late(call: Callable[..., Any]) -> None:
            with pytest.raises(RpcTimeoutError, match="worker1"):
                call("worker1", numel, (big,), timeout=0.5)

        assert timed(lambda: late(caller.rpc_sync)) < 1.5
        assert timed(lambda: late(caller.rpc_async)) < 1.5
        assert timed(lambda: caller.rpc_async("worker1", identity, (1,)).wait()) < 2.0
        with pytest.raises(RpcTimeoutError):
            sending.result(PATIENCE)
        # The first call had begun, so it is sent; the others were withdrawn. Only replies came that no thread awaits.
        for forwarder in workers.forwarders:
            forwarder.rate = None
        assert caller.rpc_sync("worker1", numel, (big,), timeout=PATIENCE) == big.numel()
        assert caller.agent.calling() == [line]
        served = next(line for line in workers[1].agent.serving.lines)
        until(lambda: line.calls_sent == line.calls_settled == served.calls_finished)


def test_two_workers_that_send_to_each_other_do_not_wait_for_each_other() -> None:
    big = torch.arange(1 << 19, dtype=torch.float32)
    with slow_cluster(2, 64 * MEGABIT) as workers, ThreadPoolExecutor(4) as pool:
        sent = [
            pool.submit(workers[rank % 2].rpc_sync, f"worker{1 - rank % 2}", identity, (big,), timeout=PATIENCE)
            for rank in range(4)
        ]
        assert all(torch.equal(each.result(PATIENCE), big) for each in sent)


def test_late_replies_do_not_keep_the_thread_of_the_coroutines() -> None:
    with slow_cluster(3, 4 * MEGABIT) as workers:
        slow, other = workers[0], workers[2]
        other.rpc_sync("worker1", nothing)
        futures = [slow.rpc_async("worker1", ones_later, (1 << 17,), timeout=PATIENCE) for _ in range(3)]
        until(lambda: is_congested(workers[1], "worker0"))
        other.rpc_sync("worker1", nothing, timeout=PATIENCE)
        assert not all(future.done() for future in futures)
        assert all(torch.equal(future.wait(), torch.ones(1 << 17)) for future in futures)


def test_a_late_reply_keeps_its_value_from_the_coroutine_s_return() -> None:
    with slow_cluster(2, 4 * MEGABIT) as workers:
        caller = workers[0]
        caller.rpc_sync("worker1", nothing)
        kept.append(torch.zeros(1 << 17))
        futures = [caller.rpc_async("worker1", kept_later, timeout=PATIENCE) for _ in range(2)]
        until(lambda: is_congested(workers[1], "worker0") and workers[1].agent.serving.lines.copy().pop().unsent > 0)
        kept.pop().fill_(1.0)
        assert all(torch.equal(future.wait(), torch.zeros(1 << 17)) for future in futures)


def test_a_peer_that_does_not_read_costs_little_and_the_others_nothing() -> None:
    """worker1 asks for 160 MiB and is stopped. worker0 buffers only a few MiB, and serves worker2 as before."""
    with Crew(3, segment_pool_bytes=0, max_unsent_bytes=16 << 20) as crew:
        before = crew[0].run(resident)
        crew[1].run(ask, 40, 1 << 20)
        crew[1].signal(signal.SIGSTOP)
        crew[2].run(call_often, 200)
        assert crew[0].run(resident) - before < 64 << 20
        assert crew[0].run(threads) < 40
        crew[1].signal(signal.SIGCONT)
        assert crew[1].run(take_all) == [1 << 20] * 40


def test_requests_do_not_begin_while_many_replies_wait_to_be_sent() -> None:
    """The first reply takes 2 s. By then, all requests have come."""
    begun.clear()
    with slow_cluster(2, 4 * MEGABIT, max_unsent_bytes=1 << 20) as workers:
        caller = workers[0]
        caller.rpc_sync("worker1", identity, (1,))
        futures = [caller.rpc_async("worker1", counted_ones, (1 << 18,), timeout=PATIENCE) for _ in range(60)]
        assert futures[0].wait().numel() == 1 << 18
        assert len(begun) < 30, "more than a few MiB of replies wait"
        for forwarder in workers.forwarders:
            forwarder.rate = None
        assert [future.wait().numel() for future in futures] == begun


def test_a_peer_that_takes_nothing_is_lost_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with slow_cluster(2, None, unresponsive_after=1) as workers:
        workers[0].rpc_sync("worker1", identity, (1,))
        for forwarder in workers.forwarders:
            forwarder.rate = 2 * MEGABIT
        future = workers[0].rpc_async("worker1", ones, (1 << 20,), timeout=PATIENCE)
        until(lambda: is_congested(workers[1], "worker0"))
        for forwarder in workers.forwarders:
            forwarder.hold()
        with pytest.raises(WorkerLostError, match="worker1"):
            future.wait()
        until(lambda: not workers[1].agent.serving.lines)
        assert any("it has taken nothing of a message" in record.getMessage() for record in caplog.records)


def test_all_threads_that_wait_to_send_learn_that_the_connection_has_ended() -> None:
    """One thread writes, and the others wait for their turn: none of them stays until its deadline."""
    big = torch.ones(1 << 20)
    with slow_cluster(2, None) as workers, ThreadPoolExecutor(3) as pool:
        caller = workers[0]
        caller.rpc_sync("worker1", identity, (1,))
        for forwarder in workers.forwarders:
            forwarder.hold()
        (line,) = caller.agent.calling()
        sending = [pool.submit(caller.rpc_sync, "worker1", numel, (big,), timeout=PATIENCE) for _ in range(3)]
        until(lambda: line.unsent >= 2 * big.nbytes)
        line.shutdown()
        for each in sending:
            with pytest.raises(WorkerLostError, match="worker1"):
                each.result(PATIENCE / 3)


def test_a_call_counts_in_the_quota_until_its_reply_has_left() -> None:
    quotas = Quotas(calls=2)
    with slow_cluster(2, 2 * MEGABIT, trust="federation", quotas=quotas) as workers:
        caller = workers[0]
        caller.rpc_sync("worker1", exposed_ones, (1,))
        futures = [caller.rpc_async("worker1", exposed_slowly, (1 << 18,), timeout=PATIENCE) for _ in range(2)]
        until(lambda: is_congested(workers[1], "worker0") and not workers[1].agent.activity.late)
        with pytest.raises(QuotaError, match="2 calls of this peer are under way"):
            caller.rpc_sync("worker1", exposed_ones, (1,), timeout=PATIENCE)
        for forwarder in workers.forwarders:
            forwarder.rate = None
        assert all(future.wait().numel() == 1 << 18 for future in futures)
        assert caller.rpc_sync("worker1", exposed_ones, (1,), timeout=PATIENCE).numel() == 1


meetings: dict[str, threading.Barrier] = {}


@rpc.expose
def exposed_meet(name: str, seconds: float) -> bool:
    """Whether all calls of that name have run at the same time."""
    try:
        meetings[name].wait(seconds)
    except threading.BrokenBarrierError:
        return False
    return True


def test_calls_of_a_peer_that_does_not_read_run_one_at_a_time() -> None:
    """If the calls ran side by side, the results of all of them would be in memory at the same time."""
    with slow_cluster(2, None, trust="federation") as workers:
        caller = workers[0]
        meetings["reading"], meetings["not reading"] = threading.Barrier(2), threading.Barrier(2)
        both = [caller.rpc_async("worker1", exposed_meet, ("reading", PATIENCE), timeout=PATIENCE) for _ in range(2)]
        assert all(future.wait() for future in both)
        for forwarder in workers.forwarders:
            forwarder.rate = MEGABIT
        large = caller.rpc_async("worker1", exposed_ones, (1 << 20,), timeout=PATIENCE)
        until(lambda: is_congested(workers[1], "worker0"))
        apart = [caller.rpc_async("worker1", exposed_meet, ("not reading", 0.5), timeout=PATIENCE) for _ in range(2)]
        assert not any(future.wait() for future in apart)
        for forwarder in workers.forwarders:
            forwarder.rate = None
        assert large.wait().numel() == 1 << 20


def test_a_federation_refuses_replies_that_pile_up() -> None:
    with slow_cluster(2, 2 * MEGABIT, trust="federation", max_unsent_bytes=3 << 20) as workers:
        caller = workers[0]
        caller.rpc_sync("worker1", exposed_ones, (1,))
        futures = [caller.rpc_async("worker1", exposed_slowly, (1 << 18,), timeout=PATIENCE) for _ in range(8)]
        until(lambda: sum(future.done() for future in futures) >= 3)
        for forwarder in workers.forwarders:
            forwarder.rate = None
        outcomes, refusals = [], []
        for future in futures:
            try:
                outcomes.append(future.wait().numel())
            except QuotaError as error:
                refusals.append(str(error))
        assert outcomes == [1 << 18] * len(outcomes)
        assert 3 <= len(outcomes) <= 5
        assert all("worker1" in text and "max_unsent_bytes" in text for text in refusals)
