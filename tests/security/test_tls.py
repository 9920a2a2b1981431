"""TLS without sockets: two tunnels joined over bytes, every reason for a refusal, and the messages."""

from __future__ import annotations

import datetime
import os
import pickle
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from backhaul.errors import AuthenticationError, OptionError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security import tls as tls_module
from backhaul.security.certificates import Authority
from backhaul.security.tls import (
    RECORD,
    TLS,
    ClusterCredentials,
    Credentials,
    OwnCredentials,
    Tunnel,
    contexts_of,
    first_record,
)
from mint import DAY, Mint

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
ANOTHER_CLUSTER = "it comes from another cluster: give all workers the same secret or key file"

Outcome = tuple[Exception | None, Exception | None]


def join(server: Tunnel, client: Tunnel, change: Callable[[bytes], bytes] = bytes) -> Outcome:
    """Run a handshake over bytes. Returns what the server and the client raised. ``change`` alters bytes on the way."""
    raised: dict[bool, Exception] = {}
    for _ in range(4):
        for one, other in ((client, server), (server, client)):
            if one.server not in raised:
                try:
                    if one.shake():
                        one.check()
                except (AuthenticationError, ProtocolError) as error:
                    raised[one.server] = error
            other.feed(change(one.take()))
    return raised.get(True), raised.get(False)


def cluster(secret: bytes = SECRET, name: str = "ana") -> ClusterCredentials:
    return ClusterCredentials(secret, name)


def between(server: Credentials, client: Credentials) -> tuple[Tunnel, Tunnel]:
    return server.tunnel(server=True), client.tunnel(server=False)


@pytest.fixture(scope="module")
def mint(tmp_path_factory: pytest.TempPathFactory) -> Mint:
    return Mint(tmp_path_factory.mktemp("ca"))


# Good ones.


def test_two_workers_of_a_cluster_learn_each_other_s_names() -> None:
    server, client = between(cluster(name="ana"), cluster(name="bö b/1"))
    assert join(server, client) == (None, None)
    assert server.names == {"bö b/1"}
    assert client.names == {"ana"}
    assert server.stream.version() == client.stream.version() == "TLSv1.3"
    assert server.stream.compression() is None


@pytest.mark.parametrize("size", [0, 1, 5000, RECORD, RECORD + 1, 100_000])
def test_bytes_arrive_in_both_directions(size: int) -> None:
    server, client = between(cluster(), cluster())
    assert join(server, client) == (None, None)
    data = os.urandom(size)
    for one, other in ((server, client), (client, server)):
        sent = one.write(data)
        assert size < 16 or data not in sent
        other.feed(sent)
        got = b""
        while piece := other.read(1 << 20):
            got += piece
        assert got == data
        assert other.read(1) == b""


def test_there_is_no_session_to_resume() -> None:
    server, client = between(cluster(), cluster())
    assert join(server, client) == (None, None)
    client.feed(server.write(b"x"))
    assert client.read(1) == b"x"
    assert client.stream.session is None or not client.stream.session.has_ticket
    assert not client.stream.session_reused


def test_a_recorded_connection_cannot_be_replayed() -> None:
    """The exact bytes that a client sent to one server are sent to another server of the same cluster."""
    server, client = between(cluster(), cluster())
    said = b""
    for _ in range(3):
        client.shake()
        piece = client.take()
        said += piece
        server.feed(piece)
        server.shake()
        client.feed(server.take())
    said += client.write(b"hello")
    again = cluster().tunnel(server=True)
    again.feed(said)
    with pytest.raises(ProtocolError):
        again.shake()


def test_a_certificate_is_renewed_when_half_of_its_life_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = cluster()
    first = credentials.tunnel(server=True).stream.context
    assert credentials.tunnel(server=True).stream.context is first
    assert credentials._issued is not None
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=1)
    credentials._issued = credentials._issued._replace(renew_at=past)
    server, client = between(credentials, cluster())
    assert server.stream.context is not first
    assert join(server, client) == (None, None)


# Wrong peers. Both sides say why.


