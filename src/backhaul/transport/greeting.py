"""The greeting on a new connection, in steps that do not wait.

Each greeting is a generator: it yields what it waits for, ``"read"`` or ``"write"``, and returns its result. So the
listening side can run hundreds of greetings on one thread (`agent.door`), and the connecting side can wait for a single
one (`drive`).
"""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backhaul.errors import AuthenticationError
from backhaul.ids import GUEST
from backhaul.options import RpcOptions
from backhaul.security import handshake
from backhaul.security.handshake import HEAD_SIZE, Hello, Welcome, disagreement
from backhaul.transport.base import Channel, ChannelClosed, Want
from backhaul.transport.sockets import NO_WAIT, SEND_FLAGS, closed, remaining

if TYPE_CHECKING:
    from backhaul.transport.pipe import Pipe
    from backhaul.transport.segments import Budget
    from backhaul.transport.strands import Strands

T = TypeVar("T")
Steps = Generator[Want, None, T]

_LONGEST_LIST = 1000
_EVENTS: dict[Want, int] = {"read": select.POLLIN, "write": select.POLLOUT}


class Line(ABC):
    """A new connection, on which two workers greet each other."""

    checks = False
    """Whether this side wants checksums. After the greeting, whether they are used: one of the two wants them."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    @abstractmethod
    def open(self) -> Steps[frozenset[str] | None]:
        """Authenticate the peer. Returns the names that it may use, or None if it may use any.

        Raises `AuthenticationError` if the peer may not connect.
        """

    @abstractmethod
    def say(self, data: bytes) -> Steps[None]:
        """Send all of ``data``."""

    @abstractmethod
    def hear(self, count: int) -> Steps[bytes]:
        """Receive exactly ``count`` bytes."""

    @abstractmethod
    def channel(self, options: RpcOptions, budget: Budget, fabric: str, strands: Strands | None = None) -> Channel:
        """The channel for this connection after the greeting, in which both sides have agreed on ``fabric``."""

    def pipe(self, options: RpcOptions, fabric: str) -> Pipe:
        """The pipe for this connection, if it is a strand of another channel."""
        raise ChannelClosed("a connection of this kind cannot be one of several")

    def send(self, data: bytes) -> Steps[None]:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest, SEND_FLAGS) :]
            except BlockingIOError:
                yield "write"
            except OSError as error:
                raise closed(error) from error

    def receive(self, most: int) -> Steps[bytes]:
        while True:
            try:
                data = self.socket.recv(most, NO_WAIT)
            except BlockingIOError:
                yield "read"
            except OSError as error:
                raise closed(error) from error
            else:
                if not data:
                    raise ChannelClosed("the connection ended during the greeting")
                return data


def receive_visitor(
    line: Line,
    judge: Callable[[Hello], Welcome],
    fabric: str = "tls",
    on_trusted: Callable[[], None] = lambda: None,
    widen: Callable[[Hello, Welcome], Welcome] = lambda hello, welcome: welcome,
) -> Steps[Hello]:
    """The greeting of the listening side. Returns the peer's hello.

    ``judge`` decides whether to admit the peer. If it refuses, the welcome is sent, and this raises
    `AuthenticationError`. A worker of another ``fabric`` is refused; a guest is not, since it always has TLS. ``widen``
    sets how many connections there may be, and refuses a further connection without a channel.
    """
    names = yield from line.open()
    on_trusted()
    rest = handshake.length_of_hello((yield from line.hear(HEAD_SIZE)))
    hello = handshake.decode_hello((yield from line.hear(rest)))
    if names is None or hello.name in names:
        welcome = judge(hello)
    else:
        welcome = Welcome(-1, "", f"it says that it is {hello.name!r}, and its certificate is for {_listed(names)}")
    expected = "tls" if hello.id == GUEST else fabric
    if not welcome.refused and hello.fabric != expected:
        refused = disagreement(hello.name, hello.fabric, welcome.name, expected)
        welcome = msgspec.structs.replace(welcome, refused=refused)
    welcome = msgspec.structs.replace(welcome, fabric=expected)
    if not welcome.refused:
        welcome = widen(hello, welcome)
    line.checks = line.checks or hello.checks
    if line.checks:
        welcome = msgspec.structs.replace(welcome, checks=True)
    yield from line.say(handshake.encode(welcome))
    if welcome.refused:
        raise AuthenticationError(f"refused worker {hello.name!r}: {welcome.refused}")
    return hello


def visit(line: Line, hello: Hello) -> Steps[Welcome]:
    """The greeting of the connecting side. Returns the peer's welcome, which may be a refusal."""
    names = yield from line.open()
    if line.checks:
        hello = msgspec.structs.replace(hello, checks=True)
    yield from line.say(handshake.encode(hello))
    rest = handshake.length_of_welcome((yield from line.hear(HEAD_SIZE)))
    welcome = handshake.decode_welcome((yield from line.hear(rest)))
    if names is not None and welcome.name not in names:
        raise AuthenticationError(
            f"the worker there says that it is {welcome.name!r}, and its certificate is for {_listed(names)}"
        )
    if welcome.fabric != hello.fabric:  # an older version does not check the hello's fabric
        raise AuthenticationError(disagreement(hello.name, hello.fabric, welcome.name, welcome.fabric))
    line.checks = welcome.checks
    return welcome


def drive(steps: Steps[T], sock: socket.socket, deadline: float) -> T:
    """Run all steps, and wait as they ask. Raises `TimeoutError` at the deadline."""
    while True:
        left = remaining(deadline)
        try:
            want = next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        poll = select.poll()
        poll.register(sock, _EVENTS[want])
        poll.poll(left * 1000)


def _listed(names: frozenset[str]) -> str:
    text = ", ".join(map(repr, sorted(names))) or "nobody"
    return text if len(text) <= _LONGEST_LIST else text[:_LONGEST_LIST] + "…"
