"""``fabric="plain"``: the greeting uses TLS, both ends agree on the fabric, and the rest is not encrypted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import torch.distributed as dist
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

from backhaul.errors import AuthenticationError, OptionError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.handshake import HEAD_SIZE, MAGIC, Welcome, length_of_hello
from backhaul.security.handshake import encode as encode_greeting
from backhaul.security.tls import ClusterCredentials
from backhaul.seeing.guest import Guest, transport_for
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Addresses, Channel
from backhaul.transport.greeting import Steps, drive, receive_visitor, visit
from backhaul.transport.plain import TcpChannel
from backhaul.transport.segments import Budget
from backhaul.transport.tls import TlsChannel, TlsLine
from backhaul.trust.policy import FEDERATION
from backhaul.wire.messages import Ping, Result
from backhaul.worker import Worker
from mint import Mint

SECRET = os.urandom(32)
PLAIN = {"transport": "tcp", "secret": SECRET, "fabric": "plain"}
TLS = {"transport": "tcp", "secret": SECRET, "fabric": "tls"}


def test_the_greeting_is_encrypted_and_what_follows_is_not(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, **PLAIN)
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    relay = Relay(server.addresses.tcp, threads)
    near, _ = make(**PLAIN).connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
    far, _ = there.result(timeout=SOON)
    for words in (MAGIC, b"worker", b"group", b"plain", SECRET):
        assert words not in relay.noted
    send(near, Result(1, "anybody may know this"))
    assert receive(far).message == Result(1, "anybody may know this")
    assert b"anybody may know this" in relay.noted
    near.close()
    far.close()
    relay.wait()


def test_tensors_of_all_sizes_both_ways() -> None:
    group = Group("plain")
    near, far = group.pair()
    assert (type(near), near.path, type(far)) == (TcpChannel, "tcp", TcpChannel)
    with ThreadPoolExecutor(2) as threads:
        for size in (1, 1000, 100_000, 3_000_000):
            sent = torch.rand(size)
            for one, other in ((near, far), (far, near)):
                came = threads.submit(receive, other)
                send(one, Result(size, None), [sent])
                assert torch.equal(came.result(timeout=SOON).tensors[0], sent)
    group.close()


@pytest.mark.parametrize(("here", "there"), [("tls", "plain"), ("plain", "tls")])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_workers_with_different_fabrics_do_not_connect(here: str, there: str, transport: str) -> None:
    workers = pair_of_workers({**TLS, "fabric": here, "transport": transport}, {**TLS, "fabric": there})
    with pytest.raises(AuthenticationError) as caught:
        workers[0].rpc_sync("b", os.getpid)
    for words in (f"worker 'a' has fabric='{here}'", f"worker 'b' has fabric='{there}'", "give all workers"):
        assert words in str(caught.value)
    with pytest.raises(AuthenticationError, match=f"worker 'b' has fabric='{there}', and worker 'a' has"):
        workers[1].rpc_sync("a", os.getpid)
    for worker in workers:
        worker.shutdown(graceful=False)


def pair_of_workers(*options: dict[str, object]) -> list[Worker]:
    store = dist.HashStore()
    made: dict[int, Worker] = {}

    def make(rank: int) -> None:
        made[rank] = Worker("ab"[rank], rank, 2, store=store, options=RpcOptions(**options[rank]))  # type: ignore[arg-type]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[0], made[1]]


# Peers, or a man in the middle, that claim another fabric.


@pytest.fixture
def ends() -> Iterator[tuple[Odd, TlsLine]]:
    """The lines of a client and of a server, on one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    client = Odd(near, ClusterCredentials(SECRET, HELLO.name), server=False)
    server = TlsLine(far, ClusterCredentials(SECRET, WELCOME.name), server=True)
    yield client, server
    near.close()
    far.close()


def welcome_without_a_word_about_it(line: TlsLine) -> Steps[None]:
    """The greeting of a Backhaul version without this option."""
    yield from line.open()
    yield from line.hear(length_of_hello((yield from line.hear(HEAD_SIZE))))
    yield from line.say(encode_greeting(Welcome(0, "worker0")))


