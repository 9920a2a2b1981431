"""The first bytes of a connection, without I/O.

After the kernel (see `credentials`) or TLS (see `tls`) has authenticated the peer, both sides send their names. Numbers
are little-endian::

    client -> server   "BHL2"  length (2)  Hello, msgpack
    server -> client   "BHL2"  length (2)  Welcome, msgpack

A server that refuses a client gives the reason in its `Welcome`.
"""

from __future__ import annotations

import struct

import msgspec

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.ids import Addresses
from backhaul.wire.messages import VERSION

MAGIC = b"BHL2"
MAX_MESSAGE = 4096
_HEAD = struct.Struct("<4sH")
HEAD_SIZE = _HEAD.size


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The worker that connects, and the rank of the worker that it expects to reach."""

    group: str
    id: int
    name: str
    to_id: int
    addresses: Addresses = Addresses()
    """Its own addresses. From these, others learn of a newcomer, or of a process that has replaced another."""
    incarnation: str = ""
    """Distinguishes this process from others that have had its name and rank: see `agent.fate`."""
    frames: int = VERSION
    """The version of its frames."""
    fabric: str = "tls"
    """The kind of its TCP connections after the greeting: ``tls``, or ``plain``, without encryption."""
    checks: bool = False
    """Whether it wants checksums on this connection: see `wire.records`."""
    connections: int = 1
    """The most connections that may carry one large tensor: see `transport.strands`."""
    token: str = ""
    """For a further connection of a channel: the token from the welcome on the first connection."""
    strand: int = 0
    """For a further connection: its number, from 1."""


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The worker that answers. ``refused`` is the reason if it refuses the connection."""

    id: int
    name: str
    refused: str = ""
    incarnation: str = ""
    fabric: str = "tls"
    """As in `Hello`. Both sides send it inside TLS, so nobody between them can change it."""
    checks: bool = False
    """Whether this connection has checksums from now on."""
    connections: int = 1
    """The most connections that may carry one large tensor, including this one."""
    token: str = ""
    """The token that further connections must send."""


LEAVING = "it is shutting down"
"""The ``refused`` of a worker that no longer accepts connections."""


class LeavingError(AuthenticationError):
    """The worker that was greeted is about to leave the group."""


def require_welcome(welcome: Welcome) -> None:
    """Raise `AuthenticationError` if a worker refuses the connection; `LeavingError` if it is shutting down."""
    if welcome.refused:
        kind = LeavingError if welcome.refused == LEAVING else AuthenticationError
        raise kind(f"the worker there refused the connection: {welcome.refused}")


def disagreement(name: str, fabric: str, other_name: str, other_fabric: str) -> str:
    """The message for two workers with different fabrics, which do not talk to each other."""
    return (
        f"worker {name!r} has fabric={fabric!r}, and worker {other_name!r} has fabric={other_fabric!r}: give all "
        "workers of the group the same RpcOptions(fabric=...)"
    )


# The exceptions of decoding. Text that is not UTF-8, and endless nesting, raise other types than msgspec's.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_hello_decoder = msgspec.msgpack.Decoder(Hello)
_welcome_decoder = msgspec.msgpack.Decoder(Welcome)


def encode(message: Hello | Welcome) -> bytes:
    """The bytes that a side sends."""
    data = msgspec.msgpack.encode(message)
    return _HEAD.pack(MAGIC, len(data)) + data


def length_of_hello(head: bytes) -> int:
    """How many bytes follow the first `HEAD_SIZE` bytes of a client. Raises `ProtocolError`."""
    return _length(head, "a connection that does not speak Backhaul: it starts with", "a greeting")


def length_of_welcome(head: bytes) -> int:
    """How many bytes follow the first `HEAD_SIZE` bytes of a server. Raises `ProtocolError`."""
    return _length(head, "the listener there is not a Backhaul worker: it says", "an answer")


def _length(head: bytes, stranger: str, what: str) -> int:
    magic, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ProtocolError(f"{stranger} {magic!r}")
    if length > MAX_MESSAGE:
        raise ProtocolError(f"{what} of {length} bytes; {MAX_MESSAGE} is the limit")
    return int(length)


def decode_hello(message: bytes) -> Hello:
    try:
        return _hello_decoder.decode(message)
    except _UNREADABLE as error:
        raise ProtocolError(f"a greeting that cannot be read: {error}") from None


def decode_welcome(message: bytes) -> Welcome:
    """Raises `ProtocolError`, or `AuthenticationError` if the server refuses the connection."""
    try:
        welcome = _welcome_decoder.decode(message)
    except _UNREADABLE as error:
        raise ProtocolError(f"an answer that cannot be read: {error}") from None
    require_welcome(welcome)
    return welcome
