"""Any message may come on either channel of a link: each goes to the thread that listens, to the pool, or nowhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent.calling import Calling
from backhaul.agent.line import Line
from backhaul.agent.listening import Listener
from backhaul.agent.serving import Served
from backhaul.errors import WorkerLostError
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Check, Gradients, Pass, Ping, Report, Result, Tally
from backhaul.worker import Worker

PATIENCE = 10.0
ABOUT = 7


def line_of(worker: Worker) -> Calling:
    """The line that worker0 has opened to worker1."""
    worker.rpc_sync("worker1", int)
    line: Calling = worker.agent._route("worker1", time.monotonic() + PATIENCE)
    assert line.drain()
    return line


def served_by(worker: Worker) -> Served:
    """The end at ``worker`` of the line from worker0."""
    (found,) = [line for line in worker.agent.serving.lines if line.peer.name == "worker0"]
    return found


def report(number: int, about: int = ABOUT) -> Report:
    return Report(Pass(about, 1, about, False, False), False, (number,), ())


def numbers(listener: Listener) -> list[int]:
    """Take the reports that have arrived, and return their numbers."""
    found = []
    while listener.arrived:
        found.append(listener.arrived.popleft()[1].message.consumed[0])
    return found


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


def until_read(line: Calling) -> None:
    """Return when some thread reads this line."""
    never = threading.Event()
    limit = time.monotonic() + PATIENCE
    while not line.being_read():
        assert time.monotonic() < limit, "nobody reads"
        never.wait(0.001)


@pytest.fixture
def listener(pair: InProcessCluster) -> Iterator[Listener]:
    """Make this thread listen. No tick notices that it is away."""
    line_of(pair[0])
    ignore_absence(pair[0])
    with pair[0].agent.listeners.listen(ABOUT, lambda: [1]) as found:
        yield found


def ignore_absence(worker: Worker) -> None:
    agent = worker.agent
    agent.watch.ticks = [tick for tick in agent.watch.ticks if tick != agent.listeners.tick]


def await_arrival(worker: Worker, listener: Listener) -> None:
    limit = time.monotonic() + PATIENCE
    while not listener.arrived and time.monotonic() < limit:
        worker.agent.listeners.wait(listener, lambda: False, limit - time.monotonic())


# To the thread that listens.


def test_a_message_that_has_already_arrived_ends_the_wait(pair: InProcessCluster, listener: Listener) -> None:
    served_by(pair[1]).reply(encode(report(1)))
    await_arrival(pair[0], listener)
    assert numbers(listener) == [1]


def test_a_thread_that_waits_is_woken(pair: InProcessCluster, listener: Listener) -> None:
    line = line_of(pair[0])

    def send_when_read() -> None:
        until_read(line)
        served_by(pair[1]).reply(encode(report(2)))

    thread = started(send_when_read)
    await_arrival(pair[0], listener)
    assert numbers(listener) == [2]
    joined(thread)


def test_another_thread_can_end_the_wait(pair: InProcessCluster, listener: Listener) -> None:
    thread = started(listener.wake)
    start = time.monotonic()
    pair[0].agent.listeners.wait(listener, lambda: False, PATIENCE)
    assert time.monotonic() - start < PATIENCE / 2
    assert not listener.arrived
    joined(thread)


def test_a_call_of_another_thread_gets_its_reply_from_the_thread_that_listens(
    pair: InProcessCluster, listener: Listener
) -> None:
    line = line_of(pair[0])
    found: list[int] = []

    def call_when_read() -> None:
        until_read(line)
        found.append(pair[0].rpc_sync("worker1", int, args=("5",)))
        listener.wake()

    thread = started(call_when_read)
    limit = time.monotonic() + PATIENCE
    while not found and time.monotonic() < limit:
        pair[0].agent.listeners.wait(listener, lambda: bool(found), PATIENCE)
    assert found == [5]
    joined(thread)


def test_the_thread_that_reads_for_a_call_wakes_the_thread_that_listens(
    pair: InProcessCluster, listener: Listener
) -> None:
    """The other thread has the role of the reader; it hands out what comes."""
    _gates["asked"], _gates["answer"] = threading.Event(), threading.Event()
    caller = started(lambda: pair[0].rpc_sync("worker1", _wait_for_answer))
    assert _gates["asked"].wait(PATIENCE)
    served_by(pair[1]).reply(encode(report(3)))
    await_arrival(pair[0], listener)
    assert numbers(listener) == [3]
    _gates["answer"].set()
    joined(caller)


_gates: dict[str, threading.Event] = {}


def _wait_for_answer() -> None:
    _gates["asked"].set()
    assert _gates["answer"].wait(PATIENCE)


def test_messages_keep_their_order(pair: InProcessCluster, listener: Listener) -> None:
    for number in range(20):
        served_by(pair[1]).reply(encode(report(number)))
    found: list[int] = []
    while len(found) < 20:
        await_arrival(pair[0], listener)
        assert listener.arrived
        found += numbers(listener)
    assert found == list(range(20))


def test_a_connection_that_ends_ends_the_wait(pair: InProcessCluster, listener: Listener) -> None:
    line = line_of(pair[0])
    served_by(pair[1]).shutdown()
    limit = time.monotonic() + PATIENCE
    while line.lost is None and time.monotonic() < limit:
        pair[0].agent.listeners.wait(listener, lambda: line.lost is not None, PATIENCE)
    assert line.lost is not None
    listener.wake()  # too late, and does no harm
    start = time.monotonic()
    pair[0].agent.listeners.wait(listener, lambda: False, 0.01)
    assert time.monotonic() - start < PATIENCE / 2


# To the pool.


def test_messages_for_a_thread_that_is_away_are_handled_by_the_pool(
    pair: InProcessCluster, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = Handled(pair[0], Report, monkeypatch)
    listener.add(line_of(pair[0]), envelope_of(report(1)))
    pair[0].agent.listeners.step_away(listener)
    assert handled.came.wait(PATIENCE), "what had arrived"
    handled.came.clear()
    served_by(pair[1]).reply(encode(report(2)))
    assert handled.came.wait(PATIENCE), "what comes meanwhile, read by the watch thread"
    assert handled.messages == [report(1), report(2)]
    assert not listener.arrived
    pair[0].agent.listeners.wait(listener, lambda: True, PATIENCE)  # back again
    served_by(pair[1]).reply(encode(report(3)))
    await_arrival(pair[0], listener)
    assert numbers(listener) == [3]


def read_beside_the_watch(
    pair: InProcessCluster, line: Calling, message: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads a message that the watch thread has noticed, too; a tick has left the line to that thread."""
    watch = pair[0].agent.watch
    token = line.begin_reading()
    assert token
    attended = threading.Event()
    attend = watch._attend

    def tell() -> bool:
        had = line in watch._soon
        found = attend()
        if had:
            attended.set()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(watch, "_attend", tell)
        served_by(pair[1]).reply(encode(message))
        assert attended.wait(PATIENCE)
    line.finish_reading(token, PATIENCE)


