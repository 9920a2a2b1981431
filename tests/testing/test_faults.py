"""The shipped faults: what each does to a message, and how the workers at both ends react."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backhaul.errors import RpcTimeoutError, WorkerLostError
from backhaul.options import RpcOptions
from backhaul.rpc import get_worker_info, rpc_sync
from backhaul.testing import Faults, FaultyTransport, InProcessCluster
from backhaul.testing.faults import FaultyChannel
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.stream import StreamTransport
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Failure, Goodbye, Ping, Result
from backhaul.worker import Worker

SHORT = 0.3  # a timeout that is meant to pass
SOON = 10.0


class Runs:
    """Counts how often something ran, and lets the test wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def add(self) -> int:
        with self._changed:
            self._count += 1
            self._changed.notify_all()
            return self._count

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, SOON), f"{self._count} of {count}"

    @property
    def count(self) -> int:
        with self._changed:
            return self._count


runs = Runs()


@pytest.fixture(autouse=True)
def _fresh_runs() -> None:
    global runs
    runs = Runs()


def count_runs() -> int:
    return runs.add()


def fail() -> None:
    raise ValueError("no")


def count_and_fail() -> None:
    runs.add()
    fail()


def forward(to: str) -> int:
    return rpc_sync(to, count_runs)


# Decisions.


def test_nothing_happens_unless_asked_for() -> None:
    faults = Faults()
    assert {faults.decide(kind) for kind in (Call, Result, Failure, Ping) for _ in range(100)} == {"pass"}
    assert faults.counts == {"pass": 400}


def test_faults_occur_as_often_as_configured() -> None:
    faults = Faults(seed=1, drop=0.1, delay=0.2, duplicate=0.3, cut=0.05)
    for _ in range(10_000):
        faults.decide(Call)
    for action, share in (("drop", 0.1), ("delay", 0.2), ("duplicate", 0.3), ("cut", 0.05), ("pass", 0.35)):
        assert abs(faults.counts[action] / 10_000 - share) < 0.02


def test_the_same_seed_decides_the_same() -> None:
    def decisions(seed: int) -> list[str]:
        faults = Faults(seed, drop=0.3, cut=0.3)
        return [faults.decide(Result) for _ in range(50)]

    assert decisions(7) == decisions(7)
    assert decisions(7) != decisions(8)


def test_only_the_given_kinds_are_touched() -> None:
    faults = Faults(drop=1.0, kinds=(Result,))
    assert [faults.decide(kind) for kind in (Call, Result, Ping, Goodbye)] == ["pass", "drop", "pass", "pass"]
    assert Faults(drop=1.0).decide(Ping) == "pass"


def test_next_decides_on_the_next_message_of_a_kind() -> None:
    faults = Faults(drop=1.0, kinds=(Result,))
    faults.next("cut", Call)
    faults.next("duplicate", Result)
    faults.next("delay", Call)
    faults.next("cut", Ping)
    assert faults.decide(Result) == "duplicate"
    assert faults.decide(Call) == "cut"
    assert faults.decide(Call) == "delay"
    assert faults.decide(Call) == "pass"
    assert faults.decide(Result) == "drop"
    assert faults.decide(Ping) == "cut"


def test_held_messages_are_sent_once() -> None:
    faults = Faults(delay_seconds=None)
    sent = []
    faults.hold(lambda: sent.append(1))
    faults.hold(lambda: sent.append(2))
    assert sent == []
    faults.release()
    faults.release()
    assert sent == [1, 2]


def test_held_messages_leave_after_their_delay() -> None:
    faults = Faults(delay_seconds=0.001)
    sent = threading.Event()
    faults.hold(sent.set)
    assert sent.wait(SOON)


# Writes.


