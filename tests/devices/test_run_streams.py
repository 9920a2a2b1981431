"""Gradients of a run on GPUs are used after the device has computed them, on whatever streams its Recvs are.

The code of `autograd.run` and `devices.handover` runs unchanged, on a `FakeDevice`.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import FakeDevice, Race

from backhaul.autograd.run import EngineRun, Mine
from backhaul.devices.handover import Key, Streams
from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Shortcut

STARTER, ME = 0, 1


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

    def current_key(self, device: int, /) -> Key:
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


class Original:
    """A gradient for this worker, of which the run makes a copy on the current stream."""

    def __init__(self, world: World, gradient: torch.Tensor) -> None:
        self._world = world
        self._gradient = gradient

    def clone(self) -> torch.Tensor:
        made = self._gradient.clone()
        self._world.use(self._gradient)
        self._world.make(made, self._world.made[self._gradient.data_ptr()])
        return made


class World:
    """One run: Recvs that torch's engine reaches one by one, each on the stream of its forward pass."""

    def __init__(self, seed: int, run: type[EngineRun] = EngineRun, streams: type[Streams] = Streams) -> None:
        self.random = Random(seed)
        self.fake = FakeDevice(seed)
        self.driver = Driver(self.fake)
        self.streams = streams((0,), self.driver)
        self.made: dict[int, int] = {}
        """By address of the gradient: its value."""
        self.used = 0
        """How many gradients have left, or were used by this worker."""
        chance = self.random
        count = chance.choice([1, 2, 2, 3, 4])
        senders = [WorkerInfo(rank, f"worker{rank}") for rank in (STARTER, 2)]
        self.nodes = [Node(chance.choice(senders), 10 * number) for number in range(count)]
        agent: Any = SimpleNamespace(
            observers=(),
            devices=SimpleNamespace(streams=self.streams),
            me=WorkerInfo(ME, "worker1"),
            execution=SimpleNamespace(edges=None),
        )
        shortcuts = {}
        if chance.random() < 0.3:
            mine = [node.recv.message for node in self.nodes if node.recv.sender.id == STARTER]
            shortcuts = {message: Shortcut(message, ME, message) for message in mine if chance.random() < 0.7}
        local: Any = SimpleNamespace(
            backward=SimpleNamespace(id=1),
            shortcuts=shortcuts,
            starter=STARTER,
            giving_to=lambda rank: None,
            onward=lambda source, recv: (),
            record=SimpleNamespace(sends=defaultdict(lambda: torch.zeros(()))),
        )
        component: Any = SimpleNamespace(
            sources=(1,), recvs=dict.fromkeys(self.nodes, (0,)), waits=chance.random() < 0.3, size=5
        )
        protocol: Any = SimpleNamespace(require=lambda local, recv: None, send=self.send, hand_over=self.hand_over)
        self.run_ = run(
            agent,
            local,
            component,
            protocol=protocol,
            held=lambda run: None,
            joint=chance.random() < 0.2,
            carried=chance.random() < 0.8,
        )

    def make(self, gradient: torch.Tensor, value: int) -> None:
        """Write a gradient on the current stream."""
        self.made[gradient.data_ptr()] = value
        self.fake.write(gradient.data_ptr(), value, self.driver.stream)

    def use(self, gradient: torch.Tensor) -> None:
        """Read a gradient on the current stream."""
        self.fake.read(gradient.data_ptr(), self.made[gradient.data_ptr()], self.driver.stream)

    def send(self, local: Any, rank: int, message: Any, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.use(tensor)
            self.used += 1

    def hand_over(self, local: Any, gradients: Mine) -> None:
        """Use gradients for this worker, as another thread does, with a stream of its own."""
        before, self.driver.stream = self.driver.stream, 5
        self.streams.catch_up()  # as a thread does before it runs the component of these gradients
        for (gradient,) in gradients.values():
            if gradient is not None:
                self.use(gradient)
                self.used += 1
        self.driver.stream = before

    def run(self) -> None:
        chance = self.random
        gradients = []
        for number, node in enumerate(self.nodes):
            self.driver.stream = chance.choice([1, 2, 3])
            gradient = None if chance.random() < 0.3 else torch.zeros(4)
            if gradient is not None:
                gradients.append(gradient)
                self.make(gradient, number)
            self.run_.emit(node, [gradient])
            if chance.random() < 0.2:
                self.fake.run()
        self.driver.stream = 4
        self.run_.flush()
        if (late := self.run_.outcome.late) is not None:
            self.streams.catch_up()  # as `progress` does before it reports
            self.send(None, late.to.id, None, late.tensors)
        self.hand_over(None, self.run_.outcome.mine or {})
        self.fake.run()
        assert self.used == len(gradients)


def run_world(seed: int, run: type[EngineRun] = EngineRun, streams: type[Streams] = Streams) -> None:
    world = World(seed, run, streams)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("backhaul.autograd.run.plain", lambda gradient: Original(world, gradient))
        world.run()


def run_many(run: type[EngineRun] = EngineRun, streams: type[Streams] = Streams) -> None:
    for seed in range(200):
        run_world(seed, run, streams)


@pytest.mark.parametrize("seed", range(200))
def test_no_gradient_is_used_too_early(seed: int) -> None:
    run_world(seed)


class NotesNothing(EngineRun):
    def _note_streams(self) -> None:
        pass


class NotesOnlyWhatIsHeld(EngineRun):
    """The gradients of a single Recv may wait for the report."""

    def _note_streams(self) -> None:
        if self._held is not None:
            super()._note_streams()


class NotesNoCopy(EngineRun):
    """The copy of a gradient for this worker is work, too."""

    def _keep(self, source: int, gradient: torch.Tensor | None) -> None:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(Streams, "leave_word", lambda streams: None)
            super()._keep(source, gradient)


class WaitsForOthersOnlyWithSeveral(EngineRun):
    """A gradient may be the only one of its message, and yet leave with a later Recv that has none."""

    def _post(self, parcel: Any, recv: Any = None) -> None:
        super()._post(parcel, recv if len(parcel.tensors) > 1 else recv or SimpleNamespace())


class NeverWaits(Streams):
    def catch_up(self) -> None:
        pass


@pytest.mark.parametrize("mistake", [NotesNothing, NotesOnlyWhatIsHeld, NotesNoCopy, WaitsForOthersOnlyWithSeveral])
def test_a_mistake_of_a_run_is_noticed(mistake: type[EngineRun]) -> None:
    with pytest.raises(Race):
        run_many(mistake)


def test_a_mistake_of_the_streams_is_noticed() -> None:
    with pytest.raises(Race):
        run_many(streams=NeverWaits)
