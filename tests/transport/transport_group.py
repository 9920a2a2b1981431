"""Transports of one kind, both ends of channels, and a door that admits visitors."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Channel, Listener, Transport, Visitor
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.transport.stream import StreamListener, StreamTransport
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import encode
from greetings import admit, greet

SECRET = bytes(range(32))
HELLO = Hello("group", 1, "worker1", 0)
WELCOME = Welcome(0, "worker0")
SOON = 10.0  # seconds: bounds waits that end at once unless something is broken

Judge = Callable[[Hello], Welcome]
Made = Callable[..., StreamTransport]


def soon() -> float:
    return time.monotonic() + SOON


def welcome_all(hello: Hello) -> Welcome:
    return WELCOME


def never(hello: Hello) -> Welcome:
    raise AssertionError(f"an unknown visitor was judged: {hello}")


def admit_one(listener: Listener, judge: Judge) -> tuple[Channel, Hello]:
    """Wait for one visitor, and greet it."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    assert poll.poll(SOON * 1000)
    visitor = listener.accept()
    assert visitor is not None
    return admit(visitor, judge, soon())


def only_listener(transport: StreamTransport) -> StreamListener:
    (listener,) = transport.listen()
    assert isinstance(listener, StreamListener)
    return listener


class Door:
    """Admits visitors, several at a time, as an agent does."""

    def __init__(self, listeners: list[Listener], judge: Judge, patience: float) -> None:
        self.outcomes: queue.Queue[tuple[Channel, Hello] | Exception] = queue.Queue()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._judge = judge
        self._patience = patience
        self._threads = ThreadPoolExecutor(8)
        self._bell = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def channel(self) -> Channel:
        outcome = self.outcomes.get(timeout=SOON)
        assert not isinstance(outcome, Exception), outcome
        return outcome[0]

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._threads.shutdown()
        os.close(self._bell)
        while not self.outcomes.empty():
            outcome = self.outcomes.get()
            if not isinstance(outcome, Exception):
                outcome[0].close()

    def _serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._bell, *self._listeners):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._bell:
                    return
                visitor = self._listeners[descriptor].accept()
                if visitor is not None:
                    self._threads.submit(self._admit, visitor)

    def _admit(self, visitor: Visitor) -> None:
        try:
            if (found := greet(visitor, self._judge, time.monotonic() + self._patience)) is not None:
                self.outcomes.put(found)
        except Exception as error:
            self.outcomes.put(error)


class Group:
    """Transports of one kind that can reach each other. It closes everything that it made at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._network = Network()
        self._ends: list[Callable[[], None]] = []

    def transport(self, name: str = HELLO.name, **options: Any) -> Transport:
        made: Transport
        if self.kind == "memory":
            made = MemoryTransport(self._network, RpcOptions(**options))
        else:
            given: dict[str, Any] = {"transport": self.kind}
            if self.kind == "checked":
                given = {"transport": "unix", "checksum": True}
            elif self.kind in ("tcp", "plain"):
                given = {"transport": "tcp", "secret": SECRET, "fabric": "tls" if self.kind == "tcp" else "plain"}
            made = StreamTransport(RpcOptions(**{**given, **options}))
        made.introduce(name)
        self._ends.append(made.close)
        return made

    def door(self, judge: Judge = welcome_all, patience: float = SOON, **options: Any) -> tuple[Transport, Door]:
        transport = self.transport(WELCOME.name, **options)
        door = Door(list(transport.listen()), judge, patience)
        self._ends.append(door.close)
        return transport, door

    def connect(self, there: Transport) -> Channel:
        channel, welcome = self.transport().connect(there.addresses, HELLO, soon())
        assert (welcome.id, welcome.name) == (WELCOME.id, WELCOME.name)
        assert welcome.checks == (self.kind == "checked")
        self._ends.append(channel.close)
        return channel

    def pair(self, **options: Any) -> tuple[Channel, Channel]:
        """Both ends of a channel."""
        transport, door = self.door(**options)
        near = self.connect(transport)
        far = door.channel()
        self._ends.append(far.close)
        return near, far

    def close(self) -> None:
        for end in reversed(self._ends):
            end()


def send(channel: Channel, message: Any, tensors: Any = ()) -> None:
    frame = encode(message, tensors)
    done = channel.write(frame)
    while not done:
        channel.wait(read=False, write=True, timeout=SOON)
        done = channel.flush()


def receive(channel: Channel) -> Envelope:
    deadline = soon()
    while (envelope := channel.next()) is None:
        if not channel.read(SOON):
            assert time.monotonic() < deadline, "nothing came"
    return envelope


def is_readable(channel: Channel | Listener) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def run(*jobs: Callable[[], None]) -> None:
    """Run the functions in parallel. Raises what one of them raised."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        for done in [threads.submit(job) for job in jobs]:
            done.result(timeout=60)
