"""What every transport must do, run once for each; then what only sockets have to do."""

from __future__ import annotations

import itertools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.handshake import CHALLENGE_SIZE, Hello, Welcome
from backhaul.transport import stream
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport, Visitor
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.transport.stream import StreamTransport
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Goodbye, Ping, Result

SECRET = bytes(range(32))
HELLO = Hello("group", 1, "worker1", 0)
WELCOME = Welcome(0, "worker0")
SOON = 10.0  # bounds waits that are over at once unless something is broken

Judge = Callable[[Hello], Welcome]


def soon() -> float:
    return time.monotonic() + SOON


def welcome_all(hello: Hello) -> Welcome:
    return WELCOME


class Door:
    """Lets visitors in, several at a time, as an agent does."""

    def __init__(self, listeners: list[Listener], judge: Judge, patience: float) -> None:
        self.outcomes: queue.Queue[tuple[Channel, Hello] | Exception] = queue.Queue()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._judge = judge
        self._patience = patience
        self._threads = ThreadPoolExecutor(8)
        self._bell = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def channel(self) -> Channel:
        outcome = self.outcomes.get(timeout=SOON)
        assert not isinstance(outcome, Exception), outcome
        return outcome[0]

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._threads.shutdown()
        os.close(self._bell)
        while not self.outcomes.empty():
            outcome = self.outcomes.get()
            if not isinstance(outcome, Exception):
                outcome[0].close()

    def _serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._bell, *self._listeners):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._bell:
                    return
                visitor = self._listeners[descriptor].accept()
                if visitor is not None:
                    self._threads.submit(self._admit, visitor)

    def _admit(self, visitor: Visitor) -> None:
        try:
            self.outcomes.put(visitor.admit(self._judge, time.monotonic() + self._patience))
        except Exception as error:
            self.outcomes.put(error)


class Group:
    """Transports of one kind that can reach each other; all that it makes is closed at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._network = Network()
        self._ends: list[Callable[[], None]] = []

    def transport(self, **options: Any) -> Transport:
        made: Transport
        if self.kind == "memory":
            made = MemoryTransport(self._network, RpcOptions(**options))
        else:
            secret = SECRET if self.kind == "tcp" else None
            made = StreamTransport(RpcOptions(**{"transport": self.kind, "secret": secret, **options}))
        self._ends.append(made.close)
        return made

    def door(self, judge: Judge = welcome_all, patience: float = SOON, **options: Any) -> tuple[Transport, Door]:
        transport = self.transport(**options)
        door = Door(list(transport.listen()), judge, patience)
        self._ends.append(door.close)
        return transport, door

    def connect(self, there: Transport) -> Channel:
        channel, welcome = self.transport().connect(there.addresses, HELLO, soon())
        assert welcome == WELCOME
        self._ends.append(channel.close)
        return channel

    def pair(self, **options: Any) -> tuple[Channel, Channel]:
        """Both ends of a channel."""
        transport, door = self.door(**options)
        near = self.connect(transport)
        far = door.channel()
        self._ends.append(far.close)
        return near, far

    def close(self) -> None:
        for end in reversed(self._ends):
            end()


@pytest.fixture(params=["memory", "unix", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


@pytest.fixture(params=["unix", "tcp"])
def sockets(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


def send(channel: Channel, message: Any, tensors: Any = ()) -> None:
    frame = encode(message, tensors)
    done = channel.write(frame)
    while not done:
        channel.wait(read=False, write=True, timeout=SOON)
        done = channel.flush()


def receive(channel: Channel) -> Envelope:
    deadline = soon()
    while (envelope := channel.next()) is None:
        if not channel.read(SOON):
            assert time.monotonic() < deadline, "nothing came"
    return envelope


def is_readable(channel: Channel | Listener) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def run(*jobs: Callable[[], None]) -> None:
    """Run them side by side; raise what one of them raised."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        for done in [threads.submit(job) for job in jobs]:
            done.result(timeout=60)


# The greeting.


def test_both_learn_who_the_other_is(group: Group) -> None:
    transport, door = group.door()
    channel, welcome = group.transport().connect(transport.addresses, HELLO, soon())
    assert welcome == WELCOME
    there = door.outcomes.get(timeout=SOON)
    assert not isinstance(there, Exception)
    assert there[1] == HELLO
    channel.close()
    there[0].close()


def test_one_transport_listens_and_connects(group: Group) -> None:
    transport, door = group.door()
    channel, _ = transport.connect(transport.addresses, HELLO, soon())
    send(channel, Ping(1))
    there = door.channel()
    assert receive(there).message == Ping(1)
    channel.close()
    there.close()


