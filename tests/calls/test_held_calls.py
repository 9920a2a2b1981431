"""Calls that are held back and sent together: all run, in order, whether or not a thread waits for them."""

from __future__ import annotations

import asyncio
import math
import operator
import signal
import socket
import threading
from collections import defaultdict

import pytest
import torch
from callees import identity, open_gate, wait_for_gate, who
from test_shutdown import shut_down_all

from backhaul import current_worker, rpc
from backhaul.agent import link_state
from backhaul.agent.calling import Calling
from backhaul.rpc import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.wire.frames import encode
from backhaul.wire.messages import AwaitEnd, Ping
from backhaul.worker import Worker
from crew import Crew

PATIENCE = 20.0
BACKLOG = link_state.BACKLOG

ran: dict[str, list[int]] = defaultdict(list)
over: dict[str, threading.Event] = defaultdict(threading.Event)


def note(name: str, number: int, last: int) -> None:
    """Append to a list of the test. The last call sets an event."""
    ran[name].append(number)
    if len(ran[name]) == last:
        over[name].set()


def keep_busy(worker: Worker, gate: str) -> list[torch.futures.Future[bool]]:
    """Make enough calls to worker1 that further calls are held back."""
    return [worker.rpc_async("worker1", wait_for_gate, args=(gate,)) for _ in range(BACKLOG + 1)]


def route(worker: Worker) -> Calling:
    return worker.agent._route(1, math.inf)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of this test's list and event. It is made once, because two threads would make two."""
    name = str(request.node.name)
    ran[name], over[name] = [], threading.Event()
    return name


@pytest.fixture
def busy(pair: InProcessCluster, gate: str) -> InProcessCluster:
    keep_busy(pair[0], gate)
    assert pair[0].rpc_sync("worker1", who) == "worker1"  # and no call is held back any more
    return pair


def test_5000_calls_run_although_no_thread_waits(pair: InProcessCluster, name: str) -> None:
    count = 5000
    futures = [pair[0].rpc_async("worker1", note, args=(name, i, count)) for i in range(count)]
    assert over[name].wait(PATIENCE)
    assert sorted(ran[name]) == list(range(count))
    assert torch.futures.wait_all(futures) == [None] * count


@pytest.mark.parametrize("count", range(1, 19))
def test_the_last_held_calls_leave_at_a_tick(busy: InProcessCluster, name: str, gate: str, count: int) -> None:
    """The tick sends calls that are too few to be sent at once."""
    for i in range(count):
        busy[0].rpc_async("worker1", note, args=(name, i, count))
    assert over[name].wait(PATIENCE)
    open_gate(gate)


def test_calls_of_one_thread_leave_in_order() -> None:
    """One thread serves them, so they run in the order of arrival."""
    count = 1000
    over["order"] = threading.Event()
    with InProcessCluster(2, sockets=True, options=RpcOptions(num_worker_threads=1)) as workers:
        large = torch.zeros(100_000)
        for i in range(count):
            # Some calls are held back, some are too large for that, and for some a thread waits.
            extra = (large,) if i % 50 == 7 else ()
            future = workers[0].rpc_async("worker1", note_in_order, args=(i, count, *extra))
            if i % 90 == 3:
                future.wait()
        assert over["order"].wait(PATIENCE)
    assert ran["order"] == list(range(count))


def note_in_order(number: int, last: int, *_: object) -> None:
    note("order", number, last)