def test_a_line_is_read_for_a_thread_that_is_away_after_another_thread_has_read_it(
    pair: InProcessCluster, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(pair[0])
    handled = Handled(pair[0], Report, monkeypatch)
    pair[0].agent.listeners.step_away(listener)
    read_beside_the_watch(pair, line, report(1), monkeypatch)
    assert handled.came.wait(PATIENCE)
    handled.came.clear()
    served_by(pair[1]).reply(encode(report(2)))
    assert handled.came.wait(PATIENCE)
    assert handled.messages == [report(1), report(2)]


def test_a_hang_up_is_noticed_after_another_thread_has_read_the_line(
    pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(pair[0])
    lost = threading.Event()
    pair[0].agent.on_connection_ended.append(lambda *_: lost.set())
    pair[0].agent.watch.keep_reading(line)
    pair[0].agent.watch.stop_reading(line)  # it is armed for replies that no thread wants any more
    read_beside_the_watch(pair, line, report(1), monkeypatch)
    served_by(pair[1]).shutdown()
    assert lost.wait(PATIENCE)
    assert line.lost is not None


def test_ticks_notice_a_thread_that_stays_away(pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    line_of(pair[0])
    handled = Handled(pair[0], Report, monkeypatch)
    with pair[0].agent.listeners.listen(ABOUT, lambda: [1]) as found:
        served_by(pair[1]).reply(encode(report(1)))
        assert handled.came.wait(PATIENCE)
        assert found.away
    assert handled.messages == [report(1)]


def envelope_of(message: object) -> Envelope:
    decoder = Decoder(1 << 20)
    (found,) = decoder.receive_data(bytes(encode(message)))
    return found


class Handled:
    """Replaces a worker's handler of one kind of message, and records the thread on which it runs."""

    def __init__(self, worker: Worker, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[object] = []
        self.threads: list[str] = []
        self.lines: list[Line] = []
        self.came = threading.Event()
        monkeypatch.setitem(worker.agent._handlers, kind, self._handle)

    def _handle(self, line: Line, envelope: Envelope) -> Frame | None:
        self.messages.append(envelope.message)
        self.threads.append(threading.current_thread().name)
        self.lines.append(line)
        self.came.set()
        return None


@pytest.mark.parametrize(
    "message",
    [
        report(4, about=ABOUT + 1),
        Gradients(Pass(9, 1, 9, False, False), (1,), ()),
        Check(5, Pass(9, 1, 9, False, False), 1),
        Ping(5),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_nobody_listens_for_is_handled_by_the_pool(
    pair: InProcessCluster, listener: Listener, monkeypatch: pytest.MonkeyPatch, message: object
) -> None:
    line = line_of(pair[0])
    handled = Handled(pair[0], type(message), monkeypatch)
    served_by(pair[1]).reply(encode(message))
    assert pair[0].rpc_sync("worker1", int, args=("6",)) == 6  # and this thread reads both
    assert handled.came.wait(PATIENCE)
    assert handled.messages == [message]
    assert handled.threads == ["backhaul-worker0"]
    assert handled.lines == [line]
    assert not listener.arrived


def test_a_request_that_comes_among_replies_is_answered(pair: InProcessCluster) -> None:
    """The request may even be a call: it runs on the pool, and its reply goes back on the same line."""
    line = line_of(pair[0])
    served = served_by(pair[1])
    answered = threading.Event()
    replies: list[object] = []

    def take(_: Line, envelope: Envelope) -> None:
        replies.append(envelope.message)
        answered.set()

    pair[1].agent._handlers[Result] = take
    tree, _ = pair[1].agent._codec.pack_call(int, ("12",), {})
    served.reply(encode(Call(77, tree)))
    assert pair[0].rpc_sync("worker1", int, args=("6",)) == 6
    assert answered.wait(PATIENCE)
    assert replies == [Result(77, 12)]
    assert (line.calls_started, line.calls_finished) == (1, 1)


def test_a_message_is_read_although_no_thread_waits(pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed pass its thread is gone, but messages that the others still send must be handled."""
    line_of(pair[0])
    handled = Handled(pair[0], Report, monkeypatch)
    pair[0].agent.listeners.read_later([1])
    served_by(pair[1]).reply(encode(report(1)))
    assert handled.came.wait(PATIENCE)


# Nowhere.


@pytest.mark.parametrize("calls", [True, False], ids=["read by a call", "read by a listener"])
@pytest.mark.parametrize("junk", ["a message without a handler", "no message"])
def test_a_senseless_message_ends_the_connection(
    pair: InProcessCluster, calls: bool, junk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(pair[0])
    _gates["asked"], _gates["answer"] = threading.Event(), threading.Event()
    monkeypatch.delitem(pair[0].agent._handlers, Tally)
    served_by(pair[1]).reply(Frame([b"\xff" * 64], 64) if junk == "no message" else encode(Tally(1)))
    if calls:
        with pytest.raises(WorkerLostError, match="worker1"):
            pair[0].rpc_sync("worker1", _wait_for_answer)
    else:
        with pair[0].agent.listeners.listen(ABOUT, lambda: [1]) as found:
            limit = time.monotonic() + PATIENCE
            while line.lost is None and time.monotonic() < limit:
                pair[0].agent.listeners.wait(found, lambda: line.lost is not None, PATIENCE)
    assert line.lost is not None
    assert line.fileno() == -1, "closed"
    _gates["answer"].set()
    assert pair[0].rpc_sync("worker1", int, args=("7",)) == 7, "over a new connection"


def test_a_late_reply_is_dropped(pair: InProcessCluster, listener: Listener) -> None:
    line = line_of(pair[0])
    served_by(pair[1]).reply(encode(Result(123_456, 1)))
    assert pair[0].rpc_sync("worker1", int, args=("6",)) == 6
    assert line.lost is None
    assert not listener.arrived
    assert line.outstanding == 0


# Backward.


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "sockets"])
def test_the_thread_of_backward_runs_what_comes_back(workers: int, sockets: bool) -> None:
    """A chain that comes back to the starter from each worker in turn: no other thread of the starter takes part."""
    threads: set[int] = set()
    x = torch.rand(3, 3, requires_grad=True)
    hops = 6
    with InProcessCluster(workers, sockets=sockets) as cluster, cluster[0].as_current():
        for _ in range(5):
            with dist_autograd.context() as ctx:
                y = x
                for hop in range(hops):
                    y = rpc.rpc_sync(f"worker{1 + hop % (workers - 1)}", torch.tanh, args=(y * 2,))
                    y.register_hook(lambda _: threads.add(threading.get_ident()))
                dist_autograd.backward(ctx, [y.sum()])
                gradient = dist_autograd.get_gradients(ctx)[x]
            assert threads == {threading.get_ident()}
        assert not cluster[0].agent.listeners._listeners
    z = x
    for _ in range(hops):
        z = torch.tanh(z * 2)
    (expected,) = torch.autograd.grad(z.sum(), [x])
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("gate", [False, True], ids=["waiting for the end", "waiting at a gate"])
def test_a_peer_that_hangs_in_a_pass_is_noticed_in_time(gate: bool) -> None:
    """The thread of `backward` reads all lines and pings nobody: the watch thread does."""
    patience = 0.4
    x = torch.rand(3, requires_grad=True)
    with (
        InProcessCluster(2, sockets=True, options=RpcOptions(unresponsive_after=patience)) as workers,
        workers[0].as_current(),
        dist_autograd.context() as ctx,
    ):
        y = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
        if gate:
            y = rpc.rpc_sync("worker1", torch.tanh, args=(y * 2 + x,)) + y
        for kind in (Gradients, Check, Ping):
            workers[1].agent._handlers[kind] = lambda line, envelope: None
        start = time.monotonic()
        with pytest.raises(WorkerLostError, match="has not answered"):
            dist_autograd.backward(ctx, [y.sum()])
        assert time.monotonic() - start < 5 * patience