def test_another_secret() -> None:
    for server, client in ((SECRET, OTHER), (OTHER, SECRET)):
        there, here = join(*between(cluster(server), cluster(client)))
        assert isinstance(here, AuthenticationError)
        assert str(here).startswith(f"the peer's certificate is refused: {ANOTHER_CLUSTER}")
        assert isinstance(there, AuthenticationError)
        assert str(there).startswith(f"the peer does not accept this worker's certificate: {ANOTHER_CLUSTER}")
        for error in (there, here):
            assert SECRET.hex() not in str(error)
            assert OTHER.hex() not in str(error)


def test_a_client_of_another_cluster_that_verifies_nothing_is_refused() -> None:
    """The client finishes its handshake before the refusal. Its first read shows the refusal."""
    server, client = between(cluster(SECRET), cluster(OTHER))
    context = client.stream.context
    context.verify_mode = ssl.CERT_NONE
    there, here = join(server, Tunnel(context, server=False))
    assert isinstance(there, AuthenticationError)
    assert str(there).startswith(f"the peer's certificate is refused: {ANOTHER_CLUSTER}")
    assert isinstance(here, AuthenticationError)
    assert str(here).startswith(f"the peer does not accept this worker's certificate: {ANOTHER_CLUSTER}")


def issued(moment: datetime.timedelta) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of the right cluster, with a certificate from another time."""
    authority = Authority(SECRET)
    now = datetime.datetime.now(datetime.timezone.utc)
    return contexts_of(authority.issue("ana", now + moment), authority.certificate)


MOMENTS = [
    (
        -2 * DAY,
        "it has expired; renew it, or check the clocks",
        "says that this worker's certificate has expired",
    ),
    (+DAY, "it is not valid yet; check the clocks", "does not accept this worker's certificate, or not yet"),
]


@pytest.mark.parametrize(("moment", "judged", "told"), MOMENTS, ids=["expired", "not yet valid"])
def test_a_certificate_of_another_time(moment: datetime.timedelta, judged: str, told: str) -> None:
    bad_server, bad_client = issued(moment)
    good = cluster()
    server, client = join(good.tunnel(server=True), Tunnel(bad_client, server=False))
    assert judged in str(server)
    assert told in str(client)
    server, client = join(Tunnel(bad_server, server=True), good.tunnel(server=False))
    assert told in str(server)
    assert judged in str(client)
    for error in (server, client):
        assert isinstance(error, AuthenticationError)


def test_no_certificate() -> None:
    server = cluster().tunnel(server=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    there, here = join(server, Tunnel(context, server=False))
    assert str(there) == "the peer shows no certificate, so it cannot be identified"
    assert str(here) == "the peer wants a certificate, and this worker showed none"
    assert isinstance(there, AuthenticationError)
    assert isinstance(here, AuthenticationError)


@pytest.mark.parametrize("old", ["server", "client"])
def test_an_older_version_of_tls(old: str) -> None:
    server, client = cluster().tunnel(server=True), cluster().tunnel(server=False)
    context = (server if old == "server" else client).stream.context
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    server, client = Tunnel(server.stream.context, server=True), Tunnel(client.stream.context, server=False)
    there, here = join(server, client)
    for error in (there, here):
        assert isinstance(error, AuthenticationError)
        assert "no version of TLS in common: Backhaul speaks TLS 1.3 only" in str(error)


PLAIN = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"BHL2" + bytes(100),
    b"\0",
    b"\x16\x02\x01",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\xff" * 99,
]


@pytest.mark.parametrize("data", PLAIN)
def test_plain_text_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="plain text where TLS is spoken") as refusal:
        first_record(data, server=True)
    assert (repr(data[:4]) if data[:1].isalpha() else "other bytes") in str(refusal.value)
    with pytest.raises(ProtocolError, match="does not speak TLS, so it is not a Backhaul worker: it says"):
        first_record(data, server=False)


def test_a_first_record_is_waited_for() -> None:
    client = cluster().tunnel(server=False)
    client.shake()
    hello = client.take()
    for count in range(len(hello)):
        assert not first_record(hello[:count], server=True)
    assert first_record(hello, server=True)
    assert first_record(bytearray(hello + b"more"), server=True)
    for length in (0, 0x7FFF):
        with pytest.raises(ProtocolError, match=f"starts with a record of {length} bytes"):
            first_record(b"\x16\x03\x01" + length.to_bytes(2, "big"), server=True)


@pytest.mark.parametrize("place", [5, 43, 100, -1])
def test_a_handshake_that_is_changed_on_the_way_fails(place: int) -> None:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        if len(changed) > 100:
            changed[place] ^= 0x41
        return bytes(changed)

    there, here = join(*between(cluster(), cluster()), change)
    assert there is not None
    assert here is not None


def test_garbage_after_a_good_start_is_a_protocol_error() -> None:
    server = cluster().tunnel(server=True)
    server.feed(b"\x16\x03\x01\x00\x10" + bytes(16))
    with pytest.raises(ProtocolError, match="the peer does not speak TLS as Backhaul does"):
        server.shake()


def test_changed_data_is_noticed() -> None:
    server, client = between(cluster(), cluster())
    assert join(server, client) == (None, None)
    sent = bytearray(client.write(b"hello"))
    sent[-1] ^= 1
    server.feed(sent)
    with pytest.raises(ProtocolError):
        server.read(5)


def test_reading_and_writing_before_the_handshake() -> None:
    tunnel = cluster().tunnel(server=True)
    assert tunnel.read(1) == b""
    with pytest.raises(ProtocolError):
        tunnel.write(b"x")


# The user's own certificates.


def test_certificates_of_the_user_s_own(mint: Mint) -> None:
    bank = OwnCredentials(mint.tls("bank", dns=["bank", "bank.example.org"]), "bank")
    shop = OwnCredentials(mint.tls("shop"), "shop")
    server, client = between(bank, shop)
    assert join(server, client) == (None, None)
    assert server.names == {"shop"}
    assert client.names == {"bank", "bank.example.org"}


NAMES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"common"}),
    ({"dns": ["a.example.org"]}, {"a.example.org"}),
    ({"uris": ["backhaul:worker:a%20b"], "dns": ["c"]}, {"a b", "c"}),
    ({"uris": ["spiffe://example.org/a"]}, set()),
]


@pytest.mark.parametrize(("how", "names"), NAMES)
def test_the_names_of_a_certificate(mint: Mint, how: dict[str, Any], names: set[str]) -> None:
    """The common name counts only if there is no other name, because an authority may let clients choose it."""
    assert mint.tls("common", **how).names() == names


def test_a_certificate_for_another_worker_is_refused_at_the_start(mint: Mint) -> None:
    with pytest.raises(OptionError, match=r"this worker is 'shop', and its certificate .* is for 'bank', 'till': get"):
        OwnCredentials(mint.tls("x", dns=["bank", "till"]), "shop")


def test_another_ca(mint: Mint, tmp_path: Path) -> None:
    stranger = OwnCredentials(Mint(tmp_path, "other CA").tls("shop"), "shop")
    there, here = join(*between(OwnCredentials(mint.tls("bank"), "bank"), stranger))
    assert "with certificates of your own, the same CA" in str(here)
    assert "with certificates of your own, the same CA" in str(there)


def expect(text: str, ca: Any, cert: Any, key: Any) -> None:
    with pytest.raises(OptionError, match=text):
        TLS(ca, cert, key)


def test_each_file_that_cannot_be_used_is_named(mint: Mint, tmp_path: Path) -> None:
    ca = os.fspath(mint.ca)
    cert, key = mint.issue("bank", file="files")
    other_cert, other_key = mint.issue("bank", file="other")
    nothing, text = os.fspath(tmp_path / "nothing"), tmp_path / "text"
    text.write_text("not PEM")
    text.chmod(0o600)
    assert TLS(Path(ca), Path(cert), Path(key)) == TLS(ca, cert, key)  # type: ignore[arg-type]
    expect(f"there is no CA file {nothing}", nothing, cert, key)
    expect(f"there is no certificate {nothing}", ca, nothing, key)
    expect(f"there is no private key {nothing}", ca, cert, nothing)
    expect(f"the CA file {text} contains no certificates", text, cert, key)
    expect(f"the certificate {text} and the private key {key} cannot be read", ca, text, key)
    expect(f"the certificate {cert} and the private key {text} cannot be read", ca, cert, text)
    expect(f"the private key {other_key} does not belong to the certificate {cert}", ca, cert, other_key)
    expect(r"TLS\(cert=\.\.\.\) must be the path of a PEM file, not None", ca, None, key)
    expect(r"TLS\(ca=\.\.\.\) must be the path of a PEM file, not ''", "", cert, key)
    os.chmod(other_key, 0o640)
    expect(rf"the private key {other_key} is open to other users \(mode 0640\)", ca, other_cert, other_key)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("old", {"life": -DAY / 2}, "would be refused by every peer: it has expired"),
    ("young", {"since": DAY / 2}, "would be refused by every peer: it is not valid yet"),
    ("server", {"usages": [ExtendedKeyUsageOID.SERVER_AUTH]}, "it is not for this use: .* for client and server"),
    ("client", {"usages": [ExtendedKeyUsageOID.CLIENT_AUTH]}, "it is not for this use: .* for client and server"),
]


@pytest.mark.parametrize(("name", "how", "text"), BAD)
def test_certificates_that_peers_would_refuse_are_refused_here(
    mint: Mint, name: str, how: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        mint.tls(name, **how)


def test_a_certificate_of_another_ca_than_the_given_one(mint: Mint, tmp_path: Path) -> None:
    cert, key = Mint(tmp_path, "stranger").issue("bank")
    expect(f"{mint.ca} is not the CA that issued it", os.fspath(mint.ca), cert, key)


def test_a_key_with_a_password_does_not_prompt(mint: Mint, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    cert, key = mint.issue("bank", file="locked")
    loaded = load_pem_private_key(Path(key).read_bytes(), None)
    locked = loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret word"))
    Path(key).write_bytes(locked)
    expect(f"the private key {key} has a password", os.fspath(mint.ca), cert, key)


def test_certificates_are_read_again_when_they_change(mint: Mint) -> None:
    tls = mint.tls("bank", file="renewed")
    credentials = OwnCredentials(tls, "bank")
    first = credentials.tunnel(server=True).stream.context
    assert credentials.tunnel(server=True).stream.context is first
    mint.issue("bank", file="renewed", dns=["bank", "new"])
    server, client = between(credentials, OwnCredentials(mint.tls("shop"), "shop"))
    assert server.stream.context is not first
    assert join(server, client) == (None, None)
    assert client.names == {"bank", "new"}


def test_the_old_files_are_used_while_only_one_is_new(mint: Mint) -> None:
    """The files are being replaced. Until that is done, the old ones still work."""
    tls = mint.tls("bank", file="half")
    credentials = OwnCredentials(tls, "bank")
    first = credentials.tunnel(server=True).stream.context
    whole = Path(tls.key).read_bytes()
    Path(tls.key).write_bytes(whole[:50])
    assert credentials.tunnel(server=True).stream.context is first
    os.unlink(tls.key)
    assert credentials.tunnel(server=True).stream.context is first


def test_the_option_is_pickled_and_shows_no_key(mint: Mint) -> None:
    tls = mint.tls("bank", file="option")
    options = RpcOptions(tls=tls)
    assert pickle.loads(pickle.dumps(options)).tls == tls
    assert "BEGIN" not in repr(options)


def test_relative_paths_stay_the_same_files(mint: Mint, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = mint.issue("bank", file="relative")
    monkeypatch.chdir(mint.directory)
    tls = TLS(mint.ca.name, Path(cert).name, Path(key).name)
    monkeypatch.chdir("/")
    assert tls.names() == {"bank"}


def test_every_reason_of_a_refusal_is_listed_once() -> None:
    reasons = [each for _, refusals in tls_module._REFUSALS for each in refusals]
    assert len(set(reasons)) == len(reasons)