class FakeChannel(Channel):
    """Records writes. With ``full`` set, a write stays unfinished until `flush` finds room."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.full = False
        self.ended = False
        self.waited = threading.Event()
        self.calls: list[str] = []

    def fileno(self) -> int:
        return 77

    def write(self, frame: Frame) -> bool:
        assert frame.size == len(bytes(frame))
        if self.ended:
            raise ChannelClosed("ended")
        self.written.append(bytes(frame))
        return not self.full

    def flush(self) -> bool:
        return not self.full

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> None:
        self.full = False
        self.waited.set()

    def read(self, timeout: float | None, bell: int | None = None) -> bool:
        self.calls.append("read")
        return False

    def next(self) -> Envelope | None:
        self.calls.append("next")
        return None

    def shutdown(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.calls.append("close")

    def messages(self) -> list[Any]:
        return [envelope.message for envelope in Decoder().receive_data(b"".join(self.written))]


def test_a_dropped_frame_seems_written() -> None:
    faults, inside = Faults(), FakeChannel()
    faults.next("drop", Call)
    assert FaultyChannel(inside, faults).write(encode(Call(1, None)))
    assert inside.written == []


def test_a_duplicated_frame_is_written_twice() -> None:
    faults, inside = Faults(), FakeChannel()
    faults.next("duplicate", Result)
    assert FaultyChannel(inside, faults).write(encode(Result(1, None), [torch.ones(100_000)]))
    assert inside.messages() == [Result(1, None)] * 2


def test_a_cut_ends_the_channel_at_both_ends() -> None:
    faults, inside = Faults(), FakeChannel()
    faults.next("cut", Call)
    channel = FaultyChannel(inside, faults)
    with pytest.raises(ChannelClosed, match="cut by a fault"):
        channel.write(encode(Call(1, None)))
    assert inside.ended
    assert inside.written == []


def test_a_delayed_frame_is_overtaken_and_is_a_copy() -> None:
    faults, inside = Faults(delay_seconds=None), FakeChannel()
    faults.next("delay", Call)
    channel = FaultyChannel(inside, faults)
    tensor = torch.zeros(100_000)
    assert channel.write(encode(Call(1, None), [tensor]))
    assert channel.write(encode(Call(2, None)))
    tensor.fill_(1)
    faults.release()
    first, second = Decoder().receive_data(b"".join(inside.written))
    assert [first.message.id, second.message.id] == [2, 1]
    assert not second.tensors[0].any()


def test_a_delayed_frame_does_not_cut_into_an_unfinished_one() -> None:
    faults, inside = Faults(delay_seconds=None), FakeChannel()
    faults.next("delay", Call)
    channel = FaultyChannel(inside, faults)
    channel.write(encode(Call(1, None)))
    inside.full = True
    assert channel.write(encode(Call(2, None))) is False
    with ThreadPoolExecutor(1) as threads:
        released = threads.submit(faults.release)
        assert channel.flush() is False
        assert len(inside.written) == 1
        inside.full = False
        assert channel.flush() is True
        released.result(timeout=SOON)
    assert [message.id for message in inside.messages()] == [2, 1]


def test_a_delayed_frame_waits_for_room() -> None:
    faults, inside = Faults(delay_seconds=None), FakeChannel()
    faults.next("delay", Call)
    FaultyChannel(inside, faults).write(encode(Call(1, None)))
    inside.full = True
    faults.release()
    assert inside.waited.is_set()
    assert inside.messages() == [Call(1, None)]


def test_a_frame_that_is_delayed_beyond_the_end_is_lost() -> None:
    faults, inside = Faults(delay_seconds=None), FakeChannel()
    faults.next("delay", Call)
    channel = FaultyChannel(inside, faults)
    channel.write(encode(Call(1, None)))
    channel.shutdown()
    faults.release()
    assert inside.written == []


def test_all_other_methods_reach_the_inner_channel() -> None:
    inside = FakeChannel()
    channel = FaultyChannel(inside, Faults())
    assert channel.fileno() == 77
    assert channel.read(None) is False
    assert channel.next() is None
    channel.wait(read=True, write=False, timeout=0)
    channel.close()
    assert inside.calls == ["read", "next", "close"]
    assert channel.flush()


def joined(*messages: Any) -> Frame:
    """Several replies in one write, as a server sends them."""
    data = b"".join(bytes(encode(message)) for message in messages)
    return Frame([data], len(data))


def test_each_message_of_a_joined_write_is_decided_separately() -> None:
    faults, inside = Faults(delay_seconds=None), FakeChannel()
    channel = FaultyChannel(inside, faults)
    for action in ("pass", "drop", "duplicate", "delay"):
        faults.next(action, Result)  # type: ignore[arg-type]
    assert channel.write(joined(*(Result(number, None) for number in range(6))))
    assert [message.id for message in inside.messages()] == [0, 2, 2, 4, 5]
    faults.release()
    assert [message.id for message in inside.messages()] == [0, 2, 2, 4, 5, 3]
    assert faults.counts == {"pass": 3, "drop": 1, "duplicate": 1, "delay": 1}


def test_a_joined_write_with_every_message_dropped() -> None:
    inside = FakeChannel()
    assert FaultyChannel(inside, Faults(drop=1.0)).write(joined(Result(1, None), Result(2, None)))
    assert inside.written == []


# The reactions of workers.


@pytest.fixture(params=["memory", "sockets"])
def cluster(request: pytest.FixtureRequest) -> Callable[[Faults], InProcessCluster]:
    return lambda faults: InProcessCluster(2, faults=faults, sockets=request.param == "sockets")


Made = Callable[[Faults], InProcessCluster]


def test_a_dropped_call_times_out(cluster: Made) -> None:
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("drop", Call)
        with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout: count_runs on worker 'worker1'"):
            near.rpc_sync("worker1", count_runs, timeout=SHORT)
        assert runs.count == 0
        assert near.rpc_sync("worker1", count_runs) == 1


def test_a_dropped_reply_times_out_after_the_function_ran(cluster: Made) -> None:
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("drop", Result)
        with pytest.raises(RpcTimeoutError):
            near.rpc_sync("worker1", count_runs, timeout=SHORT)
        assert runs.count == 1
        assert near.rpc_sync("worker1", count_runs) == 2


def test_a_dropped_failure_times_out(cluster: Made) -> None:
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("drop", Failure)
        with pytest.raises(RpcTimeoutError):
            near.rpc_sync("worker1", fail, timeout=SHORT)
        with pytest.raises(ValueError, match="no"):
            near.rpc_sync("worker1", fail)


def test_a_future_whose_call_was_dropped_times_out_though_nobody_waits(cluster: Made) -> None:
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("drop", Call)
        future = near.rpc_async("worker1", count_runs, timeout=SHORT)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        assert done.wait(SOON)
        with pytest.raises(RpcTimeoutError):
            future.wait()


def test_a_delayed_call_is_overtaken(cluster: Made) -> None:
    faults = Faults(delay_seconds=None)
    with cluster(faults) as (near, _):
        faults.next("delay", Call)
        delayed = near.rpc_async("worker1", count_runs)
        assert near.rpc_sync("worker1", count_runs) == 1
        assert not delayed.done()
        faults.release()
        assert delayed.wait() == 2


def test_a_delayed_reply_is_overtaken(cluster: Made) -> None:
    faults = Faults(delay_seconds=None)
    with cluster(faults) as (near, _):
        faults.next("delay", Result)
        delayed = near.rpc_async("worker1", count_runs)
        runs.wait_for(1)
        assert near.rpc_sync("worker1", count_runs) == 2
        assert not delayed.done()
        faults.release()
        assert delayed.wait() == 1


def test_a_delayed_message_comes_by_itself(cluster: Made) -> None:
    faults = Faults(delay_seconds=0.01)
    with cluster(faults) as (near, _):
        faults.next("delay", Call)
        faults.next("delay", Result)
        assert near.rpc_sync("worker1", count_runs) == 1
        assert faults.counts["delay"] == 2


def test_a_reply_after_the_timeout_is_discarded(cluster: Made) -> None:
    faults = Faults(delay_seconds=None)
    with cluster(faults) as (near, _):
        faults.next("delay", Result)
        with pytest.raises(RpcTimeoutError):
            near.rpc_sync("worker1", operator.add, args=(1, 1), timeout=SHORT)
        faults.release()
        assert [near.rpc_sync("worker1", operator.add, args=(number, 10)) for number in range(5)] == [*range(10, 15)]


def test_a_duplicated_call_runs_twice_and_its_caller_gets_one_reply(cluster: Made) -> None:
    """This fault means at-least-once; the second reply finds no waiting call."""
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("duplicate", Call)
        assert near.rpc_sync("worker1", count_runs) == 1
        runs.wait_for(2)
        assert near.rpc_sync("worker1", count_runs) == 3


@pytest.mark.parametrize("kind", [Call, Result])
def test_duplicates_do_no_harm_to_a_future(cluster: Made, kind: type) -> None:
    faults = Faults(duplicate=1.0, kinds=(kind,))
    with cluster(faults) as (near, _):
        futures = [near.rpc_async("worker1", operator.mul, args=(number, 2)) for number in range(20)]
        assert [future.wait() for future in futures] == [2 * number for number in range(20)]
        assert near.rpc_sync("worker1", operator.add, args=(1, 2)) == 3


def test_a_duplicated_failure(cluster: Made) -> None:
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("duplicate", Failure)
        with pytest.raises(ValueError, match="no"):
            near.rpc_sync("worker1", fail)
        assert near.rpc_sync("worker1", operator.add, args=(1, 2)) == 3


@pytest.mark.parametrize("kind", [Call, Failure])
def test_a_cut_loses_the_worker_and_the_next_call_reconnects(cluster: Made, kind: type) -> None:
    # Not a Result: a worker that lost another may ping it, and Results answer pings.
    faults = Faults()
    with cluster(faults) as (near, _):
        faults.next("cut", kind)
        with pytest.raises(WorkerLostError, match="worker 'worker1' is lost") as lost:
            near.rpc_sync("worker1", count_and_fail, timeout=SOON)
        assert lost.value.worker == "worker1"
        assert near.rpc_sync("worker1", operator.add, args=(1, 2), timeout=SOON) == 3
        assert runs.count == (0 if kind is Call else 1)


def test_a_cut_fails_all_waiting_callers(cluster: Made) -> None:
    faults = Faults(delay_seconds=None)
    with cluster(faults) as (near, _):
        assert near.rpc_sync("worker1", operator.add, args=(1, 2)) == 3
        for _ in range(3):
            faults.next("delay", Result)
        futures = [near.rpc_async("worker1", count_runs) for _ in range(3)]
        runs.wait_for(3)
        faults.next("cut", Call)
        with pytest.raises(WorkerLostError):
            near.rpc_sync("worker1", count_runs)
        for future in futures:
            with pytest.raises(WorkerLostError):
                future.wait()
        faults.release()
        assert near.rpc_sync("worker1", count_runs) == 4


def test_a_fault_in_a_nested_call_reaches_the_first_caller(cluster: Made) -> None:
    faults = Faults()
    with cluster(faults) as (near, far):
        assert near.rpc_sync("worker1", forward, args=("worker0",)) == 1
        assert far.rpc_sync("worker0", forward, args=("worker1",)) == 2
        # The first Result belongs to the inner call.
        faults.next("cut", Result)
        with pytest.raises(WorkerLostError, match="worker 'worker0' is lost"):
            near.rpc_sync("worker1", forward, args=("worker0",), timeout=SOON)
        assert near.rpc_sync("worker1", forward, args=("worker0",), timeout=SOON) == 4


@pytest.mark.parametrize("seed", range(3))
def test_under_any_faults_a_call_gives_its_value_or_one_of_two_errors(cluster: Made, seed: int) -> None:
    faults = Faults(seed, drop=0.03, delay=0.1, duplicate=0.1, cut=0.05, delay_seconds=0.001)
    outcomes: Counter[str] = Counter()
    with cluster(faults) as (near, _):
        for number in range(60):
            try:
                value = near.rpc_sync("worker1", operator.add, args=(number, torch.tensor([1])), timeout=0.1)
            except (RpcTimeoutError, WorkerLostError) as error:
                outcomes[type(error).__name__] += 1
            else:
                assert value.tolist() == [number + 1]
                outcomes["value"] += 1
    assert outcomes["value"] > 30
    assert sum(faults.counts.values()) - faults.counts["pass"] > 5


def test_faults_over_another_transport() -> None:
    """As a user would put them under their own worker."""
    faults = Faults()
    store = dist.HashStore()

    def make(rank: int) -> Worker:
        transport = FaultyTransport(StreamTransport(RpcOptions()), faults)
        return Worker(f"worker{rank}", rank, 2, store=store, transport=transport)

    with ThreadPoolExecutor(2) as threads:
        near, far = threads.map(make, range(2))
    try:
        tensor = torch.arange(1 << 20)
        for action in ("pass", "delay", "duplicate"):
            faults.next(action, Call)  # type: ignore[arg-type]
            assert torch.equal(near.rpc_sync("worker1", torch.neg, args=(tensor,), timeout=SOON), -tensor)
        faults.next("cut", Call)
        with pytest.raises(WorkerLostError):
            near.rpc_sync("worker1", torch.neg, args=(tensor,))
        assert far.rpc_sync("worker0", get_worker_info).name == "worker0"
    finally:
        near.shutdown(graceful=False)
        far.shutdown(graceful=False)
