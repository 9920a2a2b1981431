"""When a group may end: the decision alone, then the promises that carry the answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backhaul.agent.farewell import Counts, _Promise, balanced

TABLE: dict[str, tuple[dict[int, Counts], bool]] = {
    "nobody": ({}, True),
    "one, idle": ({0: (True, {}, {})}, True),
    "one, busy": ({0: (False, {}, {})}, False),
    "two that never talked": ({0: (True, {}, {}), 1: (True, {}, {})}, True),
    "one of two is busy": ({0: (True, {}, {}), 1: (False, {}, {})}, False),
    "all sent is finished": ({0: (True, {1: 3}, {}), 1: (True, {}, {0: 3})}, True),
    "both ways": ({0: (True, {1: 3}, {1: 5}), 1: (True, {0: 5}, {0: 3})}, True),
    "a call is on its way": ({0: (True, {1: 3}, {}), 1: (True, {}, {0: 2})}, False),
    "the first call is on its way": ({0: (True, {1: 1}, {}), 1: (True, {}, {})}, False),
    "it is on its way back to the leader": ({0: (True, {}, {}), 1: (True, {0: 1}, {})}, False),
    "calls to oneself": ({0: (True, {0: 7}, {0: 7})}, True),
    "a call to oneself runs": ({0: (True, {0: 7}, {0: 6})}, False),
    "the tallies were taken at different times": ({0: (True, {1: 2}, {}), 1: (True, {}, {0: 3})}, False),
    "calls to a dead member do not count": ({0: (True, {1: 2, 2: 9}, {}), 1: (True, {}, {0: 2})}, True),
    "calls of a dead member do not count": ({0: (True, {}, {2: 4})}, True),
    "a ring": ({0: (True, {1: 1}, {2: 1}), 1: (True, {2: 1}, {0: 1}), 2: (True, {0: 1}, {1: 1})}, True),
    "a ring with a gap": ({0: (True, {1: 1}, {2: 1}), 1: (True, {2: 2}, {0: 1}), 2: (True, {0: 1}, {1: 1})}, False),
    "sent none is like never sent": ({0: (True, {1: 0}, {}), 1: (True, {}, {})}, True),
}


@pytest.mark.parametrize("name", TABLE)
def test_two_tallies_are_compared(name: str) -> None:
    tallies, expected = TABLE[name]
    assert balanced(tallies) is expected


def test_settled_means_that_nothing_is_under_way() -> None:
    """Against a model: calls start and finish at random. The tallies are settled exactly when no call is unfinished."""
    for seed in range(200):
        rng = random.Random(seed)
        ranks = range(rng.randrange(1, 5))
        sent = {rank: dict.fromkeys(ranks, 0) for rank in ranks}
        finished = {rank: dict.fromkeys(ranks, 0) for rank in ranks}
        under_way: list[tuple[int, int]] = []
        for _ in range(rng.randrange(12)):
            if under_way and rng.random() < 0.5:
                caller, callee = under_way.pop(rng.randrange(len(under_way)))
                finished[callee][caller] += 1
            else:
                call = (rng.choice(ranks), rng.choice(ranks))
                sent[call[0]][call[1]] += 1
                under_way.append(call)
        tallies: dict[int, Counts] = {rank: (True, sent[rank], finished[rank]) for rank in ranks}
        assert balanced(tallies) is (not under_way)


# Promises.


class FakePeer:
    id = 3


class FakeInbound:
    peer = FakePeer()

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def reply(self, frame: Any) -> None:
        self.replies.append(frame)


class FakeEnvelope:
    def __init__(self, id: int) -> None:
        self.message = self
        self.id = id


def answer(id: int, value: Any) -> Any:
    return id, value


def test_a_promise_answers_earlier_requests_once_it_is_kept() -> None:
    promise = _Promise(answer)
    inbound: Any = FakeInbound()
    asked: Any = [FakeEnvelope(1), FakeEnvelope(2)]
    assert [promise.handle(inbound, envelope) for envelope in asked] == [None, None]
    assert promise.asked_by() == {3}
    promise.keep("value")
    assert inbound.replies == [(1, "value"), (2, "value")]
    assert promise.asked_by() == set()


def test_a_kept_promise_answers_later_requests_at_once() -> None:
    promise = _Promise(answer)
    inbound: Any = FakeInbound()
    promise.keep(None)
    envelope: Any = FakeEnvelope(5)
    assert promise.handle(inbound, envelope) == (5, None)
    assert inbound.replies == []
