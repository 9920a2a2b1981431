"""The shipped scheduler: one seed gives one order of delivery, and results are right in any order."""

from __future__ import annotations

import operator
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from backhaul import functions
from backhaul.agent.future import Future
from backhaul.errors import RpcTimeoutError
from backhaul.rpc import get_worker_info, rpc_async, rpc_sync
from backhaul.testing import InProcessCluster, Scheduler, scheduler
from backhaul.transport.memory import MemoryChannel, Network

SOON = 20.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as necessary: on a busy machine a running request may look like a blocked one."""
    monkeypatch.setattr(scheduler, "PATIENCE", SOON)


# Remote functions.

seen: list[int] = []
gate = threading.Event()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    seen.clear()
    gate.clear()
    yield
    gate.set()


def note(number: int) -> int:
    seen.append(number)
    return number


def relay(path: list[int], value: int) -> int:
    """Pass a value along a path of workers; each adds its rank."""
    value += get_worker_info().id
    return rpc_sync(path[0], relay, args=(path[1:], value)) if path else value


def fan_out(depth: int) -> int:
    """Ask both other workers, at once, to do the same one level less deep; returns the total count."""
    if depth == 0:
        return 1
    me = get_worker_info().id
    futures = [rpc_async((me + step) % 3, fan_out, args=(depth - 1,)) for step in (1, 2)]
    return 1 + sum(future.wait() for future in futures)


def open_gate() -> str:
    gate.set()
    return "opened"


def pass_gate() -> str:
    assert gate.wait(SOON)
    return "passed"


def fail(text: str) -> None:
    raise ValueError(text)


@functions.async_execution
def add_later(to: int, value: int) -> Future[int]:
    return rpc_async(to, operator.add, args=(value, 1)).then(lambda done: done.value() * 10)


async def add_async(to: int, value: int) -> int:
    return await rpc_async(to, operator.add, args=(value, 1))


# The order.


def log_of(seed: int, depth: int = 2) -> list[str]:
    """The delivery order of a fixed program's messages."""
    with InProcessCluster(3, seed=seed) as workers:
        with workers.scheduler.hold():
            futures = [worker.rpc_async((rank + 1) % 3, fan_out, args=(depth,)) for rank, worker in enumerate(workers)]
        assert [future.wait() for future in futures] == [2 ** (depth + 1) - 1] * 3
        return list(workers.scheduler.log)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_seed_gives_the_same_order(seed: int) -> None:
    assert log_of(seed) == log_of(seed)


@functions.async_execution
def chain(path: list[int], value: int) -> Future[int]:
    """Call along a path from callbacks alone: no thread waits."""
    if len(path) == 1:
        return rpc_async(path[0], operator.add, args=(value, 1))
    return rpc_async(path[0], chain, args=(path[1:], value)).then(lambda done: done.value() + 1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_callbacks_count_as_effects(seed: int) -> None:
    def log() -> list[str]:
        with InProcessCluster(3, seed=seed) as workers:
            with workers.scheduler.hold():
                paths = ([1, 2, 0, 1], [2, 0, 1, 2], [0, 1, 2, 0])
                futures = [
                    workers[rank].rpc_async(path[0], chain, args=(path[1:], 0)) for rank, path in enumerate(paths)
                ]
            assert [future.wait() for future in futures] == [3] * 3
            return list(workers.scheduler.log)

    assert log() == log() == log()


@pytest.mark.usefixtures("patient")
def test_other_seeds_give_other_orders() -> None:
    logs = [tuple(log_of(seed)) for seed in range(6)]
    assert len(set(logs)) >= 5
    # The same messages, in another order.
    assert len({tuple(sorted(log)) for log in logs}) == 1


@pytest.mark.usefixtures("patient")
def test_the_log_names_the_receiving_channels() -> None:
    with InProcessCluster(2, seed=3) as workers:
        assert workers[0].rpc_sync("worker1", operator.add, args=(1, 2)) == 3
        assert workers.scheduler.log == ["1<-worker0", "worker0->1"]
        assert workers.scheduler.seed == 3


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(5))
def test_one_channel_keeps_its_order(seed: int) -> None:
    with InProcessCluster(3, seed=seed) as workers:
        with workers.scheduler.hold():
            futures = [
                worker.rpc_async("worker2", note, args=(100 * worker.info.id + number,))
                for number in range(10)
                for worker in workers[:2]
            ]
        for future in futures:
            future.wait()
    assert [number for number in seen if number < 100] == list(range(10))
    assert [number for number in seen if number >= 100] == list(range(100, 110))