def stop_ticking(workers: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> Calling:
    """Held calls stay held until something other than a tick sends them."""
    line = route(workers[0])
    monkeypatch.setattr(workers[0].agent.watch, "remind", lambda _: None)
    return line


def test_a_call_is_held_while_many_are_under_way(
    busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = stop_ticking(busy, monkeypatch)
    futures = [busy[0].rpc_async("worker1", operator.add, args=(i, 1)) for i in range(3)]
    assert line._state.holds == 3
    assert futures[0].wait() == 1  # waiting for one call sends all
    assert line._state.holds == 0
    assert [future.wait() for future in futures] == [1, 2, 3]
    open_gate(gate)


def test_enough_held_calls_leave_at_once(
    busy: InProcessCluster, name: str, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = stop_ticking(busy, monkeypatch)
    count = link_state.MOST_HELD + 1
    for i in range(count):
        busy[0].rpc_async("worker1", note, args=(name, i, count))
    assert line._state.holds == 0
    assert over[name].wait(PATIENCE)
    open_gate(gate)


def test_large_calls_are_not_held_and_take_the_others_along(
    busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = stop_ticking(busy, monkeypatch)
    x = torch.arange(1_000_000)
    small = busy[0].rpc_async("worker1", identity, args=(1,))
    assert line._state.holds == 1
    large = busy[0].rpc_async("worker1", identity, args=(x,))
    assert line._state.holds == 0
    assert small.wait() == 1
    assert torch.equal(large.wait(), x)
    open_gate(gate)


def test_adding_a_callback_sends_held_calls_at_once(
    busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = stop_ticking(busy, monkeypatch)
    done = threading.Event()
    futures = [busy[0].rpc_async("worker1", who) for _ in range(3)]
    assert line._state.holds == 3
    futures[2].add_done_callback(lambda _: done.set())
    assert line._state.holds == 0
    assert done.wait(PATIENCE)
    doubled = busy[0].rpc_async("worker1", operator.add, args=(1, 1)).then(lambda f: 2 * f.value())
    assert line._state.holds == 0
    assert doubled.wait() == 4
    open_gate(gate)


def test_an_awaited_call_leaves_at_once(busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_ticking(busy, monkeypatch)

    async def ask() -> list[int]:
        futures = [busy[0].rpc_async("worker1", operator.add, args=(i, 1)) for i in range(5)]
        return [await future for future in futures]  # type: ignore[misc]

    assert asyncio.run(asyncio.wait_for(ask(), PATIENCE)) == [1, 2, 3, 4, 5]
    open_gate(gate)


def test_held_calls_of_collected_futures_leave(busy: InProcessCluster, gate: str) -> None:
    """Torch attaches callbacks to the futures that Backhaul does not see."""
    futures = [busy[0].rpc_async("worker1", operator.add, args=(i, 1)) for i in range(5)]
    assert [future.wait() for future in torch.futures.collect_all(futures).wait()] == [1, 2, 3, 4, 5]
    open_gate(gate)


def test_a_held_call_can_time_out(busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_ticking(busy, monkeypatch)
    future = busy[0].rpc_async("worker1", wait_for_gate, args=(gate,), timeout=0.2)
    done = threading.Event()
    busy[0].rpc_async("worker1", who)  # held back, since no thread waits for it
    future.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE)
    with pytest.raises(rpc.RpcTimeoutError):
        future.wait()
    open_gate(gate)


def test_a_peer_that_dies_while_calls_are_held(
    busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = stop_ticking(busy, monkeypatch)
    futures = [busy[0].rpc_async("worker1", who) for _ in range(10)]
    assert line._state.holds == 10
    open_gate(gate)
    busy[1].shutdown(graceful=False)
    for future in futures:
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            future.wait()
    assert line._state.holds == 0


def test_a_call_that_comes_when_the_peer_has_just_been_lost(
    pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call opens its slot after all others have failed, and before the channel is closed. It must fail too."""
    assert pair[0].rpc_sync("worker1", who) == "worker1"
    line = route(pair[0])
    channel = line.channel
    shutting, asked = threading.Event(), threading.Event()
    shut = channel.shutdown
    errors: list[BaseException] = []

    def shut_late() -> None:
        shutting.set()
        assert asked.wait(PATIENCE)
        shut()

    def ask() -> None:
        assert shutting.wait(PATIENCE)
        try:
            line.ask(1 << 40, encode(AwaitEnd(1 << 40, 0)), "a question", math.inf, is_call=False)
        except BaseException as error:
            errors.append(error)
        asked.set()

    monkeypatch.setattr(channel, "shutdown", shut_late)
    run = threading.Thread(target=ask)
    run.start()
    line.lose(rpc.WorkerLostError("worker 'worker1' is lost: it was killed", "worker1"))
    run.join(PATIENCE)
    assert [type(error) for error in errors] == [rpc.WorkerLostError]


def test_some_threads_wait_for_their_calls_and_others_do_not(pair: InProcessCluster) -> None:
    wrong: list[object] = []
    futures: list[torch.futures.Future[int]] = []
    lock = threading.Lock()

    def work(thread: int) -> None:
        mine = []
        for i in range(150):
            if thread % 2:
                mine.append(pair[0].rpc_async("worker1", operator.add, args=(1000 * thread, i)))
            elif pair[0].rpc_sync("worker1", operator.add, args=(1000 * thread, i)) != 1000 * thread + i:
                wrong.append((thread, i))
        with lock:
            futures.extend(mine)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    expected = sorted(1000 * thread + i for thread in (1, 3, 5, 7) for i in range(150))
    assert sorted(torch.futures.wait_all(futures)) == expected


@pytest.mark.parametrize("threads", [2, 8])
def test_many_threads_make_calls_without_waiting(pair: InProcessCluster, name: str, threads: int) -> None:
    """Some thread may be about to hold a call back when the tick comes."""
    each = 3000 // threads

    def work(thread: int) -> None:
        for i in range(each):
            pair[0].rpc_async("worker1", note, args=(name, thread * each + i, each * threads))

    makers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert over[name].wait(PATIENCE)
    assert sorted(ran[name]) == list(range(each * threads))


def test_a_graceful_shutdown_waits_for_held_calls(pair: InProcessCluster, name: str) -> None:
    count = 100
    futures = [pair[0].rpc_async("worker1", note, args=(name, i, count)) for i in range(count)]
    assert shut_down_all(pair) == []
    assert over[name].is_set()
    assert all(future.done() for future in futures)


def test_a_hard_shutdown_fails_held_calls(busy: InProcessCluster, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_ticking(busy, monkeypatch)
    futures = [busy[0].rpc_async("worker1", who) for _ in range(5)]
    busy[0].shutdown(graceful=False)
    for future in futures:
        with pytest.raises(rpc.BackhaulError):
            future.wait()
    open_gate(gate)


def hold_for_a_full_socket() -> None:
    """Calls are held back, and when they are sent the socket has no room."""
    line = current_worker.get().agent._route(1, math.inf)
    for _ in range(BACKLOG + 1):
        rpc.rpc_async("worker1", who)
    line.send_held()
    assert not line._state.holds
    ping = bytes(encode(Ping(0)))
    try:
        while True:
            assert line.channel._socket.send(ping, socket.MSG_DONTWAIT) == len(ping)  # type: ignore[attr-defined]
    except BlockingIOError:
        pass
    for i in range(3):
        rpc.rpc_async("worker1", note, args=("full", i, 3))
    line.send_held()  # as a tick does


def await_notes(name: str) -> bool:
    return over[name].wait(30)


def test_held_calls_that_met_a_full_socket_leave_later() -> None:
    """The calls are sent when there is room, although no thread waits for them and nothing else is sent."""
    with Crew(2) as crew:
        assert crew[0].run(rpc.rpc_sync, "worker1", who) == "worker1"
        crew[1].signal(signal.SIGSTOP)
        crew[0].run(hold_for_a_full_socket)
        crew[1].signal(signal.SIGCONT)
        assert crew[1].run(await_notes, "full")
