"""Ports: what a workload can ask of a system, implemented for each system.

A port is one end of a system. Entering it joins the processes, leaving it parts them; a
client's end then answers `noop`, `echo`, `burst` and so on. The two RPC systems share an API and
so a port, which exposes their modules to the workloads that differentiate (`gradients`). The others are
limits: `SocketPort` makes no calls, but moves bytes there and back, in memory that is already warm, over a unix socket;
`TcpPort` does so over TCP, and `SslPort` over TCP with TLS; `CopyPort` has no other process at all, and copies as often
as an echo must.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Protocol

import torch

from backhaul.security.certificates import Authority
from backhaul.security.keys import read_key_file
from backhaul.security.tls import contexts_of
from backhaul.transport.sockets import begin_untimed, choose_control, connect_tcp

CLIENT, SERVER, SECOND = "client", "server", "second-client"
SERVERS = (SERVER, "server-2", "server-3", "server-4")
"""The servers for work on several servers."""

BACKHAUL, TORCH, PING_PONG, MEMCPY = "backhaul", "torch", "ping-pong", "memcpy"
BACKHAUL_TLS, SSL, TCP = "backhaul-tls", "ssl", "tcp"

_PATIENCE = 60.0

KEY_FILE = "cluster.key"
"""The name of a key in the directory that a system's processes share."""


class Port(Protocol):
    def noop(self) -> None:
        """One call without arguments, there and back."""

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, sent there and back."""

    def burst(self, count: int) -> None:
        """``count`` no-op calls, all sent before waiting for the first."""

    def nest(self, depth: int) -> int:
        """A call that calls back, and so on: ``depth`` nested calls. Returns ``depth``."""

    def refer(self) -> None:
        """Make a value on the server that stays there, and fetch it through its reference."""

    def circle(self, ring: Sequence[str], depth: int) -> list[str]:
        """``depth`` nested calls around a ``ring`` of workers. Returns the worker that served each call."""


# -- called remotely: module-level, so that both systems find them by name ----------------------


def nothing() -> None:
    pass


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def descend(module: str, there: str, here: str, depth: int) -> int:
    """Runs on ``here``; the remaining calls start on ``there``."""
    if depth == 1:
        return 1
    below: int = sys.modules[module].rpc_sync(there, descend, args=(module, here, there, depth - 1))
    return below + 1


def pass_on(module: str, ring: Sequence[str], depth: int) -> list[str]:
    """Runs on the first worker of the ring; the remaining calls start on the next, and so on."""
    rpc = sys.modules[module]
    here = rpc.get_worker_info().name
    if depth == 1:
        return [here]
    after = (*ring[1:], ring[0])
    return [here, *rpc.rpc_sync(after[0], pass_on, args=(module, after, depth - 1))]


# -- the ports ----------------------------------------------------------------------------------


class RpcPort:
    """A worker of Backhaul or of torch.distributed.rpc: ``rpc`` and ``autograd`` are the modules of that system.

    ``kept`` holds what a workload needs again in the next round; it is cleared before the workers part.
    """

    def __init__(
        self,
        rpc: Any,
        autograd: Any,
        optimizer: Callable[[], Any],
        role: str,
        roles: Sequence[str],
        init: Callable[[], None],
    ) -> None:
        self.rpc = rpc
        self.autograd = autograd
        self.optimizer = optimizer  # returns the class, so that only training imports it
        self.kept: dict[str, Any] = {}
        self.role = role
        self._roles = roles
        self._init = init

    def join(self) -> None:
        """Become a worker of the group."""
        self._init()

    def __enter__(self) -> RpcPort:
        self.join()
        if self.role != SERVER:
            self.noop()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.kept.clear()
        self.rpc.shutdown(graceful=kind is None)

    def meet(self) -> None:
        """Call every other worker, so that everything that calls ever start is started."""
        for role in self._roles:
            if role != self.role:
                self.rpc.rpc_sync(role, nothing)
                self.rpc.rpc_async(role, same, args=(torch.ones(4),)).wait()

    def noop(self) -> None:
        self.rpc.rpc_sync(SERVER, nothing)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        back: torch.Tensor = self.rpc.rpc_sync(SERVER, same, args=(tensor,))
        return back

    def burst(self, count: int) -> None:
        futures = [self.rpc.rpc_async(SERVER, nothing) for _ in range(count)]
        for future in futures:
            future.wait()

    def nest(self, depth: int) -> int:
        depth_reached: int = self.rpc.rpc_sync(SERVER, descend, args=(self.rpc.__name__, CLIENT, SERVER, depth))
        return depth_reached

    def refer(self) -> None:
        self.rpc.remote(SERVER, nothing).to_here()

    def circle(self, ring: Sequence[str], depth: int) -> list[str]:
        names: list[str] = self.rpc.rpc_sync(ring[0], pass_on, args=(self.rpc.__name__, tuple(ring), depth))
        return names


def backhaul_port(role: str, roles: Sequence[str], directory: str, **more: Any) -> RpcPort:
    """A port of Backhaul. ``more`` are options."""
    from backhaul import autograd, rpc

    def init() -> None:
        options = rpc.RpcOptions(init_method=f"file://{directory}/meeting-point", **more)
        rpc.init_rpc(role, rank=roles.index(role), world_size=len(roles), rpc_backend_options=options)

    def optimizer() -> Any:
        from backhaul.optim import DistributedOptimizer

        return DistributedOptimizer

    return RpcPort(rpc, autograd, optimizer, role, roles, init)


def backhaul_tls_port(role: str, roles: Sequence[str], directory: str) -> RpcPort:
    return backhaul_port(role, roles, directory, transport="tcp", key_file=os.path.join(directory, KEY_FILE))


def torch_port(role: str, roles: Sequence[str], directory: str, **more: Any) -> RpcPort:
    """A port of torch RPC. ``more`` are options."""
    from torch.distributed import autograd, rpc

    def init() -> None:
        # Torch's code warns about itself when it starts; and when an optimizer is made, regardless of the filters.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        warnings.showwarning = partial(_show_unless_of_scripts, warnings.showwarning)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/meeting-point", **more)
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            role, rank=roles.index(role), world_size=len(roles), rpc_backend_options=options
        )

    def optimizer() -> Any:
        from torch.distributed.optim import DistributedOptimizer

        return DistributedOptimizer

    return RpcPort(rpc, autograd, optimizer, role, roles, init)


def _show_unless_of_scripts(show: Callable[..., None], message: Warning | str, *rest: Any, **more: Any) -> None:
    if "`TorchScript` support" not in str(message):
        show(message, *rest, **more)


def torch_has_rpc() -> bool:
    """Whether this build of torch has RPC to compare with; some do not."""
    if not torch.distributed.is_available():
        return False
    try:
        from torch.distributed import rpc
    except ImportError:
        return False
    return bool(rpc.is_available())


class _Stream:
    """A connected socket. A message is its length, 8 bytes, and then that many bytes."""

    LENGTH = struct.Struct("<Q")
    _BUFFER_BYTES = 4 << 20  # the same as Backhaul's

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._memory = bytearray(1 << 10)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, self._BUFFER_BYTES)

    def send(self, data: memoryview) -> None:
        header = self.LENGTH.pack(len(data))
        if not data:
            self.connection.sendall(header)
            return
        sent = self.connection.sendmsg((header, data)) - len(header)
        if sent < len(data):
            self.connection.sendall(data[sent:])

    def receive(self) -> memoryview:
        """The next message, in memory that the following one reuses."""
        header = self.connection.recv(self.LENGTH.size, socket.MSG_WAITALL)
        if not header:
            raise EOFError
        (size,) = self.LENGTH.unpack(header)
        if size > len(self._memory):
            self._memory = bytearray(size)
        place = memoryview(self._memory)[:size]
        while place:
            place = place[self.connection.recv_into(place) :]
        return memoryview(self._memory)[:size]


class _SslStream(_Stream):
    """The same over TLS, where there is neither ``sendmsg`` nor ``MSG_WAITALL``."""

    def send(self, data: memoryview) -> None:
        self.connection.sendall(self.LENGTH.pack(len(data)))
        if data:
            self.connection.sendall(data)

    def receive(self) -> memoryview:
        header = bytearray(self.LENGTH.size)
        self._fill(memoryview(header))
        (size,) = self.LENGTH.unpack(header)
        if size > len(self._memory):
            self._memory = bytearray(size)
        self._fill(memoryview(self._memory)[:size])
        return memoryview(self._memory)[:size]

    def _fill(self, place: memoryview) -> None:
        while place:
            count = self.connection.recv_into(place)
            if not count:
                raise EOFError
            place = place[count:]


class SocketPort:
    """A unix stream socket to the server, which sends back what it receives, with a thread for each client."""

    def __init__(self, role: str, roles: Sequence[str], directory: str) -> None:
        self._role = role
        self._path = os.path.join(directory, "socket")

    def __enter__(self) -> SocketPort:
        if self._role == SERVER:
            listener = self._open()
            listener.listen()
            threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if "_stream" in self.__dict__:
            self._stream.connection.close()

    def noop(self) -> None:
        self._stream.connection.sendall(_Stream.LENGTH.pack(0))
        self._stream.receive()

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        self._stream.send(memoryview(tensor.numpy()).cast("B"))  # type: ignore[arg-type]  # arrays are buffers
        return torch.frombuffer(self._stream.receive(), dtype=tensor.dtype)

    def burst(self, count: int) -> None:
        connection = self._stream.connection
        message = _Stream.LENGTH.pack(0)
        replies = count * len(message)
        for _ in range(count):
            while True:
                try:
                    connection.send(message, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:  # the server waits for room too, so read some
                    replies -= len(connection.recv(1 << 16))
        while replies:
            replies -= len(connection.recv(1 << 16))

    @cached_property
    def _stream(self) -> _Stream:
        # At first use, when the server listens.
        return self._stream_over(self._connect(), server=False)

    def _open(self) -> socket.socket:
        """The socket that the server listens on."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._path)
        return listener

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        return connection

    def _stream_over(self, connection: socket.socket, *, server: bool) -> _Stream:
        return _Stream(connection)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream = self._stream_over(connection, server=True)
        with stream.connection:
            try:
                while True:
                    stream.send(stream.receive())
            except EOFError:
                return


class TcpPort(SocketPort):
    """The same over TCP, on loopback. A file at the path contains the address."""

    host = "127.0.0.1"

    def _open(self) -> socket.socket:
        listener = socket.create_server((self.host, 0))
        begin_untimed(listener)
        with open(self._path, "w") as file:
            file.write("{} {}".format(*listener.getsockname()))
        return listener

    def _connect(self) -> socket.socket:
        with open(self._path) as file:
            host, port = file.read().split()
        return connect_tcp(host, int(port), time.monotonic() + _PATIENCE)

    def _stream_over(self, connection: socket.socket, *, server: bool) -> _Stream:
        self._tune(connection)
        return _Stream(connection)

    def _tune(self, connection: socket.socket) -> None:
        """Set up a connection as Backhaul does, so that the limit is one that Backhaul could reach."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        choose_control(connection)


class SslPort(TcpPort):
    """The same with TLS, by Python's own `ssl`, configured as in Backhaul."""

    def __init__(self, role: str, roles: Sequence[str], directory: str) -> None:
        super().__init__(role, roles, directory)
        authority = Authority(read_key_file(os.path.join(directory, KEY_FILE)))
        self._contexts = contexts_of(authority.issue(role), authority.certificate)

    def _stream_over(self, connection: socket.socket, *, server: bool) -> _Stream:
        self._tune(connection)
        context: ssl.SSLContext = self._contexts[0 if server else 1]
        return _SslStream(context.wrap_socket(connection, server_side=server))


class CopyPort:
    """No other process: an echo is a copy there and a copy back, both into warm memory."""

    def __init__(self, role: str, roles: Sequence[str], directory: str) -> None:
        self._there = self._back = torch.empty(0)

    def __enter__(self) -> CopyPort:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        pass

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._there.shape != tensor.shape:
            self._there, self._back = torch.zeros_like(tensor), torch.zeros_like(tensor)
        self._there.copy_(tensor)
        return self._back.copy_(self._there)


def no_port(role: str, roles: Sequence[str], directory: str) -> AbstractContextManager[None]:
    """For a process that has imported torch and joins no group: the baseline for memory."""
    return nullcontext()


NO_SYSTEM = "torch, imported"

PORTS: dict[str, Callable[[str, Sequence[str], str], AbstractContextManager[Any]]] = {
    BACKHAUL: backhaul_port,
    TORCH: torch_port,
    PING_PONG: SocketPort,
    MEMCPY: CopyPort,
    BACKHAUL_TLS: backhaul_tls_port,
    SSL: SslPort,
    TCP: TcpPort,
    NO_SYSTEM: no_port,
}
"""System -> a function that makes the port of one role; all roles share a directory."""
