"""TCP: on loopback only, never without a secret, and nothing is decoded from who does not know it."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from backhaul.errors import AuthenticationError, OptionError, ProtocolError
from backhaul.options import SECRET_VARIABLE, RpcOptions
from backhaul.security.handshake import CHALLENGE_SIZE, MAGIC, NONCE, PROOF, WELCOME_HEAD_SIZE, Hello, Welcome
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener
from backhaul.transport.stream import StreamListener, StreamTransport
from backhaul.wire.frames import encode
from backhaul.wire.messages import Ping

SECRET = secrets.token_bytes(32)
OTHER = secrets.token_bytes(32)
HELLO = Hello("group", 1, "worker1", 0)
WELCOME = Welcome(0, "worker0")
SOON = 10.0

Made = Callable[..., StreamTransport]


def soon() -> float:
    return time.monotonic() + SOON


@pytest.fixture(autouse=True)
def _no_secret_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def make() -> Iterator[Made]:
    made: list[StreamTransport] = []

    def transport(**options: Any) -> StreamTransport:
        made.append(StreamTransport(RpcOptions(**options)))
        return made[-1]

    yield transport
    for each in made:
        each.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def welcome_all(hello: Hello) -> Welcome:
    return WELCOME


def never(hello: Hello) -> Welcome:
    raise AssertionError(f"judged without proof: {hello}")


def admit(listener: Listener, judge: Callable[[Hello], Welcome]) -> tuple[Channel, Hello]:
    """Wait for one visitor, and greet it."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    assert poll.poll(SOON * 1000)
    visitor = listener.accept()
    assert visitor is not None
    return visitor.admit(judge, soon())


def tcp_listener(transport: StreamTransport) -> StreamListener:
    (listener,) = transport.listen()
    assert isinstance(listener, StreamListener)
    return listener


# Where it listens.


def own_addresses() -> list[str]:
    """This machine's addresses other than loopback, as its interfaces have them."""
    found = []
    for text in Path("/proc/net/fib_trie").read_text().split("|--")[1:]:
        address, rest = text.split(maxsplit=1)
        if "host LOCAL" in rest and not address.startswith("127."):
            found.append(address)
    return sorted(set(found))


def test_it_listens_on_one_loopback_address_and_no_other(make: Made) -> None:
    listener = tcp_listener(make(transport="tcp", secret=SECRET))
    host, port = listener._socket.getsockname()
    assert host == "127.0.0.1"
    for other in ("127.0.0.2", *own_addresses()):
        with pytest.raises(OSError), socket.create_connection((other, port), timeout=SOON):
            pass
    with socket.create_connection((host, port), timeout=SOON):
        pass


def test_nothing_listens_on_ipv6(make: Made) -> None:
    port = tcp_listener(make(transport="tcp", secret=SECRET))._socket.getsockname()[1]
    with pytest.raises(OSError), socket.create_connection(("::1", port), timeout=SOON):
        pass


@pytest.mark.parametrize("wanted", ["auto", "unix"])
def test_without_a_secret_there_is_no_tcp(make: Made, wanted: str) -> None:
    transport = make(transport=wanted)
    (listener,) = transport.listen()
    assert isinstance(listener, StreamListener)
    assert listener._socket.family == socket.AF_UNIX
    assert transport.addresses.tcp is None


def test_with_a_secret_auto_offers_both_and_each_alone_only_itself(make: Made) -> None:
    for wanted, unix, tcp in (("auto", True, True), ("unix", True, False), ("tcp", False, True)):
        transport = make(transport=wanted, secret=SECRET)
        assert len(transport.listen()) == unix + tcp
        assert (transport.addresses.unix is not None, transport.addresses.tcp is not None) == (unix, tcp)


def test_tcp_without_a_secret_is_refused(make: Made) -> None:
    transport = make(transport="tcp")
    with pytest.raises(OptionError, match=r"transport 'tcp' needs a secret .* `backhaul run`"):
        transport.listen()
    assert transport.addresses.tcp is None


def test_a_worker_without_a_secret_does_not_try_tcp(make: Made) -> None:
    with pytest.raises(ChannelClosed, match=r"no way to reach it: .* has no secret"):
        make().connect(Addresses(host="elsewhere", tcp=("127.0.0.1", 1)), HELLO, soon())


