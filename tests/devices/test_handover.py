"""Threads hand values on a GPU to each other: nothing is used too early, in any order of their steps and of the device.

Then mistakes are planted, in the code and in its use. The simulation must notice each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import FakeDevice, Race
from handover_simulation import FakeDriver, Work, run, simulated
from turns import World

from backhaul.devices.handover import Baton, Key, Streams

_FEW = 50
_MANY = 1000
_MOST_UNNOTICED = 600  # schedules in which a mistake may do no harm


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with simulated() as made:
        yield made


def test_nothing_is_used_too_early(world: World) -> None:
    run_many(world, range(_FEW))


@pytest.mark.long
def test_nothing_is_used_too_early_in_many_schedules(world: World) -> None:
    run_many(world, range(_FEW, _MANY))


def test_a_seed_makes_the_same_schedule_each_time(world: World) -> None:
    def schedule(seed: int) -> list[int]:
        run(world, seed)
        turns = [number for number, _ in world.trace]
        first = min(set(turns) - {0})  # the main thread has the number 0
        return [number and number - first for number in turns]

    once = [schedule(seed) for seed in range(5)]
    assert [schedule(seed) for seed in range(5)] == once
    assert len(set(map(tuple, once))) == 5


# What the hot path costs.


def test_a_thread_that_is_alone_enqueues_nothing(world: World) -> None:
    fake = FakeDevice(0)
    streams = Streams((0, 1), FakeDriver(fake))
    streams.adopt_thread()
    for _ in range(3):
        with streams.handling():
            streams.catch_up()
            streams.leave_word()
    assert not fake._recorded
    assert not any(fake._streams.values())


def test_a_request_with_nothing_to_wait_for_runs_few_functions(world: World) -> None:
    """The driver's function for the current stream is one of C. It takes no lock."""
    driver = FakeDriver(FakeDevice(0))
    streams = Streams((0, 1), driver)
    streams.adopt_thread()
    streams.leave(streams.enter())
    keys = {device: driver.current_key(device) for device in streams.devices}
    streams._current = keys.__getitem__
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        before = streams.enter()
        streams.catch_up()
        streams.leave(before)
    finally:
        sys.setprofile(None)
    called = [name for name in called if name != "<listcomp>"]  # a function of its own before Python 3.12
    assert called == ["enter", "catch_up", "catch_up", "leave", "leave_word"]


def test_a_thread_waits_once_for_each_other_stream(world: World) -> None:
    fake = FakeDevice(0)
    driver = FakeDriver(fake)
    streams = Streams((0,), driver)
    keys = [driver.new_stream(0) for _ in range(4)]
    for key in keys:
        driver.make_current([key])
        streams.leave_word()
    streams.catch_up()
    enqueued = sum(map(len, fake._streams.values()))
    assert enqueued == 2 * 3
    assert streams._only == {0: keys[-1]}  # so nothing takes the lock
    streams.catch_up()
    streams.leave_word()
    assert sum(map(len, fake._streams.values())) == enqueued
    driver.make_current([keys[0]])
    streams.begin()
    assert sum(map(len, fake._streams.values())) == enqueued + 2  # only that one has work that it has not waited for


# Streams that a thread has when it does nothing, and when it was interrupted.


@pytest.fixture
def streams(world: World) -> Streams:
    made = Streams((0, 1), FakeDriver(FakeDevice(0)))
    made.adopt_thread()
    return made


def current(streams: Streams) -> list[Key]:
    return [streams._current(device) for device in streams.devices]


def test_a_thread_keeps_the_streams_of_the_worker_after_its_first_request(streams: Streams) -> None:
    before = streams.enter()
    own = current(streams)
    streams.leave(before)
    assert current(streams) == own == list(streams._own)


@pytest.mark.parametrize("requests_before", [0, 1])
@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_a_thread_that_was_interrupted_gets_its_streams_back(
    streams: Streams, requests_before: int, chosen: Sequence[int]
) -> None:
    """The interruption may come before its first request, as in the callback of a future."""
    for _ in range(requests_before):
        streams.leave(streams.enter())
    streams._driver.make_current([streams._driver.new_stream(device) for device in chosen])
    mine = current(streams)
    with streams.handling():
        assert current(streams) == list(streams._own)
        assert current(streams) != mine
    assert current(streams) == mine


