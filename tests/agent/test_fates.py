"""Workers that cannot reach each other for a while: what they keep, what fails meanwhile, and what works again
afterwards."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from backhaul import autograd, rpc
from backhaul.agent.observing import Event, Over, Present, Suspected
from backhaul.agent.serving import Served
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello
from backhaul.testing import Faults, InProcessCluster
from backhaul.transport.base import Channel
from backhaul.wire.messages import Goodbye
from backhaul.worker import Worker

SOON = 10.0


class Seen:
    """Records what the observers of one worker are told about its peers, and waits for it."""

    def __init__(self, worker: Worker) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        worker.agent.observers.add(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, Suspected | Present | Over):
            with self._changed:
                self.events.append(event)
                self._changed.notify_all()

    def wait_for(self, kind: type[Event], peer: str) -> None:
        def came() -> bool:
            return any(type(event) is kind and event.peer == peer for event in self.events)  # type: ignore[attr-defined]

        with self._changed:
            assert self._changed.wait_for(came, SOON), self.events


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


@pytest.fixture(params=["memory", "sockets"])
def parted(request: pytest.FixtureRequest) -> Iterator[tuple[InProcessCluster, Faults]]:
    faults = Faults()
    with InProcessCluster(3, faults=faults, sockets=request.param == "sockets") as workers:
        yield workers, faults


def test_references_survive_a_cut_both_ways(parted: tuple[InProcessCluster, Faults]) -> None:
    workers, faults = parted
    seen = [Seen(worker) for worker in workers]
    with workers[0].as_current():
        theirs = rpc.remote("worker1", torch.ones, args=(3,))
        theirs.to_here()
    with workers[1].as_current():
        back = rpc.remote("worker0", torch.zeros, args=(2,))
        back.to_here()
    faults.part()
    seen[0].wait_for(Suspected, "worker1")
    seen[1].wait_for(Suspected, "worker0")
    with workers[0].as_current():
        began = time.monotonic()
        with pytest.raises(rpc.WorkerSuspectedError, match="references to it are kept"):
            theirs.to_here()
        with pytest.raises(rpc.WorkerLostError):
            rpc.rpc_sync("worker1", int)
        assert time.monotonic() - began < 1  # at once, without an attempt
    assert workers[1].references.counts()["values"] == 1
    assert workers[0].references.counts()["values"] == 1
    faults.heal()
    seen[0].wait_for(Present, "worker1")
    seen[1].wait_for(Present, "worker0")
    with workers[0].as_current():
        assert torch.equal(theirs.to_here(), torch.ones(3))
    with workers[1].as_current():
        assert torch.equal(back.to_here(), torch.zeros(2))
    del theirs, back
    gc.collect()
    wait_until(lambda: not any(worker.references.counts()["values"] for worker in workers))
    assert not any(isinstance(event, Over) for each in seen for event in each.events)


def keep(rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    return rref


def test_a_reference_that_was_on_its_way_to_a_third_worker_is_not_lost(
    parted: tuple[InProcessCluster, Faults],
) -> None:
    workers, faults = parted
    seen = [Seen(worker) for worker in workers]
    with workers[0].as_current():
        value = rpc.remote("worker2", torch.ones, args=(3,))
        value.to_here()
        handed_on = [rpc.remote("worker1", keep, args=(value,)) for _ in range(20)]
        faults.part()
        seen[0].wait_for(Suspected, "worker1")
        seen[0].wait_for(Suspected, "worker2")
        faults.heal()
        seen[0].wait_for(Present, "worker1")
        seen[0].wait_for(Present, "worker2")
        assert torch.equal(value.to_here(), torch.ones(3))
        del value, handed_on
    gc.collect()
    wait_until(lambda: not any(worker.references.counts()["values"] for worker in workers))
    wait_until(lambda: not any(worker.references.counts()["pinned"] for worker in workers))


def test_a_context_outlives_a_cut(parted: tuple[InProcessCluster, Faults]) -> None:
    """Gradients of a pass that is over, on a worker that cannot be reached for a while, are still there after it."""
    workers, faults = parted
    seen = Seen(workers[0])
    with workers[0].as_current(), autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2.0))
        autograd.backward(context_id, [y.sum()])
        faults.part()
        seen.wait_for(Suspected, "worker1")
        assert len(workers[1].autograd.contexts) == 1
        faults.heal()
        seen.wait_for(Present, "worker1")
        z = rpc.rpc_sync("worker1", torch.mul, args=(x, 3.0))
        autograd.backward(context_id, [z.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 5.0))
    wait_until(lambda: not any(len(worker.autograd.contexts) for worker in workers))


def test_a_context_that_ends_during_a_cut_ends_everywhere_after_it(parted: tuple[InProcessCluster, Faults]) -> None:
    workers, faults = parted
    seen = [Seen(worker) for worker in workers]
    with workers[0].as_current(), autograd.context():
        x = torch.ones(3, requires_grad=True)
        rpc.rpc_sync("worker1", torch.mul, args=(x, 2.0))
        faults.part()
        seen[0].wait_for(Suspected, "worker1")
        seen[1].wait_for(Suspected, "worker0")
    assert len(workers[1].autograd.contexts) == 1
    faults.heal()
    seen[1].wait_for(Present, "worker0")
    wait_until(lambda: not len(workers[1].autograd.contexts))


def test_a_worker_that_is_silent_for_too_long_is_given_up() -> None:
    faults = Faults()
    options = RpcOptions(lost_after=0.5)
    with InProcessCluster(2, faults=faults, options=options) as workers:
        seen = Seen(workers[0])
        with workers[0].as_current():
            value = rpc.remote("worker1", torch.ones, args=(3,))
            value.to_here()
        faults.part()
        seen.wait_for(Over, "worker1")
        over = next(event for event in seen.events if isinstance(event, Over))
        assert not over.certain
        with workers[0].as_current(), pytest.raises(rpc.WorkerLostError, match="lost or has freed it"):
            value.to_here()
        wait_until(lambda: workers[1].references.counts()["values"] == 0)
        faults.heal()
        with workers[0].as_current():  # it can be called again, and be given references
            assert rpc.rpc_sync("worker1", int) == 0
            again = rpc.remote("worker1", torch.ones, args=(2,))
            assert torch.equal(again.to_here(), torch.ones(2))


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "sockets"])
def test_the_end_of_a_worker_is_known_at_once(sockets: bool) -> None:
    with InProcessCluster(2, sockets=sockets) as workers:
        seen = Seen(workers[0])
        with workers[1].as_current():
            value = rpc.remote("worker0", torch.ones, args=(3,))
            value.to_here()
        began = time.monotonic()
        workers[1].shutdown(graceful=False)
        seen.wait_for(Over, "worker1")
        assert time.monotonic() - began < 5
        over = next(event for event in seen.events if isinstance(event, Over))
        assert over.certain
        wait_until(lambda: workers[0].references.counts()["values"] == 0)
        assert not any(isinstance(event, Suspected) for event in seen.events)


def test_a_graceful_shutdown_waits_for_unreachable_workers(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    with InProcessCluster(3, faults=faults) as workers:
        seen = [Seen(worker) for worker in workers]
        for worker in workers:
            with worker.as_current():
                for name in ("worker0", "worker1", "worker2"):
                    rpc.rpc_sync(name, int)
        errors: list[BaseException] = []

        def leave(rank: int) -> None:
            try:
                workers[rank].shutdown()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(3)]
        faults.part()
        for peer in (1, 2):
            seen[0].wait_for(Suspected, f"worker{peer}")
            seen[peer].wait_for(Suspected, "worker0")
        for thread in threads:
            thread.start()
        threads[0].join(0.5)
        assert all(thread.is_alive() for thread in threads)
        faults.heal()
        for thread in threads:
            thread.join(SOON)
        assert not errors
        assert all(worker.closed for worker in workers)


def test_a_graceful_shutdown_that_times_out_names_unreachable_workers() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as workers:
        seen = Seen(workers[1])
        with workers[1].as_current():
            rpc.rpc_sync("worker0", int)
        faults.part()
        seen.wait_for(Suspected, "worker0")
        with pytest.raises(rpc.RpcTimeoutError, match="'worker0', which could not be reached at the deadline"):
            workers[1].shutdown(timeout=0.5)


def call_until_lost(worker: Worker, use: Callable[[], object], ready: threading.Barrier) -> list[BaseException]:
    errors: list[BaseException] = []
    with worker.as_current():
        use()
        ready.wait()
        for _ in range(2000):
            try:
                use()
            except BaseException as error:
                errors.append(error)
            if len(errors) > 20:
                break
    return errors


def test_calls_to_a_leaving_worker_raise_only_worker_lost_errors() -> None:
    """Whatever the leaving worker is doing when a call arrives, the only error is `WorkerLostError`."""
    for _ in range(5):
        with InProcessCluster(3, sockets=True) as workers, ThreadPoolExecutor(2) as threads:
            with workers[1].as_current():
                value = rpc.remote("worker2", torch.ones, args=(3,))
            ready = threading.Barrier(3)
            calls = threads.submit(call_until_lost, workers[0], partial(rpc.rpc_sync, "worker2", int), ready)
            fetches = threads.submit(call_until_lost, workers[1], value.to_here, ready)
            ready.wait()
            workers[2].shutdown(graceful=False)
            errors = [*calls.result(SOON), *fetches.result(SOON)]
            assert errors
            assert {type(error) for error in errors} <= {rpc.WorkerLostError, rpc.WorkerSuspectedError}


def test_news_of_an_earlier_process_does_not_end_the_present_one() -> None:
    with InProcessCluster(2) as workers:
        assert workers[0].rpc_sync("worker1", int) == 0
        agent, peer = workers[0].agent, workers[1].info
        assert not agent.fates.end(peer, "it was killed", incarnation="0" * 12)
        assert not agent.link(peer).fate.over
        assert workers[0].rpc_sync("worker1", int) == 0
        assert agent.fates.end(peer, "it was killed", incarnation=workers[1].agent.membership.incarnation)


def test_an_event_during_an_examination_starts_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first examination may have looked before the event."""
    with InProcessCluster(2) as workers:
        agent, peer = workers[0].agent, workers[1].info
        looked = threading.Semaphore(0)
        go_on = threading.Event()

        def is_reachable(info: rpc.WorkerInfo, seconds: float) -> bool:
            looked.release()
            return go_on.wait(SOON)

        monkeypatch.setattr(agent, "is_reachable", is_reachable)
        agent.fates.examine(peer)
        assert looked.acquire(timeout=SOON)
        agent.fates.examine(peer)
        go_on.set()
        assert looked.acquire(timeout=SOON)
        wait_until(lambda: not agent.fates.busy)


