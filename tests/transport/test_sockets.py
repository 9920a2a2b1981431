"""Tests only for sockets: strangers, full backlogs and buffers, paths, and transports that a child abandons."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transport_group import HELLO, SECRET, SOON, Door, Group, receive, run, send, soon, welcome_all

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.transport import stream
from backhaul.transport.base import Addresses, ChannelClosed, Transport
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.transport.stream import StreamTransport
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import encode
from backhaul.wire.messages import Ping


def raw(transport: Transport) -> socket.socket:
    """A connection without Backhaul's code."""
    addresses = transport.addresses
    family, address = (socket.AF_INET, addresses.tcp) if addresses.tcp else (socket.AF_UNIX, addresses.unix)
    sock = socket.socket(family)
    sock.connect(address)  # without a timeout, a unix socket waits for room in the backlog
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


def test_a_silent_client_is_cut_off_and_delays_no_other(sockets: Group) -> None:
    transport, door = sockets.door(patience=0.5)
    began = time.monotonic()
    with raw(transport) as silent:
        sockets.connect(transport)
        assert time.monotonic() - began < 0.5
        door.channel().close()
        assert until_end(silent) == b""
        assert 0.4 < time.monotonic() - began < 2
    assert isinstance(door.outcomes.get(timeout=SOON), TimeoutError | ChannelClosed)


def test_a_client_that_sends_byte_by_byte_gets_no_extra_time(sockets: Group) -> None:
    """The deadline covers the whole greeting. A byte now and then does not extend it."""
    transport, door = sockets.door(patience=0.4)
    began = time.monotonic()
    with raw(transport) as slow:
        slow.sendall(b"BHL2")
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


@pytest.mark.long
def test_a_thousand_connections_of_garbage(sockets: Group) -> None:
    transport, door = sockets.door(patience=2.0)
    openings = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"BHL2", b"BHL2" + b"\xff" * 200, os.urandom(70), b"\0" * 5000]
    for opening in itertools.islice(itertools.cycle(openings), 1000):
        with raw(transport) as sock:
            try:
                sock.sendall(opening)
            except OSError:
                pass  # the connection was cut before
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


def test_a_server_that_is_not_a_worker(sockets: Group) -> None:
    """Another program listens at the address."""
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
        with pytest.raises(ProtocolError, match="not a Backhaul worker: it says b'220 '"):
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
        waiting = raw(transport)  # takes the only place in the backlog
        outcomes: list[Any] = []

        def connect() -> None:
            try:
                outcomes.append(group.connect(transport))
            except Exception as error:
                outcomes.append(error)

        threads = [threading.Thread(target=connect) for _ in range(4)]
        for thread in threads:
            thread.start()
        threads[0].join(0.2)  # they should all be waiting now; the test checks that they still are
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
    """In a forked child nothing is removed, because the parent still listens."""
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
    """A unix socket's path has at most about a hundred characters."""
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
    here = Addresses(host=transport.addresses.host, tcp=("127.0.0.1", 1))
    with pytest.raises(ChannelClosed, match=r"on one host need the same RpcOptions\(transport="):
        transport.connect(here, HELLO, soon())


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
