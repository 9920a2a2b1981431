"""The send buffer of a TCP socket fits the link that it leads to."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transport_group import HELLO, SOON, Group, receive, send, soon

from backhaul.ids import Addresses
from backhaul.transport.sockets import SendBuffer, fitting, tune
from backhaul.wire.messages import Result
from slow_link import Forwarder


@pytest.mark.parametrize(
    ("rate", "round_trip", "least", "most"),
    [
        (
            125_000,
            0.0,
            12_500,
            25_000,
        ),  # 1 Mbit/s: a message behind a full buffer waits at most a fifth of a second
        (125_000, 0.5, 62_500, 100_000),  # half a second's worth of bytes is always on the way
        (1_000, 0.0, 1, 16 << 10),
        (10_000_000_000, 0.0, 4 << 20, 4 << 20),
    ],
)
def test_the_fitting_size_follows_from_rate_and_round_trip(
    rate: float, round_trip: float, least: int, most: int
) -> None:
    assert least <= fitting(rate, round_trip) <= most


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        tune(one, 10.0)
        yield one, other


def size_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_a_fast_link_keeps_its_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    one, _ = pair
    before = size_of(one)
    buffer = SendBuffer(one)
    buffer.begin()
    for seconds in range(5):
        buffer.fit(time.monotonic() + seconds, waited=False)
    assert size_of(one) == before
    assert buffer.slice >= 1 << 20


def test_the_buffer_of_a_slow_link_is_small_until_the_link_is_fast_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    before = size_of(one)
    buffer = SendBuffer(one)
    buffer.begin()
    buffer.fit(1.0, waited=True)
    one.sendall(bytes(10_000))
    other.recv(10_000, socket.MSG_WAITALL)
    buffer.fit(2.0, waited=True)  # 10 kB in a second
    assert size_of(one) <= 16 << 10
    assert buffer.slice == 4096
    one.sendall(bytes(4 << 10))
    other.recv(4 << 10, socket.MSG_WAITALL)
    buffer.fit(2.0001 + 0.1, waited=True)  # 40 kB in a second
    assert size_of(one) < 1 << 20
    buffer.begin()
    buffer.fit(3.0, waited=False)
    size = 0
    while size < 8 << 20:
        one.sendall(bytes(2048))
        size += len(other.recv(2048, socket.MSG_WAITALL))
    buffer.fit(3.11, waited=False)
    assert size_of(one) == before


@pytest.mark.parametrize("kind", ["tcp", "plain"])
def test_a_large_tensor_over_a_slow_link_makes_the_buffer_small(kind: str, threads: ThreadPoolExecutor) -> None:
    group = Group(kind)
    transport, door = group.door()
    assert transport.addresses.tcp is not None
    forwarder = Forwarder(transport.addresses.tcp, 1_000_000)
    near, _ = group.transport().connect(Addresses(host="elsewhere", tcp=forwarder.address), HELLO, soon())
    far = door.channel()
    with socket.socket(fileno=os.dup(near.fileno())) as sock:
        before = size_of(sock)
        came = threads.submit(receive, far)
        send(near, Result(1, None), [torch.rand(300_000)])
        assert came.result(timeout=SOON).message == Result(1, None)
        assert size_of(sock) < before / 4
    near.close()
    far.close()
    group.close()
    forwarder.close()
