"""What comes where replies do: to the thread that listens for it, however it waits, and to nobody after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent.news import Bell, News
from backhaul.agent.outbound import Outbound
from backhaul.agent.serving import Inbound
from backhaul.testing import InProcessCluster
from backhaul.wire.frames import encode
from backhaul.wire.messages import Pass, Report, TakePart
from backhaul.worker import Worker

PATIENCE = 10.0
ABOUT = 7


@pytest.fixture
def pair() -> Iterator[InProcessCluster]:
    with InProcessCluster(2, sockets=True) as workers:
        yield workers


def outbound_of(worker: Worker) -> Outbound:
    with worker.as_current():
        rpc.rpc_sync("worker1", int)
    return worker.agent._route("worker1", PATIENCE)


def inbound_of(worker: Worker) -> Inbound:
    (found,) = [inbound for inbound in worker.agent.serving.inbounds if inbound.peer.name == "worker0"]
    return found


def report(number: int, about: int = ABOUT) -> Report:
    return Report(Pass(about, 1, about, False, False), False, (number,), ())


def numbers(news: News) -> list[int]:
    return [envelope.message.consumed[0] for envelope in news.arrived]


@pytest.fixture
def news(pair: InProcessCluster) -> Iterator[News]:
    found = outbound_of(pair[0]).listen(ABOUT)
    assert found is not None
    yield found
    found.close()


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


def until_reading(outbound: Outbound) -> None:
    """Return when some thread waits for what comes."""
    limit = threading.Event()
    for _ in range(1000):
        if outbound.being_read():
            return
        limit.wait(0.005)
    pytest.fail("nobody reads")


def test_what_is_there_already_ends_the_wait(pair: InProcessCluster, news: News) -> None:
    news.reset()
    inbound_of(pair[1]).reply(encode(report(1)))
    news.wait(PATIENCE)
    assert numbers(news) == [1]


def test_who_waits_is_woken(pair: InProcessCluster, news: News) -> None:
    news.reset()
    thread = started(lambda: news.wait(PATIENCE))
    until_reading(news.outbound)
    inbound_of(pair[1]).reply(encode(report(2)))
    joined(thread)
    assert numbers(news) == [2]


def test_a_bell_ends_the_wait(news: News) -> None:
    news.reset()
    thread = started(lambda: news.wait(PATIENCE))
    until_reading(news.outbound)
    news.ring()
    joined(thread)
    assert not news.arrived


def test_a_bell_that_rang_before_the_wait_ends_it_too(news: News) -> None:
    news.reset()
    news.ring()
    news.wait(PATIENCE)
    # And not the next one.
    news.reset()
    news.wait(0.01)
    assert not news.slot.done


def test_a_call_of_another_thread_gets_its_reply_from_who_listens(pair: InProcessCluster, news: News) -> None:
    news.reset()
    thread = started(lambda: news.wait(PATIENCE))
    until_reading(news.outbound)
    with pair[0].as_current():
        assert rpc.rpc_sync("worker1", int, args=("5",)) == 5
    assert thread.is_alive()
    news.ring()
    joined(thread)


def test_who_listens_is_woken_by_who_reads_for_a_call(pair: InProcessCluster, news: News) -> None:
    """The other thread has the role of the reader; it hands out what comes, and the listener sleeps."""
    asked, answer = threading.Event(), threading.Event()
    _gates["asked"], _gates["answer"] = asked, answer
    with pair[0].as_current():
        future = rpc.rpc_async("worker1", _wait_for_answer)
    caller = started(future.wait)
    assert asked.wait(PATIENCE)
    until_reading(news.outbound)
    news.reset()
    listener = started(lambda: news.wait(PATIENCE))
    inbound_of(pair[1]).reply(encode(report(3)))
    joined(listener)
    assert numbers(news) == [3]
    answer.set()
    joined(caller)


_gates: dict[str, threading.Event] = {}


def _wait_for_answer() -> None:
    _gates["asked"].set()
    assert _gates["answer"].wait(PATIENCE)


def test_what_nobody_listens_for_is_dropped(pair: InProcessCluster, news: News) -> None:
    inbound_of(pair[1]).reply(encode(report(4, about=ABOUT + 1)))
    with pair[0].as_current():
        assert rpc.rpc_sync("worker1", int, args=("6",)) == 6
    assert not news.arrived


def test_other_messages_do_not_belong_there(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessCluster(2, sockets=True) as workers:
        outbound = outbound_of(workers[0])
        inbound_of(workers[1]).reply(encode(TakePart(Pass(1, 1, 1, False, False), ())))
        with workers[0].as_current(), pytest.raises(rpc.WorkerLostError, match="where replies are expected"):
            rpc.rpc_sync("worker1", int)
        assert outbound.lost is not None


def test_a_connection_that_ends_ends_the_wait() -> None:
    with InProcessCluster(2, sockets=True) as workers:
        outbound = outbound_of(workers[0])
        news = outbound.listen(ABOUT)
        assert news is not None
        news.reset()
        thread = started(lambda: news.wait(PATIENCE))
        until_reading(outbound)
        inbound_of(workers[1]).shutdown()
        joined(thread)
        assert outbound.lost is not None
        news.ring()  # too late, and does no harm
        assert outbound.listen(ABOUT) is None


def test_who_waits_on_a_connection_that_has_ended_does_nothing_but_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors may belong to another connection by then."""
    with InProcessCluster(2, sockets=True) as workers:
        outbound = outbound_of(workers[0])
        news = outbound.listen(ABOUT)
        assert news is not None
        outbound.lose(ConnectionError("cut"))
        reads: list[object] = []
        monkeypatch.setattr(outbound._channel, "read", lambda *how: reads.append(how))
        news.reset()
        begin = time.thread_time()
        news.wait(0.2)
        assert time.thread_time() - begin < 0.1, "it was awake all the time"
        thread = started(lambda: news.wait(PATIENCE))
        news.ring()
        joined(thread)
        assert not reads


def test_memory_channels_hear_no_bells() -> None:
    with InProcessCluster(2) as workers:
        assert outbound_of(workers[0]).listen(ABOUT) is None


def test_a_bell_rings_once_and_not_when_closed() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.hush()
    bell.hush()
    bell.ring()
    bell.close()
    bell.close()
    bell.ring()
    bell.hush()
    assert bell.fileno() == -1


def test_the_thread_of_backward_runs_what_comes_back(pair: InProcessCluster) -> None:
    """A chain that comes back to the starter each time: no other thread of it takes part."""
    threads: set[int] = set()
    x = torch.rand(3, 3, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = x
        for _ in range(3):
            y = rpc.rpc_sync("worker1", torch.tanh, args=(y * 2,))
            y.register_hook(lambda _: threads.add(threading.get_ident()))
        dist_autograd.backward(ctx, [y.sum()])
        gradient = dist_autograd.get_gradients(ctx)[x]
    assert threads == {threading.get_ident()}
    z = x
    for _ in range(3):
        z = torch.tanh(z * 2)
    (expected,) = torch.autograd.grad(z.sum(), [x])
    assert torch.equal(gradient, expected)
    assert not outbound_of(pair[0])._news