def test_a_thread_that_was_interrupted_first_still_gets_the_streams_of_the_worker(streams: Streams) -> None:
    default = current(streams)
    streams._driver.make_current([streams._driver.new_stream(0)])
    with streams.handling():
        pass
    streams._driver.make_current(default)
    streams.leave(streams.enter())
    assert current(streams) == list(streams._own)


def test_a_thread_gets_default_streams_back_if_it_has_chosen_them(streams: Streams) -> None:
    default = current(streams)
    streams.leave(streams.enter())
    streams._driver.make_current(default)
    with streams.handling():
        assert current(streams) == list(streams._own)
    assert current(streams) == default


def test_a_thread_of_the_user_keeps_its_streams(world: World) -> None:
    streams = Streams((0, 1), FakeDriver(FakeDevice(0)))
    mine = current(streams)
    with streams.handling():
        assert current(streams) == mine
    streams.begin()
    assert current(streams) == mine


def test_begin_gives_a_thread_of_the_worker_its_streams(streams: Streams) -> None:
    streams.begin()
    assert current(streams) == list(streams._own)


# Mistakes.


def run_many(world: World, seeds: range, **kinds: type) -> None:
    for seed in seeds:
        run(world, seed, **kinds)


def notices(world: World, **kinds: type) -> None:
    with pytest.raises(Race):
        run_many(world, range(_MOST_UNNOTICED), **kinds)


class Waiting(Streams):
    """`_wait_on` in steps, so that a mistake replaces one of them."""

    def _wait_on(self, device: int) -> None:
        mine = self._current(device)
        with self._lock:
            fresh = self._fresh[device]
            others = fresh - {mine}
            if not others:
                return
            self._begin(device, mine)
            here = self._driver.current_stream(device)
            event = self._event(device)
            for other in others:
                self._driver.record(event, self._driver.handle(other))
                self._driver.wait(event, here)
            self._end(device, mine)

    def _begin(self, device: int, mine: Key) -> None:
        self._only[device] = None

    def _end(self, device: int, mine: Key) -> None:
        self._fresh[device].clear()
        self._fresh[device].add(mine)
        self._only[device] = mine


class OnlyBeforeTheWait(Waiting):
    def _begin(self, device: int, mine: Key) -> None:
        self._only[device] = mine


class OnlyDuringTheRecord(Waiting):
    def _begin(self, device: int, mine: Key) -> None:
        pass


class ForgetsItself(Waiting):
    def _end(self, device: int, mine: Key) -> None:
        self._fresh[device].clear()
        self._only[device] = mine


class WithoutLock(Waiting):
    def _wait_on(self, device: int) -> None:
        mine = self._current(device)
        others = self._fresh[device] - {mine}
        if others:
            self._begin(device, mine)
            here = self._driver.current_stream(device)
            event = self._event(device)
            for other in others:
                self._driver.record(event, self._driver.handle(other))
                self._driver.wait(event, here)
            self._end(device, mine)


class EventReused(Streams):
    """The lock guards the sets, but not the event."""

    def _wait_on(self, device: int) -> None:
        mine = self._current(device)
        with self._lock:
            others = self._fresh[device] - {mine}
            if not others:
                return
            self._only[device] = None
            event = self._event(device)
        here = self._driver.current_stream(device)
        for other in others:
            self._driver.record(event, self._driver.handle(other))
            self._driver.wait(event, here)
        with self._lock:
            self._fresh[device] -= others
            self._fresh[device].add(mine)
            self._only[device] = mine if len(self._fresh[device]) == 1 else None


class WaitsForOne(Streams):
    def _wait_on(self, device: int) -> None:
        mine = self._current(device)
        with self._lock:
            others = self._fresh[device] - {mine}
            if not others:
                return
            self._only[device] = None
            here = self._driver.current_stream(device)
            event = self._event(device)
            self._driver.record(event, self._driver.handle(others.pop()))
            self._driver.wait(event, here)
            self._fresh[device] = {mine}
            self._only[device] = mine


class RecordsThenWaits(Waiting):
    """The event has the last record only."""

    def _wait_on(self, device: int) -> None:
        mine = self._current(device)
        with self._lock:
            others = self._fresh[device] - {mine}
            if not others:
                return
            self._begin(device, mine)
            here = self._driver.current_stream(device)
            event = self._event(device)
            for other in others:
                self._driver.record(event, self._driver.handle(other))
            self._driver.wait(event, here)
            self._end(device, mine)


