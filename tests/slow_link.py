"""Slow links: a forwarder on loopback that passes bytes on at a given rate, and workers behind one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from backhaul.ids import Addresses
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Transport
from backhaul.transport.stream import StreamTransport

SECRET = bytes(range(32))
_CHUNK = 4096
_BUFFER = 16 * 1024


class Forwarder:
    """Forwards at most ``rate`` bytes a second each way; None means without a limit. `hold` stops everything."""

    def __init__(self, target: tuple[str, int], rate: float | None) -> None:
        self.rate = rate
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._flows.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._sockets += [near, far]
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        due = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._flows.wait()
                if self.rate is not None:
                    due = max(due, time.monotonic() - 0.05) + len(data) / self.rate
                    time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Behind(StreamTransport):
    """Announces the address of a forwarder instead of its own."""

    def __init__(self, options: RpcOptions, rate: float | None, forwarders: list[Forwarder]) -> None:
        super().__init__(options)
        self._rate = rate
        self._forwarders = forwarders
        self._forwarder: Forwarder | None = None

    @property
    def addresses(self) -> Addresses:
        found = super().addresses
        if found.tcp is None:
            return found
        if self._forwarder is None:
            self._forwarder = Forwarder((found.tcp[0], found.tcp[1]), self._rate)
            self._forwarders.append(self._forwarder)
        return Addresses(host=found.host, tcp=self._forwarder.address)


class SlowCluster(InProcessCluster):
    """Workers in this process with TLS between them, each behind a forwarder."""

    def __init__(self, size: int, rate: float | None, options: RpcOptions) -> None:
        self.forwarders: list[Forwarder] = []
        self._rate = rate
        super().__init__(size, sockets=True, options=options)

    def _transport(self, rank: int = 0) -> Transport:
        assert self._options is not None
        return _Behind(self._options, self._rate, self.forwarders)

    def close(self) -> None:
        for forwarder in self.forwarders:
            forwarder.release()
        super().close()
        for forwarder in self.forwarders:
            forwarder.close()


@contextlib.contextmanager
def slow_cluster(size: int, rate: float | None, **options: object) -> Iterator[SlowCluster]:
    """``rate`` is in bytes a second."""
    made = RpcOptions(transport="tcp", secret=SECRET, **options)  # type: ignore[arg-type]
    with SlowCluster(size, rate, made) as cluster:
        yield cluster
