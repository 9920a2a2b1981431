"""No more threads can be started: the work is done later, and every connection is still read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from backhaul import rpc
from backhaul.agent.completions import Completions
from backhaul.agent.observing import Observers
from backhaul.agent.pool import Pool
from backhaul.agent.serving import Served
from backhaul.agent.watch import Watch
from backhaul.testing import InProcessCluster

PATIENCE = 10.0


class NoThreads:
    """Makes a pool refuse to start a thread, ``left`` times."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.refused = threading.Event()
        self._run = pool.run
        monkeypatch.setattr(pool, "run", self.run)

    def run(self, job: object) -> None:
        if self.left:
            self.left -= 1
            self.refused.set()
            raise RuntimeError("can't start new thread")
        self._run(job)  # type: ignore[arg-type]


# The pool itself.


def test_a_pool_that_could_not_start_a_thread_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("backhaul-test", 1, lambda: None)
    done = threading.Event()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.run(done.set)
    assert pool.size == 0
    pool.run(done.set)
    assert done.wait(PATIENCE)
    pool.close(time.monotonic() + PATIENCE)
    assert pool.size == 0


# Leading.


gates: dict[str, threading.Event] = {}


def block(name: str) -> str:
    gates["asked"].set()
    assert gates[name].wait(PATIENCE)
    return name


def ask_back() -> int:
    """A request that waits for a call of its own."""
    return rpc.rpc_sync("worker0", int, args=("3",))


@pytest.fixture
def busy(pair: InProcessCluster) -> Iterator[InProcessCluster]:
    gates["asked"], gates["one"] = threading.Event(), threading.Event()
    assert pair[0].rpc_sync("worker1", int) == 0
    yield pair
    gates["one"].set()


def served_by(workers: InProcessCluster) -> Served:
    (found,) = [line for line in workers[1].agent.serving.lines if line.peer.name == "worker0"]
    return found


def test_the_leader_keeps_the_lead_if_no_thread_can_take_it(
    busy: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = served_by(busy)
    serving = busy[1].agent.serving
    monkeypatch.setattr(serving, "tick", lambda: False)
    busy[1].agent.watch.ticks[0] = lambda: False
    slow = busy[0].rpc_async("worker1", block, args=("one",))
    slow.attend()
    assert gates["asked"].wait(PATIENCE)
    lead = line.lead
    assert lead is not None
    holder, turn, detached = lead._role.holder, lead.turn, set(serving.detached)
    threads = NoThreads(busy[1].agent.pool, monkeypatch)
    threads.left = 1
    with pytest.raises(RuntimeError, match="new thread"):
        lead.pass_on(turn=turn)
    assert (lead._role.holder, lead.turn, lead.busy, serving.detached) == (holder, turn, True, detached)
    gates["one"].set()
    assert slow.wait() == "one"
    assert busy[0].rpc_sync("worker1", int, args=("4",)) == 4, "it reads on"


def test_held_replies_are_not_lost_with_a_successor_that_never_came(
    busy: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = served_by(busy).lead
    assert lead is not None
    busy[1].agent.watch.ticks[0] = lambda: False
    slow = busy[0].rpc_async("worker1", block, args=("one",))
    slow.attend()
    assert gates["asked"].wait(PATIENCE)
    frame = busy[1].agent.answer(123_456, None)
    lead._out, lead._out_bytes = [frame], frame.size
    threads = NoThreads(busy[1].agent.pool, monkeypatch)
    threads.left = 1
    with pytest.raises(RuntimeError, match="new thread"):
        lead.pass_on(turn=lead.turn)
    assert (lead._out, lead._out_bytes) == ([frame], frame.size)
    gates["one"].set()
    assert slow.wait() == "one"


def test_the_next_tick_tries_again_to_start_a_successor(
    busy: InProcessCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = NoThreads(busy[1].agent.pool, monkeypatch)
    threads.left = 1
    slow = busy[0].rpc_async("worker1", block, args=("one",))
    slow.attend()
    assert gates["asked"].wait(PATIENCE)
    assert threads.refused.wait(PATIENCE)
    assert busy[0].rpc_sync("worker1", int, args=("4",)) == 4, "another thread leads now"
    assert not slow.done()
    gates["one"].set()
    assert slow.wait() == "one"
    assert "goes on after a failure" in caplog.text


def ask_around() -> str:
    """A request that waits for a call, which waits for a request to this worker."""
    return rpc.rpc_sync("worker0", rpc.rpc_sync, args=("worker1", str, ("here",)))


def test_a_nested_call_needs_no_thread(busy: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert busy[0].rpc_sync("worker1", ask_back) == 3
    threads = NoThreads(busy[1].agent.pool, monkeypatch)
    threads.left = 1
    assert busy[0].rpc_sync("worker1", ask_back) == 3
    assert not threads.refused.is_set()


def test_a_nested_call_that_gets_no_thread_fails_and_its_connection_survives(
    busy: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert busy[0].rpc_sync("worker1", ask_around) == "here"
    threads = NoThreads(busy[1].agent.pool, monkeypatch)
    threads.left = 1
    with pytest.raises(RuntimeError, match="new thread"):
        busy[0].rpc_sync("worker1", ask_around)
    assert busy[0].rpc_sync("worker1", ask_around) == "here"


# Completions.


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Completions, NoThreads]]:
    pool = Pool("backhaul-test", 1, lambda: None)
    watch = Watch("backhaul-test-watch", None, lambda: None)
    threads = NoThreads(pool, monkeypatch)
    yield Completions(pool, watch, Observers()), threads
    pool.close(time.monotonic() + PATIENCE)
    watch.abandon()


def test_completions_run_at_a_tick_if_no_thread_could_be_started(
    completions: tuple[Completions, NoThreads], caplog: pytest.LogCaptureFixture
) -> None:
    queue, threads = completions
    threads.left = 3
    done = threading.Event()
    ran: list[int] = []

    def last() -> None:
        ran.append(3)
        done.set()

    queue.add(lambda: ran.append(1))
    queue.add(lambda: ran.append(2))
    assert queue.tick()
    assert not ran
    queue.add(last)
    assert done.wait(PATIENCE)
    assert ran == [1, 2, 3]
    assert "no thread can be started" in caplog.text


def test_the_ticks_drain_the_queue_without_threads(completions: tuple[Completions, NoThreads]) -> None:
    queue, threads = completions
    threads.left = 3
    done = threading.Event()
    queue.add(done.set)
    for _ in range(2):
        assert queue.tick()
    assert threads.left == 0
    queue.tick()
    assert done.wait(PATIENCE)


def test_a_stuck_queue_that_gets_no_thread_continues_at_a_later_tick(
    completions: tuple[Completions, NoThreads],
) -> None:
    """The job that blocks keeps its thread, and the others get one at a later tick."""
    queue, threads = completions
    begun, gate, done = threading.Event(), threading.Event(), threading.Event()

    def blocks() -> None:
        begun.set()
        gate.wait(PATIENCE)

    queue.add(blocks)
    assert begun.wait(PATIENCE)
    queue.add(done.set)
    threads.left = 1
    for _ in range(3):
        assert queue.tick()
    assert threads.refused.is_set()
    assert done.wait(PATIENCE)
    gate.set()