class TrustsNone(Streams):
    """Takes None for nothing to wait for."""

    def catch_up(self) -> None:
        for device, only in self._only.items():
            if only is not None and self._current(device) != only:
                self._wait_on(device)


class NeverCatchesUp(Streams):
    def catch_up(self) -> None:
        pass


class NeverLeavesWord(Streams):
    def leave_word(self) -> None:
        pass


class AlwaysTheOnlyOne(Streams):
    def leave_word(self) -> None:
        for device in self._only:
            mine = self._current(device)
            with self._lock:
                self._fresh[device].add(mine)
                self._only[device] = mine


class LeavesWordWithoutLock(Streams):
    def leave_word(self) -> None:
        for device, only in self._only.items():
            mine = self._current(device)
            if only != mine:
                fresh = self._fresh[device]
                fresh.add(mine)
                self._only[device] = mine if len(fresh) == 1 else None


class NeverRestores(Streams):
    def leave(self, before: Sequence[Key]) -> None:
        self.leave_word()


class RestoresOnlyLater(Streams):
    """Takes what a thread interrupts for nothing if it has not handled a request yet."""

    def enter(self) -> Sequence[Key]:
        if self._state.is_own and not self._state.is_ready:
            self._state.is_ready = True
            self._driver.make_current(self._own or self._make())
            self.catch_up()
            return ()
        return super().enter()


@pytest.mark.parametrize(
    "mistake",
    [
        OnlyBeforeTheWait,
        OnlyDuringTheRecord,
        ForgetsItself,
        WithoutLock,
        EventReused,
        WaitsForOne,
        RecordsThenWaits,
        TrustsNone,
        NeverCatchesUp,
        NeverLeavesWord,
        AlwaysTheOnlyOne,
        LeavesWordWithoutLock,
        NeverRestores,
        RestoresOnlyLater,
    ],
)
def test_a_mistake_of_streams_is_noticed(world: World, mistake: type[Streams]) -> None:
    notices(world, streams=mistake)


def test_the_steps_of_waiting_without_a_mistake_are_right(world: World) -> None:
    run_many(world, range(_FEW), streams=Waiting)


class LeavesWordAfterPublication(Work):
    def leave_word(self) -> None:
        self.word_is_due = True

    def publish(self, values: Sequence[object]) -> None:
        super().publish(values)  # type: ignore[arg-type]
        if getattr(self, "word_is_due", False):
            self.streams._driver.current_key(0)  # another thread may take the turn
            self.streams.leave_word()


class DoesNotTellTheAllocator(Work):
    def tell_allocator(self, value: object, stream: int) -> None:
        pass


@pytest.mark.parametrize("mistake", [LeavesWordAfterPublication, DoesNotTellTheAllocator])
def test_a_mistake_of_a_thread_is_noticed(world: World, mistake: type[Work]) -> None:
    notices(world, thread=mistake)


class LeftWithoutWaiting(Baton):
    def leave(self) -> None:
        with self._lock:
            for device in self._devices:
                stream = self._driver.current_stream(device)
                event = self._left.get(device) or self._driver.new_event(device)
                self._driver.record(event.number, stream)
                self._left[device] = event


class TakenWithoutWaiting(Baton):
    def take(self) -> None:
        pass


class NeverLeft(Baton):
    def leave(self) -> None:
        pass


class LeftWithoutLock(Baton):
    def leave(self) -> None:
        self._wait()
        for device in self._devices:
            stream = self._driver.current_stream(device)
            event = self._left.get(device) or self._driver.new_event(device)
            self._driver.record(event.number, stream)
            self._left[device] = event


class NotedBeforeTheRecord(Baton):
    def leave(self) -> None:
        with self._lock:
            self._wait()
            for device in self._devices:
                stream = self._driver.current_stream(device)
                self._left[device] = event = self._driver.new_event(device)
                self._lock.release()
                self._driver.record(event.number, stream)
                self._lock.acquire()


@pytest.mark.parametrize(
    "mistake", [LeftWithoutWaiting, TakenWithoutWaiting, NeverLeft, LeftWithoutLock, NotedBeforeTheRecord]
)
def test_a_mistake_with_the_baton_is_noticed(world: World, mistake: type[Baton]) -> None:
    notices(world, baton=mistake)