def test_a_goodbye_is_known_before_the_end_of_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Worker 1 has not opened a connection of its own, so its goodbye comes where worker 0 reads replies."""
    with InProcessCluster(2, sockets=True) as workers, workers[0].as_current():
        rpc.rpc_sync("worker1", int)
        seen = Seen(workers[0])
        suspected = threading.Event()
        workers[0].agent.fates.on_suspected.append(lambda peer, error: suspected.set())
        # The handler of the goodbye is slow. On another thread it would end after the connection has been examined.
        workers[0].agent.intercept(Goodbye, lambda envelope: suspected.wait(0.5) and None)
        workers[1].shutdown(graceful=False)
        seen.wait_for(Over, "worker1")
        assert [getattr(event, "reason", event) for event in seen.events] == ["it has left the group"]
    assert not [record for record in caplog.records if "cannot be reached" in record.getMessage()]


def test_a_connection_that_is_let_in_while_its_worker_closes_gets_a_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that lets the connection in finds that the worker closes before `close` itself says goodbye."""
    closing, welcomed = threading.Event(), threading.Event()
    with InProcessCluster(2, sockets=True) as workers, workers[0].as_current():
        agent = workers[1].agent
        welcome, add, close = agent._reception._welcome, agent.serving.add, agent._reception.door.close

        def add_and_wait(line: Served) -> None:
            add(line)
            assert closing.wait(10)

        def close_after_the_welcome() -> None:
            closing.set()
            assert welcomed.wait(10)
            close()

        def welcome_noted(channel: Channel, hello: Hello) -> None:
            welcome(channel, hello)
            welcomed.set()

        monkeypatch.setattr(agent._reception, "_welcome", welcome_noted)
        monkeypatch.setattr(agent.serving, "add", add_and_wait)
        monkeypatch.setattr(agent._reception.door, "close", close_after_the_welcome)
        rpc.rpc_sync("worker1", int)
        seen = Seen(workers[0])
        workers[1].shutdown(graceful=False)
        seen.wait_for(Over, "worker1")
        assert [getattr(event, "reason", event) for event in seen.events] == ["it has left the group"]


def test_a_goodbye_that_comes_during_an_examination_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Worker 0 loses its connection, and reads the goodbye on the connection of worker 1 during the examination."""
    with InProcessCluster(2, sockets=True) as workers:
        for rank in (0, 1):
            with workers[rank].as_current():
                rpc.rpc_sync(f"worker{1 - rank}", int)
        seen = Seen(workers[0])
        examines = threading.Event()
        fates = workers[0].agent.fates
        reach = fates._agent.is_reachable

        def is_reachable(info: rpc.WorkerInfo, seconds: float) -> bool:
            """The real one, when the peer has left."""
            examines.set()
            wait_until(lambda: workers[0].agent.link(info).left)
            return reach(info, seconds)

        fates._agent.is_reachable = is_reachable  # type: ignore[method-assign]
        line = workers[0].agent.link(workers[1].info).open
        assert line is not None
        line.lose(ConnectionError("cut by the test"))
        assert examines.wait(SOON)
        workers[1].shutdown(graceful=False)
        seen.wait_for(Over, "worker1")
        assert [getattr(event, "reason", event) for event in seen.events] == ["it has left the group"]
    assert not [record for record in caplog.records if "cannot be reached" in record.getMessage()]
