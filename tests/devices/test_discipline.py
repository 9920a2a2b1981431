"""The order of copies and events of a segment: no memory is used before its event, in any order of the device."""

from __future__ import annotations

import random
import sys
from collections import deque
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import FakeDevice, Race

from backhaul.devices.discipline import Incoming, Outgoing

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