@pytest.mark.usefixtures("patient")
def test_two_channels_are_interleaved_as_the_seed_says() -> None:
    orders = set()
    for seed in range(6):
        seen.clear()
        with InProcessCluster(3, seed=seed) as workers:
            with workers.scheduler.hold():
                futures = [workers[rank].rpc_async("worker2", note, args=(rank,)) for _ in range(4) for rank in (0, 1)]
            for future in futures:
                future.wait()
        orders.add(tuple(seen))
    assert len(orders) >= 4


# Holding.


def test_nothing_is_delivered_while_held() -> None:
    with InProcessCluster(2, seed=0) as workers:
        assert workers[0].rpc_sync("worker1", operator.add, args=(1, 2)) == 3
        before = list(workers.scheduler.log)
        with workers.scheduler.hold(), workers.scheduler.hold():
            future = workers[0].rpc_async("worker1", note, args=(1,))
            with pytest.raises(RpcTimeoutError):
                workers[0].rpc_sync("worker1", note, args=(2,), timeout=0.3)
            assert not future.done()
            assert workers.scheduler.log == before
            assert seen == []
        assert future.wait() == 1
        # A call that timed out was still sent; its reply is discarded.
        assert workers[0].rpc_sync("worker1", note, args=(3,)) == 3
        assert seen == [1, 2, 3]


def test_the_network_is_idle_when_all_work_is_done() -> None:
    with InProcessCluster(2, seed=0) as workers:
        assert workers.scheduler.await_idle(SOON)
        with workers.scheduler.hold():
            future = workers[0].rpc_async("worker1", note, args=(1,))
            assert not workers.scheduler.idle()
            assert not workers.scheduler.await_idle(0.001)
        assert workers.scheduler.await_idle(SOON)
        assert workers.scheduler.idle()
        assert seen == [1]
        assert future.wait() == 1


def test_a_hold_ends_with_its_block_even_by_an_error() -> None:
    with InProcessCluster(2, seed=0) as workers:
        with pytest.raises(KeyError), workers.scheduler.hold():
            raise KeyError
        assert workers[0].rpc_sync("worker1", operator.add, args=(1, 2)) == 3


def test_closing_delivers_what_is_left() -> None:
    """A cluster ends even if a test holds messages back."""
    with InProcessCluster(2, seed=0) as workers:
        workers.scheduler.hold().__enter__()
        future = workers[0].rpc_async("worker1", note, args=(1,))
        workers.scheduler.release()
        assert future.wait() == 1


def test_a_cluster_without_a_seed_has_no_scheduler() -> None:
    with InProcessCluster(1) as workers, pytest.raises(TypeError, match="give it a seed"):
        workers.scheduler  # noqa: B018


def test_messages_to_a_closed_channel_are_dropped() -> None:
    network = Scheduler(0)
    channel = MemoryChannel(network, "0<-test")
    other = MemoryChannel(network, "test->0")
    channel.peer, other.peer = other, channel
    with network.hold():
        network.post(channel, b"x")
        channel.close()
    network.release()
    other.close()
    assert "0<-test" not in network.log


# Programs.


