"""The conformance suite for channels, run once for each transport."""

from __future__ import annotations

import select
import threading
import time
from typing import Any

import pytest
import torch
from transport_group import SOON, Group, is_readable, receive, run, send

from backhaul.errors import ProtocolError
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.landing import land
from backhaul.wire.messages import Call, Failed, Goodbye, Pass, Ping, Result


def test_messages_go_both_ways(group: Group) -> None:
    near, far = group.pair()
    send(near, Call(1, [0, "x"]), [torch.arange(5)])
    there = receive(far)
    assert there.message == Call(1, [0, "x"])
    assert torch.equal(there.tensors[0], torch.arange(5))
    send(far, Result(1, None))
    assert receive(near).message == Result(1, None)


def test_messages_keep_their_order(group: Group) -> None:
    near, far = group.pair()

    def write() -> None:
        for number in range(2000):
            send(near, Ping(number))

    def read() -> None:
        assert [receive(far).message.id for _ in range(2000)] == list(range(2000))

    run(write, read)


def test_several_frames_in_one_write(group: Group) -> None:
    near, far = group.pair()
    data = b"".join(bytes(encode(message)) for message in (Ping(1), Ping(2), Goodbye()))
    assert near.write(Frame([data], len(data)))
    assert [receive(far).message for _ in range(3)] == [Ping(1), Ping(2), Goodbye()]


def test_a_frame_of_more_pieces_than_a_system_call_takes(group: Group) -> None:
    near, far = group.pair()
    data = bytes(encode(Result(1, "x" * 3000)))
    frame = Frame([data[place : place + 1] for place in range(len(data))], len(data))
    done = near.write(frame)
    while not done:
        near.wait(read=False, write=True, timeout=SOON)
        done = near.flush()
    assert receive(far).message == Result(1, "x" * 3000)


@pytest.mark.long
def test_64_mib_both_ways_at_once(group: Group) -> None:
    """Each side must read while it waits for room; otherwise both would deadlock."""
    near, far = group.pair()
    tensors = [torch.full((16 << 20,), number, dtype=torch.int32) for number in (1, 2)]

    def exchange(channel: Channel, mine: int, theirs: int) -> None:
        frame = encode(Ping(mine), [tensors[mine]])
        done = channel.write(frame)
        got: Envelope | None = None
        while not done or got is None:
            if not done:
                done = channel.flush()
            channel.read(0)
            got = channel.next() or got
            if not done or got is None:
                channel.wait(read=got is None, write=not done, timeout=SOON)
        assert got.message == Ping(theirs)
        assert torch.equal(got.tensors[0], tensors[theirs])

    run(lambda: exchange(near, 0, 1), lambda: exchange(far, 1, 0))


def test_received_tensors_belong_to_the_receiver(group: Group) -> None:
    near, far = group.pair()
    small, large = torch.zeros(10), torch.zeros(100_000)
    got: list[torch.Tensor] = []
    run(lambda: send(near, Ping(1), [small, large]), lambda: got.extend(receive(far).tensors))
    small.fill_(1)
    large.fill_(1)
    for tensor in got:
        assert not tensor.any()
        tensor.add_(1)


def test_garbage_is_a_protocol_error(group: Group) -> None:
    near, far = group.pair()
    assert near.write(Frame([b"GET / HTTP/1.1\r\n\r\n" * 3], 54))
    with pytest.raises(ProtocolError, match="not a frame"):
        receive(far)


def test_messages_over_the_limit_are_refused(group: Group) -> None:
    near, far = group.pair(max_message_bytes=1000)
    send(near, Result(1, "x" * 900))
    assert receive(far).message == Result(1, "x" * 900)
    send(near, Result(2, "x" * 1000))
    send(near, Ping(3))
    found = receive(far)
    assert found.message == Result(2, [])  # only its number is decoded
    with pytest.raises(MemoryError, match="over the limit of 1000 at the receiver; option max_message_bytes"):
        land(found.tensors)
    assert receive(far).message == Ping(3)
    send(near, Failed(Pass(1, 1, 1, False, False), "worker1", "ValueError", "x" * 1000, ""))
    with pytest.raises(ProtocolError, match="over the limit of 1000; option max_message_bytes"):
        receive(far)


# Waiting.


def test_reading_an_idle_channel_returns_nothing(group: Group) -> None:
    near, _ = group.pair()
    assert near.next() is None
    assert near.read(0) is False
    began = time.monotonic()
    assert near.read(0.1) is False
    assert 0.05 < time.monotonic() - began < 2
    assert near.next() is None


