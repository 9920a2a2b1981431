"""A seeded simulation of `devices.handover`: threads that hand values on a GPU to each other, on a `FakeDevice`.

One seed is one schedule::

    python tests/devices/handover_simulation.py FROM TO     # runs many

The code of `handover` runs unchanged, on the simulated threads and locks of `turns`. Another thread may take the turn
before every bytecode of it and before and after every operation of the driver. `FakeDevice` raises `Race` as soon as
some order of the device would use a value before it is made, or memory before its last user is done.

The threads do what those of a worker do
----------------------------------------
- A thread of the worker handles a request: it uses values that others have published, makes new ones, leaves word and
  publishes them. Its function may choose another stream, and other requests may interrupt it (a gate).
- A thread of the worker runs the callback of a future on fresh streams, and may be interrupted as well.
- A user's thread, on its own streams, uses values and makes new ones.
- All of them take turns with parameters that several locks guard and one baton orders.
- Values are dropped, and torch's allocator gives their memory to others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
sys.path.insert(0, str(Path(__file__).parent))

from fake_device import FakeDevice, Race
from turns import World, here, installed
from turns_threads import Lock, Thread

from backhaul.devices import handover
from backhaul.devices.handover import Baton, Key, Streams

_MOST_VALUES = 4
_DEFAULT = 0


class _Event:
    def __init__(self, number: int) -> None:
        self.number = number


class FakeDriver:
    """A `handover.Driver` of a `FakeDevice`. Another thread may take the turn before and after each operation."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self._streams: dict[tuple[int, int], Key] = {}  # by thread and device: its current stream
        self._bound: set[tuple[int, int]] = set()  # threads and devices: where `record` and `wait` may be called
        self._handles: dict[Key, int] = {}
        self._made = 0
        self._events = 0

    def current_key(self, device: int, /) -> Key:
        here().pause()
        return self._streams.get((here().running.number, device), (_DEFAULT, device, 1))

    def current_stream(self, device: int) -> int:
        found = self.handle(self.current_key(device))
        self._bound.add((here().running.number, device))
        return found

    def handle(self, key: Key) -> int:
        return self._handles.setdefault(key, len(self._handles) + 1)

    def new_stream(self, device: int) -> Key:
        self._made += 1
        return self._made, device, 1

    def make_current(self, keys: Sequence[Key]) -> None:
        for key in keys:
            here().pause()
            self._streams[here().running.number, key[1]] = key

    def new_event(self, device: int) -> _Event:
        here().pause()
        self._events += 1
        return _Event(self._events)

    def record(self, event: int, stream: int) -> None:
        self._enqueue(self.device.record, event, stream)

    def wait(self, event: int, stream: int) -> None:
        self._enqueue(self.device.wait, event, stream)

    def _enqueue(self, operation: Callable[[int, int], None], event: int, stream: int) -> None:
        here().pause()
        if not any(thread == here().running.number for thread, _ in self._bound):
            raise AssertionError("the driver is called on a thread to which no context is bound")
        if not 1 <= event <= self._events:
            raise AssertionError(f"there is no event {event}")
        operation(event, stream)
        here().pause()


class _Value:
    """Something that a thread has published."""

    def __init__(self, device: int, memory: int, content: int, home: int, made: _Event | None) -> None:
        self.device = device
        self.memory = memory
        self.content = content
        self.home = home
        """The stream of its memory."""
        self.made = made
        """The event that a future has for it; None if word was left."""
        self.users = 0
        self.dropped = False


