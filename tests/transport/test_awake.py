"""Waiting for bytes: a thread stays awake for about as long as recent waits took, and then sleeps."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from select import poll
from typing import Any

import pytest

from backhaul.transport import awake
from backhaul.transport.awake import Rhythm, most_awake, poll_awake
from backhaul.transport.readable import Readable

MOST = 0.003
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture(autouse=True)
def _several_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has several idle processors."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(awake, "_turn", awake._Turn())
    monkeypatch.setattr("os.sched_yield", lambda: None)


class Clock:
    """A clock that advances when a thread polls or sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comes_after: float, look: float = 0.00001) -> None:
        self.now = 100.0
        self.comes_at = self.now + comes_after
        self.look = look
        self.looks = 0
        self.slept = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def poll(self, milliseconds: int | None) -> awake.Ready:
        start = self.now
        if milliseconds == 0:
            self.looks += 1
            self.now += self.look
        else:
            end = math.inf if milliseconds is None else start + milliseconds / 1000
            self.now = max(start, min(end, self.comes_at))
            self.slept += self.now - start
        return [(3, 1)] if self.now >= self.comes_at else []


class TimedPoll:
    """`select.poll` for a `Clock`: the machine cannot take the processor from the thread while it looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inside = poll()
        self.register = self._inside.register

    def poll(self, milliseconds: int | None) -> awake.Ready:
        found = self._inside.poll(milliseconds)
        if milliseconds == 0:
            self._clock.now += self._clock.look
        elif milliseconds is not None and not found:
            self._clock.now += milliseconds / 1000
        return found


# The rhythm.


@pytest.mark.parametrize(
    ("waits", "worth"),
    [
        ([], 0.0),
        ([0.0], 0.0001),
        ([0.001], 0.0021),
        ([0.002], MOST),
        ([MOST], 0.0),
        ([5.0], 0.0),
        ([0.0005, 0.0001], 0.0011),
        ([0.0001, 0.0005], 0.0011),
        ([5.0, 0.0001], 0.0003),
        ([0.0001, 5.0], 0.0),
        ([0.001, 0.0001, 0.0001], 0.0003),
    ],
)
def test_staying_awake_is_worth_twice_the_longer_of_the_last_two_waits(waits: list[float], worth: float) -> None:
    rhythm = Rhythm()
    for seconds in waits:
        rhythm.waited(seconds)
    assert rhythm.worth(MOST) == pytest.approx(worth)


@pytest.mark.parametrize("most", [0.0, 0.0002, 0.01])
def test_no_wait_is_worth_more_than_the_limit(most: float) -> None:
    rhythm = Rhythm()
    rhythm.waited(0.0001)
    rhythm.waited(0.0001)
    assert rhythm.worth(most) <= most


@pytest.mark.parametrize(
    ("processors", "option", "expected"),
    [
        (1, None, 0.0),
        (1, 0.5, 0.0),
        (2, None, awake._FOR_EACH_PROCESSOR),
        (3, None, 2 * awake._FOR_EACH_PROCESSOR),
        (64, None, awake._MOST),
        (2, 0.0, 0.0),
        (2, 0.5, 0.5),
    ],
)
def test_the_limit_follows_from_the_option_and_the_processors(
    processors: int, option: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    assert most_awake(option) == pytest.approx(expected)


# The wait.


def rhythm_of(*waits: float) -> Rhythm:
    rhythm = Rhythm()
    for seconds in waits:
        rhythm.waited(seconds)
    return rhythm


def test_bytes_that_come_in_the_rhythm_find_the_thread_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=0.0015)
    rhythm = rhythm_of(0.001)
    assert poll_awake(clock.poll, rhythm, None, MOST)
    assert clock.slept == 0.0
    assert rhythm.worth(MOST) > 0.0021, "the next one may take as long as this one"


def test_a_thread_stays_awake_for_about_twice_the_last_wait_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=1.0)
    rhythm = rhythm_of(0.0005)
    assert poll_awake(clock.poll, rhythm, None, MOST)
    assert clock.slept == pytest.approx(1.0 - 0.0011, abs=0.0001)
    assert rhythm.worth(MOST) == 0.0, "that was long: the next one sleeps at once"


def test_a_thread_never_stays_awake_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=1.0)
    assert poll_awake(clock.poll, rhythm_of(0.0029), None, MOST)
    assert clock.slept == pytest.approx(1.0 - MOST, abs=0.0001)


def test_a_thread_that_is_idle_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=1.0)
    rhythm = Rhythm()
    for _ in range(3):
        clock.comes_at = clock.now + 1.0
        assert poll_awake(clock.poll, rhythm, None, MOST)
    assert clock.looks == 0


def test_no_thread_stays_awake_if_the_limit_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=0.001)
    assert poll_awake(clock.poll, rhythm_of(0.0), None, 0.0)
    assert clock.looks == 0


@pytest.mark.parametrize("last", [0.0005, 5.0], ids=["awake", "asleep"])
def test_a_timeout_is_kept(monkeypatch: pytest.MonkeyPatch, last: float) -> None:
    clock = Clock(monkeypatch, comes_after=5.0)
    start = clock.now
    assert not poll_awake(clock.poll, rhythm_of(last), 0.05, MOST)
    assert 0.0499 <= clock.now - start < 0.06


def test_a_timeout_while_a_thread_stays_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=5.0)
    start = clock.now
    assert not poll_awake(clock.poll, rhythm_of(0.001), 0.0005, MOST)
    assert 0.0005 <= clock.now - start < 0.002


def test_one_thread_of_a_process_is_awake_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=0.001)
    with awake._turn.lock:
        assert poll_awake(clock.poll, rhythm_of(0.0005), None, MOST)
    assert clock.looks == 0
    assert not awake._turn.lock.locked()


def test_a_thread_that_gets_its_processor_back_too_late_pauses_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, comes_after=math.inf)

    def taken() -> None:
        clock.now += 0.002

    monkeypatch.setattr("os.sched_yield", taken)
    pauses = []
    for _ in range(8):
        clock.now = max(clock.now, awake._turn.paused_until)
        clock.comes_at = clock.now + 0.001
        assert poll_awake(clock.poll, rhythm_of(0.001), None, MOST)
        pauses.append(awake._turn.paused_until - clock.now)
        looks = clock.looks
        clock.comes_at = clock.now + 0.001
        assert poll_awake(clock.poll, rhythm_of(0.001), None, MOST)
        assert clock.looks == looks, "all threads sleep in the pause"
    assert pauses[0] == pytest.approx(awake._MIN_PAUSE, abs=0.001)
    assert pauses[1] > 1.5 * pauses[0]
    assert pauses[2] > 1.5 * pauses[1]
    assert max(pauses) <= awake._MAX_PAUSE


def test_yielding_the_processor_costs_nothing_if_no_bytes_came(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=math.inf)

    def taken() -> None:
        clock.now += 0.002

    monkeypatch.setattr("os.sched_yield", taken)
    assert not poll_awake(clock.poll, rhythm_of(0.001), 0.01, MOST)
    assert awake._turn.paused_until == 0.0


def test_a_good_exchange_makes_the_next_pause_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=0.0005)
    for _ in range(5):
        awake._turn.pause(0.0)
    awake._turn.paused_until = 0.0
    assert poll_awake(clock.poll, rhythm_of(0.0005), None, MOST)
    awake._turn.pause(0.0)
    assert awake._turn.paused_until == awake._MIN_PAUSE


# A socket.


def busy_seconds(found: Readable, timeout: float) -> float:
    """The processor time of this thread while it waits, and nothing comes."""
    before = time.thread_time()
    assert not found.wait(timeout)
    return time.thread_time() - before


def in_an_exchange(ends: Pair, most: float | None = MOST) -> Readable:
    """A socket whose last bytes came at once."""
    mine, other = ends
    found = Readable(mine, most)
    for _ in range(2):
        other.send(b"x")
        assert found.wait(1)
        mine.recv(1)
    return found


def test_bytes_that_have_arrived_end_the_wait(ends: Pair) -> None:
    mine, other = ends
    other.send(b"x")
    assert Readable(mine, MOST).wait(None)


def test_no_bytes_in_time(ends: Pair) -> None:
    start = time.monotonic()
    assert not Readable(ends[0], MOST).wait(0.02)
    assert 0.02 <= time.monotonic() - start < 1


def test_the_end_of_a_connection_is_something_to_read(ends: Pair) -> None:
    mine, other = ends
    other.close()
    assert Readable(mine, MOST).wait(None)


@pytest.mark.parametrize("exchange", [False, True])
def test_bytes_that_come_during_the_wait_end_it(ends: Pair, exchange: bool) -> None:
    mine, other = ends
    found = in_an_exchange(ends) if exchange else Readable(mine, MOST)
    sender = threading.Timer(0.01, other.send, [b"x"])
    sender.start()
    assert found.wait(5)
    sender.join()


def test_an_idle_socket_costs_nothing(ends: Pair) -> None:
    found = Readable(ends[0], MOST)
    assert busy_seconds(found, 0.1) < 0.01
    assert busy_seconds(found, 0.1) < 0.01


def test_in_an_exchange_a_socket_is_looked_at_again_and_again(ends: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, comes_after=math.inf)
    monkeypatch.setattr("select.poll", lambda: TimedPoll(clock))
    offers: list[float] = []
    monkeypatch.setattr("os.sched_yield", lambda: offers.append(clock.now))
    found = in_an_exchange(ends)
    offers.clear()
    assert not found.wait(0.01)
    assert len(offers) > 1, "it was awake for a moment"
    offers.clear()
    assert not found.wait(0.01)
    assert not offers, "and only once"


def test_on_one_processor_no_thread_stays_awake(ends: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    offers: list[Any] = []
    monkeypatch.setattr("os.sched_yield", lambda: offers.append(None))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    found = in_an_exchange(ends, None)
    assert not found.wait(0.01)
    assert not offers
    assert len(os.sched_getaffinity(0)) == 1
