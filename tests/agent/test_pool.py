"""The pool: a job never waits for a thread, threads are used again, and close ends them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backhaul.agent import pool as pool_module
from backhaul.agent.pool import Pool

SOON = 10.0

Made = Callable[..., Pool]


@pytest.fixture
def make() -> Iterator[Made]:
    made: list[Pool] = []

    def pool(keep: int = 4, enter: Callable[[], None] = lambda: None) -> Pool:
        made.append(Pool("backhaul-test", keep, enter))
        made[-1]._idle = Idle()
        return made[-1]

    yield pool
    for each in made:
        each.close(time.monotonic() + SOON)


class Idle(list[Any]):
    """The pool's list of idle threads. A test can wait for its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def append(self, item: Any) -> None:
        with self.changed:
            super().append(item)
            self.changed.notify_all()

    def remove(self, item: Any) -> None:
        with self.changed:
            super().remove(item)
            self.changed.notify_all()


class Threads(set[threading.Thread]):
    """The pool's set of threads. A test can wait for the end of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def discard(self, item: threading.Thread) -> None:
        with self.changed:
            super().discard(item)
            self.changed.notify_all()


def run(pool: Pool, job: Callable[[], None]) -> threading.Event:
    """Start a job. The event is set when it is over."""
    done = threading.Event()

    def and_tell() -> None:
        try:
            job()
        finally:
            done.set()

    pool.run(and_tell)
    return done


def idle(pool: Pool, count: int) -> None:
    """Wait until ``count`` threads are idle: a thread becomes idle only after the end of its job."""
    assert isinstance(pool._idle, Idle)
    with pool._idle.changed:
        assert pool._idle.changed.wait_for(lambda: len(pool._idle) == count, SOON), f"{len(pool._idle)} idle"


def test_a_job_runs_on_another_thread(make: Made) -> None:
    seen: list[threading.Thread] = []
    assert run(make(), lambda: seen.append(threading.current_thread())).wait(SOON)
    assert seen[0] is not threading.current_thread()
    assert seen[0].name == "backhaul-test"
    assert seen[0].daemon


def test_jobs_that_wait_for_each_other_all_run(make: Made) -> None:
    """No job waits for a free thread, however many jobs there are."""
    pool = make(keep=1)
    together = threading.Barrier(51)
    for _ in range(50):
        pool.run(lambda: together.wait(SOON) and None)
    together.wait(SOON)
    assert pool.size >= 1


def test_an_idle_thread_is_used_again(make: Made) -> None:
    pool = make()
    seen = set()
    for _ in range(20):
        assert run(pool, lambda: seen.add(threading.get_ident())).wait(SOON)
        idle(pool, 1)
    assert len(seen) == 1
    assert pool.size == 1


def test_the_thread_that_ran_last_is_the_first_to_run_again(make: Made) -> None:
    pool = make()
    gates = [threading.Event() for _ in range(3)]
    ran: list[int] = []
    done = [run(pool, lambda gate=gate: gate.wait(SOON) and ran.append(threading.get_ident())) for gate in gates]
    for place in (1, 0, 2):
        gates[place].set()
        assert done[place].wait(SOON)
        idle(pool, len(ran))
    again: list[int] = []
    assert run(pool, lambda: again.append(threading.get_ident())).wait(SOON)
    assert again == ran[-1:]


def test_a_thread_that_goes_idle_while_the_pool_closes_ends(make: Made) -> None:
    """`close` has looked for idle threads a moment before this one is on the list."""
    pool = make()
    pool._threads = Threads()

    class Late(Idle):
        def append(self, item: Any) -> None:
            pool._closed = True
            super().append(item)

    pool._idle = Late()
    assert run(pool, lambda: None).wait(SOON)
    with pool._threads.changed:
        assert pool._threads.changed.wait_for(lambda: not pool._threads, SOON)


def test_enter_runs_first_and_once_on_each_thread(make: Made) -> None:
    entered: list[int] = []
    pool = make(enter=lambda: entered.append(threading.get_ident()))
    seen: list[bool] = []
    for _ in range(3):
        assert run(pool, lambda: seen.append(threading.get_ident() in entered)).wait(SOON)
        idle(pool, 1)
    assert seen == [True] * 3
    assert len(entered) == 1


def test_a_job_that_raises_is_logged_and_its_thread_goes_on(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    pool = make()
    with caplog.at_level(logging.ERROR):
        assert run(pool, lambda: 1 // 0).wait(SOON)  # type: ignore[arg-type, return-value]
        idle(pool, 1)
    assert "a job of the pool failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert run(pool, lambda: None).wait(SOON)
    assert pool.size == 1


def test_a_job_is_forgotten_when_it_is_over(make: Made) -> None:
    """An idle thread must not keep the tensors of its last call alive."""

    class Thing:
        pass

    pool = make()
    thing = Thing()
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    assert run(pool, lambda thing=thing: None).wait(SOON)
    del thing
    assert gone.wait(SOON)
    idle(pool, 1)


def test_idle_threads_beyond_those_kept_end(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_IDLE_SECONDS", 0.01)
    pool = make(keep=2)
    threads = pool._threads = Threads()
    together = threading.Barrier(9)
    for _ in range(8):
        pool.run(lambda: together.wait(SOON) and None)
    assert pool.size == 8
    together.wait(SOON)
    with threads.changed:
        assert threads.changed.wait_for(lambda: len(threads) == 2, SOON)
    idle(pool, 2)
    assert run(pool, lambda: None).wait(SOON)


def test_jobs_and_retiring_threads_do_not_miss_each_other(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads end all the time while jobs come in: each job runs exactly once."""
    monkeypatch.setattr(pool_module, "_IDLE_SECONDS", 0.0001)
    pool = make(keep=0)
    done = 0
    lock = threading.Lock()
    all_done = threading.Event()

    def job() -> None:
        nonlocal done
        with lock:
            done += 1
            if done == 2000:
                all_done.set()

    for _ in range(2000):
        pool.run(job)
    assert all_done.wait(SOON)
    assert done == 2000


