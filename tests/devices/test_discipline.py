"""The order of copies and events: no memory is used before its event, in any order of the device."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import FakeDevice, Race

from backhaul.devices import discipline
from backhaul.devices.discipline import Event, HostCopy, HostDevice, Incoming, Outgoing

SEGMENT, FILLED, DRAINED = 1, 101, 102


def exchange(seed: int, outgoing: type[Outgoing] = Outgoing, incoming: type[Incoming] = Incoming) -> None:
    """Send values through one segment, on changing streams, with an arbitrarily late receiver."""
    chance = random.Random(seed)
    device = FakeDevice(seed)
    sender = outgoing(device, SEGMENT, FILLED, DRAINED)
    receiver = incoming(device, SEGMENT, FILLED, DRAINED)
    is_free = True
    told: deque[int] = deque()
    received: list[tuple[int, int]] = []
    fresh = iter(range(1000, 100_000))
    sent = 0
    while len(received) < 12:
        if is_free and (not told or chance.random() < 0.5):
            stream = chance.randrange(3)
            source = next(fresh)
            device.write(source, sent, stream)
            is_free = False
            sender.fill(source, 1, stream)
            told.append(sent)
            sent += 1
        elif told and chance.random() < 0.2:  # the receiver does not want the data
            told.popleft()
            is_free = True
        elif told:
            target = next(fresh)
            receiver.drain(target, 1, 10 + chance.randrange(3))
            received.append((told.popleft(), target))
            is_free = True
        if chance.random() < 0.2:
            device.run()
    device.run()
    assert [device.memory[target] for _, target in received] == [value for value, _ in received]


def exchange_often(outgoing: type[Outgoing] = Outgoing, incoming: type[Incoming] = Incoming) -> None:
    for seed in range(20):
        exchange(seed, outgoing, incoming)


@pytest.mark.parametrize("seed", range(50))
def test_every_value_arrives_whatever_the_device_does_first(seed: int) -> None:
    exchange(seed)


class NoWaitForDrained(Outgoing):
    def fill(self, source: int, size: int, stream: int) -> None:
        self._device.copy(self._memory, source, size, stream)
        self._device.record(self._filled, stream)


class NoWaitForWhatNobodyTookOut(Outgoing):
    def fill(self, source: int, size: int, stream: int) -> None:
        if self._stream is not None:
            self._device.wait(self._drained, stream)
        self._stream = stream
        self._device.copy(self._memory, source, size, stream)
        self._device.record(self._filled, stream)


class RecordsTooEarly(Outgoing):
    def fill(self, source: int, size: int, stream: int) -> None:
        if self._stream is not None:
            self._device.wait(self._drained, stream)
            self._device.wait(self._filled, stream)
        self._stream = stream
        self._device.record(self._filled, stream)
        self._device.copy(self._memory, source, size, stream)


class WaitsOnce(Outgoing):
    def fill(self, source: int, size: int, stream: int) -> None:
        self._device.copy(self._memory, source, size, stream)
        self._device.record(self._filled, stream)
        self._device.wait(self._drained, stream)


class NoWaitForFilled(Incoming):
    def drain(self, target: int, size: int, stream: int) -> None:
        self._device.copy(target, self._memory, size, stream)
        self._device.record(self._drained, stream)


class NeverRecordsDrained(Incoming):
    def drain(self, target: int, size: int, stream: int) -> None:
        self._device.wait(self._filled, stream)
        self._device.copy(target, self._memory, size, stream)


class RecordsDrainedTooEarly(Incoming):
    def drain(self, target: int, size: int, stream: int) -> None:
        self._device.wait(self._filled, stream)
        self._device.record(self._drained, stream)
        self._device.copy(target, self._memory, size, stream)


@pytest.mark.parametrize("mistake", [NoWaitForDrained, NoWaitForWhatNobodyTookOut, RecordsTooEarly, WaitsOnce])
def test_a_mistake_of_the_sender_is_noticed(mistake: type[Outgoing]) -> None:
    with pytest.raises(Race):
        exchange_often(outgoing=mistake)


@pytest.mark.parametrize("mistake", [NoWaitForFilled, NeverRecordsDrained, RecordsDrainedTooEarly])
def test_a_mistake_of_the_receiver_is_noticed(mistake: type[Incoming]) -> None:
    with pytest.raises(Race):
        exchange_often(incoming=mistake)


# Copies to the host.

SIZE = 5


class Numbered(NamedTuple):
    number: int


class Shared:
    """The events of several copies."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._unused: list[Event] = []
        self.used: set[int] = set()

    def take(self) -> Event:
        event = self._unused.pop() if self._unused else Numbered(next(self._numbers))
        self.used.add(event.number)
        return event

    def give_back(self, event: Event) -> None:
        self.used.remove(event.number)
        self._unused.append(event)


