"""A thread that waits for many lines: it reads whatever comes, is woken by others, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from awaiting import await_events
from backhaul import rpc
from backhaul.agent.calling import Calling
from backhaul.agent.listening import Listener
from backhaul.agent.observing import Event, HandedOut
from backhaul.agent.serving import Served
from backhaul.agent.waiting import Bell, Vigil, Vigils, Waiter
from backhaul.testing import InProcessCluster
from backhaul.transport.awake import Rhythm
from backhaul.wire.frames import encode
from backhaul.wire.messages import Pass, Report
from backhaul.worker import Worker

PATIENCE = 10.0
ABOUT = 7


@pytest.fixture(params=["memory", "sockets"])
def trio(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    with InProcessCluster(3, sockets=request.param == "sockets") as workers:
        yield workers


@pytest.fixture
def vigil() -> Iterator[Vigil]:
    made = Vigil(Rhythm(), 0.0)
    yield made
    made.close()


def line_to(workers: InProcessCluster, rank: int) -> Calling:
    """The line of worker0 to another worker, opened and empty."""
    workers[0].rpc_sync(f"worker{rank}", int)
    line: Calling = workers[0].agent._route(rank, time.monotonic() + PATIENCE)
    assert line.drain()
    return line


def served_by(worker: Worker) -> Served:
    """The end at ``worker`` of the line from worker0."""
    (found,) = [line for line in worker.agent.serving.lines if line.peer.name == "worker0"]
    return found


def report(number: int, about: int = ABOUT) -> Report:
    return Report(Pass(about, 1, about, False, False), False, (number,), ())


def numbers(listener: Listener) -> list[int]:
    return [envelope.message.consumed[0] for _, envelope in listener.arrived]


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


def keep(vigil: Vigil, lines: list[Calling], done: Callable[[], bool]) -> None:
    """Wait until ``done()``. A memory channel may once be readable without a message."""
    while not done():
        vigil.wait(lines, done, PATIENCE)


class Polls:
    """Signals that a vigil is about to look at its lines."""

    def __init__(self, vigil: Vigil, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.lines: list[Calling] = []
        wait = vigil._await

        def tell(reading: list[Calling], seconds: float) -> list[tuple[int, int]]:
            self.lines = list(reading)
            self.begun.set()
            return wait(reading, seconds)

        monkeypatch.setattr(vigil, "_await", tell)


# Bells and sleepers.


def test_a_bell_is_readable_from_ring_to_hush() -> None:
    bell = Bell()
    poll = select.poll()
    poll.register(bell.fileno(), select.POLLIN)
    assert not poll.poll(0)
    bell.ring()
    bell.ring()
    assert poll.poll(0)
    bell.hush()
    assert not poll.poll(0)
    bell.hush()
    bell.ring()
    assert poll.poll(0)
    bell.close()


def test_a_closed_bell_does_nothing() -> None:
    bell = Bell()
    bell.close()
    bell.close()
    bell.ring()
    bell.hush()
    assert bell.fileno() == -1


def test_a_sleeper_is_woken_by_another_thread() -> None:
    waiter = Waiter()
    thread = started(waiter.wake)
    assert waiter.sleep(PATIENCE)
    joined(thread)


def test_two_wakes_before_a_sleep_end_one_sleep() -> None:
    waiter = Waiter()
    waiter.wake()
    waiter.wake()
    assert waiter.sleep(PATIENCE)
    assert not waiter.sleep(0.001)


def test_a_sleep_without_an_end_can_be_woken() -> None:
    waiter = Waiter()
    thread = started(waiter.wake)
    assert waiter.sleep(float("inf"))
    joined(thread)


# Vigils.


def test_a_vigil_ends_when_it_is_woken(vigil: Vigil, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = Polls(vigil, monkeypatch)
    thread = started(lambda: vigil.wait([], lambda: False, PATIENCE))
    assert polls.begun.wait(PATIENCE)
    vigil.wake()
    joined(thread)


def test_a_wake_before_a_vigil_ends_only_this_vigil(vigil: Vigil) -> None:
    vigil.wake()
    start = time.monotonic()
    vigil.wait([], lambda: False, PATIENCE)
    assert time.monotonic() - start < PATIENCE / 2
    start = time.monotonic()
    vigil.wait([], lambda: False, 0.05)
    assert time.monotonic() - start >= 0.05


def test_a_vigil_that_is_already_done_does_not_wait(vigil: Vigil, trio: InProcessCluster) -> None:
    line = line_to(trio, 1)
    start = time.monotonic()
    vigil.wait([line], lambda: True, PATIENCE)
    assert time.monotonic() - start < PATIENCE / 2
    assert not line.being_read()


def test_a_vigil_can_be_woken_before_it_checks_whether_it_is_done(vigil: Vigil, trio: InProcessCluster) -> None:
    """A message that comes between the check and the sleep must wake the thread."""
    line = line_to(trio, 1)
    seen: list[bool] = []

    def done() -> bool:
        seen.append(line.being_read())
        vigil.wake()
        return False

    vigil.wait([line], done, PATIENCE)
    assert seen == [True]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_vigil_reads_the_line_on_which_a_message_comes(
    trio: InProcessCluster, vigil: Vigil, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    lines = [line_to(trio, 1), line_to(trio, 2)]
    polls = Polls(vigil, monkeypatch)
    agent = trio[0].agent
    agent.watch.ticks = [tick for tick in agent.watch.ticks if tick != agent.listeners.tick]
    with agent.listeners.listen(ABOUT, lambda: [1, 2]) as listener:
        thread = started(lambda: keep(vigil, lines, lambda: bool(listener.arrived)))
        assert polls.begun.wait(PATIENCE)
        assert polls.lines == lines
        served_by(trio[rank]).reply(encode(report(rank)))
        joined(thread)
        assert numbers(listener) == [rank]
    assert not any(line.being_read() for line in lines)


def test_a_line_that_another_thread_reads_is_left_to_it(
    trio: InProcessCluster, vigil: Vigil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role comes to the vigil when that thread stops, and the vigil reads the line from then on."""
    lines = [line_to(trio, 1), line_to(trio, 2)]
    token = lines[0].begin_reading()
    assert token
    polls = Polls(vigil, monkeypatch)
    thread = started(lambda: vigil.wait(lines, lambda: False, PATIENCE))
    assert polls.begun.wait(PATIENCE)
    assert polls.lines == lines[1:]
    assert not lines[0].stop_reading(token)
    joined(thread)  # woken for the role
    vigil.wait(lines, lambda: False, 0.0)
    assert polls.lines == lines