def test_many_connect_at_once(group: Group) -> None:
    transport, door = group.door()
    count = 40
    channels: list[Channel] = []
    run(*[lambda: channels.append(group.connect(transport)) for _ in range(count)])
    for number, channel in enumerate(channels):
        send(channel, Ping(number))
    there = [door.channel() for _ in range(count)]
    assert sorted(receive(channel).message.id for channel in there) == list(range(count))
    for channel in there:
        channel.close()


def test_a_peer_that_the_judge_refuses_is_told_why(group: Group) -> None:
    transport, door = group.door(lambda hello: Welcome(0, "worker0", "it is shutting down"))
    with pytest.raises(AuthenticationError, match="refused the connection: it is shutting down"):
        group.transport().connect(transport.addresses, HELLO, soon())
    refusal = door.outcomes.get(timeout=SOON)
    assert isinstance(refusal, AuthenticationError)
    assert str(refusal) == "refused worker 'worker1': it is shutting down"


def test_a_peer_of_another_group_is_refused_and_a_good_one_is_not(group: Group) -> None:
    def judge(hello: Hello) -> Welcome:
        return Welcome(0, "worker0", "" if hello.group == "group" else "it belongs to another group")

    transport, door = group.door(judge)
    with pytest.raises(AuthenticationError, match="another group"):
        group.transport().connect(transport.addresses, Hello("other", 1, "worker1", 0), soon())
    group.connect(transport)
    assert isinstance(door.outcomes.get(timeout=SOON), AuthenticationError)
    door.channel().close()


def test_nobody_is_there(group: Group) -> None:
    transport, door = group.door()
    addresses = transport.addresses
    door.close()
    transport.close()
    with pytest.raises(ChannelClosed, match="nobody"):
        group.transport().connect(addresses, HELLO, soon())


def test_is_listening(group: Group) -> None:
    transport, door = group.door()
    asking = group.transport()
    assert asking.is_listening(transport.addresses, soon())
    door.close()
    transport.close()
    assert not asking.is_listening(transport.addresses, soon())
    assert not asking.is_listening(Addresses(), soon())


def test_no_address_at_all(group: Group) -> None:
    with pytest.raises(ChannelClosed):
        group.transport().connect(Addresses(), HELLO, soon())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_connections_that_come_to_nothing_leave_no_descriptor(group: Group) -> None:
    transport, door = group.door(lambda hello: Welcome(0, "worker0", "no"))
    asking = group.transport()
    before = descriptors()
    for _ in range(5):
        with pytest.raises(AuthenticationError):
            asking.connect(transport.addresses, HELLO, soon())
        assert isinstance(door.outcomes.get(timeout=SOON), AuthenticationError)
    assert descriptors() == before
    door.close()
    transport.close()
    before = descriptors()
    for _ in range(5):
        with pytest.raises(ChannelClosed):
            asking.connect(transport.addresses, HELLO, soon())
    assert descriptors() == before


def test_a_visitor_that_is_turned_away_is_told_nothing(group: Group) -> None:
    transport = group.transport()
    (listener,) = transport.listen()

    def turn_away() -> None:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        poll.poll()
        visitor = listener.accept()
        assert visitor is not None
        visitor.turn_away()

    def connect() -> None:
        with pytest.raises(ChannelClosed):
            group.transport().connect(transport.addresses, HELLO, soon())

    run(turn_away, connect)


def test_a_worker_that_does_not_answer_is_a_timeout_and_not_a_loss(group: Group) -> None:
    """The agent reports a loss otherwise, and takes the worker off a dynamic group's list."""
    transport = group.transport()
    transport.listen()  # and nobody lets visitors in
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        group.transport().connect(transport.addresses, HELLO, began + 0.2)
    assert 0.1 < time.monotonic() - began < 2


def test_a_deadline_that_has_passed(group: Group) -> None:
    transport = group.transport()
    transport.listen()
    with pytest.raises(TimeoutError):
        group.transport().connect(transport.addresses, HELLO, time.monotonic() - 1)


def test_listeners_are_readable_when_somebody_is_there(group: Group) -> None:
    transport = group.transport()
    (listener,) = transport.listen()
    assert listener.accept() is None
    assert not is_readable(listener)

    def admit() -> None:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        assert poll.poll(SOON * 1000)
        visitor = listener.accept()
        assert visitor is not None
        visitor.admit(welcome_all, soon())[0].close()

    run(admit, lambda: group.connect(transport).close())
    assert listener.accept() is None
    assert not is_readable(listener)


# Frames.


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


def test_64_mib_both_ways_at_once(group: Group) -> None:
    """Neither side may wait for room without reading: that is all that keeps this from a deadlock."""
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


