"""Which thread holds the lock that another thread waits for, derived from their stacks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backhaul.inspection.blocking import Blocked, find_blocked

PATIENCE = 10.0
GLOBAL = threading.Lock()


class Things:
    """Ways to take and hold a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reentrant = threading.RLock()
        self.condition = threading.Condition()
        self.held = threading.Event()
        self.over = threading.Event()

    def hold_with(self) -> None:
        with self.lock:
            self.held.set()
            self.over.wait()

    def hold_acquired(self) -> None:
        self.lock.acquire()
        try:
            self.held.set()
            self.over.wait()
        finally:
            self.lock.release()

    def hold_global(self) -> None:
        with contextlib.nullcontext(), GLOBAL:
            self.held.set()
            self.over.wait()

    def hold_reentrant(self) -> None:
        self.reentrant.acquire()
        self.hold_more()

    def hold_more(self) -> None:
        """The source does not show which lock this is."""
        self.held.set()
        self.over.wait()
        self.reentrant.release()

    def hold_condition(self) -> None:
        with self.condition:
            self.held.set()
            self.over.wait()

    def hold_secretly(self) -> None:
        getattr(self, "lo" + "ck").acquire()
        self.held.set()
        self.over.wait()
        getattr(self, "lo" + "ck").release()

    def want_with(self) -> None:
        with self.lock:
            pass

    def want_acquired(self) -> None:
        self.lock.acquire()
        self.lock.release()

    def want_global(self) -> None:
        with GLOBAL:
            pass

    def want_reentrant(self) -> None:
        with self.reentrant:
            pass

    def want_condition(self) -> None:
        with self.condition:
            pass

    def want_event(self) -> None:
        self.held.set()
        self.over.wait()


@pytest.fixture
def things() -> Iterator[Things]:
    found = Things()
    try:
        yield found
    finally:
        found.over.set()


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def blocked_at(thread: threading.Thread) -> Blocked:
    """What a thread is blocked on, once it is."""
    assert thread.ident is not None
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = find_blocked(sys._current_frames()).get(thread.ident)
        if found is not None:
            return found
        threading.Event().wait(0.01)
    raise AssertionError("it is not found to be blocked")


@pytest.mark.parametrize(
    ("hold", "want", "what"),
    [
        ("hold_with", "want_with", "self.lock"),
        ("hold_acquired", "want_acquired", "self.lock"),
        ("hold_with", "want_acquired", "self.lock"),
        ("hold_global", "want_global", "GLOBAL"),
        ("hold_reentrant", "want_reentrant", "self.reentrant"),
        ("hold_condition", "want_condition", "self.condition"),
    ],
)
def test_the_holder_of_a_lock(things: Things, hold: str, want: str, what: str) -> None:
    holder = start(getattr(things, hold))
    assert things.held.wait(PATIENCE)
    waiter = start(getattr(things, want))
    assert blocked_at(waiter) == {"on": "lock", "what": what, "holder": holder.ident}
    things.over.set()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_a_lock_whose_holder_is_unknown(things: Things) -> None:
    start(things.hold_secretly)
    assert things.held.wait(PATIENCE)
    waiter = start(things.want_with)
    assert blocked_at(waiter) == {"on": "lock", "what": "self.lock", "holder": None}
    things.over.set()
    waiter.join(PATIENCE)


def test_a_thread_that_is_joined(things: Things) -> None:
    joined = start(things.want_event)
    waiter = start(joined.join)
    assert blocked_at(waiter) == {"on": "thread", "what": joined.name, "holder": joined.ident}
    assert blocked_at(joined) == {"on": "event", "what": "", "holder": None}
    things.over.set()
    waiter.join(PATIENCE)


def test_a_thread_that_has_its_lock_is_not_blocked(things: Things) -> None:
    theirs, ours = os.pipe()

    def read_inside() -> None:
        with things.lock:
            things.held.set()
            os.read(theirs, 1)

    thread = start(read_inside)
    assert things.held.wait(PATIENCE)
    assert find_blocked(sys._current_frames()).get(thread.ident or 0) is None
    os.close(ours)  # the reader sees the end of file
    thread.join(PATIENCE)
    os.close(theirs)


class Tempting:
    """Inspection must not run user code."""

    asked = False

    @property
    def lock(self) -> threading.Lock:
        Tempting.asked = True
        return GLOBAL

    def want(self) -> None:
        with self.lock:
            pass


def test_finding_a_holder_runs_no_code_of_the_user(things: Things) -> None:
    start(things.hold_global)
    assert things.held.wait(PATIENCE)
    waiter = start(Tempting().want)
    deadline = time.monotonic() + PATIENCE
    while not Tempting.asked and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    Tempting.asked = False
    find_blocked(sys._current_frames())
    assert not Tempting.asked
    things.over.set()
    waiter.join(PATIENCE)