def test_the_descriptor_is_readable_while_there_is_something_to_read(group: Group) -> None:
    near, far = group.pair()
    assert not is_readable(far)
    for count in (1, 3):
        for number in range(count):
            send(near, Ping(number))
        far.wait(read=True, write=False, timeout=SOON)
        assert is_readable(far)
        for number in range(count):
            assert receive(far).message == Ping(number)
        # Otherwise the watch thread, which sleeps on it, would never sleep again.
        assert far.read(0) is False
        assert not is_readable(far)


def test_wait_returns_at_its_timeout(group: Group) -> None:
    near, _ = group.pair()
    began = time.monotonic()
    near.wait(read=True, write=False, timeout=0.1)
    assert 0.05 < time.monotonic() - began < 2


def test_wait_returns_when_there_is_room(group: Group) -> None:
    near, _ = group.pair()
    began = time.monotonic()
    near.wait(read=False, write=True, timeout=SOON)
    near.wait(read=True, write=True, timeout=SOON)
    assert time.monotonic() - began < 2


def test_a_reader_is_woken_by_a_message(group: Group) -> None:
    near, far = group.pair()
    got: list[Any] = []

    def read() -> None:
        assert far.read(None)
        got.append(receive(far).message)

    run(read, lambda: send(near, Ping(1)))
    assert got == [Ping(1)]


# The end.


@pytest.mark.parametrize("side", ["near", "far"])
@pytest.mark.parametrize("how", ["shutdown", "close"])
def test_the_end_comes_after_all_sent_messages(group: Group, side: str, how: str) -> None:
    near, far = group.pair()
    ending, other = (near, far) if side == "near" else (far, near)
    send(ending, Ping(1))
    getattr(ending, how)()
    assert receive(other).message == Ping(1)
    with pytest.raises(ChannelClosed):
        other.read(SOON)
    with pytest.raises(ChannelClosed):
        other.read(0)
    assert other.next() is None

    def write() -> None:
        for _ in range(2):  # TCP notices the end from the answer to the first write
            send(other, Ping(2))
            other.wait(read=True, write=False, timeout=SOON)

    with pytest.raises(ChannelClosed):
        write()


@pytest.mark.parametrize("how", ["shutdown", "close"])
def test_writing_after_the_end_here(group: Group, how: str) -> None:
    near, _ = group.pair()
    getattr(near, how)()
    with pytest.raises(ChannelClosed):
        near.write(encode(Ping(1)))


def test_reading_after_the_end_here(group: Group) -> None:
    near, _ = group.pair()
    near.shutdown()
    for timeout in (None, 0, 1.0):
        with pytest.raises(ChannelClosed):
            near.read(timeout)


def test_ending_twice_does_no_harm(group: Group) -> None:
    near, far = group.pair()
    for channel in (near, far):
        channel.shutdown()
        channel.shutdown()
        channel.close()
        channel.close()
        channel.shutdown()


@pytest.mark.parametrize("side", ["here", "there"])
def test_shutdown_wakes_a_reading_thread(group: Group, side: str) -> None:
    near, far = group.pair()
    reads = threading.Event()

    def read() -> None:
        reads.set()
        with pytest.raises(ChannelClosed):
            near.read(None)

    def end() -> None:
        reads.wait()
        (near if side == "here" else far).shutdown()

    run(read, end)


@pytest.mark.parametrize("side", ["here", "there"])
def test_shutdown_wakes_a_waiting_thread(group: Group, side: str) -> None:
    near, far = group.pair()
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        near.wait(read=True, write=False, timeout=None)

    def end() -> None:
        waits.wait()
        (near if side == "here" else far).shutdown()

    run(wait, end)
    assert is_readable(near)


@pytest.mark.parametrize("side", ["near", "far"])
def test_a_hang_up_is_visible_even_if_no_thread_reads(group: Group, side: str) -> None:
    """The watch thread notices a dead peer this way when no call is running."""
    near, far = group.pair()
    ending, other = (near, far) if side == "near" else (far, near)
    with select.epoll() as epoll:
        epoll.register(other.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)
        assert epoll.poll(0) == []
        send(ending, Ping(1))
        ending.close()
        ((descriptor, event),) = epoll.poll(SOON)
    assert descriptor == other.fileno()
    assert event & select.EPOLLRDHUP
    assert receive(other).message == Ping(1)


def test_the_end_in_the_middle_of_a_frame(group: Group) -> None:
    near, far = group.pair()
    data = bytes(encode(Ping(1)))[:-1]
    assert near.write(Frame([data], len(data)))
    near.shutdown()
    with pytest.raises(ChannelClosed):
        receive(far)