def copy_to_host(seed: int, copy: type[HostCopy] = HostCopy) -> None:
    """Make copies on several streams, and read as much of each as is said to be there, while the device works."""
    chance = random.Random(seed)
    device, events = FakeDevice(seed), Shared()
    copies: list[tuple[int, HostCopy]] = []
    for number in range(6):
        stream, source, target = chance.randrange(3), 1000 * number + 100, 1000 * number + 500
        for place in range(SIZE):
            device.write(source + place, (number, place), stream)
        copies.append((target, copy(device, target, source, SIZE, stream, events.take, events.give_back)))
        for _ in range(chance.randrange(40)):
            device.step()
        for index, (begin, each) in enumerate(copies):
            for place in range(each.done()):
                assert device.host_reads(begin + place) == (index, place)
    device.run()
    assert [each.done() for _, each in copies] == [SIZE] * len(copies)
    assert all(each.is_over for _, each in copies)
    assert not events.used


def copy_to_host_often(copy: type[HostCopy]) -> None:
    for seed in range(50):
        copy_to_host(seed, copy)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discipline, "CHUNK", 2)


def test_the_host_reads_what_is_there(small_chunks: None) -> None:
    # Of a chunk of two, the fake device copies the first piece.
    device, events = FakeDevice(0), Shared()
    for place in range(SIZE):
        device.write(100 + place, place, 0)
    device.run()
    copy = HostCopy(device, 500, 100, SIZE, 0, events.take, events.give_back)
    seen = []
    for place in (0, 2, 4):
        seen.append(copy.done())
        assert not copy.is_over
        device.step()
        assert copy.done() == seen[-1], "the copy is made, but its event is not over"
        device.step()
        assert device.host_reads(500 + place) == place
    assert [*seen, copy.done()] == [0, 2, 4, 5]
    assert copy.is_over
    assert not events.used


@pytest.fixture
def single_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discipline, "CHUNK", 1)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_said_to_be_there_is_there(seed: int, single_chunks: None) -> None:
    copy_to_host(seed)


def test_a_copy_that_is_not_read_is_over_at_some_time(single_chunks: None) -> None:
    device, events = FakeDevice(0), Shared()
    for place in range(SIZE):
        device.write(100 + place, place, 0)
    copy = HostCopy(device, 500, 100, SIZE, 0, events.take, events.give_back)
    assert not copy.is_over
    device.run()
    assert copy.is_over
    assert not events.used


class RecordsBefore:
    """A device that does these two in the wrong order."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._late: list[tuple[int, int, int, int]] = []
        self.is_over = device.is_over

    def copy_to_host(self, target: int, source: int, size: int, stream: int) -> None:
        self._late.append((target, source, size, stream))

    def record(self, event: int, stream: int) -> None:
        self._device.record(event, stream)
        self._device.copy_to_host(*self._late.pop())


class CopiesAfterItsEvent(HostCopy):
    def __init__(
        self,
        device: HostDevice,
        target: int,
        source: int,
        size: int,
        stream: int,
        take: Callable[[], Event],
        give_back: Callable[[Event], None],
    ) -> None:
        super().__init__(RecordsBefore(device), target, source, size, stream, take, give_back)


class LooksAtAnyChunk(HostCopy):
    def done(self) -> int:
        for end, event in self._chunks:
            if self._device.is_over(event.number):
                self._done = max(self._done, end + 1)
        return min(self._done, SIZE)


class GivesBackTooEarly(HostCopy):
    def __init__(
        self,
        device: HostDevice,
        target: int,
        source: int,
        size: int,
        stream: int,
        take: Callable[[], Event],
        give_back: Callable[[Event], None],
    ) -> None:
        def borrow() -> Event:
            event = take()
            give_back(event)
            return event

        super().__init__(device, target, source, size, stream, borrow, lambda event: None)


@pytest.mark.parametrize("mistake", [CopiesAfterItsEvent, LooksAtAnyChunk, GivesBackTooEarly])
def test_a_mistake_of_a_copy_to_the_host_is_noticed(mistake: type[HostCopy], single_chunks: None) -> None:
    with pytest.raises(AssertionError):
        copy_to_host_often(mistake)