def test_what_arrives_is_the_receiver_s_own(group: Group) -> None:
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
    send(near, Result(1, "x" * 1000))
    with pytest.raises(ProtocolError, match="over the limit of 1000; option max_message_bytes"):
        receive(far)


# Waiting.


def test_reading_nothing(group: Group) -> None:
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
        # Or the watch thread, which sleeps on it, never sleeps again.
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
def test_the_end_comes_after_what_was_sent(group: Group, side: str, how: str) -> None:
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
        for _ in range(2):  # TCP learns from the answer to the first
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
def test_shutdown_wakes_who_reads(group: Group, side: str) -> None:
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
def test_shutdown_wakes_who_waits(group: Group, side: str) -> None:
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
def test_a_hang_up_shows_although_nobody_reads(group: Group, side: str) -> None:
    """It is how the watch thread notices a peer that died while no call was under way."""
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


# Sockets only.


def raw(transport: Transport) -> socket.socket:
    """A connection from somebody who does not use our code."""
    addresses = transport.addresses
    family, address = (socket.AF_INET, addresses.tcp) if addresses.tcp else (socket.AF_UNIX, addresses.unix)
    sock = socket.socket(family)
    sock.connect(address)  # without a timeout: a unix socket waits for room in the backlog then
    sock.settimeout(SOON)
    return sock


def until_end(sock: socket.socket) -> bytes:
    got = b""
    try:
        while piece := sock.recv(4096):
            got += piece
    except ConnectionResetError:
        pass
    return got


def test_who_says_nothing_is_cut_off_and_holds_nobody_up(sockets: Group) -> None:
    transport, door = sockets.door(patience=0.5)
    began = time.monotonic()
    with raw(transport) as silent:
        assert len(silent.recv(4096)) == CHALLENGE_SIZE
        sockets.connect(transport)
        assert time.monotonic() - began < 0.5
        door.channel().close()
        assert until_end(silent) == b""
        assert 0.4 < time.monotonic() - began < 2
    assert isinstance(door.outcomes.get(timeout=SOON), TimeoutError | ChannelClosed)


def test_who_dribbles_has_no_more_time_than_others(sockets: Group) -> None:
    """The deadline is for the whole greeting: a byte now and then does not extend it."""
    transport, door = sockets.door(patience=0.4)
    began = time.monotonic()
    with raw(transport) as slow:
        slow.sendall(b"BHL1")
        slow.settimeout(0.1)
        while True:
            try:
                slow.sendall(b"\0")
                if not slow.recv(4096):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
            assert time.monotonic() - began < 5
    assert time.monotonic() - began < 2
    assert isinstance(door.outcomes.get(timeout=SOON), Exception)


def test_a_thousand_connections_of_garbage(sockets: Group) -> None:
    transport, door = sockets.door(patience=2.0)
    openings = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"BHL1", b"BHL1" + b"\xff" * 200, os.urandom(70), b"\0" * 5000]
    for opening in itertools.islice(itertools.cycle(openings), 1000):
        with raw(transport) as sock:
            try:
                sock.sendall(opening)
            except OSError:
                pass  # it was cut off first
    began = time.monotonic()
    channel, _ = sockets.transport().connect(transport.addresses, HELLO, soon())
    assert time.monotonic() - began < 2
    outcomes = [door.outcomes.get(timeout=SOON) for _ in range(1001)]
    good = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    assert len(good) == 1
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert all(isinstance(e, ProtocolError | AuthenticationError | ChannelClosed | TimeoutError) for e in errors)
    send(channel, Ping(1))
    assert receive(good[0][0]).message == Ping(1)
    channel.close()
    good[0][0].close()


def test_a_server_that_is_no_worker(sockets: Group) -> None:
    """Something else has taken the address over."""
    transport = sockets.transport()
    (listener,) = transport.listen()

    def serve() -> None:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        poll.poll()
        sock, _ = listener._socket.accept()  # type: ignore[attr-defined]
        with sock:
            sock.sendall(b"220 mail.example.org ESMTP ready, how are you?\r\n")
            until_end(sock)

    def connect() -> None:
        with pytest.raises(ProtocolError, match="no Backhaul worker: it says b'220 '"):
            sockets.transport().connect(transport.addresses, HELLO, soon())

    run(serve, connect)


