"""Simulated threads: one runs at a time, time jumps, a seed determines the turns, and standstills are found."""

from __future__ import annotations

import operator
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from turns import StandStill, World, installed

from backhaul import functions
from backhaul.agent.future import Future
from backhaul.options import RpcOptions
from backhaul.rpc import rpc_async
from backhaul.testing import InProcessCluster, scheduler


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with installed("backhaul", __name__):
        yield


def count_up(threads: int) -> list[int]:
    """The order in which several threads take a lock."""
    lock = threading.Lock()
    order: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            with lock:
                order.append(number)

    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return order


def test_the_same_seed_gives_the_same_turns() -> None:
    def run(seed: int) -> tuple[list[int], list[tuple[int, int]]]:
        with World(seed) as world:
            return count_up(4), world.trace

    assert run(3) == run(3)
    assert len({tuple(run(seed)[0]) for seed in range(5)}) == 5


def test_waiting_takes_no_time() -> None:
    with World(0):
        began = time.monotonic()
        time.sleep(1000.0)
        assert not threading.Event().wait(500.0)
        assert 1500 <= time.monotonic() - began < 1501


def test_a_wait_ends_when_another_thread_notifies() -> None:
    with World(1):
        condition = threading.Condition()
        there: list[str] = []

        def bring() -> None:
            time.sleep(2.0)
            with condition:
                there.append("it")
                condition.notify_all()

        began = time.monotonic()
        threading.Thread(target=bring).start()
        with condition:
            assert condition.wait_for(lambda: bool(there), 10.0)
        assert time.monotonic() - began < 3


def test_a_wait_ends_at_its_deadline() -> None:
    with World(1):
        lock = threading.Lock()
        assert lock.acquire()
        assert not lock.acquire(timeout=5.0)
        assert not lock.acquire(blocking=False)
        condition = threading.Condition()
        with condition:
            assert not condition.wait_for(lambda: False, 5.0)


def test_threads_that_wait_for_each_other_are_noticed() -> None:
    with World(0):
        a, b = threading.Lock(), threading.Lock()
        met = threading.Event()

        def other() -> None:
            with b:
                met.set()
                a.acquire()

        with a:
            threading.Thread(target=other, name="the other one").start()
            met.wait()
            with pytest.raises(StandStill, match=r"(?s)all threads wait for each other.*the other one.*in other"):
                b.acquire()


def test_descriptors() -> None:
    with World(2):
        near, far = socket.socketpair()
        poll = select.poll()
        poll.register(near.fileno(), select.POLLIN)
        assert poll.poll(1000) == []
        threading.Timer(3.0, lambda: far.send(b"!")).start()
        assert poll.poll(None) == [(near.fileno(), select.POLLIN)]
        assert near.recv(10) == b"!"
        with select.epoll() as epoll:
            epoll.register(near.fileno(), select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT)
            assert epoll.poll(1.0) == []
            far.shutdown(socket.SHUT_WR)
            assert epoll.poll(1.0) == [(near.fileno(), select.EPOLLIN | select.EPOLLRDHUP)]
            assert epoll.poll(1.0) == []  # once
        near.close()
        assert near.fileno() == -1


def test_an_epoll_can_be_polled() -> None:
    with World(2):
        near, far = socket.socketpair()
        with select.epoll() as epoll:
            epoll.register(near.fileno(), select.EPOLLIN)
            poll = select.poll()
            poll.register(epoll.fileno(), select.POLLIN)
            assert poll.poll(1000) == []
            threading.Timer(3.0, lambda: far.send(b"!")).start()
            assert poll.poll(None) == [(epoll.fileno(), select.POLLIN)]
            assert epoll.poll(0) == [(near.fileno(), select.EPOLLIN)]
            near.recv(10)
            assert poll.poll(1000) == []


@functions.async_execution
def chain(path: list[int], value: int) -> Future[int]:
    """Call along a path from callbacks only, so that no thread waits."""
    if len(path) == 1:
        return rpc_async(path[0], operator.add, args=(value, 1))
    return rpc_async(path[0], chain, args=(path[1:], value)).then(lambda done: done.value() + 1)


def test_the_order_of_a_scheduler_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped scheduler, on a busy machine: each world has different turns, but the same order of messages."""
    monkeypatch.setattr(scheduler, "PATIENCE", 20.0)

    def log(world: int) -> list[str]:
        options = RpcOptions(busy_poll=0.0)
        with World(world, busy=True), InProcessCluster(3, seed=0, options=options) as workers:
            with workers.scheduler.hold():
                paths = ([1, 2, 0, 1], [2, 0, 1, 2], [0, 1, 2, 0])
                futures = [
                    worker.rpc_async(path[0], chain, args=(path[1:], 0))
                    for worker, path in zip(workers, paths, strict=True)
                ]
            assert [future.wait() for future in futures] == [3] * 3
            assert workers.scheduler.guesses == 0
            return list(workers.scheduler.log)

    logs = [log(world) for world in (0, 25, 33, *range(50, 58))]
    assert logs == [logs[0]] * len(logs)