@pytest.mark.parametrize("seed", range(4))
def test_nested_calls(seed: int) -> None:
    with InProcessCluster(3, seed=seed) as workers:
        path = [1, 2, 0, 1, 0, 2, 1, 0] * 3
        assert workers[0].rpc_sync(path[0], relay, args=(path[1:], 0)) == sum(path)


@pytest.mark.parametrize("seed", range(3))
def test_calls_to_oneself_and_errors_and_futures(seed: int) -> None:
    with InProcessCluster(2, seed=seed) as workers:
        with pytest.raises(ValueError, match="there"):
            workers[0].rpc_sync("worker1", fail, args=("there",))
        assert workers[0].rpc_sync("worker0", relay, args=([0, 1, 1, 0], 5)) == 7
        assert workers[0].rpc_sync("worker1", add_later, args=(0, 4)) == 50
        assert workers[1].rpc_sync("worker0", add_async, args=(1, 4)) == 5
        tensor = torch.arange(100_000)
        assert torch.equal(workers[0].rpc_sync("worker1", torch.neg, args=(tensor,)), -tensor)


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_blocks_does_not_stall_the_rest_for_ever(seed: int) -> None:
    """Only another message can free the request: after some patience the scheduler delivers that one."""
    with InProcessCluster(2, seed=seed) as workers:
        began = time.monotonic()
        with workers.scheduler.hold():
            blocked = workers[0].rpc_async("worker1", pass_gate)
            opener = workers[1].rpc_async("worker0", open_gate)
        assert blocked.wait() == "passed"
        assert opener.wait() == "opened"
        assert time.monotonic() - began < 5


def test_a_request_that_blocks_lets_the_next_of_its_own_channel_in() -> None:
    with InProcessCluster(2, seed=0) as workers:
        with workers.scheduler.hold():
            blocked = workers[0].rpc_async("worker1", pass_gate)
            opener = workers[0].rpc_async("worker1", open_gate)
        assert opener.wait() == "opened"
        assert blocked.wait() == "passed"


class Program:
    """A random tree of calls: each node runs on some worker, asks its children, and adds up."""

    def __init__(self, seed: int, workers: int) -> None:
        self._random = random.Random(seed)
        self._workers = workers
        self.roots = [self._node(3) for _ in range(3)]

    def _node(self, depth: int) -> list[object]:
        children = [self._node(depth - 1) for _ in range(self._random.randrange(3))] if depth else []
        return [
            self._random.randrange(self._workers),
            self._random.randrange(100),
            self._random.random() < 0.5,
            children,
        ]

    @classmethod
    def value(cls, node: list[object]) -> object:
        return node[1] + sum(cls.value(child) for child in node[3])  # type: ignore[operator, union-attr, misc]


def run_node(node: list[object]) -> int:
    _, value, at_once, children = node
    assert get_worker_info().id == node[0]
    if at_once:
        futures = [rpc_async(child[0], run_node, args=(child,)) for child in children]  # type: ignore[attr-defined]
        return value + sum(future.wait() for future in futures)  # type: ignore[operator]
    return value + sum(rpc_sync(child[0], run_node, args=(child,)) for child in children)  # type: ignore


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_random_programs_over_50_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        program = Program(seed, 3)
        with InProcessCluster(3, seed=seed) as workers:
            with workers.scheduler.hold():
                futures = [
                    workers[(root[0] + 1) % 3].rpc_async(root[0], run_node, args=(root,))  # type: ignore[operator]
                    for root in program.roots
                ]
            assert [future.wait() for future in futures] == [Program.value(root) for root in program.roots], seed


def test_a_plain_network_delivers_at_once() -> None:
    network = Network()
    channel = MemoryChannel(network, "a")
    other = MemoryChannel(network, "b")
    channel.peer, other.peer = other, channel
    network.post(channel, bytes.fromhex("4248 01 08 01000000 00000000 0000000000000000 90"))
    assert channel.read(0)
    assert channel.next() is not None
    channel.close()
    other.close()
