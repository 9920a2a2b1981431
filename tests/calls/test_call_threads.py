"""Nested calls, and threads that make calls at the same time."""

from __future__ import annotations

import math
import operator
import queue
import threading
import time

import pytest
import torch
from callees import bounce, identity, open_gate, wait_for_gate, who

from backhaul.agent.line import Line
from backhaul.agent.pending import Slot
from backhaul.rpc import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import encode, join
from backhaul.wire.messages import Call, Ping, Result


def test_200_nested_calls_in_a_cycle(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", bounce, args=("worker1", "worker0", 200)) == 200


def test_many_threads_nest_at_once() -> None:
    with InProcessCluster(2, options=RpcOptions(num_worker_threads=1)) as workers:
        results: list[int] = []

        def call(index: int) -> None:
            me, other = ("worker0", "worker1") if index % 2 else ("worker1", "worker0")
            results.append(workers[index % 2].rpc_sync(other, bounce, args=(other, me, 10)))

        threads = [threading.Thread(target=call, args=(i,)) for i in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [10] * 30


@pytest.mark.parametrize("count", [1, 40])
def test_blocked_requests_do_not_starve_the_one_that_frees_them(gate: str, count: int) -> None:
    with InProcessCluster(2, options=RpcOptions(num_worker_threads=2)) as workers:
        blocked = [workers[0].rpc_async("worker1", wait_for_gate, args=(gate,)) for _ in range(count)]
        workers[0].rpc_sync("worker1", open_gate, args=(gate,), timeout=15)
        assert all(future.wait() for future in blocked)


def test_a_burst_of_slow_requests_makes_few_threads() -> None:
    with InProcessCluster(2, options=RpcOptions(num_worker_threads=4)) as workers:
        futures = [workers[0].rpc_async("worker1", spin, args=(0.01,)) for _ in range(100)]
        torch.futures.wait_all(futures)
        assert workers[1].agent.pool.size < 20


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.long
def test_large_messages_both_ways_at_once(pair: InProcessCluster) -> None:
    """The messages are so large that neither side can write everything before it reads."""
    x = torch.randn(4_000_000)
    futures = [pair[i % 2].rpc_async(f"worker{1 - i % 2}", identity, args=(x,)) for i in range(8)]
    for future in futures:
        assert torch.equal(future.wait(), x)


def test_replies_are_read_while_a_request_does_not_fit(pair: InProcessCluster) -> None:
    x = torch.randn(2_000_000)
    futures = [pair[0].rpc_async("worker1", identity, args=(x,)) for _ in range(10)]
    assert all(torch.equal(future.wait(), x) for future in futures)


def test_threads_share_one_peer(pair: InProcessCluster) -> None:
    wrong: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for i in range(100):
            got = pair[0].rpc_sync("worker1", operator.add, args=(thread * 1000, i))
            if got != thread * 1000 + i:
                wrong.append((thread, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_thread_that_does_not_need_the_role_of_reader_passes_it_on() -> None:
    """The first thread reads its own reply and that of the second, which is next in line to read, but is done."""
    asked: queue.SimpleQueue[tuple[Line, int]] = queue.SimpleQueue()

    def handle(line: Line, envelope: Envelope) -> None:
        line.count_finished(releases=False)
        asked.put((line, envelope.message.id))

    with InProcessCluster(2, options=RpcOptions(unresponsive_after=None)) as workers:
        assert workers[0].rpc_sync("worker1", who) == "worker1"
        workers[1].agent.register(Call, handle)
        for _ in range(5):
            results: queue.SimpleQueue[int] = queue.SimpleQueue()

            def call(results: queue.SimpleQueue[int] = results) -> None:
                results.put(workers[0].rpc_sync("worker1", who, timeout=20))

            requests = []
            threads = [threading.Thread(target=call) for _ in range(3)]
            for thread in threads:
                thread.start()
                requests.append(asked.get(timeout=10))
            line, _ = requests[0]
            first, second, third = (encode(Result(id, number)) for number, (_, id) in enumerate(requests))
            line.reply(join([first, second]), 2)
            assert {results.get(timeout=10), results.get(timeout=10)} == {0, 1}
            line.reply(third)
            assert results.get(timeout=10) == 2
            for thread in threads:
                thread.join(10)


def test_no_thread_waits_for_a_reply_that_another_thread_has_read(
    pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is done before its reading thread gives up the role of reader, so its caller never waits for the role."""
    assert pair[0].rpc_sync("worker1", who) == "worker1"
    line = pair[0].agent._route(1, math.inf)
    entered, release = threading.Event(), threading.Event()

    def read_until_done() -> None:
        while not slot.done:
            line.drain()

    stop_reading = line.stop_reading

    def stop_late(token: int) -> bool:
        if slot.done and threading.current_thread() is reader:
            entered.set()
            assert release.wait(20)
        return stop_reading(token)

    slot = Slot(10_000, "a ping", math.inf, is_call=False)
    line._state.open(slot, watched=False)
    line.post(encode(Ping(slot.id)))
    line.channel.wait(read=True, write=False, timeout=10)
    monkeypatch.setattr(line, "stop_reading", stop_late)
    reader = threading.Thread(target=read_until_done)
    reader.start()
    assert entered.wait(10)
    start = time.monotonic()
    line.wait(slot)
    assert time.monotonic() - start < 2
    release.set()
    reader.join(10)
