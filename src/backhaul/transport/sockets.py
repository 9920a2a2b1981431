"""Connected sockets: how they are made and set up. They stay in blocking mode; what must not wait says so."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from backhaul.transport.base import ChannelClosed

# Plain integers: combining the enumeration's members costs a microsecond each time.
NO_WAIT = int(socket.MSG_DONTWAIT)
SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

UNIX: Any = getattr(socket, "AF_UNIX", None)
"""The family of unix sockets, or None where there are none."""

_SOCKET_BUFFER = 4 << 20
_QUEUE_PAUSE = 0.005

# A silent loss of the network is noticed after about IDLE + COUNT * INTERVAL seconds of
# silence, or when written data is not acknowledged for USER_TIMEOUT.
_KEEPALIVE_IDLE = 2
_KEEPALIVE_INTERVAL = 1
_KEEPALIVE_COUNT = 4
_USER_TIMEOUT_MS = 6000


def tune(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    if sock.family == UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def connect_unix(path: str, deadline: float) -> socket.socket:
    return _connect(UNIX, path, deadline)


def connect_tcp(host: str, port: int, deadline: float) -> socket.socket:
    """To a numeric address: what peers say where they are is not worth a question to a name server."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, _, _, _, address = found[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ChannelClosed(f"{host!r}, port {port}, is no address: {error}") from None
    return _connect(family, address, deadline)


def await_ready(sock: socket.socket, *, read: bool, write: bool, timeout: float | None) -> bool:
    """Wait until the socket is ready for one of those, or has ended; False after ``timeout`` seconds."""
    poll = select.poll()
    try:
        poll.register(sock, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
    except (OSError, ValueError) as error:
        raise ChannelClosed("closed here") from error
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def remaining(deadline: float) -> float:
    """The seconds until the deadline of a greeting. Raises `TimeoutError` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the greeting took too long")
    return left


def closed(error: OSError) -> ChannelClosed:
    return ChannelClosed(str(error))


def _connect(family: int, address: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        while True:
            try:
                sock.settimeout(remaining(deadline))
                sock.connect(address)
                sock.settimeout(None)
                return sock
            except BlockingIOError:
                # A unix socket whose queue of connections is full; a TCP one would make us wait.
                time.sleep(_QUEUE_PAUSE)
    except TimeoutError:
        sock.close()
        raise
    except (OSError, ValueError, OverflowError) as error:  # a path or a port that cannot be one, too
        sock.close()
        raise ChannelClosed(f"nobody answers at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise
