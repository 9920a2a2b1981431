"""Ports: what a workload can ask of a system, in the words of each system.

A port is one end of a pair. Entering it joins the two processes, leaving it parts them; the
client's end then answers `noop`, `echo`, `burst` and `nest`. The two RPC systems share an API and
so a port, which shows their modules to the workloads that differentiate (`gradients`). The socket is the
limit: no calls, just bytes there and back, in memory that is already warm; it cannot nest.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol

import torch

CLIENT, SERVER = "client", "server"


class Port(Protocol):
    def noop(self) -> None:
        """One call without arguments, there and back."""

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, after it has been there and back."""

    def burst(self, count: int) -> None:
        """So many no-op calls, all sent before the first is waited for."""

    def nest(self, depth: int) -> int:
        """A call that calls back, and so on: ``depth`` calls, one inside the other. Returns ``depth``."""


# -- called remotely: module-level, so that both systems find them by name ----------------------


def nothing() -> None:
    pass


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def descend(module: str, there: str, here: str, depth: int) -> int:
    """Runs on ``here``; the rest of the depth runs on ``there``."""
    if depth == 1:
        return 1
    below: int = sys.modules[module].rpc_sync(there, descend, args=(module, here, there, depth - 1))
    return below + 1


# -- the ports ----------------------------------------------------------------------------------


class RpcPort:
    """A worker of Backhaul or of torch.distributed.rpc: ``rpc`` and ``autograd`` are the modules of either."""

    def __init__(self, rpc: Any, autograd: Any, role: str, init: Callable[[str, int], None]) -> None:
        self.rpc = rpc
        self.autograd = autograd
        self._role = role
        self._init = init

    def __enter__(self) -> RpcPort:
        self._init(self._role, (CLIENT, SERVER).index(self._role))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.rpc.shutdown(graceful=kind is None)

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


def backhaul_port(role: str, directory: str) -> RpcPort:
    from backhaul import autograd, rpc

    def init(name: str, rank: int) -> None:
        options = rpc.RpcOptions(init_method=f"file://{directory}/meeting-point")
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

    return RpcPort(rpc, autograd, role, init)


def torch_port(role: str, directory: str) -> RpcPort:
    from torch.distributed import autograd, rpc

    def init(name: str, rank: int) -> None:
        # Torch's own code warns about itself when it starts.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/meeting-point")
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]

    return RpcPort(rpc, autograd, role, init)


class SocketPort:
    """A unix stream socket; a message is its length, 8 bytes, and then that many bytes."""

    _LENGTH = struct.Struct("<Q")
    _BUFFER_BYTES = 4 << 20  # what Backhaul asks for too

    def __init__(self, role: str, directory: str) -> None:
        self._role = role
        self._path = os.path.join(directory, "socket")
        self._memory = bytearray(1 << 10)

    def __enter__(self) -> SocketPort:
        if self._role == SERVER:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self._path)
            listener.listen(1)
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._role == CLIENT:
            self._connection.close()

    def noop(self) -> None:
        self._connection.sendall(self._LENGTH.pack(0))
        self._receive(self._connection)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        data = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]  # arrays are buffers
        self._send(self._connection, data)
        return torch.frombuffer(self._receive(self._connection), dtype=tensor.dtype)

    def burst(self, count: int) -> None:
        message = self._LENGTH.pack(0)
        replies = count * self._LENGTH.size
        for _ in range(count):
            while True:
                try:
                    self._connection.send(message, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:  # the server waits for room too: make some
                    replies -= len(self._connection.recv(1 << 16))
        while replies:
            replies -= len(self._connection.recv(1 << 16))

    @cached_property
    def _connection(self) -> socket.socket:
        # At first use: the server listens by then.
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        self._widen(connection)
        return connection

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            connection, _ = listener.accept()
        self._widen(connection)
        with connection:
            try:
                while True:
                    self._send(connection, self._receive(connection))
            except EOFError:
                return

    def _widen(self, connection: socket.socket) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, self._BUFFER_BYTES)

    def _send(self, connection: socket.socket, data: memoryview) -> None:
        header = self._LENGTH.pack(len(data))
        if not data:
            connection.sendall(header)
            return
        sent = connection.sendmsg((header, data)) - len(header)
        if sent < len(data):
            connection.sendall(data[sent:])

    def _receive(self, connection: socket.socket) -> memoryview:
        """The next message, in memory that the one after it reuses."""
        header = connection.recv(self._LENGTH.size, socket.MSG_WAITALL)
        if not header:
            raise EOFError
        (size,) = self._LENGTH.unpack(header)
        if size > len(self._memory):
            self._memory = bytearray(size)
        place = memoryview(self._memory)[:size]
        while place:
            place = place[connection.recv_into(place) :]
        return memoryview(self._memory)[:size]


PORTS: dict[str, Callable[[str, str], AbstractContextManager[Any]]] = {
    "backhaul": backhaul_port,
    "torch": torch_port,
    "ping-pong": SocketPort,
}
"""System -> makes the port of a role; the two roles share a directory."""
