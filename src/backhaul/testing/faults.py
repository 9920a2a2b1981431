"""Faults: a transport that deliberately loses, delays or repeats messages, or cuts connections.

`Faults` decides, `FaultyTransport` acts, over any other transport::

    faults = Faults(seed=3, drop=0.1, kinds=(Result,))
    with InProcessCluster(2, faults=faults) as workers: ...

    faults = Faults()
    faults.next("cut", Call)          # the next call's connection is cut instead

    faults.part()                     # all connections break, and none can be made...
    faults.heal()                     # ...until now
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport, Visitor, Want, Way
from backhaul.transport.filling import whole
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import HEADER, Frame, kind_of
from backhaul.wire.messages import KINDS, Call, Failure, Result

Action = Literal["pass", "drop", "delay", "duplicate", "cut"]


class Faults:
    """Decides what happens to each message that is sent. Thread-safe.

    ``drop``, ``delay``, ``duplicate`` and ``cut`` are probabilities; ``kinds`` are the messages they
    apply to. A delayed message leaves after ``delay_seconds``, or when `release` is called; later
    messages overtake it. ``counts`` counts the faults so far.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        drop: float = 0.0,
        delay: float = 0.0,
        duplicate: float = 0.0,
        cut: float = 0.0,
        kinds: Sequence[type[Any]] = (Call, Result, Failure),
        delay_seconds: float | None = 0.01,
    ) -> None:
        self.delay_seconds = delay_seconds
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._chances: list[tuple[Action, float]] = [
            ("drop", drop),
            ("delay", delay),
            ("duplicate", duplicate),
            ("cut", cut),
        ]
        self._kinds = frozenset(kinds)
        self._next: deque[tuple[Action, type[Any]]] = deque()
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] = []
        self._parted = False
        self._channels: weakref.WeakSet[FaultyChannel] = weakref.WeakSet()

    def next(self, action: Action, kind: type[Any]) -> None:
        """Do this to the next message of that kind, regardless of the probabilities."""
        with self._lock:
            self._next.append((action, kind))

    def part(self) -> None:
        """Break all connections. Until `heal`, no worker can reach another."""
        with self._lock:
            self._parted = True
            channels = list(self._channels)
        for channel in channels:
            channel.shutdown()

    def heal(self) -> None:
        """Allow new connections again."""
        with self._lock:
            self._parted = False

    def made(self, channel: FaultyChannel) -> FaultyChannel:
        """Note a new connection. Raises `ChannelClosed` if the workers are parted."""
        with self._lock:
            if not self._parted:
                self._channels.add(channel)
                return channel
        channel.close()
        raise ChannelClosed("parted by a fault")

    def decide(self, kind: type[Any]) -> Action:
        with self._lock:
            action = self._choose(kind)
            self.counts[action] += 1
            return action

    def hold(self, send: Callable[[], None]) -> None:
        """Send the frame later."""
        with self._lock:
            self._held.append(send)
        if self.delay_seconds is not None:
            timer = threading.Timer(self.delay_seconds, self._send_held, (send,))
            timer.daemon = True
            timer.start()

    def release(self) -> None:
        """Send all delayed frames now."""
        for send in list(self._held):
            self._send_held(send)

    def _send_held(self, send: Callable[[], None]) -> None:
        with self._lock:
            if send not in self._held:
                return
            self._held.remove(send)
        send()

    def _choose(self, kind: type[Any]) -> Action:
        for entry in self._next:
            if entry[1] is kind:
                self._next.remove(entry)
                return entry[0]
        if kind in self._kinds:
            draw = self._random.random()
            for action, chance in self._chances:
                if draw < chance:
                    return action
                draw -= chance
        return "pass"


