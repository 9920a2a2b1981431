"""The first bytes of a connection, without I/O.

Both sides prove that they know the group's key, and neither sends it. Numbers are
little-endian::

    server -> client   "BHL1"  nonce (32)
    client -> server   "BHL1"  nonce (32)  proof (32)  length (2)  Hello, msgpack
    server -> client           proof (32)  length (2)  Welcome, msgpack

A proof is HMAC-SHA256 under the key over the side's name, both nonces and the message
that follows it. It is compared in constant time, and the message is decoded only after it
was found right.

On a unix socket the kernel vouches for the peer (see `credentials`), and over TCP its certificate does (see `tls`):
the transports give an empty key, and a proof shows no more than that both speak of the same connection.

A server that refuses says why in a `Welcome`, with a proof of zeros if it could not trust
the client. The client takes that text as a hint for a person, nothing more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

import msgspec

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.ids import Addresses
from backhaul.wire.messages import VERSION

MAGIC = b"BHL1"
NONCE = 32
PROOF = 32
MAX_MESSAGE = 4096
_LENGTH = struct.Struct("<H")
_NO_PROOF = bytes(PROOF)

CHALLENGE_SIZE = len(MAGIC) + NONCE
HELLO_HEAD_SIZE = len(MAGIC) + NONCE + PROOF + _LENGTH.size
WELCOME_HEAD_SIZE = PROOF + _LENGTH.size


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who connects, and to whom it believes to connect."""

    group: str
    id: int
    name: str
    to_id: int
    addresses: Addresses = Addresses()
    """Where it can be called back: this is how others learn of a newcomer, or of a process that has taken its place."""
    incarnation: str = ""
    """Tells this process from others that have had its name and rank: see `agent.fate`."""
    frames: int = VERSION
    """The version of the frames that it speaks."""
    fabric: str = "tls"
    """What its TCP connections are after the greeting: ``tls``, or ``plain``, without encryption."""
    checks: bool = False
    """It wants checksums on this connection: see `wire.records`."""
    connections: int = 1
    """As many may there be for one large tensor: see `transport.strands`."""
    token: str = ""
    """If this is one of several connections: what the peer has said in its welcome on the first."""
    strand: int = 0
    """If so: its number, from 1."""


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Who answers; ``refused`` says why if the connection is not wanted."""

    id: int
    name: str
    refused: str = ""
    incarnation: str = ""
    fabric: str = "tls"
    """As in `Hello`. Both say it inside of TLS, so nobody between them can change it."""
    checks: bool = False
    """There are checksums on this connection from now on."""
    connections: int = 1
    """As many may there be for one large tensor, this one included."""
    token: str = ""
    """What the others are known by."""


LEAVING = "it is shutting down"
"""The ``refused`` of a worker that lets nobody in any more."""


class LeavingError(AuthenticationError):
    """The worker that was greeted is about to leave the group."""


def require_welcome(welcome: Welcome) -> None:
    """Raise if a worker that has proved who it is refuses the connection."""
    if welcome.refused:
        kind = LeavingError if welcome.refused == LEAVING else AuthenticationError
        raise kind(f"the worker there refused the connection: {welcome.refused}")


def disagreement(name: str, fabric: str, other_name: str, other_fabric: str) -> str:
    """Why two workers do not talk to each other."""
    return (
        f"worker {name!r} has fabric={fabric!r}, and worker {other_name!r} has fabric={other_fabric!r}: give all "
        "workers of the group the same RpcOptions(fabric=...)"
    )


# What decoding raises: text that is not UTF-8 and nesting without end have errors of their own.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_hello_decoder = msgspec.msgpack.Decoder(Hello)
_welcome_decoder = msgspec.msgpack.Decoder(Welcome)


def _proof(key: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes, message: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((b"backhaul", side, server_nonce + client_nonce + message)), hashlib.sha256)


class ServerHandshake:
    """The listening side: send `challenge`, read a hello, send `answer`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE)
        self._client_nonce = b""
        self._proof = b""
        self.challenge = MAGIC + self._nonce

    def receive_head(self, head: bytes) -> int:
        """Take `HELLO_HEAD_SIZE` bytes; return how many more there are to read."""
        if head[:4] != MAGIC:
            raise ProtocolError(f"a connection that does not speak Backhaul: it starts with {head[:4]!r}")
        self._client_nonce = head[4 : 4 + NONCE]
        self._proof = head[4 + NONCE : 4 + NONCE + PROOF]
        (length,) = _LENGTH.unpack(head[-_LENGTH.size :])
        if length > MAX_MESSAGE:
            raise ProtocolError(f"a greeting of {length} bytes; {MAX_MESSAGE} is the limit")
        return int(length)

    def receive_hello(self, message: bytes) -> Hello:
        """Take the rest; raise `AuthenticationError` unless the peer knows the key."""
        expected = _proof(self._key, b"client", self._nonce, self._client_nonce, message)
        if not hmac.compare_digest(expected, self._proof):
            raise AuthenticationError("the peer does not know this group's secret")
        try:
            return _hello_decoder.decode(message)
        except _UNREADABLE as error:
            raise ProtocolError(f"a greeting that cannot be read: {error}") from None

    def answer(self, welcome: Welcome, *, trusted: bool = True) -> bytes:
        """The bytes of the answer. Without trust it carries no proof."""
        message = msgspec.msgpack.encode(welcome)
        proof = _proof(self._key, b"server", self._nonce, self._client_nonce, message) if trusted else _NO_PROOF
        return proof + _LENGTH.pack(len(message)) + message


class ClientHandshake:
    """The connecting side: read a challenge, send the hello, read the answer."""

    def __init__(self, key: bytes, hello: Hello) -> None:
        self._key = key
        self._hello = msgspec.msgpack.encode(hello)
        self._nonce = secrets.token_bytes(NONCE)
        self._server_nonce = b""
        self._proof = b""

    def receive_challenge(self, challenge: bytes) -> bytes:
        """Take `CHALLENGE_SIZE` bytes; return the bytes to send."""
        if challenge[:4] != MAGIC:
            raise ProtocolError(f"what listens there is no Backhaul worker: it says {challenge[:4]!r}")
        self._server_nonce = challenge[4:]
        proof = _proof(self._key, b"client", self._server_nonce, self._nonce, self._hello)
        return MAGIC + self._nonce + proof + _LENGTH.pack(len(self._hello)) + self._hello

    def receive_head(self, head: bytes) -> int:
        """Take `WELCOME_HEAD_SIZE` bytes; return how many more there are to read."""
        self._proof = head[:PROOF]
        (length,) = _LENGTH.unpack(head[PROOF:])
        if length > MAX_MESSAGE:
            raise ProtocolError(f"an answer of {length} bytes; {MAX_MESSAGE} is the limit")
        return int(length)

    def receive_welcome(self, message: bytes) -> Welcome:
        """Take the rest; raise `AuthenticationError` if refused or if the server proves nothing."""
        expected = _proof(self._key, b"server", self._server_nonce, self._nonce, message)
        trusted = hmac.compare_digest(expected, self._proof)
        if not trusted and self._proof != _NO_PROOF:
            raise AuthenticationError("what listens there does not know this group's secret")
        try:
            welcome = _welcome_decoder.decode(message)
        except _UNREADABLE as error:
            raise ProtocolError(f"an answer that cannot be read: {error}") from None
        if welcome.refused and not trusted:
            raise AuthenticationError(f"the worker there refused the connection: {welcome.refused}")
        if not trusted:
            raise AuthenticationError("what listens there does not know this group's secret")
        require_welcome(welcome)
        return welcome