def test_a_vigil_that_is_offered_a_role_and_leaves_passes_it_on(trio: InProcessCluster, vigil: Vigil) -> None:
    line = line_to(trio, 1)
    token = line.begin_reading()
    next_one = Waiter()

    def done() -> bool:
        assert line.line_up(next_one)
        line.stop_reading(token)  # offers it to the vigil, which is first
        return True

    vigil.wait([line], done, PATIENCE)
    assert next_one.sleep(PATIENCE)


def test_a_role_that_becomes_free_between_two_looks_is_taken(
    trio: InProcessCluster, vigil: Vigil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the vigil did not try again, no thread would read that line, and none would be woken for it."""
    line = line_to(trio, 1)
    token = line.begin_reading()
    line_up = line.line_up

    def late(waiter: Vigil) -> bool:
        line.stop_reading(token)
        return line_up(waiter)

    monkeypatch.setattr(line, "line_up", late)
    polls = Polls(vigil, monkeypatch)
    vigil.wait([line], lambda: False, 0.0)
    assert polls.lines == [line]


def test_a_line_that_is_lost_meanwhile_ends_the_vigil(
    trio: InProcessCluster, vigil: Vigil, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line_to(trio, 1), line_to(trio, 2)]
    polls = Polls(vigil, monkeypatch)
    thread = started(lambda: keep(vigil, lines, lambda: lines[0].lost is not None))
    assert polls.begun.wait(PATIENCE)
    served_by(trio[1]).shutdown()
    joined(thread)
    assert lines[0].lost is not None
    assert lines[0].fileno() == -1, "the thread that read it has closed it"
    assert lines[1].lost is None
    vigil.wait(lines, lambda: False, 0.0)
    assert polls.lines == lines[1:]


def test_a_line_that_this_worker_loses_is_closed_by_the_vigil_that_reads_it(
    trio: InProcessCluster, vigil: Vigil, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_to(trio, 1)
    polls = Polls(vigil, monkeypatch)
    thread = started(lambda: keep(vigil, [line], lambda: line.lost is not None))
    assert polls.begun.wait(PATIENCE)
    line.lose(ConnectionError("cut"))
    joined(thread)
    assert line.fileno() == -1


def test_a_vigil_on_lost_lines_sleeps(trio: InProcessCluster, vigil: Vigil) -> None:
    """The vigil polls no descriptor of a lost line, because it may belong to another connection by then."""
    line = line_to(trio, 1)
    line.lose(ConnectionError("cut"))
    before = time.thread_time()
    vigil.wait([line], lambda: False, 0.2)
    assert time.thread_time() - before < 0.1, "it was awake all the time"
    thread = started(lambda: vigil.wait([line], lambda: False, PATIENCE))
    vigil.wake()
    joined(thread)


def test_a_vigil_gives_up_all_roles_whatever_goes_wrong_with_one(
    trio: InProcessCluster, vigil: Vigil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started for a message that came. The other lines must still be read."""
    lines = [line_to(trio, 1), line_to(trio, 2)]

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    for line, served in zip(lines, [served_by(trio[1]), served_by(trio[2])], strict=True):
        monkeypatch.setattr(line, "_hand_out", fails)
        served.reply(encode(report(1)))
    until_readable(lines)
    with pytest.raises(RuntimeError):
        vigil.wait(lines, lambda: False, PATIENCE)
    assert not any(line.being_read() for line in lines)


def until_readable(lines: list[Calling]) -> None:
    for line in lines:
        poll = select.poll()
        poll.register(line.fileno(), select.POLLIN)
        assert poll.poll(PATIENCE * 1000)


def test_a_thousand_vigils_take_no_descriptors(trio: InProcessCluster) -> None:
    lines = [line_to(trio, 1), line_to(trio, 2)]
    vigils = Vigils(0.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        vigil = vigils.take()
        vigil.wait(lines, lambda: True, PATIENCE)
        vigils.give_back(vigil)
    assert len(os.listdir("/proc/self/fd")) - before <= 1, "one bell"
    vigils.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_thousand_calls_beside_a_future_take_no_descriptors(trio: InProcessCluster) -> None:
    """Each of them waits for both lines."""
    gates["slow"] = threading.Event()
    line_to(trio, 1)
    line_to(trio, 2)
    future = trio[0].rpc_async("worker2", wait_for, args=("slow",))
    assert trio[0].rpc_sync("worker1", int) == 0
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        trio[0].rpc_sync("worker1", int)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    gates["slow"].set()
    assert future.wait()


def test_threads_do_not_share_a_vigil() -> None:
    vigils = Vigils(0.0)
    one, other = vigils.take(), vigils.take()
    assert one is not other
    vigils.give_back(one)
    assert vigils.take() is one
    vigils.close()
    vigils.give_back(one)
    vigils.give_back(other)
    assert (one._bell.fileno(), other._bell.fileno()) == (-1, -1), "given back after the end"


# Futures to several workers.

gates: dict[str, threading.Event] = {}


def wait_for(name: str) -> bool:
    return gates[name].wait(PATIENCE)


def test_the_waiting_thread_completes_the_futures_of_all_workers(
    trio: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch thread and the pool take no part."""
    agent = trio[0].agent
    lines = {line_to(trio, 1), line_to(trio, 2)}
    monkeypatch.setattr(agent.watch, "_attend", lambda: False)  # its ticks come whenever they come
    told: list[Event] = []
    stop = agent.observers.add(told.append)
    for round in range(20):
        futures = [trio[0].rpc_async(f"worker{1 + i % 2}", int, args=(str(i),)) for i in range(8)]
        assert [future.wait() for future in futures] == list(range(8)), f"round {round}"
    stop()
    handed_out = [event for event in told if isinstance(event, HandedOut) and event.count]
    assert {event.line for event in handed_out} == {line.descriptor for line in lines}
    assert {event.thread for event in handed_out} == {threading.get_ident()}
    assert sum(event.count for event in handed_out) == 160


def test_a_nested_call_reads_futures_to_other_workers_too(
    trio: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio[1].agent.watch, "_attend", lambda: False)
    told: list[Event] = []
    stop = trio[1].agent.observers.add(told.append)
    assert trio[0].rpc_sync("worker1", ask_both) == [0, 5, 6]
    stop()
    waiting = {event.thread for event in told if isinstance(event, HandedOut) and event.peer == "worker2"}
    assert len(waiting) == 1


def ask_both() -> list[int]:
    future = rpc.rpc_async("worker2", int, args=("5",))
    return [rpc.rpc_sync("worker0", int), future.wait(), rpc.rpc_sync("worker2", int, args=("6",))]


def test_a_future_that_nobody_waits_for_is_read_by_the_thread_that_waits_for_another(
    trio: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    line_to(trio, 1)
    line_to(trio, 2)
    monkeypatch.setattr(trio[0].agent.watch, "_attend", lambda: False)
    gates["late"] = threading.Event()
    early = trio[0].rpc_async("worker2", int, args=("3",))
    late = trio[0].rpc_async("worker1", wait_for, args=("late",))
    waits = started(late.wait)
    limit = time.monotonic() + PATIENCE
    while not early.done() and time.monotonic() < limit:
        waits.join(0.001)
    assert early.done()
    assert waits.is_alive()
    gates["late"].set()
    joined(waits)


def test_a_future_that_is_opened_while_its_line_is_struck_off_is_not_forgotten(
    trio: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that strikes a line off has seen no futures; another thread opens one just then."""
    line = line_to(trio, 1)
    watch = trio[0].agent.watch
    monkeypatch.setattr(watch, "_attend", lambda: False)
    gates["open"] = threading.Event()
    made: list[rpc.Future[bool]] = []

    class Unread(set[Calling]):
        def discard(self, found: Calling) -> None:
            if not made:
                made.append(trio[0].rpc_async("worker1", wait_for, args=("open",)))
            super().discard(found)

    watch.unread = Unread([line])
    watch.take_over()
    assert line.futures == 1
    assert line in watch.unread
    gates["open"].set()
    assert made[0].wait()


def test_a_thread_that_listens_reads_a_line_that_is_opened_meanwhile(trio: InProcessCluster) -> None:
    """A message may come there as soon as the line is open, and nothing else would make the thread look."""
    listeners = trio[0].agent.listeners
    heard: list[int] = []

    def listen() -> None:
        with listeners.listen(ABOUT, lambda: {1}) as listener:
            listening.append(listener)
            end = time.monotonic() + PATIENCE
            while not listener.arrived and (left := end - time.monotonic()) > 0:
                listeners.wait(listener, lambda: False, left)
            heard.extend(numbers(listener))

    listening: list[Listener] = []
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        assert await_events(trio[0], lambda: bool(listening) and listening[0].waits, PATIENCE)
        line = trio[0].agent._route(1, time.monotonic() + PATIENCE)
        assert line.peer.name == "worker1"
        assert await_events(trio[1], lambda: bool(trio[1].agent.serving.lines), PATIENCE)
        served_by(trio[1]).reply(encode(report(5)))
    finally:
        thread.join(2 * PATIENCE)
    assert heard == [5]