def test_the_launcher_s_secret_is_taken_from_the_environment(
    make: Made, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.hex())
    server = make(transport="tcp")
    monkeypatch.delenv(SECRET_VARIABLE)
    there = threads.submit(admit, tcp_listener(server), welcome_all)
    channel, welcome = make(transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    assert welcome == WELCOME
    channel.close()
    there.result()[0].close()


# Who does not know the secret.


def test_a_wrong_secret_is_refused_at_both_ends(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(transport="tcp", secret=SECRET)
    there = threads.submit(admit, tcp_listener(server), never)
    with pytest.raises(AuthenticationError, match="the secrets differ; start all workers from one launcher"):
        make(transport="tcp", secret=OTHER).connect(server.addresses, HELLO, soon())
    with pytest.raises(AuthenticationError, match="the peer does not know this group's secret"):
        there.result(timeout=SOON)


def test_a_good_peer_is_served_after_a_bad_one(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(transport="tcp", secret=SECRET)
    listener = tcp_listener(server)
    for _ in range(3):
        bad = threads.submit(admit, listener, never)
        with pytest.raises(AuthenticationError):
            make(transport="tcp", secret=OTHER).connect(server.addresses, HELLO, soon())
        assert isinstance(bad.exception(timeout=SOON), AuthenticationError)
    good = threads.submit(admit, listener, welcome_all)
    channel, _ = make(transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    far, hello = good.result(timeout=SOON)
    assert hello == HELLO
    channel.write(encode(Ping(1)))
    assert far.read(SOON)
    envelope = far.next()
    assert envelope is not None
    assert envelope.message == Ping(1)
    channel.close()
    far.close()


def speak(address: Any, message: bytes, proof: bytes) -> tuple[bytes, bytes]:
    """A client of our protocol without a key: the challenge it got, and the answer to its hello."""
    with socket.create_connection(address, timeout=SOON) as sock:
        challenge = sock.recv(CHALLENGE_SIZE, socket.MSG_WAITALL)
        sock.sendall(MAGIC + bytes(NONCE) + proof + struct.pack("<H", len(message)) + message)
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
        return challenge, answer


UNDECODABLE = [b"\xc1", b"\x94\xa2\xff\xfe\x01\xa1w\x00", b"\x91" * 4000, b"", os.urandom(100)]


@pytest.mark.parametrize("message", UNDECODABLE, ids=["no msgpack", "no UTF-8", "deep", "empty", "random"])
def test_nothing_is_decoded_without_proof(make: Made, threads: ThreadPoolExecutor, message: bytes) -> None:
    """Each of these raises another error as soon as somebody decodes it."""
    server = make(transport="tcp", secret=SECRET)
    listener = tcp_listener(server)
    for proof in (bytes(PROOF), secrets.token_bytes(PROOF)):
        there = threads.submit(admit, listener, never)
        challenge, answer = speak(server.addresses.tcp, message, proof)
        assert challenge[:4] == MAGIC
        assert type(there.exception(timeout=SOON)) is AuthenticationError
        assert answer[:PROOF] == bytes(PROOF)  # the refusal proves nothing to a stranger
        assert b"the secrets differ" in answer
        assert b"worker0" not in answer


def test_the_empty_key_of_unix_sockets_opens_no_tcp(make: Made, threads: ThreadPoolExecutor) -> None:
    """Each listener has its own key: knowing how greetings go on a unix socket is no help."""
    server = make(transport="auto", secret=SECRET)
    unix, tcp = server.listen()
    assert isinstance(unix, StreamListener)
    assert isinstance(tcp, StreamListener)
    assert (unix._key, tcp._key) == (b"", SECRET)
    assert unix._socket.family == socket.AF_UNIX


# What goes over the wire.


class Relay:
    """Somebody in the middle who passes everything on, and notes it down."""

    def __init__(self, there: Any, threads: ThreadPoolExecutor, change: Callable[[bytes], bytes] = bytes) -> None:
        self.noted = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._there = there
        self._change = change
        self._lock = threading.Lock()
        self._done: Future[None] = threads.submit(self._relay)

    def _relay(self) -> None:
        near, _ = self._server.accept()
        with self._server, near, socket.create_connection(self._there, timeout=SOON) as far:
            ends = {near.fileno(): (near, far), far.fileno(): (far, near)}
            poll = select.poll()
            for descriptor in ends:
                poll.register(descriptor, select.POLLIN)
            while True:
                for descriptor, _ in poll.poll(SOON * 1000):
                    source, target = ends[descriptor]
                    try:
                        data = source.recv(65536)
                        self.noted += data
                        if not data:
                            return
                        target.sendall(self._change(data) if source is far else data)
                    except OSError:
                        return

    def wait(self) -> None:
        self._done.result(timeout=SOON)


def test_the_secret_is_not_on_the_wire(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(transport="tcp", secret=SECRET)
    there = threads.submit(admit, tcp_listener(server), welcome_all)
    relay = Relay(server.addresses.tcp, threads)
    channel, _ = make(transport="tcp", secret=SECRET).connect(
        Addresses(host="elsewhere", tcp=relay.address), HELLO, soon()
    )
    far, _ = there.result(timeout=SOON)
    channel.write(encode(Ping(1)))
    assert far.read(SOON)
    channel.close()
    far.close()
    relay.wait()
    assert MAGIC in relay.noted
    assert b"worker1" in relay.noted
    assert SECRET not in relay.noted
    assert SECRET.hex().encode() not in relay.noted
    assert not any(SECRET[start : start + 6] in relay.noted for start in range(27))


def test_a_changed_challenge_is_noticed(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(transport="tcp", secret=SECRET)
    there = threads.submit(admit, tcp_listener(server), never)
    relay = Relay(server.addresses.tcp, threads, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((AuthenticationError, ProtocolError)):
        make(transport="tcp", secret=SECRET).connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
    assert isinstance(there.exception(timeout=SOON), AuthenticationError)
    relay.wait()


def test_a_server_that_does_not_know_the_secret_is_not_believed(make: Made, threads: ThreadPoolExecutor) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve(answer: bytes) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(MAGIC + bytes(NONCE))
            sock.recv(4096)
            sock.sendall(answer)
            sock.recv(1)

    welcome = b"\x93\x00\xa7worker0\xa0"
    assert WELCOME_HEAD_SIZE == PROOF + 2
    with server:
        for proof in (bytes(PROOF), secrets.token_bytes(PROOF)):
            served = threads.submit(serve, proof + struct.pack("<H", len(welcome)) + welcome)
            with pytest.raises(AuthenticationError, match="what listens there does not know this group's secret"):
                make(transport="tcp", secret=SECRET).connect(
                    Addresses(host="elsewhere", tcp=server.getsockname()), HELLO, soon()
                )
            served.result(timeout=SOON)
