"""Whether other machines can reach the place at which a launcher lets a group meet. Asks the name service; not pure."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from backhaul.environments.table import Table


def unreachable(said: Table) -> str:
    """Why rank 0 must not host the store at the launcher's address; empty if it may.

    Many systems resolve their own name to 127.0.1.1, where no other node can reach the store.
    """
    host, nodes = said.address.value, said.nodes.value
    if host is None or nodes is None or nodes < 2 or said.address.source == "MASTER_ADDR":
        return ""
    with contextlib.suppress(OSError, UnicodeError):
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return (
                f"rank 0 hosts the store at {host} ({said.address.source}), but on this machine that name means "
                f"{found}, which the other nodes cannot reach: set MASTER_ADDR to an address of this machine for all "
                "workers, or correct /etc/hosts"
            )
    return ""
