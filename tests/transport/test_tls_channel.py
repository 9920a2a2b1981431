"""TCP uses TLS: where a worker listens, which peers get in, what is on the wire, and how frames pass through."""

from __future__ import annotations

import os
import queue
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    never,
    only_listener,
    receive,
    run,
    send,
    soon,
    welcome_all,
)

from backhaul.errors import AuthenticationError, OptionError, ProtocolError
from backhaul.options import SECRET_VARIABLE, RpcOptions
from backhaul.security import handshake
from backhaul.security.certificates import Authority, Issued
from backhaul.security.handshake import MAGIC, Welcome
from backhaul.security.keys import KEY_FILE_VARIABLE, make_key_file
from backhaul.security.tls import ClusterCredentials
from backhaul.transport.base import Addresses, Channel, ChannelClosed
from backhaul.transport.tls import TlsChannel
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Ping, Result
from mint import Mint

SECRET = os.urandom(32)
OTHER = os.urandom(32)


@pytest.fixture
def tcp() -> Iterator[Group]:
    group = Group("tcp")
    yield group
    group.close()


# Where the key comes from, and peers with another key.


def meet(make: Made, threads: ThreadPoolExecutor, server: dict[str, Any], client: dict[str, Any]) -> None:
    there = make(WELCOME.name, transport="tcp", **server)
    served = threads.submit(admit_one, only_listener(there), welcome_all)
    channel, welcome = make(transport="tcp", **client).connect(there.addresses, HELLO, soon())
    assert welcome == WELCOME
    channel.close()
    served.result()[0].close()