def test_close_ends_idle_threads_and_waits_for_busy_ones(make: Made) -> None:
    pool = make()
    gate = threading.Event()
    busy = run(pool, lambda: gate.wait(SOON) and None)
    assert run(pool, lambda: None).wait(SOON)
    idle(pool, 1)
    assert pool.size == 2
    threading.Timer(0.05, gate.set).start()
    pool.close(time.monotonic() + SOON)
    assert busy.is_set()
    assert pool.size == 0


def test_close_waits_no_longer_than_its_deadline(make: Made) -> None:
    pool = make()
    gate = threading.Event()
    busy = run(pool, lambda: gate.wait(SOON) and None)
    began = time.monotonic()
    pool.close(began + 0.1)
    assert 0.05 < time.monotonic() - began < 2
    assert not busy.is_set()
    gate.set()
    assert busy.wait(SOON)


def test_a_thread_of_the_pool_can_close_it(make: Made) -> None:
    pool = make()
    assert run(pool, lambda: pool.close(time.monotonic() + 1)).wait(SOON)


@pytest.mark.parametrize("round", range(20))
def test_close_does_not_miss_a_thread_that_is_just_getting_idle(make: Made, round: int) -> None:
    pool = make()
    done = [run(pool, lambda: None) for _ in range(round % 5 + 1)]
    pool.close(time.monotonic() + SOON)
    for each in done:
        assert each.is_set()
    assert pool.size == 0


def test_many_threads_use_one_pool(make: Made) -> None:
    pool = make()
    count = 0
    lock = threading.Lock()

    def add() -> None:
        nonlocal count
        with lock:
            count += 1

    def burst() -> None:
        for done in [run(pool, add) for _ in range(100)]:
            assert done.wait(SOON)

    threads = [threading.Thread(target=burst) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 800


def test_threads_end_while_close_looks_for_them(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    threads = pool._threads = Threads()
    gate = threading.Event()
    for _ in range(3):
        run(pool, lambda: gate.wait(SOON) and None)
    current = threading.current_thread
    closing = current()

    def look() -> threading.Thread:
        if current() is closing and not gate.is_set():
            gate.set()
            with threads.changed:
                assert threads.changed.wait_for(lambda: not threads, SOON)
        return current()

    monkeypatch.setattr(threading, "current_thread", look)
    pool.close(time.monotonic() + SOON)
    assert gate.is_set()
    assert pool.size == 0
