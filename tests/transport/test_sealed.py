"""``fabric="sealed"``: a greeting with TLS, and what follows is encrypted with the keys that it brought."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from tls_relay import Relay
from transport_group import (
    HELLO,
    SOON,
    WELCOME,
    Group,
    Made,
    admit_one,
    only_listener,
    receive,
    send,
    soon,
    welcome_all,
)

from backhaul.errors import OptionError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.sealing import LENGTH, MOST, SHARE, TAG, agree
from backhaul.seeing.guest import Guest, transport_for
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Addresses, ChannelClosed
from backhaul.transport.sealed import SealedChannel
from backhaul.transport.tls import TlsChannel
from backhaul.wire.frames import encode
from backhaul.wire.messages import Ping, Result
from backhaul.worker import transport_options
from mint import Mint

SECRET = os.urandom(32)
SEALED = {"transport": "tcp", "secret": SECRET, "fabric": "sealed"}


def test_nothing_can_be_read_on_the_way(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, **SEALED)
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    relay = Relay(server.addresses.tcp, threads)
    near, _ = make(**SEALED).connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
    far, hello = there.result(timeout=SOON)
    assert (hello.fabric, hello.seal) == ("sealed", b"")
    tensor = torch.arange(10_000)
    for one, other in ((near, far), (far, near)):
        send(one, Result(1, "nobody may know this"), [tensor])
        envelope = receive(other)
        assert envelope.message == Result(1, "nobody may know this")
        assert torch.equal(envelope.tensors[0], tensor)
    for words in (b"sealed", b"worker", b"nobody may know this", tensor.numpy().tobytes()[800:864]):
        assert words not in relay.noted
    near.close()
    far.close()
    relay.wait()


def test_tensors_of_all_sizes_both_ways() -> None:
    group = Group("sealed")
    near, far = group.pair()
    assert (type(near), near.path, type(far)) == (SealedChannel, "sealed", SealedChannel)
    with ThreadPoolExecutor(2) as threads:
        for size in (0, 1, 1000, MOST // 4 - 1, MOST // 4, MOST // 4 + 1, 100_000, 3_000_000):
            sent = torch.rand(size)
            for one, other in ((near, far), (far, near)):
                came = threads.submit(receive, other)
                send(one, Result(size, None), [sent, torch.rand(0), sent[:7]])
                found = came.result(timeout=SOON).tensors
                assert torch.equal(found[0], sent)
                assert torch.equal(found[2], sent[:7])
    group.close()


def test_keys_are_new_for_every_connection(make: Made, threads: ThreadPoolExecutor) -> None:
    server, client = make(WELCOME.name, **SEALED), make(**SEALED)
    listener = only_listener(server)
    seen = []
    for _ in range(2):
        there = threads.submit(admit_one, listener, welcome_all)
        relay = Relay(server.addresses.tcp, threads)
        near, _ = client.connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
        far, _ = there.result(timeout=SOON)
        before = len(relay.noted)
        send(near, Ping(7))
        assert receive(far).message == Ping(7)
        seen.append(bytes(relay.noted[before:]))
        near.close()
        far.close()
        relay.wait()
    assert len(seen[0]) == len(seen[1])
    assert seen[0][LENGTH:] != seen[1][LENGTH:]


# What is not what the peer has sealed.


def channel_and_wire() -> tuple[SealedChannel, socket.socket, Callable[[bytes], bytes]]:
    """A server's channel, the client's end of its socket, and what seals for it."""
    near, far = socket.socketpair()
    shares = os.urandom(SHARE), os.urandom(SHARE)
    channel = SealedChannel(far, RpcOptions(), agree(*shares, is_server=True), b"")
    sealer, _ = agree(*shares, is_server=False)

    def seal(data: bytes) -> bytes:
        made = bytearray(LENGTH + len(data) + TAG)
        sealer.seal(memoryview(data), memoryview(made))
        return bytes(made)

    return channel, near, seal


def frame_of(message: Any) -> bytes:
    return b"".join(bytes(piece) for piece in encode(message).pieces)


@pytest.mark.parametrize(
    ("breach", "says"),
    [
        (lambda record: record[:-1] + bytes([record[-1] ^ 1]), "not what the peer encrypted"),
        (lambda record: (0).to_bytes(4, "little") + record[4:], "a sealed record of 0 bytes"),
        (lambda record: (MOST + 1).to_bytes(4, "little") + record[4:], f"a sealed record of {MOST + 1} bytes"),
    ],
)
def test_what_came_before_a_bad_record_is_good(breach: Callable[[bytes], bytes], says: str) -> None:
    channel, wire, seal = channel_and_wire()
    wire.sendall(seal(frame_of(Ping(1))) + breach(seal(frame_of(Ping(2)))))
    assert channel.read(SOON)
    envelope = channel.next()
    assert envelope is not None
    assert envelope.message == Ping(1)
    with pytest.raises(ProtocolError, match=says):
        channel.read(SOON)
    assert channel.next() is None
    channel.close()
    wire.close()


def test_a_record_that_is_sent_twice_ends_the_connection() -> None:
    channel, wire, seal = channel_and_wire()
    record = seal(frame_of(Ping(1)))
    wire.sendall(record + record)
    channel.read(SOON)
    with pytest.raises(ProtocolError, match="not what the peer encrypted"):
        channel.read(SOON)
    channel.close()
    wire.close()


def test_part_of_a_record_is_no_sign_of_life_and_its_end_is_one() -> None:
    channel, wire, seal = channel_and_wire()
    record = seal(frame_of(Ping(5)))
    for number in range(len(record) - 1):
        wire.sendall(record[number : number + 1])
        assert not channel.read(SOON)
    wire.sendall(record[-1:])
    assert channel.read(SOON)
    envelope = channel.next()
    assert envelope is not None
    assert envelope.message == Ping(5)
    wire.close()
    with pytest.raises(ChannelClosed):
        channel.read(SOON)
    channel.close()


def test_many_small_records_at_once() -> None:
    channel, wire, seal = channel_and_wire()
    wanted = list(range(3000))
    data = b"".join(seal(frame_of(Ping(number))) for number in wanted)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(wire.sendall, data)
        found: list[int] = []
        while len(found) < len(wanted):
            assert channel.read(SOON)
            while (envelope := channel.next()) is not None:
                found.append(envelope.message.id)
        sent.result(timeout=SOON)
    assert found == wanted
    channel.close()
    wire.close()


# Around it.


def test_calls_and_guests() -> None:
    options = RpcOptions(**SEALED)  # type: ignore[arg-type]
    with InProcessCluster(2, options=options, sockets=True) as cluster:
        sent = torch.rand(1 << 20)
        assert torch.equal(cluster[0].rpc_sync("worker1", torch.neg, (sent,)), -sent)
        line = cluster[0].agent.calling()[0]
        assert line.channel.path == "sealed"
        address = cluster[0].agent.transport.addresses
        guest = Guest(msgspec.structs.replace(address, unix=None), transport_for(options))
        assert guest.ask("snapshot")["worker"]["name"] == "worker0"
        assert isinstance(guest._channel, TlsChannel)
        guest.close()


def test_a_federation_refuses_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    tls = Mint(tmp_path_factory.mktemp("mint")).tls("bank")
    with pytest.raises(OptionError, match='leave out fabric="sealed"'):
        transport_options(RpcOptions(trust="federation", tls=tls, fabric="sealed"))
