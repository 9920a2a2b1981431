"""TLS records that bring no data are found by their lengths, handled a few at a time, and soon end the connection."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from key_updates import KeyUpdates

from backhaul.errors import ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.tls import RECORD, ClusterCredentials, Records, Tunnel
from backhaul.transport.greeting import receive_visitor
from backhaul.transport.tls import TlsChannel, TlsLine
from backhaul.wire.frames import encode
from backhaul.wire.messages import Ping, Result
from mint import Mint

SECRET = bytes(range(32))
SOON = 10.0


def record(size: int) -> bytes:
    return b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size)


def slices(records: Records, data: bytes) -> Iterator[bytes]:
    view, start = memoryview(data), 0
    while start < len(view):
        stop = records.take(view, start)
        assert stop > start
        yield bytes(view[start:stop])
        start = stop


@pytest.mark.parametrize("seed", range(30))
def test_records_are_found_wherever_the_bytes_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    largest = chance.choice([1, 3, 7, 100, 40_000, 1 << 20])
    full = RECORD + 17 if largest > 100 else 40
    sizes = [chance.choice([17, 18, 22, full]) for _ in range(chance.randrange(1, 60))]
    data = b"".join(map(record, sizes))
    ends = list(itertools.accumulate(5 + size for size in sizes))
    records = Records()
    at = 0
    while at < len(data):
        piece = data[at : at + chance.randrange(1, largest + 1)]
        for part in slices(records, piece):
            at += len(part)
            complete = sum(1 for end in ends if at - len(part) < end <= at)
            assert complete <= Records.MOST + 1  # plus the record that began in the previous slice
            assert records.promised == sum(size - 17 for size, end in zip(sizes, ends, strict=True) if end <= at)
    assert records.promised == sum(size - 17 for size in sizes)


def test_a_large_read_of_full_records_is_one_slice() -> None:
    data = (record(RECORD + 17) * 17)[: 16 * RECORD]
    assert list(slices(Records(), data)) == [data]


class Pair(NamedTuple):
    channel: TlsChannel
    raw: socket.socket
    client: Tunnel
    keylog: Path
    worked_through: list[int]
    """The sizes of the writes to OpenSSL."""


class Noting:
    """A memory BIO that notes the size of each write."""

    def __init__(self, bio: Any, sizes: list[int]) -> None:
        self._bio = bio
        self._sizes = sizes

    @property
    def pending(self) -> int:
        return int(self._bio.pending)

    def write(self, data: memoryview) -> int:
        self._sizes.append(len(data))
        return int(self._bio.write(data))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    mint = Mint(tmp_path)
    server = Tunnel(mint.tls("bank").contexts()[0], server=True)
    context = mint.tls("shop").contexts()[1]
    context.keylog_filename = str(tmp_path / "keys")
    client = Tunnel(context, server=False)
    for _ in range(3):
        client.shake()
        server.feed(client.take())
        server.shake()
        client.feed(server.take())
    options = RpcOptions(trust="federation", tls=mint.tls("bank"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        channel = TlsChannel(listener.accept()[0], server, options)
    sizes: list[int] = []
    channel._incoming = Noting(channel._incoming, sizes)  # type: ignore[assignment]
    yield Pair(channel, raw, client, tmp_path / "keys", sizes)
    channel.close()
    raw.close()


def read_to_the_end(channel: TlsChannel) -> None:
    for _ in range(1000):
        channel.read(SOON)


def test_a_flood_of_requests_for_new_keys(pair: Pair) -> None:
    """OpenSSL handles only a few of them, however many have come."""
    pair.raw.sendall(KeyUpdates(pair.raw, pair.keylog, 0).records(600))
    with pytest.raises(ProtocolError, match="bring no data, such as requests for new keys"):
        read_to_the_end(pair.channel)
    assert sum(pair.worked_through) <= 64 * 27


def test_requests_for_new_keys_between_messages(pair: Pair) -> None:
    """Data in between does not compensate for them."""
    updates = KeyUpdates(pair.raw, pair.keylog, 0)
    seen = []

    def exchange() -> None:
        for number in range(100):
            pair.raw.sendall(updates.record(bytes(encode(Ping(number)))) + updates.records(1))
            while (envelope := pair.channel.next()) is None:
                pair.channel.read(SOON)
            seen.append(envelope.message)

    with pytest.raises(ProtocolError, match="bring no data"):
        exchange()
    assert 20 < len(seen) < 40
    assert seen == [Ping(number) for number in range(len(seen))]


def test_padded_records(pair: Pair) -> None:
    updates = KeyUpdates(pair.raw, pair.keylog, 0)
    data = encode(Ping(1))
    pair.raw.sendall(updates.record(bytes(data), padding=RECORD // 2))
    with pytest.raises(ProtocolError, match="bring no data"):
        read_to_the_end(pair.channel)


def test_messages_of_a_worker_arrive_as_they_were_sent(pair: Pair) -> None:
    """Large and small messages arrive as they were sent."""
    for number in range(40):
        tensors = [torch.randn(number * 4000)] if number % 2 else []
        data = pair.client.write(bytes(encode(Result(number, "x" * number * 50), tensors)))
        for at in range(0, len(data), 100_000):
            pair.raw.sendall(data[at : at + 100_000])
            while pair.channel.read(0.01):
                pass
        while (envelope := pair.channel.next()) is None:
            pair.channel.read(SOON)
        assert envelope.message.id == number
        assert all(map(torch.equal, envelope.tensors, tensors))
    assert pair.channel._records is not None
    assert pair.channel._records.promised == pair.channel._brought


class Greeting:
    """A client that greets a server. The server's steps run as the client continues."""

    def __init__(self, client: Tunnel) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.raw = socket.create_connection(listener.getsockname())
            self._near = listener.accept()[0]
        self._near.setblocking(False)
        self.raw.settimeout(SOON)
        line = TlsLine(self._near, ClusterCredentials(SECRET, "bank"), server=True)
        self._steps = receive_visitor(line, lambda hello: pytest.fail("nobody has said hello"))
        self.client = client

    def send(self, data: bytes) -> None:
        self.raw.sendall(data)
        next(self._steps)

    def send_often(self, make: Callable[[], bytes]) -> None:
        for _ in range(200):
            self.send(make())

    def close(self) -> None:
        self._near.close()
        self.raw.close()


