"""Mailbox: notices arrive in order and once, whatever the connections do."""

from __future__ import annotations

import random

import pytest

from backhaul.ids import RefId
from backhaul.refs.mailbox import Inbox, Outbox
from backhaul.wire.messages import Notice, Release

A, B, C = (Release(RefId(0, 1, number)) for number in (1, 2, 3))


def test_one_batch_at_a_time_is_under_way() -> None:
    box = Outbox()
    assert (len(box), box.next_batch(), box.again()) == (0, None, None)
    box.add(A)
    box.add(B)
    assert len(box) == 2
    assert box.next_batch() == (1, (A, B))
    box.add(C)
    assert len(box) == 3
    assert box.next_batch() is None
    assert box.again() == (1, (A, B))
    box.answered(1)
    assert (len(box), box.again()) == (1, None)
    assert box.next_batch() == (2, (C,))
    box.answered(2)
    assert (len(box), box.next_batch(), box.again()) == (0, None, None)


def test_a_late_answer_to_an_earlier_batch_changes_nothing() -> None:
    box = Outbox()
    box.add(A)
    box.next_batch()
    box.answered(1)
    box.add(B)
    assert box.next_batch() == (2, (B,))
    box.answered(1)
    assert box.again() == (2, (B,))


def test_a_batch_has_at_most_10_000_notices() -> None:
    """A batch with more notices might not fit into a message."""
    box = Outbox()
    for number in range(25_000):
        box.add(Release(RefId(0, 1, number)))
    sizes = []
    while (batch := box.next_batch()) is not None:
        number, notices = batch
        assert notices[0] == Release(RefId(0, 1, sum(sizes)))
        sizes.append(len(notices))
        assert len(box) == 25_000 - sum(sizes[:-1])
        box.answered(number)
    assert sizes == [10_000, 10_000, 5_000]


def test_a_dropped_notice_keeps_its_number() -> None:
    box = Outbox()
    box.add(A)
    box.next_batch()
    box.add(B)
    box.clear()
    assert (len(box), box.again()) == (0, None)
    box.add(C)
    assert box.next_batch() == (2, (C,))


def test_each_batch_number_is_accepted_once() -> None:
    box = Inbox()
    assert [box.accept(number) for number in (1, 1, 2, 1, 2, 3)] == [True, False, True, False, False, True]


def test_a_new_process_starts_its_own_count() -> None:
    box = Inbox()
    assert [box.accept(*batch) for batch in [(1, 7), (2, 7), (1, 8), (1, 8), (2, 8)]] == [True, True, True, False, True]


@pytest.mark.parametrize("seed", range(50))
def test_notices_arrive_once_over_connections_that_lose_and_repeat(seed: int) -> None:
    """Any batch that was ever sent may come at any time, and come again; answers may be lost."""
    rng = random.Random(seed)
    sent: list[Notice] = []
    taken: list[Notice] = []
    outbox, inbox = Outbox(), Inbox()
    on_the_way: list[tuple[int, tuple[Notice, ...]]] = []
    while len(taken) < 30:
        if len(sent) < 30 and rng.random() < 0.5:
            notice = Release(RefId(0, 1, len(sent)))
            sent.append(notice)
            outbox.add(notice)
        batch = outbox.next_batch() or outbox.again()
        if batch is not None:
            on_the_way.append(batch)
            number, notices = rng.choice(on_the_way)
            if inbox.accept(number):
                taken += notices
            if rng.random() < 0.5:
                outbox.answered(number)
    assert taken == sent