class Simulation:
    """One schedule. `run` raises what a thread of it has raised."""

    def __init__(
        self, seed: int, streams: type[Streams] = Streams, baton: type[Baton] = Baton, thread: type[Work] | None = None
    ) -> None:
        self.random = Random(seed)
        self.fake = FakeDevice(seed)
        self.driver = FakeDriver(self.fake)
        self.devices = self.random.choice([(0,), (0,), (0, 1)])
        self.streams = streams(self.devices, self.driver)
        self.baton = baton(self.driver, set(self.devices))
        self.parameters = [(self.random.choice(self.devices), memory) for memory in (-1, -2)]
        self.locks = [Lock() for _ in self.parameters]
        self.contents = dict.fromkeys((memory for _, memory in self.parameters), 0)
        self.values: list[_Value] = []
        self.made = 0
        self.failures: list[BaseException] = []
        self.patience = self.random.choice([1, 3, 20, 200])
        """A thread goes on for at most about this many bytecodes."""
        self.turns = self.random.choice([0.1, 0.3, 0.9])
        self._work = Work if thread is None else thread

    def run(self) -> None:
        random = self.random
        for device, memory in self.parameters:
            self.fake.write(memory, 0, self.driver.handle((_DEFAULT, device, 1)))
        self.fake.run()
        self.fake._writer.clear()  # the threads begin after that
        kinds = random.choice(
            [("own", "own"), ("own", "own", "user"), ("own", "user", "user"), ("own",) * 3 + ("user",)]
        )
        threads = [Thread(target=self._guarded, args=(self._work(self, kind == "own"),), daemon=True) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.failures:
            self.fake.run()
            return
        raise self.failures[0]

    def _guarded(self, work: Work) -> None:
        files = {
            handover.__file__,
            *(sys.modules[type(each).__module__].__file__ for each in (self.streams, self.baton)),
        }
        world, random, patience = here(), self.random, self.patience
        left = random.randrange(patience) + 1

        def on_bytecode(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if event == "opcode":
                left -= 1
                if not left:
                    left = random.randrange(patience) + 1
                    world.pause()
            return on_bytecode

        def on_call(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            return on_bytecode

        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            work.run()
        except Exception as failure:
            self.failures.append(failure)
        finally:
            sys.settrace(before)


class Work:
    """What one thread does."""

    def __init__(self, simulation: Simulation, own: bool) -> None:
        self.all = simulation
        self.random = simulation.random
        self.driver = simulation.driver
        self.fake = simulation.fake
        self.streams = simulation.streams
        self.own = own

    def run(self) -> None:
        if self.own:
            self.streams.adopt_thread()
            acts = [self.request, self.request, self.callback]
        else:
            if self.random.random() < 0.7:
                self.driver.make_current([self.driver.new_stream(device) for device in self.all.devices])
            acts = [self.user_code]
        for _ in range(self.random.randint(1, 4)):
            if self.all.failures:
                return
            if self.random.random() < self.all.turns:
                self.take_turn()
            self.random.choice(acts)()
            self.drop()

    # What a thread of the worker does.

    def request(self, depth: int = 0) -> None:
        there = list(self.all.values)  # a request comes after what its sender has seen
        before = self.streams.enter()
        try:
            if self.random.random() < 0.3:
                there = list(self.all.values)
                self.streams.catch_up()
            made = self.compute(there, depth)
            self.leave_word()
            self.publish(made)
        finally:
            self.streams.leave(before)

    def leave_word(self) -> None:
        self.streams.leave_word()

    def compute(self, there: Sequence[_Value], depth: int) -> list[_Value]:
        """A function of the user."""
        self.use_some(there)
        made = [self.make()]
        if self.random.random() < 0.3:
            device = self.random.choice(self.all.devices)
            with self.on_another_stream(device):
                aside = [self.make(device)]
                self.may_be_interrupted(depth)
                self.use_some(aside)
            made += aside
        self.may_be_interrupted(depth)
        self.use_some(made)
        return made

    def may_be_interrupted(self, depth: int) -> None:
        if self.own and depth < 2 and self.random.random() < 0.4:
            self.request(depth + 1)

    def callback(self) -> None:
        """The callback of a future, as `streams.fresh` and `streams.mark` have it."""
        before = [self.driver.current_key(device) for device in self.all.devices]
        self.driver.make_current([self.driver.new_stream(device) for device in self.all.devices])
        try:
            if self.random.random() < 0.5:
                there = list(self.all.values)
                self.streams.catch_up()
            else:
                there = [each for each in self.all.values if each.made is not None]
            made = self.compute(there, 0)
            for value in made:
                value.made = self.driver.new_event(value.device)
                self.driver.record(value.made.number, self.driver.current_stream(value.device))
            self.publish(made)
        finally:
            self.driver.make_current(before)

    # What a thread of the user does.

    def user_code(self) -> None:
        there = list(self.all.values)
        self.streams.catch_up()
        made = self.compute(there, 0)
        self.leave_word()
        self.publish(made)

    @contextmanager
    def on_another_stream(self, device: int) -> Iterator[None]:
        """As a careful user does it: the stream waits for the current one, and the current one for it."""
        here, there = self.driver.current_key(device), self.driver.new_stream(device)
        self._wait(device, there, here)
        self.driver.make_current([there])
        try:
            yield
        finally:
            self.driver.make_current([here])
            self._wait(device, here, there)

    def _wait(self, device: int, waiting: Key, awaited: Key) -> None:
        self.driver.current_stream(device)
        event = self.driver.new_event(device).number
        self.driver.record(event, self.driver.handle(awaited))
        self.driver.wait(event, self.driver.handle(waiting))

    # What all of them do.

    def make(self, device: int | None = None) -> _Value:
        if device is None:
            device = self.random.choice(self.all.devices)
        stream = self.driver.current_stream(device)
        self.all.made += 1
        memory = self.fake.allocate(stream)
        self.fake.write(memory, self.all.made, stream)
        return _Value(device, memory, self.all.made, stream, None)

    def publish(self, values: Sequence[_Value]) -> None:
        self.all.values += values

    def use_some(self, values: Sequence[_Value]) -> None:
        for value in values:
            if value.dropped or (len(values) > 1 and self.random.random() < 0.3):
                continue
            value.users += 1
            stream = self.driver.current_stream(value.device)
            if value.made is not None:
                self.driver.wait(value.made.number, stream)
            self.tell_allocator(value, stream)
            self.fake.read(value.memory, value.content, stream)
            value.users -= 1

    def tell_allocator(self, value: _Value, stream: int) -> None:
        if stream != value.home:
            self.fake.use(value.memory, stream)

    def drop(self) -> None:
        """Drop the oldest values that no thread is using."""
        values = self.all.values
        while len(values) > _MOST_VALUES and not values[0].users:
            value = values.pop(0)
            value.dropped = True
            self.fake.free(value.memory)
        if self.random.random() < 0.1:
            self.fake.run()

    def take_turn(self) -> None:
        """Change a parameter that other threads change as well."""
        index = self.random.randrange(len(self.all.locks))
        device, memory = self.all.parameters[index]
        with self.all.locks[index]:
            self.all.baton.take()
            stream = self.driver.current_stream(device)
            content = self.all.contents[memory]
            self.fake.read(memory, content, stream)
            self.all.contents[memory] = content + 1
            self.fake.write(memory, content + 1, stream)
            self.all.baton.leave()


@contextmanager
def simulated() -> Iterator[World]:
    """A block in which simulations can run."""
    with installed("backhaul"), World(0) as world:
        world._longest_turn = 1  # each lock lets others go first
        yield world


def run(world: World, seed: int, **kinds: Any) -> None:
    world.random.seed(seed)
    world.turn = world.switches = 0
    world.trace.clear()
    try:
        Simulation(seed, **kinds).run()
    except Race as race:
        raise Race(f"{race}; replay: python {Path(__file__).name} {seed} {seed + 1}") from race


def main() -> None:
    first, last = map(int, sys.argv[1:])
    with simulated() as world:
        for seed in range(first, last):
            run(world, seed)
    print(f"{last - first} schedules")


if __name__ == "__main__":
    main()
