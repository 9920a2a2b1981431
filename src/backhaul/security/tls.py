"""TLS between workers, without sockets: the certificates that a worker presents and accepts, and the bytes.

Only TLS 1.3 is used, with certificates on both sides, and without session tickets. So each connection is new, and a
recording of one is useless. Host names are not checked. What counts is the worker's name in the certificate, which the
greeting compares with the name that the peer sends.

In TLS 1.3, a client has finished its handshake before the server can refuse it. It learns of the refusal at its first
read; `Tunnel` reports it with the same messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import ssl
import threading
from abc import ABC, abstractmethod
from typing import Any, NoReturn

from backhaul.errors import AuthenticationError, OptionError, ProtocolError
from backhaul.security.certificates import Authority, Issued, worker_of
from backhaul.security.keys import read_private

RECORD = 16384
"""The most bytes in one TLS record. OpenSSL takes and returns one record at a time."""

_LONGEST_PEM = 1 << 20
_HEAD = 5  # the head of a record: its type, 3, 1 to 4, its length (2)
_TAIL = 17  # the tail of an encrypted record: the type of its contents, the authentication tag
_LONGEST_RECORD = RECORD + 256
_HANDSHAKE, _ALERT = 22, 21


@dataclasses.dataclass(frozen=True)
class TLS:
    """Your own certificates: paths of PEM files. Raises `OptionError` for files that cannot be used.

    - ``ca``: the certificates of the authorities that may issue certificates for workers of the group.
    - ``cert``: this worker's certificate, followed by intermediate certificates, if any. It must be valid for client
      and server, and contain this worker's name: as a URI ``backhaul:worker:<name>``, as a DNS name or, if it has
      neither, as its common name.
    - ``key``: its private key, without a password, in a file that other users cannot read.

    The files are read again when they change, so you can renew certificates while the worker runs.
    """

    ca: str
    cert: str
    key: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str | os.PathLike) or not os.fspath(value):
                raise OptionError(f"TLS({field.name}=...) must be the path of a PEM file, not {value!r}")
            # An absolute path means the same file after a change of directory.
            object.__setattr__(self, field.name, os.path.abspath(os.fspath(value)))
        self.names()

    def names(self) -> frozenset[str]:
        """The names of the workers in the certificate. Raises `OptionError` if one of the files cannot be used."""
        server, client = self.contexts()
        # The surest check is to try it: a handshake with ourselves, in memory.
        left, right = Tunnel(server, server=True), Tunnel(client, server=False)
        try:
            for _ in range(4):
                for one, other in ((right, left), (left, right)):
                    one.shake()
                    other.feed(one.take())
            right.check()
        except (AuthenticationError, ProtocolError) as error:
            why = str(error)
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                foreign = error.__cause__.verify_code in _FOREIGN
                why = f"{self.ca} is not the CA that issued it" if foreign else _judgement(error.__cause__)
            raise OptionError(f"the certificate {self.cert} would be refused by every peer: {why}") from None
        return left.names

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """The contexts for serving and for connecting. Raises `OptionError` if one of the files cannot be used."""
        for what, path in (("CA file", self.ca), ("certificate", self.cert)):
            if not os.path.isfile(path):
                raise OptionError(f"there is no {what} {path}")
        read_private(self.key, "private key", _LONGEST_PEM)
        made = []
        for server in (True, False):
            context = _context(server=server)
            try:
                context.load_verify_locations(cafile=self.ca)
            except (ssl.SSLError, OSError) as error:
                raise OptionError(f"the CA file {self.ca} contains no certificates in PEM: {_text(error)}") from None
            _load(context, self.cert, self.key)
            made.append(context)
        return made[0], made[1]


class Credentials(ABC):
    """The certificate that a worker presents to its peers, and the authorities that it accepts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None

    def tunnel(self, *, server: bool) -> Tunnel:
        """A tunnel for one side of a new connection."""
        with self._lock:
            if self._contexts is None or self._are_stale():
                self._contexts = self._renew()
            context = self._contexts[0 if server else 1]
        return Tunnel(context, server=server)

    def prepare(self) -> None:
        """Make the certificate now, so that the first connection need not wait for it."""
        self.tunnel(server=True)

    @abstractmethod
    def _are_stale(self) -> bool: ...

    @abstractmethod
    def _renew(self) -> tuple[ssl.SSLContext, ssl.SSLContext]: ...


