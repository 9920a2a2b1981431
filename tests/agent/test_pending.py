"""Pending calls: the slot of each reply, and calls whose deadline has passed."""

from __future__ import annotations

import math
import random

import pytest

from backhaul.agent.pending import Pending, Slot


def slot(id: int, deadline: float = math.inf) -> Slot:
    return Slot(id, f"call {id}", deadline, True)


def filled(*deadlines: float, watched: bool = True) -> Pending:
    pending = Pending()
    for id, deadline in enumerate(deadlines):
        pending.open(slot(id, deadline), watched=watched)
    return pending


def ids(slots: list[Slot]) -> list[int]:
    return [each.id for each in slots]


# Replies.


def test_a_reply_is_taken_once() -> None:
    pending = filled(math.inf, math.inf)
    assert len(pending) == 2
    taken = pending.take(1)
    assert taken is not None
    assert taken.id == 1
    assert pending.take(1) is None
    assert pending.take(7) is None
    assert len(pending) == 1


def test_draining_takes_all_and_leaves_nothing() -> None:
    pending = filled(1.0, math.inf, 2.0)
    assert ids(pending.drain()) == [0, 1, 2]
    assert len(pending) == 0
    assert pending.drain() == []
    assert pending.next_deadline() == math.inf
    assert pending.expire(1e9) == []
    pending.open(slot(5, 3.0), watched=True)
    assert pending.next_deadline() == 3.0


# Deadlines.


@pytest.mark.parametrize(
    ("deadlines", "now", "overdue", "next_deadline"),
    [
        ([], 0.0, [], math.inf),
        ([5.0], 4.9, [], 5.0),
        ([5.0], 5.0, [0], math.inf),
        ([5.0, 3.0, 4.0], 3.5, [1], 4.0),
        ([5.0, 3.0, 4.0], 4.5, [1, 2], 5.0),
        ([5.0, 3.0, 4.0], 9.0, [1, 2, 0], math.inf),
        ([math.inf, 3.0], 9.0, [1], math.inf),
        ([2.0, 2.0, 2.0], 2.0, [0, 1, 2], math.inf),
    ],
)
def test_overdue_calls_expire_in_the_order_of_their_deadlines(
    deadlines: list[float], now: float, overdue: list[int], next_deadline: float
) -> None:
    pending = filled(*deadlines)
    assert ids(pending.expire(now)) == overdue
    assert pending.next_deadline() == next_deadline
    assert len(pending) == len(deadlines) - len(overdue)
    assert pending.expire(now) == []


def test_an_expired_call_no_longer_waits_for_its_reply() -> None:
    pending = filled(1.0)
    pending.expire(2.0)
    assert pending.take(0) is None


def test_a_call_that_was_answered_does_not_expire() -> None:
    pending = filled(1.0, 2.0)
    pending.take(0)
    assert pending.next_deadline() == 2.0
    assert ids(pending.expire(9.0)) == [1]


def test_calls_that_watch_their_own_deadline_do_not_expire_here() -> None:
    pending = filled(1.0, watched=False)
    assert pending.next_deadline() == math.inf
    assert pending.expire(9.0) == []
    assert pending.take(0) is not None


def test_deadlines_of_answered_calls_do_not_pile_up() -> None:
    pending = Pending()
    pending.open(slot(0, 1e9), watched=True)
    for id in range(1, 10_000):
        pending.open(slot(id, 1e6 - id), watched=True)
        pending.take(id)
        assert len(pending._deadlines) <= 100
    assert pending.next_deadline() == 1e9


def test_pending_calls_behave_like_a_plain_dictionary() -> None:
    """Any mix of opening, answering and expiring, compared with a dictionary that is searched."""
    for seed in range(30):
        rng = random.Random(seed)
        pending, model = Pending(), {}
        now = 0.0
        for id in range(300):
            action = rng.random()
            if action < 0.6:
                deadline = rng.choice([math.inf, now + rng.random() * 10])
                pending.open(slot(id, deadline), watched=True)
                model[id] = deadline
            elif action < 0.8 and model:
                chosen = rng.choice(list(model))
                taken = pending.take(chosen)
                assert taken is not None
                del model[chosen]
            else:
                now += rng.random() * 3
                expected = sorted((deadline, id) for id, deadline in model.items() if deadline <= now)
                assert ids(pending.expire(now)) == [id for _, id in expected]
                for _, id_ in expected:
                    del model[id_]
            assert len(pending) == len(model)
            assert pending.next_deadline() == min(model.values(), default=math.inf)


def test_a_pending_call_is_found_by_its_number() -> None:
    pending = filled(math.inf)
    assert 0 in pending
    assert 1 not in pending
    pending.take(0)
    assert 0 not in pending


def test_a_new_slot_is_not_done_and_nobody_waits_for_it() -> None:
    new = slot(1)
    assert (new.done, new.envelope, new.error, new.waiters, new.thread, new.since) == (False, None, None, (), 0, 0.0)
