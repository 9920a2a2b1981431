"""The network of `simulation`: connections that lose, delay and break. It knows nothing of counting.

A connection is made by one worker to another; requests go one way, replies the other. Each direction has two
queues, *calls* and *mail*, that do not wait for each other.

When a connection breaks, or one of its ends dies, a random tail of each queue is lost and an `End` follows. Messages
before it may still be delivered at any time. Messages that are written later are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from backhaul.ids import RefId, ShareId
from backhaul.wire.messages import Notice


class Brought(NamedTuple):
    """A reference in a message. ``claim``: the sender had a claim to it; see `simulation`."""

    ref: RefId
    share: ShareId
    claim: bool


class Call(NamedTuple):
    """A call, or a result."""

    brings: tuple[Brought, ...]


class Create(NamedTuple):
    ref: RefId
    brings: tuple[Brought, ...]


class Created(NamedTuple):
    """The answer to `Create`."""

    ref: RefId
    brings: tuple[Brought, ...]


class Batch(NamedTuple):
    number: int
    notices: tuple[Notice, ...]


class Answer(NamedTuple):
    """The answer to `Batch`."""

    number: int


class End(NamedTuple):
    """The end of a queue: no message follows."""


UserMessage = Call | Create | Created
Message = UserMessage | Batch | Answer | End


class Queue:
    """Calls or mail, in one direction of one connection."""

    __slots__ = ("connection", "ended", "is_mail", "items", "receiver", "sender")

    def __init__(self, connection: Connection, sender: int, receiver: int, is_mail: bool) -> None:
        self.connection = connection
        self.sender = sender
        self.receiver = receiver
        self.is_mail = is_mail
        self.items: deque[Message] = deque()
        self.ended = False  # its end has been read


class Connection:
    """A connection that ``opener`` has made. It takes requests to ``acceptor``, and replies back."""

    def __init__(self, number: int, opener: int, acceptor: int) -> None:
        self.number = number
        self.opener = opener
        self.acceptor = acceptor
        self.ends = opener, acceptor
        self.broken = False
        self.noticed: set[int] = set()  # the ends that know that it is broken
        self.calls = {end: Queue(self, end, self.other(end), False) for end in self.ends}
        self.mail = {end: Queue(self, end, self.other(end), True) for end in self.ends}
        self.queues = *self.calls.values(), *self.mail.values()

    def queues_from(self, sender: int) -> tuple[Queue, Queue]:
        return self.calls[sender], self.mail[sender]

    def other(self, end: int) -> int:
        return self.acceptor if end == self.opener else self.opener

    def __repr__(self) -> str:
        return f"{self.opener}->{self.acceptor}#{self.number}"


class Network:
    """All connections. ``on_loss`` is told of every message that will never arrive."""

    def __init__(self, random: Random, on_loss: Callable[[Connection, Message], None]) -> None:
        self._random = random
        self._on_loss = on_loss
        self._made = 0
        self._dead: set[int] = set()
        self._between: dict[tuple[int, int], list[Connection]] = {}
        self.sound: dict[Connection, None] = {}
        self.broken: dict[Connection, None] = {}  # until both ends have noticed
        self.filled: dict[Queue, None] = {}

    def between(self, one: int, other: int) -> list[Connection]:
        """All connections between two workers so far."""
        return self._between.setdefault((min(one, other), max(one, other)), [])

    def connect(self, opener: int, acceptor: int) -> Connection:
        """A new connection. A connection to a dead worker ends at once."""
        self._made += 1
        connection = Connection(self._made, opener, acceptor)
        self.between(opener, acceptor).append(connection)
        self.sound[connection] = None
        if acceptor in self._dead:
            self.break_(connection)
        return connection

    def post(self, queue: Queue, message: Message) -> None:
        """Write a message; it may not arrive."""
        if queue.connection.broken:
            self._on_loss(queue.connection, message)
        else:
            queue.items.append(message)
            self.filled[queue] = None

    def take(self, queue: Queue) -> Message:
        message = queue.items.popleft()
        if not queue.items:
            del self.filled[queue]
        queue.ended = isinstance(message, End)
        return message

    def notice(self, connection: Connection, end: int) -> None:
        """Note that this end knows that the connection is broken."""
        connection.noticed.add(end)
        if len(connection.noticed) == 2:
            self.broken.pop(connection, None)

    def break_(self, connection: Connection) -> None:
        if not connection.broken:
            connection.broken = True
            del self.sound[connection]
            self.broken[connection] = None
        for end in connection.ends:
            for queue in connection.queues_from(end):
                self._cut(queue)
            if end in self._dead:
                self.notice(connection, end)

    def kill(self, rank: int) -> None:
        self._dead.add(rank)
        for pair, connections in self._between.items():
            if rank in pair:
                for connection in connections:
                    self.break_(connection)

    def _cut(self, queue: Queue) -> None:
        if queue.ended:
            return
        items = [message for message in queue.items if not isinstance(message, End)]
        kept = self._random.choice([len(items), self._random.randint(0, len(items))])
        if queue.receiver in self._dead:
            kept = 0
        for message in items[kept:]:
            self._on_loss(queue.connection, message)
        queue.items = deque([*items[:kept], End()])
        if queue.receiver in self._dead:
            queue.items.clear()
            self.filled.pop(queue, None)
        else:
            self.filled[queue] = None
