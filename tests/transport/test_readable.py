"""Waiting for bytes: awake in the middle of an exchange, asleep otherwise."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from backhaul.transport import readable
from backhaul.transport.readable import Readable

AWAKE_SECONDS = 0.0004
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture(autouse=True)
def _several_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nobody else wants one."""
    monkeypatch.setattr(readable, "may_stay_awake", lambda: True)
    monkeypatch.setattr(readable, "_turn", readable._Turn())
    monkeypatch.setattr("os.sched_yield", lambda: None)


def in_an_exchange(ends: Pair) -> Readable:
    """One whose last bytes were there at once."""
    mine, other = ends
    found = Readable(mine, AWAKE_SECONDS)
    other.send(b"x")
    assert found.wait(1)
    mine.recv(1)
    return found


def busy_seconds(found: Readable, timeout: float) -> float:
    """What this thread works while it waits in vain."""
    before = time.thread_time()
    assert not found.wait(timeout)
    return time.thread_time() - before


def test_bytes_that_are_there(ends: Pair) -> None:
    mine, other = ends
    other.send(b"x")
    assert Readable(mine, AWAKE_SECONDS).wait(None)


def test_no_bytes_in_time(ends: Pair) -> None:
    start = time.monotonic()
    assert not Readable(ends[0], AWAKE_SECONDS).wait(0.02)
    assert 0.02 <= time.monotonic() - start < 1


def test_the_end_of_a_connection_is_something_to_read(ends: Pair) -> None:
    mine, other = ends
    other.close()
    assert Readable(mine, AWAKE_SECONDS).wait(None)


@pytest.mark.parametrize("awake", [False, True])
def test_bytes_that_come_meanwhile(ends: Pair, awake: bool) -> None:
    mine, other = ends
    found = in_an_exchange(ends) if awake else Readable(mine, AWAKE_SECONDS)
    sender = threading.Timer(0.01, other.send, [b"x"])
    sender.start()
    assert found.wait(5)
    sender.join()


def test_who_is_idle_sleeps(ends: Pair) -> None:
    found = Readable(ends[0], AWAKE_SECONDS)
    assert busy_seconds(found, 0.2) < 0.01
    assert busy_seconds(found, 0.2) < 0.01


def test_in_an_exchange_it_is_awake_for_a_moment_and_only_once(ends: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_an_exchange(ends)
    looks: list[float] = []
    look_until = found._look_until

    def counted(poll: Any, end: float) -> bool:
        looks.append(end - time.perf_counter())
        return look_until(poll, end)

    monkeypatch.setattr(found, "_look_until", counted)
    assert not found.wait(0.01)
    assert len(looks) == 1
    assert looks[0] <= AWAKE_SECONDS
    assert not found.wait(0.01)
    assert len(looks) == 1


def test_bytes_that_come_while_it_is_awake_keep_it_so(ends: Pair) -> None:
    mine, other = ends
    found = in_an_exchange(ends)
    for _ in range(3):
        other.send(b"x")
        assert found.wait(1)
        mine.recv(1)
        assert found._comes_soon


def test_one_thread_of_a_process_is_awake_at_a_time(ends: Pair) -> None:
    found = in_an_exchange(ends)
    with readable._turn.lock:
        assert busy_seconds(found, 0.2) < 0.01


def test_who_is_not_given_its_processor_back_pauses(ends: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()  # never set: waiting for it takes the time that somebody else would
    monkeypatch.setattr("os.sched_yield", lambda: taken.wait(0.002))
    found = in_an_exchange(ends)
    pauses = []
    for _ in range(3):
        found._comes_soon = True
        readable._turn.paused_until = 0.0
        before = time.perf_counter()
        assert not found.wait(0.001)
        pauses.append(readable._turn.paused_until - before)
    assert pauses[0] >= readable._MIN_PAUSE
    assert pauses[1] > 1.5 * pauses[0]
    assert pauses[2] > 1.5 * pauses[1]
    found._comes_soon = True
    assert busy_seconds(found, 0.01) < 0.005  # asleep, in the pause


def test_an_exchange_that_goes_well_makes_the_next_pause_short(ends: Pair) -> None:
    other = ends[1]
    for _ in range(5):
        readable._turn.pause(0.0)
    found = in_an_exchange(ends)
    other.send(b"x")
    assert found.wait(1)
    readable._turn.pause(0.0)
    assert readable._turn.paused_until == readable._MIN_PAUSE


def test_on_one_processor_nobody_is_awake(ends: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readable, "may_stay_awake", lambda: False)
    found = in_an_exchange(ends)
    assert not found._comes_soon
    assert busy_seconds(found, 0.2) < 0.01
