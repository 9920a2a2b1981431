"""TCP connections without the group's credentials: each is refused at once, and learns only the reason."""

from __future__ import annotations

import datetime
import re
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from intruder import SOON, Besieged, Line, is_cut

from backhaul.errors import AuthenticationError, BackhaulError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.certificates import Authority, Issued
from backhaul.security.handshake import MAGIC
from backhaul.security.tls import ClusterCredentials, contexts_of
from backhaul.transport.base import Addresses, ChannelClosed
from backhaul.transport.stream import StreamTransport
from backhaul.wire.frames import encode
from backhaul.wire.messages import Call, Ping

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)
OTHER = secrets.token_bytes(32)


def plain_context(certificate: Issued | None, directory: Path, **versions: ssl.TLSVersion) -> ssl.SSLContext:
    """A client context that accepts any server, and shows this certificate, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        file = directory / "certificate.pem"
        file.write_bytes(certificate.key + certificate.certificate)
        context.load_cert_chain(file)
    for name, version in versions.items():
        setattr(context, name, version)
    return context


def refusal(besieged: Besieged, context: ssl.SSLContext) -> str:
    """The reason that a client with this context gets; "" if the connection is just cut. The refusal must come soon."""
    sock = besieged.tcp()
    began = time.monotonic()
    try:
        with context.wrap_socket(sock) as tls:
            # In TLS 1.3 the client finishes before the server judges it. Its first read shows the refusal.
            data = tls.recv(100)
        assert not data, f"it was let in, and told {data!r}"
        told = ""
    except (ssl.SSLError, ConnectionError) as error:
        told = getattr(error, "reason", None) or ""
    assert time.monotonic() - began < SOON
    return told


def test_a_worker_with_the_secret_gets_in(besieged: Besieged, secret: bytes) -> None:
    """This shows that the refusals in the other tests have a reason."""
    with besieged.attack():
        context = contexts_of(Authority(secret).issue("worker2"), Authority(secret).certificate)[1]
        with context.wrap_socket(besieged.tcp()) as tls:
            line = Line(tls, besieged.hello())
            line.send(bytes(encode(Ping(7))))
            assert line.answer().id == 7


def test_no_certificate(besieged: Besieged, tmp_path: Path) -> None:
    with besieged.attack():
        assert "CERTIFICATE_REQUIRED" in refusal(besieged, plain_context(None, tmp_path))
        besieged.assert_logged("certificate")


def test_tls_1_2(besieged: Besieged, secret: bytes, tmp_path: Path) -> None:
    """A client with the right certificate is refused if it speaks TLS 1.2."""
    context = plain_context(Authority(secret).issue("worker2"), tmp_path, maximum_version=ssl.TLSVersion.TLSv1_2)
    with besieged.attack():
        assert "PROTOCOL_VERSION" in refusal(besieged, context)
        besieged.assert_logged("version")


CERTIFICATES: dict[str, tuple[Callable[[bytes], Issued], str]] = {
    "another secret": (lambda secret: Authority(OTHER).issue("worker2"), "another cluster"),
    "expired": (lambda secret: Authority(secret).issue("worker2", NOW - 2 * DAY), "expired"),
    "not valid yet": (lambda secret: Authority(secret).issue("worker2", NOW + DAY), "not valid yet"),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_an_invalid_certificate(besieged: Besieged, secret: bytes, tmp_path: Path, name: str) -> None:
    make, words = CERTIFICATES[name]
    with besieged.attack():
        told = refusal(besieged, plain_context(make(secret), tmp_path))
        assert "ALERT" in told
        besieged.assert_logged(words)


def test_a_certificate_that_was_signed_by_itself(besieged: Besieged, secret: bytes, tmp_path: Path) -> None:
    """The certificate has the name of the cluster's authority, but its own key: only the signature is wrong."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    real = x509.load_pem_x509_certificate(Authority(secret).certificate.encode())
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder().subject_name(real.subject).issuer_name(real.subject)
    forged = (
        builder.public_key(key.public_key())
        .serial_number(real.serial_number)
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier("backhaul:worker:worker2")]), False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with besieged.attack():
        context = plain_context(Issued(forged.public_bytes(Encoding.PEM), private, NOW), tmp_path)
        assert "ALERT" in refusal(besieged, context)
        besieged.assert_logged("another cluster")


def test_the_certificate_of_another_worker(besieged: Besieged, secret: bytes) -> None:
    """A peer with worker2's certificate is not admitted as worker1."""
    with besieged.attack():
        authority = Authority(secret)
        context = contexts_of(authority.issue("worker2"), authority.certificate)[1]
        with (
            context.wrap_socket(besieged.tcp()) as tls,
            pytest.raises(AuthenticationError, match="says that it is 'worker1', and its certificate is for 'worker2'"),
        ):
            Line(tls, besieged.hello(rank=1))
        besieged.assert_logged("says that it is 'worker1'")


