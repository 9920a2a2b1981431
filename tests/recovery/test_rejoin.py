"""A worker that died comes back under its name: stale references raise, new calls work, a second one is refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

import backhaul.autograd as dist_autograd
from awaiting import await_events
from backhaul import rpc
from backhaul.errors import OptionError, WorkerLostError
from backhaul.security.handshake import Hello, Welcome
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Addresses, Channel, ChannelClosed
from backhaul.transport.memory import MemoryTransport
from backhaul.worker import Worker
from crew import Crew, Hand

AT_ONCE = 10.0  # on a busy machine; a worker that waits for others waits 60 seconds

held: dict[str, Any] = {}


@pytest.fixture(params=["memory", "sockets"])
def three(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    with InProcessCluster(3, sockets=request.param == "sockets") as workers:
        yield workers


def eventually(worker: Worker, holds: Callable[[], bool]) -> None:
    assert await_events(worker, holds, 10), "it did not come to be"


def number() -> int:
    return 7


def test_calls_in_both_directions_after_a_restart(three: InProcessCluster) -> None:
    before = three[2].info
    assert three[0].rpc_sync("worker2", number) == 7
    assert three[2].rpc_sync("worker1", number) == 7
    again = three.restart(2)
    assert again.info == before
    for there in range(2):
        assert three[there].rpc_sync("worker2", number) == 7
        assert three[there].rpc_sync(2, number) == 7
        assert three[2].rpc_sync(f"worker{there}", number) == 7


def test_a_worker_that_never_called_the_old_one_finds_the_new_one(three: InProcessCluster) -> None:
    three.restart(2)
    assert three[1].rpc_sync("worker2", number) == 7


def test_a_stale_reference_says_which_process_had_the_value_and_which_is_there_now(three: InProcessCluster) -> None:
    with three[0].as_current():
        stale = rpc.remote("worker2", torch.ones, args=(2,))
        assert stale.to_here().tolist() == [1.0, 1.0]
        old = three[2].agent.membership.incarnation
        new = three.restart(2).agent.membership.incarnation
        for worker in three[:2]:  # the new process greets all, but gives up on those that take seconds to answer
            assert worker.rpc_sync("worker2", number) == 7
        for use in (stale.to_here, stale.rpc_sync().sum, lambda: rpc.rpc_sync("worker1", number, args=(stale,))):
            with pytest.raises(WorkerLostError) as refusal:
                use()
            assert refusal.value.worker == "worker2"
            assert f"worker 'worker2' (incarnation {old}" in str(refusal.value)
            assert f"worker 'worker2' (incarnation {new}" in str(refusal.value)
            assert "Create it again" in str(refusal.value)
        assert rpc.remote("worker2", torch.ones, args=(2,)).to_here().tolist() == [1.0, 1.0]


class Unsociable(MemoryTransport):
    """The transport of a worker that others can call, but that cannot connect to them."""

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        raise ChannelClosed("not now")


@contextmanager
def unnoticed_restart() -> Iterator[tuple[InProcessCluster, rpc.RRef[torch.Tensor]]]:
    """Three workers, and a reference of worker 0 to a value that went with worker 2.

    No worker has heard of the new process of worker 2.
    """
    with InProcessCluster(3) as workers, workers[0].as_current():
        stale = rpc.remote("worker2", torch.ones, args=(2,))
        stale.to_here()
        workers[2].shutdown(graceful=False)
        eventually(workers[0], lambda: not workers[0].agent.is_connected(2))
        again = Worker("worker2", 2, 3, store=workers._store, transport=Unsociable(workers.network))
        try:
            yield workers, stale
        finally:
            again.shutdown(graceful=False)


def test_a_stale_reference_of_a_worker_that_has_not_heard_of_the_restart() -> None:
    """The first use makes the connection that reveals the new process: the request must not go there."""
    with (
        unnoticed_restart() as (_, stale),
        pytest.raises(WorkerLostError, match=r"none of its values|is lost or has freed it"),
    ):
        stale.to_here()


def test_a_new_reference_of_a_worker_that_has_not_heard_of_the_restart() -> None:
    """The reference belongs to the new process, although the request reveals it."""
    with unnoticed_restart():
        assert rpc.remote("worker2", torch.ones, args=(2,)).to_here().tolist() == [1.0, 1.0]


def test_a_reference_from_a_worker_that_has_heard_of_the_restart_to_one_that_has_not() -> None:
    """The reference to a value of the new process reveals that process. Only values of the old process are gone."""
    with unnoticed_restart() as (workers, stale):
        with workers[1].as_current():
            value = rpc.remote("worker2", torch.zeros, args=(2,))
            for _ in range(2):  # the first use makes the connection
                assert rpc.rpc_sync("worker0", fetch, args=(value,)) == [0.0, 0.0]
        with pytest.raises(WorkerLostError, match="is gone: "):
            stale.to_here()


def fetch(value: rpc.RRef[torch.Tensor]) -> list[float]:
    found: list[float] = value.to_here().tolist()
    return found


def test_a_successor_waits_until_its_predecessor_has_been_given_up(three: InProcessCluster) -> None:
    """The layers above are still being told of the death when the new process greets. They must not treat it as
    dead."""
    fates = three[0].agent.fates
    begun, go_on = threading.Event(), threading.Event()

    def linger(peer: rpc.WorkerInfo, reason: str) -> None:
        begun.set()
        assert go_on.wait(AT_ONCE)

    three[0].rpc_sync("worker2", number)
    fates.on_over.insert(0, linger)
    three[2].shutdown(graceful=False)
    assert begun.wait(AT_ONCE)

    def make() -> rpc.RRef[torch.Tensor]:
        with three[0].as_current():
            return rpc.remote("worker2", torch.ones, args=(2,))

    with ThreadPoolExecutor(1) as threads:
        three.restart(2)
        making = threads.submit(make)
        wait([making], 0.2)  # long enough to make a reference too early
        go_on.set()
        made = making.result(AT_ONCE)
    eventually(three[0], lambda: not fates.busy)
    with three[0].as_current():
        assert made.to_here().tolist() == [1.0, 1.0]


def keep(value: Any) -> None:
    held["stale"] = value


def test_references_that_the_old_process_held_are_freed(three: InProcessCluster) -> None:
    with three[0].as_current():
        mine = rpc.RRef(torch.ones(3))
        three[0].rpc_sync("worker2", keep, args=(mine,))
    owned = three[0].references.counts
    eventually(three[0], lambda: owned()["holders"] == 1)
    three[2].agent.close(0.0)
    three.restart(2)
    three[0].rpc_sync("worker2", number)
    eventually(three[0], lambda: owned()["holders"] == owned()["pinned"] == 0)
    held.clear()
    assert mine.local_value().tolist() == [1.0, 1.0, 1.0]


def test_gradients_through_the_new_process(three: InProcessCluster) -> None:
    x = torch.randn(3, requires_grad=True)
    for restarted in (False, True):
        if restarted:
            three.restart(2)
        with three[0].as_current(), dist_autograd.context() as context:
            y = rpc.rpc_sync("worker2", torch.mul, args=(x, x))
            dist_autograd.backward(context, [y.sum()])
            assert torch.equal(dist_autograd.get_gradients(context)[x], 2 * x.detach())


def test_a_group_with_a_restarted_worker_shuts_down_gracefully(three: InProcessCluster) -> None:
    three[0].rpc_sync("worker2", number)
    three.restart(2)
    three[1].rpc_sync("worker2", number)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda worker: worker.shutdown(timeout=20), three))


def test_a_second_living_worker_of_one_name_is_refused(three: InProcessCluster) -> None:
    began = time.monotonic()
    with pytest.raises(OptionError, match="rank 2 is taken by worker 'worker2'; every worker needs its own"):
        three._make(2, 3)
    assert time.monotonic() - began < AT_ONCE
    assert three[0].rpc_sync("worker2", number) == 7


def test_the_place_of_a_dead_worker_is_kept_for_its_name(three: InProcessCluster) -> None:
    three[2].agent.close(0.0)  # without announcing that it leaves
    with pytest.raises(OptionError, match="rank 2 belongs to worker 'worker2', which has died"):
        Worker("other", 2, 3, store=three._store, transport=three._transport())


@pytest.mark.parametrize("incarnation", ["x" * 65, "\u2028"])
def test_a_greeting_with_an_invalid_incarnation_is_refused(three: InProcessCluster, incarnation: str) -> None:
    """Errors show the text, and the peer chooses it."""
    agent = three[0].agent
    hello = Hello(agent.membership.group, 2, "worker2", 0, incarnation=incarnation)
    assert agent._reception.judge(hello).refused == "its incarnation is invalid"
    assert agent._reception.judge(msgspec.structs.replace(hello, incarnation="x" * 64)).refused == ""


# Real processes.


def call(to: str) -> int:
    return rpc.rpc_sync(to, os.getpid)


def hold(to: str) -> None:
    held["stale"] = rpc.remote(to, torch.ones, args=(2,))
    held["stale"].to_here()


def use() -> str:
    try:
        held["stale"].to_here(timeout=5)
    except WorkerLostError as error:
        return str(error)
    return "no error"


def init(place: dict[str, Any]) -> str:
    try:
        rpc.init_rpc(**place)
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_killed_process_is_replaced_by_another() -> None:
    with Crew(3) as crew:
        hold_before = crew[0].run(call, "worker2"), crew[0].run(hold, "worker2")
        second = Hand(None, None)
        try:
            second.await_start()
            began = time.monotonic()
            assert "rank 2 is taken by worker 'worker2'" in second.run(init, crew.place(2, 3))
            assert time.monotonic() - began < AT_ONCE
            crew[2].kill()
            assert second.run(init, crew.place(2, 3)) == ""
            assert crew[0].run(call, "worker2") == second.process.pid != hold_before[0]
            assert crew[1].run(call, "worker2") == second.process.pid
            text = crew[0].run(use)
            assert f"process {hold_before[0]}" in text
            assert f"process {second.process.pid}" in text
        finally:
            second.close()