def test_a_greeting_of_requests_for_new_keys(tmp_path: Path) -> None:
    """A peer with a certificate that never sends its hello."""
    context = ClusterCredentials(SECRET, "shop").tunnel(server=False).stream.context
    context.keylog_filename = str(tmp_path / "keys")
    greeting = Greeting(Tunnel(context, server=False))
    while not greeting.client.shake():
        greeting.send(greeting.client.take())
        greeting.client.feed(greeting.raw.recv(1 << 16))
    greeting.send(greeting.client.take())
    updates = KeyUpdates(greeting.raw, tmp_path / "keys", 0)
    with pytest.raises(ProtocolError, match="a greeting in TLS records that bring no data"):
        greeting.send_often(lambda: updates.records(20))
    greeting.close()


def test_a_handshake_that_does_not_end() -> None:
    """A sender may split its certificate into many records of one byte each."""
    greeting = Greeting(ClusterCredentials(SECRET, "shop").tunnel(server=False))
    greeting.client.shake()
    hello = greeting.client.take()
    # The first message claims a length of 64 KiB, and takes that many records.
    piece = hello[:3] + (1).to_bytes(2, "big") + bytes(1)
    start = hello[:3] + (4).to_bytes(2, "big") + hello[5:6] + (1 << 16).to_bytes(3, "big")
    greeting.send(start)
    with pytest.raises(ProtocolError, match="a handshake that does not end"):
        greeting.send_often(lambda: piece * 500)
    greeting.close()
