"""Gradients of a run on GPUs leave after the device has computed them, on whatever streams its Recvs are.

The code of `autograd.run` and `devices.handover` runs unchanged, on a `FakeDevice`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import FakeDevice, Race

from backhaul.autograd.run import EngineRun
from backhaul.devices.handover import Key, Streams
from backhaul.ids import WorkerInfo

STARTER = 0


class Event:
    def __init__(self, number: int) -> None:
        self.number = number


class Driver:
    """A `handover.Driver` for one thread."""

    def __init__(self, fake: FakeDevice) -> None:
        self._fake = fake
        self._numbers = itertools.count(1)
        self.stream = 1
        """The current stream."""
        self.record = fake.record
        self.wait = fake.wait

    def current(self, device: int, /) -> Key:
        return self.stream, device, 1

    def current_stream(self, device: int) -> int:
        return self.stream

    def handle(self, key: Key) -> int:
        return key[0]

    def new_stream(self, device: int) -> Key:
        raise AssertionError("the thread is one of the user's")

    def make_current(self, keys: Sequence[Key]) -> None:
        raise AssertionError("the thread is one of the user's")

    def new_event(self, device: int) -> Event:
        return Event(next(self._numbers))


class Node:
    """The node of a Recv in torch's graph."""

    def __init__(self, sender: WorkerInfo, message: int) -> None:
        self.recv = SimpleNamespace(sender=sender, message=message)


class World:
    """One run: Recvs that torch's engine reaches one by one, each on the stream of its forward pass."""

    def __init__(self, seed: int, run: type[EngineRun] = EngineRun, streams: type[Streams] = Streams) -> None:
        self.random = Random(seed)
        self.fake = FakeDevice(seed)
        self.driver = Driver(self.fake)
        self.streams = streams((0,), self.driver)
        self.made: dict[int, int] = {}
        """By address of the gradient: its value."""
        self.sent = 0
        chance = self.random
        count = chance.choice([1, 2, 2, 3, 4])
        senders = [WorkerInfo(rank, f"worker{rank}") for rank in (STARTER, 2)]
        self.nodes = [Node(chance.choice(senders), 10 * number) for number in range(count)]
        devices = SimpleNamespace(streams=self.streams)
        agent: Any = SimpleNamespace(observers=(), devices=devices, me=WorkerInfo(1, "worker1"))
        local: Any = SimpleNamespace(
            backward=SimpleNamespace(id=1), shortcuts={}, starter=STARTER, giving_to=lambda rank: None
        )
        component: Any = SimpleNamespace(
            sources=(1,), recvs=dict.fromkeys(self.nodes, (0,)), waits=chance.random() < 0.3, size=5
        )
        protocol: Any = SimpleNamespace(require=lambda local, recv: None, send=self.send)
        self.run_ = run(
            agent,
            local,
            component,
            protocol=protocol,
            held=lambda run: None,
            hold=chance.random() < 0.8,
            carried=chance.random() < 0.8,
        )

    def send(self, local: Any, rank: int, message: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the gradients on the current stream."""
        for tensor in tensors:
            address = tensor.data_ptr()
            self.fake.read(address, self.made[address], self.driver.stream)
            self.sent += 1

    def run(self) -> None:
        chance = self.random
        gradients = []
        for number, node in enumerate(self.nodes):
            self.driver.stream = chance.choice([1, 2, 3])
            gradient = None if chance.random() < 0.3 else torch.zeros(4)
            if gradient is not None:
                gradients.append(gradient)
                self.made[gradient.data_ptr()] = number
                self.fake.write(gradient.data_ptr(), number, self.driver.stream)
            self.run_.emit(node, [gradient])
            if chance.random() < 0.2:
                self.fake.run()
        self.driver.stream = 4
        self.run_.flush()
        if (late := self.run_.outcome.late) is not None:
            self.streams.catch_up()  # as `progress` does before it reports
            self.send(None, late.to.id, None, late.tensors)
        self.fake.run()
        assert self.sent == len(gradients)


def run_many(run: type[EngineRun] = EngineRun, streams: type[Streams] = Streams) -> None:
    for seed in range(200):
        World(seed, run, streams).run()


@pytest.mark.parametrize("seed", range(200))
def test_no_gradient_leaves_too_early(seed: int) -> None:
    World(seed).run()


class NotesNothing(EngineRun):
    def _note_streams(self) -> None:
        pass


class NotesOnlyWhatIsHeld(EngineRun):
    """The gradients of a single Recv may wait for the report."""

    def _note_streams(self) -> None:
        if not self._is_alone:
            super()._note_streams()


class WaitsForOthersOnlyWithSeveral(EngineRun):
    """A gradient may be the only one of its message, and yet leave with a later Recv that has none."""

    def _post(self, parcel: Any, recv: Any = None) -> None:
        super()._post(parcel, recv if len(parcel.tensors) > 1 else recv or SimpleNamespace())


class NeverWaits(Streams):
    def catch_up(self) -> None:
        pass


@pytest.mark.parametrize("mistake", [NotesNothing, NotesOnlyWhatIsHeld, WaitsForOthersOnlyWithSeveral])
def test_a_mistake_of_a_run_is_noticed(mistake: type[EngineRun]) -> None:
    with pytest.raises(Race):
        run_many(mistake)


def test_a_mistake_of_the_streams_is_noticed() -> None:
    with pytest.raises(Race):
        run_many(streams=NeverWaits)