def test_keys_from_a_file_and_from_the_environment(
    make: Made, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_key_file(str(tmp_path / "key"))
    key = bytes.fromhex((tmp_path / "key").read_text())
    meet(make, threads, {"key_file": str(tmp_path / "key")}, {"secret": key})
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    meet(make, threads, {}, {"secret": key})
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    monkeypatch.setenv(SECRET_VARIABLE, key.hex())
    meet(make, threads, {}, {"key_file": str(tmp_path / "key")})


def test_certificates_of_the_user_s_own(make: Made, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    mint = Mint(tmp_path)
    meet(make, threads, {"tls": mint.tls(WELCOME.name)}, {"tls": mint.tls(HELLO.name)})


def test_a_certificate_for_another_name_is_refused_at_the_start(make: Made, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"this worker is 'shop', and its certificate .* is for 'bank'"):
        make("shop", transport="tcp", tls=Mint(tmp_path).tls("bank"))


def test_a_wrong_secret_is_refused_at_both_ends(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    there = threads.submit(admit_one, only_listener(server), never)
    with pytest.raises(AuthenticationError, match="the peer's certificate is refused: it comes from another cluster"):
        make(transport="tcp", secret=OTHER).connect(server.addresses, HELLO, soon())
    with pytest.raises(AuthenticationError, match="does not accept this worker's certificate: it comes from another"):
        there.result(timeout=SOON)


def test_a_good_peer_is_served_after_a_bad_one(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    listener = only_listener(server)
    for _ in range(3):
        bad = threads.submit(admit_one, listener, never)
        with pytest.raises(AuthenticationError):
            make(transport="tcp", secret=OTHER).connect(server.addresses, HELLO, soon())
        assert isinstance(bad.exception(timeout=SOON), AuthenticationError)
    good = threads.submit(admit_one, listener, welcome_all)
    channel, _ = make(transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    far, hello = good.result(timeout=SOON)
    assert hello == HELLO
    send(channel, Ping(1))
    assert receive(far).message == Ping(1)
    channel.close()
    far.close()


def test_a_peer_whose_name_differs_from_its_certificate_is_refused(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    listener = only_listener(server)
    there = threads.submit(admit_one, listener, never)
    with pytest.raises(AuthenticationError, match="it says that it is 'worker1', and its certificate is for 'mallory'"):
        make("mallory", transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    with pytest.raises(AuthenticationError, match=r"refused worker 'worker1': it says .* is for 'mallory'"):
        there.result(timeout=SOON)
    there = threads.submit(admit_one, listener, lambda hello: Welcome(0, "somebody else"))
    with pytest.raises(AuthenticationError, match="says that it is 'somebody else', and its certificate is for"):
        make(transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    there.result(timeout=SOON)[0].close()


def test_a_worker_without_a_secret_does_not_try_tcp(make: Made) -> None:
    with pytest.raises(ChannelClosed, match=r"no way to reach it: .* has no secret for TCP.*need a common key"):
        make().connect(Addresses(host="elsewhere", tcp=("127.0.0.1", 1)), HELLO, soon())


def test_a_worker_that_listens_on_another_hosts_loopback_is_told_how_to_listen(make: Made) -> None:
    transport = make(transport="tcp", secret=SECRET)
    for host in ("127.0.0.1", "::1"):
        with pytest.raises(ChannelClosed, match=r"nobody answers at .*on another host but listens .*BACKHAUL_HOST"):
            transport.connect(Addresses(host="elsewhere", tcp=(host, 1)), HELLO, soon())
    with pytest.raises(ChannelClosed, match="nobody answers at") as caught:
        transport.connect(Addresses(host=transport.addresses.host, tcp=("127.0.0.1", 1)), HELLO, soon())
    assert "BACKHAUL_HOST" not in str(caught.value)


@pytest.mark.parametrize("address", [("127.0.0.1", -1), ("127.0.0.1", 1 << 20), ("localhost", 1), ("", 1), ("a\0b", 1)])
def test_a_store_that_lies_about_addresses_causes_a_failed_connection(make: Made, address: tuple[str, int]) -> None:
    with pytest.raises(ChannelClosed):
        make(transport="tcp", secret=SECRET).connect(Addresses(host="elsewhere", tcp=address), HELLO, soon())


def test_a_store_that_lies_about_paths_causes_a_failed_connection(make: Made) -> None:
    transport = make()
    for path in ("", "/no/such/path", "x" * 500, "a\0b", "/dev/null"):
        with pytest.raises(ChannelClosed):
            transport.connect(Addresses(host=transport.addresses.host, unix=path), HELLO, soon())


# Strangers.


def strangers_view(
    make: Made, threads: ThreadPoolExecutor, speak: Callable[[socket.socket], Any]
) -> tuple[Any, Exception]:
    """What a stranger receives from a worker's port, and the worker's error."""
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    there = threads.submit(admit_one, only_listener(server), never)
    assert server.addresses.tcp is not None
    with socket.create_connection(server.addresses.tcp, timeout=SOON) as sock:
        try:
            got = speak(sock)
        except OSError as error:
            got = error
    error = there.exception(timeout=SOON)
    assert isinstance(error, Exception)
    return got, error


def test_plain_text(make: Made, threads: ThreadPoolExecutor) -> None:
    def speak(sock: socket.socket) -> bytes:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return sock.recv(4096)

    got, error = strangers_view(make, threads, speak)
    assert got == b"" or isinstance(got, ConnectionResetError)
    assert isinstance(error, ProtocolError)
    assert str(error) == "plain text where TLS is spoken: a connection that starts with b'GET '"


def context(version: ssl.TLSVersion) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.maximum_version = version
    return made


def test_tls_1_2(make: Made, threads: ThreadPoolExecutor) -> None:
    got, error = strangers_view(make, threads, lambda sock: context(ssl.TLSVersion.TLSv1_2).wrap_socket(sock))
    assert isinstance(got, ssl.SSLError)
    assert "PROTOCOL_VERSION" in str(got).upper().replace(" ", "_")
    assert "Backhaul speaks TLS 1.3 only" in str(error)


def test_no_client_certificate(make: Made, threads: ThreadPoolExecutor) -> None:
    def speak(sock: socket.socket) -> bytes:
        with context(ssl.TLSVersion.TLSv1_3).wrap_socket(sock) as secured:
            return secured.recv(4096)

    got, error = strangers_view(make, threads, speak)
    assert isinstance(got, ssl.SSLError)
    assert "certificate required" in str(got)
    assert str(error) == "the peer shows no certificate, so it cannot be identified"


# What goes over the wire.


def test_a_relay_cannot_read_the_messages(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    relay = Relay(server.addresses.tcp, threads)
    client = make(transport="tcp", secret=SECRET)
    channel, _ = client.connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
    far, _ = there.result(timeout=SOON)
    send(channel, Result(1, "nobody else may know this"))
    assert receive(far).message == Result(1, "nobody else may know this")
    channel.close()
    far.close()
    relay.wait()
    assert len(relay.noted) > 1000
    for secret in (SECRET, SECRET.hex().encode(), MAGIC, b"worker", b"group", b"nobody else"):
        assert secret not in relay.noted
    assert not any(SECRET[start : start + 6] in relay.noted for start in range(27))


def test_a_changed_byte_in_the_greeting_is_noticed(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    there = threads.submit(admit_one, only_listener(server), never)
    relay = Relay(server.addresses.tcp, threads, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((AuthenticationError, ProtocolError)):
        make(transport="tcp", secret=SECRET).connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
    assert isinstance(there.exception(timeout=SOON), AuthenticationError | ProtocolError | ChannelClosed)
    relay.wait()


def test_a_changed_byte_of_a_message_is_noticed(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    relay = Relay(server.addresses.tcp, threads)
    client = make(transport="tcp", secret=SECRET)
    near, _ = client.connect(Addresses(host="elsewhere", tcp=relay.address), HELLO, soon())
    far, _ = there.result(timeout=SOON)
    send(far, Ping(1))
    assert receive(near).message == Ping(1)
    relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    send(far, Ping(2))
    with pytest.raises(ProtocolError, match="bytes that are not what the peer encrypted"):
        receive(near)
    near.close()
    far.close()
    relay.wait()


# Frames.


def test_a_tcp_channel_speaks_tls_1_3(tcp: Group) -> None:
    near, far = tcp.pair()
    for channel in (near, far):
        assert isinstance(channel, TlsChannel)
        assert channel._stream.version() == "TLSv1.3"


def test_one_thread_writes_while_another_reads(tcp: Group) -> None:
    """OpenSSL does not allow that, so there is a lock."""
    near, far = tcp.pair()
    count = 300
    tensors = [torch.full((5000 + 97 * number,), number) for number in range(count)]

    def write(channel: Channel) -> None:
        for number in range(count):
            send(channel, Ping(number), [tensors[number]] if number % 3 else [])

    def read(channel: Channel) -> None:
        for number in range(count):
            envelope = receive(channel)
            assert envelope.message == Ping(number)
            if number % 3:
                assert torch.equal(envelope.tensors[0], tensors[number])

    run(lambda: write(near), lambda: read(near), lambda: write(far), lambda: read(far))


@pytest.mark.parametrize("size", [1, 4096, 16_000, 16_384, 16_385, 100_000, 262_144, 1 << 20, (1 << 20) + 1])
def test_buffered_bytes_make_the_channel_readable(tcp: Group, size: int) -> None:
    """Bytes that were read but not decrypted, or decrypted but not taken, would not make the descriptor readable."""
    near, far = tcp.pair()
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(3)]
    written = threading.Event()

    def write() -> None:
        send(near, Ping(1), tensors)
        send(near, Ping(2))
        written.set()

    def read() -> None:
        seen: list[Any] = []
        while len(seen) < 2:
            # As the watch thread does: read while messages come, then sleep on the descriptor.
            while far.read(0):
                while (envelope := far.next()) is not None:
                    seen.append(envelope)
            poll = select.poll()
            poll.register(far.fileno(), select.POLLIN)
            assert len(seen) == 2 or poll.poll(SOON * 1000), "it sleeps on what has come already"
        assert [envelope.message for envelope in seen] == [Ping(1), Ping(2)]
        assert all(map(torch.equal, seen[0].tensors, tensors))

    run(write, read)


def test_a_record_that_comes_byte_by_byte() -> None:
    server = ClusterCredentials(SECRET, "a").tunnel(server=True)
    client = ClusterCredentials(SECRET, "b").tunnel(server=False)
    for _ in range(3):
        client.shake()
        server.feed(client.take())
        server.shake()
        client.feed(server.take())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        channel = TlsChannel(listener.accept()[0], server, RpcOptions())
    message = client.write(bytes(encode(Ping(7))))
    for place in range(len(message)):
        assert channel.next() is None
        raw.sendall(message[place : place + 1])
        # A part of a record is not a sign of life.
        assert channel.read(SOON) == (place == len(message) - 1)
    envelope = channel.next()
    assert envelope is not None
    assert envelope.message == Ping(7)
    raw.sendall(client.write(bytes(encode(Ping(8)))[:-1]))
    raw.close()
    with pytest.raises(ChannelClosed):
        receive(channel)
    channel.close()


def test_small_pieces_leave_in_one_record(tcp: Group) -> None:
    near, far = tcp.pair()
    assert isinstance(near, TlsChannel)
    data = bytes(encode(Result(1, "x" * 3000)))
    sent: queue.Queue[int] = queue.Queue()
    write = near._stream.write

    class Counting:
        def write(self, piece: Any) -> int:
            sent.put(len(piece))
            return write(piece)

    near._stream = Counting()  # type: ignore[assignment]
    assert near.write(Frame([data[place : place + 1] for place in range(len(data))], len(data)))
    assert receive(far).message == Result(1, "x" * 3000)
    assert [sent.get_nowait() for _ in range(sent.qsize())] == [len(data)]


def test_a_message_right_after_the_hello_is_not_lost(make: Made, threads: ThreadPoolExecutor) -> None:
    """A peer may send its first message with its hello, without waiting for the welcome."""
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    assert server.addresses.tcp is not None
    tunnel = ClusterCredentials(SECRET, HELLO.name).tunnel(server=False)
    with socket.create_connection(server.addresses.tcp, timeout=SOON) as sock:
        while not tunnel.shake():
            sock.sendall(tunnel.take())
            tunnel.feed(sock.recv(65536))
        sock.sendall(tunnel.take())
        sock.sendall(tunnel.write(handshake.encode(HELLO) + bytes(encode(Ping(5)))))
        far, _ = there.result(timeout=SOON)
        envelope = far.next() or receive(far)
        assert envelope.message == Ping(5)
        far.close()


@pytest.mark.parametrize("more", [b"", b"\x17\x03\x03\x00\x20" + bytes(32)], ids=["nothing", "more"])
def test_an_end_that_tls_announces(tcp: Group, more: bytes) -> None:
    near, far = tcp.pair()
    assert isinstance(near, TlsChannel)
    send(near, Ping(1))
    with pytest.raises(ssl.SSLWantReadError):
        near._stream.unwrap()
    near._socket.sendall(near._outgoing.read() + more)
    assert receive(far).message == Ping(1)
    with pytest.raises(ChannelClosed, match="the connection ended"):
        receive(far)


@pytest.mark.timeout(20)
def test_an_end_that_tls_announces_in_the_middle_of_a_tensor(tcp: Group) -> None:
    """The reading thread stops, whatever follows."""
    near, far = tcp.pair()
    assert isinstance(near, TlsChannel)
    half = bytes(encode(Result(1, None), [torch.zeros(1 << 18)]))[: 1 << 19]
    while half:
        half = half[near._stream.write(half) :]
    with pytest.raises(ssl.SSLWantReadError):
        near._stream.unwrap()
    sending = threading.Thread(target=near._socket.sendall, args=(near._outgoing.read() + bytes(1 << 16),))
    sending.start()
    with pytest.raises(ChannelClosed):
        receive(far)
    far.close()
    near._socket.shutdown(socket.SHUT_RDWR)
    sending.join(SOON)


def test_the_memory_of_an_idle_connection_is_small(tcp: Group) -> None:
    near, far = tcp.pair()
    assert isinstance(far, TlsChannel)
    send(near, Ping(1))
    receive(far)
    assert len(far._chunk) == 16_384
    run(lambda: send(near, Ping(2), [torch.zeros(1 << 20)]), lambda: receive(far) and None)
    assert len(far._chunk) == 262_144


def test_a_connection_makes_no_certificate(
    make: Made, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker makes one, for all its connections: keys and signatures would be most of the time of a greeting."""
    issued: list[str] = []
    issue = Authority.issue

    def note(authority: Authority, worker: str) -> Issued:
        issued.append(worker)
        return issue(authority, worker)

    monkeypatch.setattr(Authority, "issue", note)
    server = make(WELCOME.name, transport="tcp", secret=SECRET)
    listener = only_listener(server)
    client = make(transport="tcp", secret=SECRET)
    for _ in range(3):
        there = threads.submit(admit_one, listener, welcome_all)
        channel, _ = client.connect(server.addresses, HELLO, soon())
        channel.close()
        there.result(timeout=SOON)[0].close()
    assert sorted(issued) == sorted({HELLO.name, WELCOME.name})
