"""Claims on common objects take turns in order; other claims do not wait."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence

import pytest

from backhaul.optim.claims import Claims

WITHIN = 20.0


class Holder:
    """A thread that claims objects, and holds them until the test releases it."""

    def __init__(self, claims: Claims, objects: Sequence[object], log: list[str], name: str = "") -> None:
        self.held = threading.Event()
        self.let_go = threading.Event()
        self._work = (claims, objects, log, name)
        before = len(claims)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while len(claims) == before:  # its place in the order is fixed once the claim is listed
            threading.Event().wait(0.001)

    def _run(self) -> None:
        claims, objects, log, name = self._work
        with claims.on(objects):
            log.append(name)
            self.held.set()
            assert self.let_go.wait(WITHIN)

    def end(self) -> None:
        self.let_go.set()
        self.thread.join(WITHIN)
        assert not self.thread.is_alive()


def test_claims_on_other_objects_do_not_wait() -> None:
    claims, log = Claims(), list[str]()
    a, b = object(), object()
    holders = [Holder(claims, [each], log) for each in (a, b)]
    assert all(holder.held.wait(WITHIN) for holder in holders)
    assert len(claims) == 2
    for holder in holders:
        holder.end()
    assert len(claims) == 0


def test_claims_on_common_objects_take_turns_in_their_order() -> None:
    claims, log = Claims(), list[str]()
    a, b, c = object(), object(), object()
    first = Holder(claims, [a, b], log, "first")
    assert first.held.wait(WITHIN)
    second = Holder(claims, [b, c], log, "second")
    third = Holder(claims, [c], log, "third")  # c is free, but the second claim wants it and came first
    assert not second.held.wait(0.05)
    assert not third.held.is_set()
    first.end()
    assert second.held.wait(WITHIN)
    assert not third.held.is_set()
    second.end()
    assert third.held.wait(WITHIN)
    third.end()
    assert log == ["first", "second", "third"]


def test_no_claim_overtakes_forever() -> None:
    """A claim on two objects is granted although other threads claim each of them again and again."""
    claims, log = Claims(), list[str]()
    a, b = object(), object()
    holders = [Holder(claims, [a], log, "a"), Holder(claims, [b], log, "b"), Holder(claims, [a, b], log, "both")]
    holders += [Holder(claims, [a], log, "a"), Holder(claims, [b], log, "b")]
    for holder in holders:
        holder.end()
    assert log[2] == "both"
    assert sorted(log[:2]) == sorted(log[3:]) == ["a", "b"]


def test_equal_objects_are_not_the_same() -> None:
    claims, log = Claims(), list[str]()
    one, other = [1], [1]
    holders = [Holder(claims, [one], log), Holder(claims, [other], log)]
    assert all(holder.held.wait(WITHIN) for holder in holders)
    for holder in holders:
        holder.end()


def test_a_thread_does_not_wait_for_itself() -> None:
    claims = Claims()
    a, b = object(), object()
    with claims.on([a]), claims.on([a, b]), claims.on([b]):
        assert len(claims) == 3
    assert len(claims) == 0


def test_an_error_releases_the_claim() -> None:
    claims, log = Claims(), list[str]()
    a = object()
    with pytest.raises(ValueError, match="oh"), claims.on([a]):
        raise ValueError("oh")
    holder = Holder(claims, [a], log)
    assert holder.held.wait(WITHIN)
    holder.end()


@pytest.mark.parametrize("seed", range(5))
def test_many_threads(seed: int) -> None:
    """No object is ever held twice, every claim is granted, and no claim is left."""
    claims = Claims()
    objects = [object() for _ in range(6)]
    holding = dict.fromkeys(range(6), 0)
    errors: list[str] = []

    def work(number: int) -> None:
        chooser = random.Random(seed * 100 + number)
        for _ in range(60):
            mine = chooser.sample(range(6), chooser.randint(1, 3))
            with claims.on([objects[place] for place in mine]):
                for place in mine:
                    holding[place] += 1
                    if holding[place] != 1:
                        errors.append(f"{place} is held {holding[place]} times")
                threading.Event().wait(0.0002)
                for place in mine:
                    holding[place] -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    assert len(claims) == 0


def test_the_claim_of_an_interrupted_thread_is_withdrawn() -> None:
    claims, log = Claims(), list[str]()
    a = object()
    holder = Holder(claims, [a], log)
    assert holder.held.wait(WITHIN)

    def interrupt() -> None:
        deadline = time.monotonic() + WITHIN
        while len(claims) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    interrupting = threading.Thread(target=interrupt)
    try:
        interrupting.start()
        with pytest.raises(KeyboardInterrupt), claims.on([a]):
            raise AssertionError("two have the object")
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(claims) == 1, "the interrupted claim would keep all later ones waiting"
    holder.end()
    with claims.on([a]):
        assert len(claims) == 1