def test_a_burst_of_connections_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backlog means that the worker is busy, not that it is gone. (The kernel sees to it for TCP.)"""
    monkeypatch.setattr(stream, "_BACKLOG", 0)
    group = Group("unix")
    waiting: socket.socket | None = None
    try:
        transport = group.transport()
        (listener,) = transport.listen()
        waiting = raw(transport)  # takes the only place
        outcomes: list[Any] = []

        def connect() -> None:
            try:
                outcomes.append(group.connect(transport))
            except Exception as error:
                outcomes.append(error)

        threads = [threading.Thread(target=connect) for _ in range(4)]
        for thread in threads:
            thread.start()
        threads[0].join(0.2)  # they should all be waiting now; that they still are is what is tested
        assert outcomes == []
        waiting.close()
        door = Door([listener], welcome_all, SOON)
        for thread in threads:
            thread.join(SOON)
        assert [type(outcome).__name__ for outcome in outcomes] == ["StreamChannel"] * 4
        door.close()
    finally:
        if waiting is not None:
            waiting.close()
        group.close()


def test_a_full_backlog_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_BACKLOG", 0)
    group = Group("unix")
    try:
        transport = group.transport()
        transport.listen()
        with raw(transport):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                group.transport().connect(transport.addresses, HELLO, began + 0.2)
            assert 0.1 < time.monotonic() - began < 2
            assert group.transport().is_listening(transport.addresses, time.monotonic() + 0.1)
    finally:
        group.close()


def test_a_full_socket_takes_a_part_and_the_rest_later(sockets: Group) -> None:
    near, far = sockets.pair()
    tensor = torch.arange(16 << 20, dtype=torch.uint8)
    assert near.write(encode(Ping(1), [tensor])) is False
    assert near.flush() is False
    got: list[Envelope] = []

    def write() -> None:
        while not near.flush():
            near.wait(read=False, write=True, timeout=SOON)

    run(write, lambda: got.append(receive(far)))
    assert torch.equal(got[0].tensors[0], tensor)
    send(near, Ping(2))
    assert receive(far).message == Ping(2)


def test_flush_after_the_end(sockets: Group) -> None:
    near, far = sockets.pair()
    assert near.write(encode(Ping(1), [torch.zeros(16 << 20, dtype=torch.uint8)])) is False
    far.close()
    with pytest.raises(ChannelClosed):
        near.flush()


def test_waiting_on_a_closed_channel(sockets: Group) -> None:
    near, _ = sockets.pair()
    near.close()
    with pytest.raises(ChannelClosed):
        near.wait(read=True, write=False, timeout=0)


def test_closing_removes_the_socket_and_its_directory() -> None:
    transport = StreamTransport(RpcOptions())
    transport.listen()
    path = Path(transport.addresses.unix or "")
    assert path.is_socket()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    transport.close()
    transport.close()
    assert not path.exists()
    assert not path.parent.exists()


def test_abandoning_removes_nothing() -> None:
    """In a forked child: the parent still listens there."""
    transport = StreamTransport(RpcOptions())
    (listener,) = transport.listen()
    path = Path(transport.addresses.unix or "")
    try:
        transport.abandon()
        assert listener.fileno() == -1
        assert path.is_socket()
    finally:
        transport.close()


def test_abandoning_a_memory_transport() -> None:
    network = Network()
    transport = MemoryTransport(network)
    transport.listen()
    address = transport.addresses.memory
    transport.abandon()
    with pytest.raises(ChannelClosed, match="nobody listens"):
        network.listener(address)


def test_a_long_temporary_directory_gives_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unix socket's path has about a hundred characters."""
    deep = tmp_path / ("d" * 80)
    deep.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setenv(stream.RUNTIME_DIR_VARIABLE, str(deep))
    group = Group("unix")
    try:
        near, far = group.pair()
        send(near, Ping(1))
        assert receive(far).message == Ping(1)
    finally:
        group.close()


def test_a_unix_path_of_another_host_is_not_tried() -> None:
    transport = StreamTransport(RpcOptions(transport="unix"))
    elsewhere = Addresses(host="elsewhere", unix="/tmp/there")
    with pytest.raises(ChannelClosed, match=r"no way to reach it: it offers unix='/tmp/there' on host 'elsewhere'"):
        transport.connect(elsewhere, HELLO, soon())


def test_auto_takes_tcp_where_unix_does_not_reach() -> None:
    group = Group("auto")
    try:
        transport, door = group.door(secret=SECRET)
        addresses = transport.addresses
        assert addresses.unix
        assert addresses.tcp
        client = group.transport(secret=SECRET)
        for there, family in (
            (addresses, socket.AF_UNIX),
            (Addresses("elsewhere", addresses.unix, addresses.tcp), socket.AF_INET),
        ):
            channel, _ = client.connect(there, HELLO, soon())
            assert channel._socket.family == family  # type: ignore[attr-defined]
            channel.close()
            door.channel().close()
    finally:
        group.close()
