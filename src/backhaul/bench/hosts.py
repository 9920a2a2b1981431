"""Two hosts on one machine: network namespaces with a cable between them, and ports for systems that use it.

A user who may not make namespaces gets loopback TCP instead, which has a larger packet size and no cable.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

from backhaul.bench import ports
from backhaul.bench.ports import KEY_FILE, SERVER, RpcPort, SslPort, TcpPort, backhaul_port, torch_port

TLS, PLAIN, TORCH, SSL, TCP = "backhaul, TLS", "backhaul, plain", "torch, TCP", "bare ssl", "bare TCP"
SYSTEMS = (TLS, PLAIN, TORCH, SSL, TCP)

VARIABLE = "BACKHAUL_BENCH_HOSTS"
"""Tells the systems' processes their hosts."""
CONNECTIONS_VARIABLE = "BACKHAUL_BENCH_CONNECTIONS"
"""Tells Backhaul's processes the option ``connections``; if not set, they use the default."""

_CLONE_NEWNET = 0x40000000
_NAMESPACES = "/var/run/netns"


class Host(NamedTuple):
    """Where processes run: a network namespace, or none; their address; the name of their network interface."""

    namespace: str
    address: str
    interface: str


LOOPBACK = Host("", "127.0.0.1", "lo")


class Hosts:
    """A context manager: systems started inside run on two hosts, the server on one of them."""

    def __init__(self) -> None:
        self._made: list[str] = []
        self.why_loopback = ""
        """Why there are no namespaces, if so."""

    def __enter__(self) -> Hosts:
        name = f"between-{os.getpid()}"
        pair = [Host(f"{name}-{end}", f"10.211.55.{number}", f"bh{end}") for end, number in (("a", 1), ("b", 2))]
        try:
            self._make(pair)
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            said = getattr(error, "stderr", None) or str(error)
            self.why_loopback = f"no network namespaces ({said.strip()})"
            pair = [LOOPBACK, LOOPBACK]
        os.environ[VARIABLE] = json.dumps(pair)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        os.environ.pop(VARIABLE, None)
        self._remove()

    def _make(self, pair: Sequence[Host]) -> None:
        for host in pair:
            _ip("netns", "add", host.namespace)
            self._made.append(host.namespace)
        one, other = pair
        # Created inside the namespace, so that an interface of that name outside is not in the way.
        peer = ("peer", "name", other.interface, "netns", other.namespace)
        _ip("-n", one.namespace, "link", "add", one.interface, "type", "veth", *peer)
        for host in pair:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in (host.interface, "lo"):
                _ip("-n", host.namespace, "link", "set", interface, "up")

    def _remove(self) -> None:
        for namespace in self._made:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
        self._made = []


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def enter(role: str) -> Host:
    """Move the calling thread, and threads that it starts, to the host of that role."""
    pair = [Host(*each) for each in json.loads(os.environ[VARIABLE])]
    host = pair[0 if role == SERVER else 1]
    if host.namespace:
        descriptor = os.open(os.path.join(_NAMESPACES, host.namespace), os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host.namespace}")
        finally:
            os.close(descriptor)
    return host


def _backhaul(fabric: str) -> Callable[[str, Sequence[str], str], RpcPort]:
    def make(role: str, roles: Sequence[str], directory: str) -> RpcPort:
        key = os.path.join(directory, KEY_FILE)
        host = enter(role)
        wanted = os.environ.get(CONNECTIONS_VARIABLE)
        return backhaul_port(
            role,
            roles,
            directory,
            transport="tcp",
            key_file=key,
            host=host.address,
            fabric=fabric,
            connections=int(wanted) if wanted else None,
        )

    return make


def _torch(role: str, roles: Sequence[str], directory: str) -> RpcPort:
    """Over TCP only: its processes are on one machine, and would use shared memory."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = enter(role).interface
    return torch_port(role, roles, directory, _transports=["uv"], _channels=["mpt_uv", "basic"])


def _bare(kind: type[TcpPort]) -> Callable[[str, Sequence[str], str], TcpPort]:
    def make(role: str, roles: Sequence[str], directory: str) -> TcpPort:
        host = enter(role)
        port = kind(role, roles, directory)
        port.host = host.address
        return port

    return make


PORTS: dict[str, Callable[[str, Sequence[str], str], AbstractContextManager[Any]]] = {
    **ports.PORTS,
    TLS: _backhaul("tls"),
    PLAIN: _backhaul("plain"),
    TORCH: _torch,
    SSL: _bare(SslPort),
    TCP: _bare(TcpPort),
}
"""`ports.PORTS` plus those between two hosts."""
