"""Checks which user's process is at the other end of a unix socket, as the kernel reports it."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from backhaul.errors import AuthenticationError

_UCRED = struct.Struct("iII")


class PeerCredentials(NamedTuple):
    pid: int
    uid: int
    gid: int


def can_tell() -> bool:
    """Whether the kernel says whose process is at the other end of a unix socket."""
    return hasattr(socket, "SO_PEERCRED")


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """The ids of the process that connected, or listens, at the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(raw))


def require_same_user(sock: socket.socket) -> None:
    """Raise `AuthenticationError` unless the peer's process belongs to the user of this process."""
    peer = peer_credentials(sock)
    mine = os.geteuid()
    if peer.uid != mine:
        raise AuthenticationError(f"the peer's process (pid {peer.pid}) is of user {peer.uid}, not {mine}")
