"""Where a worker listens for TCP, and which address it announces to the others. Sends nothing."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from backhaul.environments import table as environments
from backhaul.errors import OptionError
from backhaul.options import HOST_VARIABLE, RpcOptions

LOOPBACK = "127.0.0.1"

# Addresses for documentation, which no machine has (RFC 5737, RFC 3849): the route to them is the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_UNUSED_PORT = 9


class Site(NamedTuple):
    """Where to listen: a socket address of ``family``. ``announced`` is the address that peers get."""

    family: int
    address: Any
    announced: str
    why: str
    """Why that address is announced, for display."""

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on this machine can connect."""
        return is_loopback(str(self.address[0]))


def choose_site(options: RpcOptions) -> Site:
    """Where a worker with these options listens, and which address it announces. Raises `OptionError`."""
    host = options.host_or_inherited()
    if host is None:
        return Site(
            socket.AF_INET, (LOOPBACK, options.port), LOOPBACK, "no host is given, so only this machine can call"
        )
    given = "the option host" if options.host else HOST_VARIABLE
    try:
        found = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"host {host!r} ({given}) is not a name or address of this machine: {error}") from None
    family, _, _, _, address = found[0]
    if not _parsed(str(address[0])).is_unspecified:
        why = f"{given} says {host!r}"
        return Site(family, address, str(address[0]), why if host == address[0] else f"{why}, which is {address[0]}")
    store = meeting_host(options)
    for there, what in ((store, f"to the store at {store}"), *((each, "to anywhere else") for each in _ANYWHERE)):
        announced = None if there is None else address_towards(there, family)
        if announced is not None:
            return Site(
                family, address, announced, f"{given} says {host!r}, all addresses; this one is on the way {what}"
            )
    raise OptionError(
        f"host {host!r} ({given}) means all addresses of this machine, and no route tells which of them others can "
        "reach: give that address instead"
    )


def meeting_host(options: RpcOptions) -> str | None:
    """The host of the store in which the group meets, if it has one."""
    method = options.init_method
    if method.startswith("env://"):
        method = os.environ.get("BACKHAUL_INIT_METHOD") or method
    if method.startswith("tcp://"):
        return urlsplit(method).hostname
    return environments.read().address.value if method.startswith("env://") else None


def address_towards(host: str, family: int = socket.AF_UNSPEC) -> str | None:
    """This machine's address on the route to ``host``; None if there is no route. An IPv6 socket accepts IPv4 too."""
    try:
        found = socket.getaddrinfo(
            host, _UNUSED_PORT, family if family == socket.AF_INET else socket.AF_UNSPEC, socket.SOCK_DGRAM
        )
    except (OSError, UnicodeError):
        return None
    for kind, _, _, _, address in found:
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # for a datagram socket, this only looks up the route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Whether only processes on the same machine reach this address. A name counts as one that others reach."""
    try:
        return _parsed(address).is_loopback
    except ValueError:
        return False


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