def test_plain_text(besieged: Besieged) -> None:
    with besieged.attack():
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", MAGIC + bytes(66), bytes(encode(Call(1, None))), b"\n"):
            sock = besieged.tcp()
            sock.sendall(data)
            assert is_cut(sock), data
        besieged.assert_logged("plain text where TLS is spoken")


def test_a_real_worker_with_another_secret_is_told_why(besieged: Besieged, secret: bytes) -> None:
    """Both ends explain the refusal, and neither reveals a secret."""
    transport = StreamTransport(RpcOptions(secret=OTHER, transport="tcp"))
    transport.introduce("worker2")
    with besieged.attack():
        with pytest.raises(AuthenticationError, match="another cluster") as caught:
            transport.connect(besieged.addresses, besieged.hello(), time.monotonic() + 10)
        besieged.assert_logged("another cluster")
        log = besieged.log()
    for text in (log, str(caught.value), repr(caught.value.__cause__)):
        for key in (secret, OTHER):
            assert key.hex() not in text.lower()
            assert repr(key)[2:-1] not in text


# A listener that is not a worker.


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[Addresses]:
    """A process at the address of a worker, as a false entry in the store could arrange."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(10)
                try:
                    answer(sock)
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield Addresses(host="elsewhere", tcp=server.getsockname())
        thread.join()


def _answer(sock: socket.socket, data: bytes) -> None:
    # Read first: closing a connection with unread bytes resets it, and what was sent is lost.
    sock.recv(1 << 16)
    sock.sendall(data)


def _impostor(sock: socket.socket) -> None:
    """A server of another cluster."""
    context = contexts_of(Authority(OTHER).issue("worker0"), Authority(OTHER).certificate)[0]
    with context.wrap_socket(sock, server_side=True) as tls:
        tls.sendall(MAGIC + bytes(32))


LISTENERS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "says nothing": (lambda sock: _answer(sock, b""), "ended"),
    "speaks HTTP": (lambda sock: _answer(sock, b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not speak TLS"),
    "greets in the clear": (lambda sock: _answer(sock, MAGIC + bytes(32)), "does not speak TLS"),
    "is of another cluster": (_impostor, "another cluster"),
}


@pytest.mark.parametrize("name", LISTENERS)
def test_a_listener_that_is_no_worker_learns_nothing(besieged: Besieged, secret: bytes, name: str) -> None:
    answer, words = LISTENERS[name]
    transport = StreamTransport(RpcOptions(secret=secret, transport="tcp"))
    transport.introduce("worker2")
    with listener(answer) as addresses, pytest.raises((BackhaulError, ChannelClosed), match=words):
        transport.connect(addresses, besieged.hello(), time.monotonic() + 10)


# Replay.


class Recorder:
    """Stands between a client and the worker, and records what the client sends."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.recorded = b""
        self._to = to
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _relay(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection(self._to) as worker:
            while True:
                ready, _, _ = select.select([client, worker], [], [])
                for sock in ready:
                    try:
                        data = sock.recv(1 << 16)
                    except ConnectionError:
                        data = b""
                    if not data:
                        return
                    if sock is client:
                        self.recorded += data
                    (worker if sock is client else client).sendall(data)

    def close(self) -> None:
        self._thread.join()
        self._server.close()


def test_a_replayed_connection(besieged: Besieged, secret: bytes) -> None:
    """The recorded bytes of a good peer have no effect a second time."""
    assert besieged.addresses.tcp is not None
    with besieged.attack():
        recorder = Recorder(besieged.addresses.tcp)
        context = ClusterCredentials(secret, "worker2").tunnel(server=False).stream.context
        with context.wrap_socket(socket.create_connection(recorder.address)) as tls:
            line = Line(tls, besieged.hello())
            line.send(bytes(encode(Call(1, [1, [26, "os:getpid"], [1], {}]))))
            assert line.answer().tree == besieged.pid  # the original connection works
        recorder.close()
        assert len(recorder.recorded) > 1000
        served = len(re.findall("TLS", besieged.log()))
        for pieces in ([recorder.recorded], [recorder.recorded[:517], recorder.recorded[517:]]):
            sock = besieged.tcp()
            for piece in pieces:
                sock.sendall(piece)
            assert is_cut(sock)
        assert len(re.findall("TLS", besieged.log())) >= served


def test_a_server_s_bytes_are_replayed_to_a_client(besieged: Besieged, secret: bytes) -> None:
    recorded = b""
    with besieged.attack():
        tunnel = ClusterCredentials(secret, "worker2").tunnel(server=False)
        sock = besieged.tcp()
        while not tunnel.shake():
            sock.sendall(tunnel.take())
            data = sock.recv(1 << 16)
            recorded += data
            tunnel.feed(data)
    transport = StreamTransport(RpcOptions(secret=secret, transport="tcp"))
    transport.introduce("worker2")
    with (
        listener(lambda sock: (sock.recv(4096), sock.sendall(recorded), sock.recv(4096), None)[-1]) as addresses,
        pytest.raises((AuthenticationError, ProtocolError)),
    ):
        transport.connect(addresses, besieged.hello(), time.monotonic() + 10)
