"""Several connections for one large tensor: channels, workers, and what happens when one of them breaks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from transport_group import HELLO, SECRET, SOON, Group, receive, send, soon

import backhaul.autograd as dist_autograd
from backhaul.agent.serving import Served
from backhaul.errors import AuthenticationError, WorkerLostError
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.greeting import drive, visit
from backhaul.transport.sliced import SlicedChannel
from backhaul.transport.strands import Strand
from backhaul.transport.stream import StreamTransport
from backhaul.wire.frames import encode
from backhaul.wire.messages import Ping, Result

KINDS = ["tcp", "plain"]
LARGE = 2 << 20  # elements: 8 MiB


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SlicedChannel, SlicedChannel]]:
    group = Group(request.param)
    transport, door = group.door(connections=3)
    near, _ = group.transport(connections=3).connect(transport.addresses, HELLO, soon())
    far = door.channel()
    assert isinstance(near, SlicedChannel)
    assert isinstance(far, SlicedChannel)
    yield near, far
    near.close()
    far.close()
    group.close()


def strands_of(channel: Channel) -> list[Strand]:
    assert isinstance(channel, SlicedChannel)
    assert channel._strands is not None
    return channel._strands._all


def over_strands(near: SlicedChannel, far: SlicedChannel) -> None:
    """Send large tensors until the strands carry some of them."""
    deadline = soon() + 20
    with ThreadPoolExecutor(1) as threads:
        while not any(strand._announced for strand in strands_of(far)):
            assert time.monotonic() < deadline
            sent = torch.rand(LARGE)
            came = threads.submit(receive, far)
            send(near, Result(1, None), [sent])
            assert torch.equal(came.result(timeout=SOON).tensors[0], sent)


def finish(channel: Channel) -> None:
    """Write the rest of a frame."""
    while not channel.flush():
        channel.wait(read=False, write=True, timeout=SOON)


def read_on(channel: Channel) -> None:
    while True:
        channel.next()
        channel.read(SOON)


def test_tensors_both_ways(pair: tuple[SlicedChannel, SlicedChannel]) -> None:
    near, far = pair
    over_strands(near, far)
    over_strands(far, near)
    before = far.received
    tensors = [torch.rand(LARGE), torch.arange(5), torch.rand(LARGE // 2)]
    with ThreadPoolExecutor(4) as threads:
        came = [threads.submit(receive, each) for each in (near, far)]
        sent = [threads.submit(send, each, Result(2, None), tensors) for each in (near, far)]
        for each in sent:
            each.result(timeout=SOON)
        for each in came:
            assert all(torch.equal(*both) for both in zip(each.result(timeout=SOON).tensors, tensors, strict=True))
    assert far.received - before >= sum(tensor.nbytes for tensor in tensors)
    assert all(strand.idle and strand.filled for strand in strands_of(near) + strands_of(far))


def test_small_messages_pass_and_the_rest_of_a_large_one_can_be_copied(
    pair: tuple[SlicedChannel, SlicedChannel],
) -> None:
    near, far = pair
    over_strands(near, far)
    tensor = torch.rand(4 * LARGE)
    expected = tensor.clone()
    done = near.write(encode(Result(1, None), [tensor]))
    while not near.between:  # until the kernel accepts no more
        done = near.flush()
        assert not done
    near.copy_unsent()
    tensor.zero_()
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(lambda: [receive(far) for _ in range(2)])
        out = near.interject(encode(Ping(5)))
        while not out:
            near.wait(read=False, write=True, timeout=SOON)
            out = near.flush() or near.between
        finish(near)
        first, second = came.result(timeout=SOON)
    assert first.message == Ping(5)
    assert torch.equal(second.tensors[0], expected)


def test_a_strand_is_cut_while_it_carries_a_slice(pair: tuple[SlicedChannel, SlicedChannel]) -> None:
    near, far = pair
    over_strands(near, far)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read_on, far)
        with pytest.raises(ChannelClosed, match=r"one of the connections for large tensors has broken|Broken pipe"):
            write_and_cut(near)
        with pytest.raises(ChannelClosed, match=r"has broken|the connection ended|reset by peer"):
            reading.result(timeout=SOON)


def write_and_cut(channel: SlicedChannel) -> None:
    """Write large tensors, and cut a strand that carries a part of one."""
    frame = encode(Result(1, None), [torch.rand(4 * LARGE)])
    deadline = soon() + 20
    while time.monotonic() < deadline:
        done = channel.write(frame)
        while not done:
            for strand in strands_of(channel):
                if not strand.idle and strand._pipe is not None:
                    with contextlib.suppress(OSError):  # the peer has ended it after the last round
                        strand._pipe.socket.shutdown(socket.SHUT_RDWR)
            channel.wait(read=False, write=True, timeout=SOON)
            done = channel.flush()


def test_a_strand_is_cut_while_it_is_idle(pair: tuple[SlicedChannel, SlicedChannel]) -> None:
    near, far = pair
    over_strands(near, far)
    strand = next(each for each in strands_of(near) if each.state == "open")
    assert strand._pipe is not None
    assert strand._thread is not None
    strand._pipe.socket.shutdown(socket.SHUT_RDWR)
    strand._thread.join(SOON)
    assert strand.state == "gone"
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(receive, far)
        sent = torch.rand(LARGE)
        send(near, Result(1, None), [sent])
        assert torch.equal(came.result(timeout=SOON).tensors[0], sent)


def test_the_smaller_option_limits_the_strands_and_none_is_opened_early() -> None:
    for here, there, expected in ((4, 2, 1), (2, 4, 1), (1, 4, 0), (4, 1, 0)):
        group = Group("tcp")
        transport, door = group.door(connections=there)
        near, _ = group.transport(connections=here).connect(transport.addresses, HELLO, soon())
        far = door.channel()
        for channel in (near, far):
            found = getattr(channel, "_strands", None)
            assert (0 if found is None else len(found._all)) == expected
            assert found is None or all(strand._thread is None for strand in found._all)
        near.close()
        far.close()
        group.close()


def test_a_stranger_cannot_join_a_channel() -> None:
    """The stranger has a wrong key, or an unknown token, or is another worker with a valid token."""
    group = Group("tcp")
    transport, door = group.door(connections=2)
    here = group.transport(connections=2)
    assert isinstance(here, StreamTransport)
    near, welcome = here.connect(transport.addresses, HELLO, soon())
    far = door.channel()
    assert welcome.token
    joins = msgspec.structs.replace(HELLO, connections=2, token=welcome.token, strand=1)
    other = group.transport("worker2", connections=2)
    stranger = group.transport(connections=2, secret=os.urandom(32))
    for transport_here, hello in (
        (here, msgspec.structs.replace(joins, token="0" * 32)),
        (here, msgspec.structs.replace(joins, incarnation="another")),
        (other, msgspec.structs.replace(joins, name="worker2", id=2)),
        (stranger, joins),
    ):
        assert isinstance(transport_here, StreamTransport)
        line = transport_here._reach(transport.addresses, soon())
        with pytest.raises((AuthenticationError, ChannelClosed)):
            drive(visit(line, hello), line.socket, soon())
        line.socket.close()
        assert isinstance(door.outcomes.get(timeout=SOON), Exception)
    assert strands_of(far)[0]._thread is None
    near.close()
    far.close()
    assert not transport._looms._all  # type: ignore[attr-defined]
    group.close()


def test_the_number_of_connections_follows_from_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [RpcOptions(connections=given).most_connections for given in (None, 1, 7)] == [1, 1, 7]
    assert [RpcOptions(fabric="plain", connections=given).most_connections for given in (None, 1, 7)] == [4, 1, 7]
    assert RpcOptions(trust="federation", connections=7).most_connections == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    assert RpcOptions(fabric="plain").most_connections == 1


# Workers.


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def scale(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 3


@pytest.fixture(params=["tls", "plain"])
def workers(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    options = RpcOptions(transport="tcp", secret=SECRET, connections=3, fabric=request.param)
    with InProcessCluster(2, sockets=True, options=options) as cluster:
        yield cluster


def used(cluster: InProcessCluster) -> int:
    """The number of slices that went over strands."""
    lines = [line for worker in cluster for line in worker.agent.serving.lines]
    return sum(strand._announced for line in lines for strand in strands_of(line.channel))


def warm_up(cluster: InProcessCluster) -> None:
    deadline = time.monotonic() + 60
    while not used(cluster):
        assert time.monotonic() < deadline
        cluster[0].rpc_sync(cluster[1].info.name, echo, (torch.rand(LARGE),))


def test_values_and_gradients_are_exact(workers: InProcessCluster) -> None:
    warm_up(workers)
    with workers[0].as_current():
        x = torch.rand(LARGE, requires_grad=True)
        before = used(workers)
        with dist_autograd.context() as context:
            y = workers[0].rpc_sync(workers[1].info.name, scale, (x,))
            assert torch.equal(y, 3 * x)
            dist_autograd.backward(context, [(y * y).sum()])
            gradient = dist_autograd.get_gradients(context)[x]
        local = x.detach().clone().requires_grad_()
        ((local * 3) ** 2).sum().backward()
        assert torch.equal(gradient, local.grad)
        assert used(workers) > before


def test_small_calls_beside_large_ones(workers: InProcessCluster) -> None:
    warm_up(workers)
    to = workers[1].info.name
    going = [workers[0].rpc_async(to, echo, (torch.full((2 * LARGE,), float(i)),)) for i in range(3)]
    for number in range(50):
        assert workers[0].rpc_sync(to, echo, (number,)) == number
    for i, future in enumerate(going):
        assert torch.equal(future.wait(), torch.full((2 * LARGE,), float(i)))


def test_a_cut_strand_is_a_lost_connection_and_the_next_call_opens_another(workers: InProcessCluster) -> None:
    used: list[Served] = []
    while not used:  # the first large messages may have gone over one connection
        warm_up(workers)
        used = [line for line in workers[1].agent.serving.lines if strands_of(line.channel)[0]._thread is not None]
    to = workers[1].info.name
    served = used[0]
    broke = threading.Event()

    def cut_when_used() -> None:
        before = [strand._announced for strand in strands_of(served.channel)]
        while not broke.is_set():
            for strand, count in zip(strands_of(served.channel), before, strict=True):
                if strand._announced > count and strand._pipe is not None:
                    with contextlib.suppress(OSError):
                        strand._pipe.socket.shutdown(socket.SHUT_RDWR)
                    return
            time.sleep(0)

    cutter = threading.Thread(target=cut_when_used)
    cutter.start()
    deadline = time.monotonic() + 60
    caught: Any = None
    while caught is None and time.monotonic() < deadline:
        try:
            workers[0].rpc_sync(to, echo, (torch.rand(8 * LARGE),))
        except WorkerLostError as error:
            caught = error
        if not cutter.is_alive() and caught is None:
            break  # it was cut while idle, so it is just not used any more
    broke.set()
    cutter.join()
    sent = torch.rand(LARGE)
    assert torch.equal(workers[0].rpc_sync(to, echo, (sent,), retry=5), sent)


def test_without_threads_or_descriptors_one_connection_is_used(
    workers: InProcessCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("backhaul-strand"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(3):
        sent = torch.rand(LARGE)
        assert torch.equal(workers[0].rpc_sync(workers[1].info.name, echo, (sent,)), sent)
    assert not used(workers)
    assert "was not opened: can't start new thread" in caplog.text


def test_a_strand_that_ends_as_it_is_chosen_breaks_the_channel() -> None:
    broken: list[Exception] = []
    strand = Strand(1, lambda: None, broken.append)
    strand.state = "gone"
    strand.give(memoryview(b"x"), None)
    assert [str(error) for error in broken] == ["the connection has ended"]
    strand.expect(None, 1)
    assert len(broken) == 2
    strand.close()