class ClusterCredentials(Credentials):
    """The credentials of a worker in the cluster with this secret."""

    def __init__(self, secret: bytes, name: str) -> None:
        super().__init__()
        self._secret = secret
        self._name = name
        self._authority: Authority | None = None
        self._issued: Issued | None = None

    def _are_stale(self) -> bool:
        return self._issued is None or datetime.datetime.now(datetime.timezone.utc) >= self._issued.renew_at

    def _renew(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        if self._authority is None:
            self._authority = Authority(self._secret)
        self._issued = self._authority.issue(self._name)
        return contexts_of(self._issued, self._authority.certificate)


class OwnCredentials(Credentials):
    """The credentials of a worker with the user's certificates. Raises `OptionError` if they are for another name."""

    def __init__(self, tls: TLS, name: str) -> None:
        super().__init__()
        self._tls = tls
        self._seen: tuple[object, ...] = ()
        names = tls.names()
        if name not in names:
            raise OptionError(
                f"this worker is {name!r}, and its certificate {tls.cert} is for {_listed(names)}: get a certificate "
                f"with the URI backhaul:worker:{name} or the DNS name {name}, or give the worker a name from it"
            )

    def _are_stale(self) -> bool:
        return self._seen != self._look()

    def _look(self) -> tuple[object, ...]:
        seen: list[object] = []
        for path in (self._tls.ca, self._tls.cert, self._tls.key):
            with contextlib.suppress(OSError):  # the file is being replaced: the next connection finds the new one
                status = os.stat(path)
                seen.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(seen)

    def _renew(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        seen = self._look()
        try:
            made = self._tls.contexts()
        except OptionError:
            if self._contexts is None:
                raise
            made = self._contexts  # only some of the files are new: keep the old contexts, which still work
        else:
            self._seen = seen
        return made


class Tunnel:
    """One side of a TLS connection, without I/O. It turns data into encrypted bytes, and encrypted bytes into data.

    Call `feed` with received bytes, send the bytes from `take`, and call `shake` until it returns True. Not
    thread-safe.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self.server = server
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.stream = context.wrap_bio(self.incoming, self.outgoing, server_side=server)
        self.feed = self.incoming.write
        self.take = self.outgoing.read

    def shake(self) -> bool:
        """Continue the handshake. Returns True when it is finished. Send the bytes from `take` even after it raises.

        Raises `AuthenticationError` or `ProtocolError` with the reason.
        """
        try:
            self.stream.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise_plainly(error, server=self.server)
        return True

    def read(self, count: int) -> bytes:
        """At most ``count`` bytes of data from the peer; empty if it needs more bytes from `feed`."""
        try:
            return self.stream.read(count)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            raise_plainly(error, server=self.server)

    def check(self) -> None:
        """Raise if the peer has sent a refusal after the handshake."""
        self.read(1)

    def write(self, data: bytes) -> bytes:
        """The bytes to send so that the peer gets ``data``."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self.stream.write(rest[:RECORD]) :]
        except ssl.SSLError as error:
            raise_plainly(error, server=self.server)
        return self.take()

    @property
    def names(self) -> frozenset[str]:
        """The names of the workers in the peer's certificate. Known after the handshake."""
        certificate: dict[str, Any] = dict(self.stream.getpeercert() or {})
        alternatives = certificate.get("subjectAltName", ())
        if alternatives:
            workers = [worker_of(str(value)) for kind, value in alternatives if kind == "URI"]
            hosts = [str(value) for kind, value in alternatives if kind == "DNS"]
            return frozenset([*filter(None, workers), *hosts])
        subject = [pair for part in certificate.get("subject", ()) for pair in part]
        return frozenset(str(value) for kind, value in subject if kind == "commonName")


def first_record(data: bytes | bytearray, *, server: bool) -> bool:
    """Whether ``data`` contains the whole first record of a handshake. Raises `ProtocolError` if it cannot be one.

    A server checks this before it makes a `Tunnel`, so that a peer that sends other bytes costs almost nothing.
    """
    if data and (data[0] not in (_HANDSHAKE, _ALERT) or (len(data) > 1 and data[1] != 3)):
        start = bytes(data[:4])
        # Arbitrary bytes are not shown: they would make each of thousands of log lines different.
        shown = repr(start) if start.isascii() and start.decode().isprintable() else "other bytes"
        if server:
            raise ProtocolError(f"plain text where TLS is spoken: a connection that starts with {shown}")
        raise ProtocolError(f"the listener there does not speak TLS, so it is not a Backhaul worker: it says {shown}")
    if len(data) < _HEAD:
        return False
    length = int.from_bytes(data[3:5], "big")
    if not length or length > _LONGEST_RECORD:
        raise ProtocolError(f"a handshake that starts with a record of {length} bytes")
    return len(data) >= _HEAD + length


class Records:
    """Finds the records in the bytes of a connection, without its keys, and returns a few at a time. Pure.

    The length of a record is not encrypted. So it is known how much data a record can bring before OpenSSL works on it.
    A record that brings less is padded, or it is a request for new keys, which costs OpenSSL as much as kilobytes of
    data. A worker sends neither. Not thread-safe.
    """

    MOST = 16
    """The most records in a slice. A large read of full records is one slice."""

    def __init__(self) -> None:
        self.promised = 0
        """The most bytes of data that all complete records can bring."""
        self._head = b""  # the start of a head whose rest has not come yet
        self._size = 0  # the size of the current record, without its head
        self._due = 0  # the bytes of that record that have not come yet

    def take(self, data: memoryview, start: int) -> int:
        """The end of the slice of ``data`` that begins at ``start``: after a record, or at the end of ``data``."""
        end = len(data)
        if self._head:
            missing = _HEAD - len(self._head)
            self._head += bytes(data[start : start + missing])
            if len(self._head) < _HEAD:
                return end
            self._size = self._due = int.from_bytes(self._head[3:], "big")
            self._head = b""
            start += missing
        at, size, room = start + self._due, self._size, self.MOST
        while room and at + _HEAD <= end:
            if size > _TAIL:
                self.promised += size - _TAIL
            size = data[at + 3] << 8 | data[at + 4]
            at += _HEAD + size
            room -= 1
        if at > end:
            self._size, self._due = size, at - end
            return end
        if size > _TAIL:
            self.promised += size - _TAIL
        self._size = self._due = 0
        if room:
            self._head = bytes(data[at:])
            return end
        return at


def contexts_of(issued: Issued, authority: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts for serving and for connecting, with a certificate that this process has issued."""
    made = []
    # The module ssl reads private keys only from files. This file is in memory, and has no name that others could open.
    descriptor = os.memfd_create("backhaul", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, issued.key + issued.certificate)
        for server in (True, False):
            context = _context(server=server)
            context.load_verify_locations(cadata=authority)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            made.append(context)
    finally:
        os.close(descriptor)
    return made[0], made[1]


def _context(*, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if server:
        context.num_tickets = 0
    return context


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    def no_password() -> NoReturn:
        raise OptionError(
            f"the private key {key} has a password: give a key without one, in a file that other users cannot read"
        )

    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OptionError(f"the private key {key} does not belong to the certificate {certificate}") from None
        raise OptionError(
            f"the certificate {certificate} and the private key {key} cannot be read: {_text(error)}; both must be PEM"
        ) from None
    except OSError as error:
        raise OptionError(f"cannot read the certificate {certificate} or the private key {key}: {error}") from None


def raise_plainly(error: ssl.SSLError, *, server: bool) -> NoReturn:
    """Raise an error that explains a TLS error. ``server``: it happened on the listening side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        raise AuthenticationError(f"the peer's certificate is refused: {_judgement(error)}") from error
    reason = error.reason or ""
    for words, refusals in _REFUSALS:
        if any(each in reason for each in refusals):
            raise AuthenticationError(words) from None
    who = "the peer" if server else "the listener there"
    raise ProtocolError(f"{who} does not speak TLS as Backhaul does: {_text(error)}") from None


_SAME_KEY = (
    "it comes from another cluster: give all workers the same secret or key file (`--key-file`), or start them from "
    "one launcher; with certificates of your own, the same CA"
)
_CLOCKS = "check the clocks of both hosts"

# OpenSSL's codes for a certificate that is not signed, or not by a known authority.
_FOREIGN = (2, 7, 18, 19, 20, 21)
_JUDGEMENTS = {
    9: f"it is not valid yet; {_CLOCKS}",
    10: f"it has expired; renew it, or {_CLOCKS}",
    26: "it is not for this use: a worker's certificate must be for client and server (extended key usage)",
    **dict.fromkeys(_FOREIGN, _SAME_KEY),
}

# Messages, and OpenSSL's names of the reasons. Those with ALERT come from the peer, about this worker.
_REFUSALS: list[tuple[str, tuple[str, ...]]] = [
    (
        f"the peer does not accept this worker's certificate: {_SAME_KEY}",
        ("ALERT_UNKNOWN_CA", "ALERT_DECRYPT_ERROR"),
    ),
    (f"the peer says that this worker's certificate has expired: {_CLOCKS}", ("ALERT_CERTIFICATE_EXPIRED",)),
    (
        f"the peer does not accept this worker's certificate, or not yet: {_CLOCKS}",
        ("ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN", "ALERT_CERTIFICATE_REVOKED"),
    ),
    (
        "the peer says that this worker's certificate is not for this use: it must be for client and server",
        ("ALERT_UNSUPPORTED_CERTIFICATE",),
    ),
    ("the peer shows no certificate, so it cannot be identified", ("PEER_DID_NOT_RETURN_A_CERTIFICATE",)),
    ("the peer wants a certificate, and this worker showed none", ("ALERT_CERTIFICATE_REQUIRED",)),
    (
        "the two sides have no version of TLS in common: Backhaul speaks TLS 1.3 only",
        ("UNSUPPORTED_PROTOCOL", "ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE", "WRONG_SSL_VERSION"),
    ),
]


def _judgement(error: ssl.SSLCertVerificationError) -> str:
    return _JUDGEMENTS.get(error.verify_code, error.verify_message)


def _text(error: OSError) -> str:
    """The message of OpenSSL, or of the system."""
    return str(getattr(error, "reason", None) or error.strerror or error)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nobody"
