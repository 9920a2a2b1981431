"""The send buffer of a TCP socket fits the link that it leads to."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from backhaul.transport.sockets import SendBuffer, fitting, tune


@pytest.mark.parametrize(
    ("rate", "round_trip", "least", "most"),
    [
        (
            125_000,
            0.0,
            12_500,
            25_000,
        ),  # 1 Mbit/s: a message behind all of it waits for a fifth of a second at the most
        (125_000, 0.5, 62_500, 100_000),  # what half a second takes is on its way all the time
        (1_000, 0.0, 1, 16 << 10),
        (10_000_000_000, 0.0, 4 << 20, 4 << 20),
    ],
)
def test_what_fits(rate: float, round_trip: float, least: int, most: int) -> None:
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


def test_a_slow_link_gets_a_small_one_and_a_large_one_when_it_is_fast_again(
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