def test_a_client_refuses_a_server_that_ignores_its_fabric(
    ends: tuple[TlsLine, TlsLine], threads: ThreadPoolExecutor
) -> None:
    client, server = ends
    there = threads.submit(drive, welcome_without_a_word_about_it(server), server.socket, soon())
    hello = msgspec.structs.replace(HELLO, fabric="plain")
    with pytest.raises(AuthenticationError, match=r"worker 'worker1' has fabric='plain'.* 'worker0' has fabric='tls'"):
        drive(visit(client, hello), client.socket, soon())
    there.result(timeout=SOON)


def test_a_server_refuses_a_client_with_another_fabric(
    ends: tuple[TlsLine, TlsLine], threads: ThreadPoolExecutor
) -> None:
    client, server = ends
    steps = receive_visitor(server, welcome_all, "tls")
    there = threads.submit(drive, steps, server.socket, soon())
    with pytest.raises(AuthenticationError, match="refused the connection: worker 'worker1' has fabric='plain'"):
        drive(visit(client, msgspec.structs.replace(HELLO, fabric="plain")), client.socket, soon())
    with pytest.raises(AuthenticationError, match="'worker0' has fabric='tls'"):
        there.result(timeout=SOON)


class Odd(TlsLine):
    """A client's line that sends ``more`` with its hello, and then calls ``then``."""

    more = b""

    def then(self) -> None:
        pass

    def say(self, data: bytes) -> Steps[None]:
        yield from super().say(data + self.more)
        self.then()


def test_frames_that_come_with_the_welcome_are_not_lost(ends: tuple[Odd, TlsLine], threads: ThreadPoolExecutor) -> None:
    client, server = ends
    options, budget = RpcOptions(fabric="plain"), Budget(0)

    def serve() -> Channel:
        drive(receive_visitor(server, welcome_all, "plain"), server.socket, soon())
        channel = server.channel(options, budget, "plain")
        send(channel, Ping(7))
        return channel

    there = threads.submit(serve)
    client.then = lambda: there.result(timeout=SOON)  # type: ignore[method-assign,assignment,return-value]
    drive(visit(client, msgspec.structs.replace(HELLO, fabric="plain")), client.socket, soon())
    near = client.channel(options, budget, "plain")
    envelope = near.next()
    assert envelope is not None
    assert envelope.message == Ping(7)
    near.close()
    there.result(timeout=SOON).close()


def test_a_client_that_does_not_wait_for_its_welcome_is_refused(
    ends: tuple[Odd, TlsLine], threads: ThreadPoolExecutor
) -> None:
    client, server = ends
    client.more = b"and more"
    steps = visit(client, msgspec.structs.replace(HELLO, fabric="plain"))
    there = threads.submit(drive, steps, client.socket, soon())
    drive(receive_visitor(server, welcome_all, "plain"), server.socket, soon())
    with pytest.raises(ProtocolError, match="goes on where it should have ended"):
        server.channel(RpcOptions(fabric="plain"), Budget(0), "plain")
    there.result(timeout=SOON)


# Other parts.


def test_calls_and_guests_work_over_the_plain_fabric() -> None:
    options = RpcOptions(**PLAIN)  # type: ignore[arg-type]
    with InProcessCluster(2, options=options, sockets=True) as cluster:
        sent = torch.rand(1 << 20)
        assert torch.equal(cluster[0].rpc_sync("worker1", torch.neg, (sent,)), -sent)
        line = cluster[0].agent.calling()[0]
        assert line.channel.path == "tcp"
        address = cluster[0].agent.transport.addresses
        guest = Guest(msgspec.structs.replace(address, unix=None), transport_for(options))
        assert guest.ask("snapshot")["worker"]["name"] == "worker0"
        assert isinstance(guest._channel, TlsChannel)
        guest.close()


def test_a_federation_refuses_the_plain_fabric(tmp_path_factory: pytest.TempPathFactory) -> None:
    tls = Mint(tmp_path_factory.mktemp("mint")).tls("bank")
    with pytest.raises(OptionError, match='leave out fabric="plain"'):
        FEDERATION.transport_options(RpcOptions(trust="federation", tls=tls, fabric="plain"))
    with pytest.raises(OptionError, match=r"one connection for each direction.*leave out connections=2"):
        FEDERATION.transport_options(RpcOptions(trust="federation", tls=tls, connections=2))
