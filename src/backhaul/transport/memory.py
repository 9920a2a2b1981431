"""Channels between workers of one process. Messages are still encoded to bytes and decoded.

A `Network` is a set of workers that can reach each other this way. It delivers at once and in order; a subclass may
hold messages back and decide the order (`testing.scheduler`).
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from backhaul.errors import AuthenticationError
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome, require_welcome
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport, Visitor, Want
from backhaul.transport.filling import whole
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame

END = b""
"""Posted to the peer when a channel ends."""


class _Bell:
    """A descriptor that is readable after `ring` until `hush`, and shows a hang-up after `hang_up`.

    It is a pair of sockets, so that it looks like a real connection to the watch thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ear, self._rope = socket.socketpair()
        self._ear.setblocking(False)
        self._rope.setblocking(False)

    def fileno(self) -> int:
        return self._ear.fileno()

    def ring(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # the buffer is full, or the bell is hung up or closed
            self._rope.send(b"!")

    def hush(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            while self._ear.recv(4096):
                pass

    def hang_up(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._rope.shutdown(socket.SHUT_WR)

    def wait(self, timeout: float | None) -> bool:
        fd = self._ear.fileno()
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        with self._lock:
            self._ear.close()
            self._rope.close()


def _decoder(options: RpcOptions) -> Decoder:
    bounded, drains = not options.policy.believes, options.limits is None
    return Decoder(options.message_limit, None, options.head_limit, bounded=bounded, drains=drains)


class MemoryChannel(Channel):
    """One end of a pair of channels in this process."""

    def __init__(self, network: Network, name: str, options: RpcOptions | None = None) -> None:
        self.name = name
        self.peer: MemoryChannel | None = None
        self._network = network
        self._bell = _Bell()
        self._inbox: deque[bytes] = deque()
        self._decoder = _decoder(RpcOptions() if options is None else options)
        self._ready: deque[Envelope] = deque()
        self._ended = False

    def fileno(self) -> int:
        return self._bell.fileno()

    def write(self, frame: Frame) -> bool:
        if self._ended or self.peer is None:
            raise ChannelClosed("the channel ended")
        self._network.post(self.peer, whole(frame))
        self.sent += frame.size
        return True

    def flush(self) -> bool:
        return True

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        return write or self._bell.wait(timeout)

    def read(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._ended:
                raise ChannelClosed("the channel ended")
            if not self._inbox:
                self._bell.hush()
                # The hush has silenced messages that came before it, so look again. Later messages ring.
                if not self._inbox and not self._ended:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self._bell.wait(left)
                continue
            data = self._inbox.popleft()
            if not self._inbox:
                self._bell.hush()  # a thread that polls must not find what has been read already
            if self._inbox:
                self._bell.ring()  # the bell may be hushed, and there is more for the next read
            if data == END:
                self._ended = True
                raise ChannelClosed("the connection ended")
            self.received += len(data)
            messages = self._decoder.receive_data(data)
            self._ready.extend(messages)
            self._network.taken(self, len(messages))
            return True

    def next(self) -> Envelope | None:
        return self._ready.popleft() if self._ready else None

    @property
    def unread(self) -> bool:
        """Whether data has arrived that no thread has read."""
        return bool(self._inbox)

    def deliver(self, data: bytes) -> None:
        """Add arrived data. The network calls this."""
        self._inbox.append(data)
        self._bell.ring()
        if data == END:
            self._bell.hang_up()

    def shutdown(self) -> None:
        if not self._ended and self.peer is not None:
            self._network.post(self.peer, END)
        self._ended = True
        self._bell.ring()
        self._bell.hang_up()  # a socket that is shut down on this side shows a hang-up here too

    def close(self) -> None:
        self.shutdown()
        self._network.closed(self)
        self._bell.close()


class Network:
    """Workers of this process that can reach each other."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = itertools.count()

    def listen(self, options: RpcOptions) -> MemoryListener:
        address = f"memory-{next(self._numbers)}"
        listener = self._listeners[address] = MemoryListener(self, address, options)
        return listener

    def unlisten(self, listener: MemoryListener) -> None:
        self._listeners.pop(listener.address, None)

    def listener(self, address: str | None) -> MemoryListener:
        listener = None if address is None else self._listeners.get(address)
        if listener is None:
            raise ChannelClosed(f"nobody listens at {address}")
        return listener

    def has_listener(self, address: str | None) -> bool:
        return address in self._listeners

    def post(self, to: MemoryChannel, data: bytes) -> None:
        """Deliver a message that was sent to ``to``."""
        to.deliver(data)

    def taken(self, channel: MemoryChannel, count: int) -> None:
        """Called after a thread has read ``count`` messages from the channel."""

    def closed(self, channel: MemoryChannel) -> None:
        """Called when the channel is closed: no thread will read from it again."""


class MemoryVisitor(Visitor):
    def __init__(self, network: Network, hello: Hello, near: RpcOptions, far: RpcOptions) -> None:
        self.hello = hello
        self.near = MemoryChannel(network, f"{hello.name}->{hello.to_id}", near)
        self.far = MemoryChannel(network, f"{hello.to_id}<-{hello.name}", far)
        self.near.peer, self.far.peer = self.far, self.near
        self.welcome: Welcome | None = None
        self.answered = threading.Event()

    def fileno(self) -> int:
        return self.far.fileno()

    def step(self, judge: Callable[[Hello], Welcome]) -> Want | tuple[Channel, Hello]:
        self.welcome = judge(self.hello)
        self.answered.set()
        if self.welcome.refused:
            self.far.close()
            raise AuthenticationError(f"refused worker {self.hello.name!r}: {self.welcome.refused}")
        return self.far, self.hello

    def turn_away(self) -> None:
        self.far.close()
        self.answered.set()


class MemoryListener(Listener):
    def __init__(self, network: Network, address: str, options: RpcOptions) -> None:
        self.address = address
        self.options = options
        self._network = network
        self._bell = _Bell()
        self._visitors: deque[MemoryVisitor] = deque()
        self._closing = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._bell.fileno()

    def visit(self, visitor: MemoryVisitor) -> None:
        with self._closing:
            if not self._closed:
                self._visitors.append(visitor)
                self._bell.ring()
                return
        visitor.turn_away()

    def accept(self) -> Visitor | None:
        self._bell.hush()
        try:
            visitor = self._visitors.popleft()
        except IndexError:
            return None
        if self._visitors:
            self._bell.ring()
        return visitor

    def close(self) -> None:
        self._network.unlisten(self)
        with self._closing:
            self._closed = True
        while self._visitors:
            self._visitors.popleft().turn_away()
        self._bell.close()


class MemoryTransport(Transport):
    """A worker's place in a `Network`."""

    def __init__(self, network: Network, options: RpcOptions | None = None) -> None:
        self._network = network
        self._options = RpcOptions() if options is None else options
        self._listener: MemoryListener | None = None

    def listen(self) -> Sequence[Listener]:
        self._listener = self._network.listen(self._options)
        return [self._listener]

    @property
    def addresses(self) -> Addresses:
        return Addresses(memory=None if self._listener is None else self._listener.address)

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        listener = self._network.listener(addresses.memory)
        visitor = MemoryVisitor(self._network, hello, self._options, listener.options)
        try:
            listener.visit(visitor)  # from here on the listener owns the far end
            if not visitor.answered.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("nobody answered")
            if visitor.welcome is None:
                raise ChannelClosed("the listener closed")
            require_welcome(visitor.welcome)
        except BaseException:
            visitor.near.close()  # the other side notices, and closes its end
            raise
        return visitor.near, visitor.welcome

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        return self._network.has_listener(addresses.memory)

    def is_over(self, addresses: Addresses) -> bool:
        return not self._network.has_listener(addresses.memory)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def abandon(self) -> None:
        self.close()
