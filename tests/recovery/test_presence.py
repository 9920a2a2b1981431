"""Callbacks tell the user which workers are lost, and which have joined."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest
import torch.distributed as dist

from backhaul import rpc
from backhaul.errors import MisuseError, NotInitializedError
from backhaul.testing import Faults, InProcessCluster
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.wire.messages import Call
from backhaul.worker import Worker

SOON = 20.0


def number() -> int:
    return 7


class News:
    """What a worker was told, in order."""

    def __init__(self, worker: Worker) -> None:
        self._told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.threads: set[str] = set()
        with worker.as_current():
            self.handles = [rpc.on_lost(self._lost), rpc.on_joined(self._joined)]

    def _lost(self, info: rpc.WorkerInfo, cause: rpc.WorkerLostError) -> None:
        assert cause.worker == info.name
        self.threads.add(threading.current_thread().name)
        self._told.put((f"{info.name} lost", str(cause)))

    def _joined(self, info: rpc.WorkerInfo) -> None:
        self.threads.add(threading.current_thread().name)
        self._told.put((f"{info.name} joined", ""))

    def next(self) -> tuple[str, str]:
        return self._told.get(timeout=SOON)

    def is_empty(self) -> bool:
        return self._told.empty()


@pytest.mark.parametrize("sockets", [False, True])
def test_a_worker_is_lost_and_comes_back(sockets: bool) -> None:
    with InProcessCluster(3, sockets=sockets) as three:
        news = News(three[0])
        three[0].rpc_sync("worker2", number)
        three[2].agent.close(0.0)
        assert news.next()[0] == "worker2 lost"
        three.restart(2)
        assert news.next() == ("worker2 joined", "")
        assert news.threads <= {"backhaul-worker0"}
        assert three[0].rpc_sync("worker2", number) == 7
        assert news.is_empty()


def test_a_worker_that_leaves_is_lost_and_the_text_says_so() -> None:
    with InProcessCluster(2) as pair:
        news = News(pair[0])
        pair[0].rpc_sync("worker1", number)
        pair[1].rpc_sync("worker0", number)
        pair[1].shutdown(graceful=False)
        assert news.next() == ("worker1 lost", "worker 'worker1' has left the group")


def test_a_worker_that_cannot_be_reached_is_lost_until_it_answers() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as pair:
        pair[0].rpc_sync("worker1", number)
        news = News(pair[0])
        faults.part()
        assert news.next()[0] == "worker1 lost"
        faults.heal()
        assert news.next()[0] == "worker1 joined"
        assert pair[0].rpc_sync("worker1", number) == 7


def test_a_broken_connection_that_is_made_again_is_not_a_loss() -> None:
    faults = Faults()
    with InProcessCluster(3, faults=faults) as three:
        three[0].rpc_sync("worker1", number)
        news = News(three[0])
        faults.next("cut", Call)
        with pytest.raises(rpc.WorkerLostError):
            three[0].rpc_sync("worker1", number)
        assert three[0].rpc_sync("worker1", number) == 7
        three[2].shutdown(graceful=False)  # the first event to report
        assert three[0].rpc_sync("worker1", number) == 7
        three[0].agent.fates.examine(three[2].info)
        assert news.next()[0] == "worker2 lost"


def test_a_callback_may_make_calls_and_its_exceptions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def fail(info: rpc.WorkerInfo, cause: rpc.WorkerLostError) -> None:
        raise ValueError("a bad callback")

    def ask(info: rpc.WorkerInfo, cause: rpc.WorkerLostError) -> None:
        answers.put(rpc.rpc_sync("worker1", number))

    with InProcessCluster(3) as three, caplog.at_level(logging.ERROR):
        with three[0].as_current():
            rpc.on_lost(fail)
            rpc.on_lost(ask)
        three[0].rpc_sync("worker2", number)
        three[2].agent.close(0.0)
        assert answers.get(timeout=SOON) == 7
        assert "fail for worker 'worker2' failed" in caplog.text
        assert "a bad callback" in caplog.text


def test_a_callback_that_was_removed_is_not_called() -> None:
    with InProcessCluster(3) as three:
        news, other = News(three[0]), News(three[0])
        for handle in other.handles:
            handle.remove()
            handle.remove()
        three[0].rpc_sync("worker2", number)
        three[2].agent.close(0.0)
        news.next()
        assert other.is_empty()
        with three[0].as_current(), rpc.on_lost(lambda info, cause: None):
            pass


def test_newcomers_to_a_dynamic_group() -> None:
    store, network = dist.HashStore(), Network()

    def join(name: str) -> Worker:
        return Worker(name, None, None, store=store, transport=MemoryTransport(network))

    first = join("first")
    news = News(first)
    second = join("second")
    assert news.next() == ("second joined", "")
    assert first.rpc_sync("second", number) == 7
    second.shutdown(graceful=False)
    assert news.next()[0] == "second lost"
    again = join("second")
    assert news.next()[0] == "second joined"
    again.shutdown(graceful=False)
    first.shutdown(graceful=False)


def test_a_callback_needs_a_function_and_a_worker() -> None:
    with InProcessCluster(1) as alone, alone[0].as_current(), pytest.raises(MisuseError, match="a callback is"):
        rpc.on_lost("function")  # type: ignore[arg-type]
    with pytest.raises(NotInitializedError):
        rpc.on_joined(lambda info: None)


def test_the_end_of_a_group_is_not_a_loss() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with InProcessCluster(3) as three:
        news = [News(worker) for worker in three]
        for worker in three:
            for peer in range(3):
                worker.rpc_sync(peer, number)
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda worker: worker.shutdown(), three))
        assert all(each.is_empty() for each in news)