class FaultyChannel(Channel):
    """Writes frames as `Faults` decides; reads like the channel inside."""

    def __init__(self, inside: Channel, faults: Faults) -> None:
        self._inside = inside
        self._faults = faults
        # The agent's writer and the sender of delayed frames alternate by whole frames.
        self._turn = threading.Condition()
        self._unfinished = False

    def fileno(self) -> int:
        return self._inside.fileno()

    @property
    def between(self) -> bool:  # type: ignore[override]
        return self._inside.between

    @property
    def awaits(self) -> bool:  # type: ignore[override]
        return self._inside.awaits

    @property
    def fills(self) -> bool:  # type: ignore[override]
        return self._inside.fills

    def write(self, frame: Frame) -> bool:
        passed = self._suffer(frame)
        if not passed:
            return True
        with self._turn:
            self._unfinished = not self._inside.write(_join(passed))
            return not self._unfinished

    def interject(self, frame: Frame) -> bool:
        passed = self._suffer(frame)
        if not passed:
            return True
        with self._turn:
            return self._inside.interject(_join(passed))

    def copy_unsent(self) -> None:
        self._inside.copy_unsent()

    def way(self) -> Way:
        return self._inside.way()

    def _suffer(self, frame: Frame) -> list[Frame]:
        """The frames that remain after the faults."""
        passed: list[Frame] = []
        for each in _split(frame):
            action = self._faults.decide(KINDS[kind_of(each.pieces[0])])
            if action == "cut":
                self._inside.shutdown()
                raise ChannelClosed("cut by a fault")
            if action == "delay":
                copy = Frame([whole(each)], each.size)
                self._faults.hold(lambda copy=copy: self._write_late(copy))  # type: ignore[misc]
            elif action != "drop":
                passed += [each] * (2 if action == "duplicate" else 1)
        return passed

    def flush(self) -> bool:
        with self._turn:
            if self._unfinished and self._inside.flush():
                self._unfinished = False
                self._turn.notify_all()
            return not self._unfinished

    def _write_late(self, frame: Frame) -> None:
        try:
            with self._turn:
                self._turn.wait_for(lambda: not self._unfinished, timeout=5.0)
                done = self._inside.write(frame)
                while not done:
                    self._inside.wait(read=False, write=True, timeout=1.0)
                    done = self._inside.flush()
        except ChannelClosed:
            pass  # the channel closed during the delay

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        return self._inside.wait(read=read, write=write, timeout=timeout)

    def read(self, timeout: float | None) -> bool:
        return self._inside.read(timeout)

    def next(self) -> Envelope | None:
        return self._inside.next()

    def shutdown(self) -> None:
        self._inside.shutdown()

    def close(self) -> None:
        self._inside.close()


def _split(frame: Frame) -> list[Frame]:
    """The messages of a write, one by one: a server may send several replies at once."""
    _, _, _, metadata, table, payload = HEADER.unpack_from(frame.pieces[0])
    if HEADER.size + metadata + table + payload == frame.size:
        return [frame]
    parts = []
    data = memoryview(whole(frame))
    while data:
        _, _, _, metadata, table, payload = HEADER.unpack_from(data)
        size = HEADER.size + metadata + table + payload
        parts.append(Frame([data[:size]], size))
        data = data[size:]
    return parts


def _join(frames: list[Frame]) -> Frame:
    if len(frames) == 1:
        return frames[0]
    return Frame([b"".join(map(whole, frames))], sum(each.size for each in frames))


class _FaultyVisitor(Visitor):
    def __init__(self, inside: Visitor, faults: Faults) -> None:
        self._inside = inside
        self._faults = faults

    def fileno(self) -> int:
        return self._inside.fileno()

    def step(self, judge: Callable[[Hello], Welcome]) -> Want | tuple[Channel, Hello] | None:
        outcome = self._inside.step(judge)
        if outcome is None or isinstance(outcome, str):
            return outcome
        channel, hello = outcome
        return self._faults.made(FaultyChannel(channel, self._faults)), hello

    def turn_away(self) -> None:
        self._inside.turn_away()


class _FaultyListener(Listener):
    def __init__(self, inside: Listener, faults: Faults) -> None:
        self._inside = inside
        self._faults = faults

    def fileno(self) -> int:
        return self._inside.fileno()

    def accept(self) -> Visitor | None:
        visitor = self._inside.accept()
        return None if visitor is None else _FaultyVisitor(visitor, self._faults)

    def close(self) -> None:
        self._inside.close()


class FaultyTransport(Transport):
    """Another transport, with faults in everything it sends, requests and replies alike."""

    def __init__(self, inside: Transport, faults: Faults) -> None:
        self._inside = inside
        self._faults = faults

    def listen(self) -> Sequence[Listener]:
        return [_FaultyListener(listener, self._faults) for listener in self._inside.listen()]

    def introduce(self, name: str) -> None:
        self._inside.introduce(name)

    @property
    def addresses(self) -> Addresses:
        return self._inside.addresses

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        channel, welcome = self._inside.connect(addresses, hello, deadline)
        return self._faults.made(FaultyChannel(channel, self._faults)), welcome

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        return self._inside.is_listening(addresses, deadline)

    def is_over(self, addresses: Addresses) -> bool:
        return self._inside.is_over(addresses)

    def trim(self) -> float:
        return self._inside.trim()

    def when_used(self, callback: Callable[[], None]) -> None:
        self._inside.when_used(callback)

    def close(self) -> None:
        self._inside.close()

    def abandon(self) -> None:
        self._inside.abandon()
