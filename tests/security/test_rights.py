"""Rights: what a peer may name, how much of it, and which notices it may send, from tables."""

from __future__ import annotations

from typing import Any

import pytest

from backhaul.ids import RefId, ShareId
from backhaul.refs.counting import Counting
from backhaul.trust.rights import GivenRights, Rights
from backhaul.wire.messages import (
    Call,
    Create,
    Fetch,
    Notice,
    Obituary,
    Recall,
    Refs,
    Register,
    Registered,
    Release,
    Sweep,
    Swept,
    Unpin,
)

ME, PEER, OTHER, STRANGER = 0, 1, 2, 3
RANKS = frozenset({ME, PEER, OTHER})
LARGE = 1 << 63

MADE = RefId(ME, PEER, 5)
"""A value of ours that the peer has had made."""
GIVEN = RefId(ME, ME, 1)
"""A value of ours that is under way to the peer."""
KEPT = RefId(ME, ME, 2)
"""A value of ours that no peer was given."""
OTHERS = RefId(ME, OTHER, 5)
"""A value of ours that another peer has had made."""


def counting(*, direct: bool = True) -> Counting:
    made = Counting(ME, direct=direct)
    made.own_for(MADE, PEER)
    made.own_for(OTHERS, OTHER)
    for ref in (GIVEN, KEPT):
        assert made.new_ref(ME) == ref
        made.own(ref)
    made.share(GIVEN, PEER)
    return made


def given(limit: int | None = 10) -> GivenRights:
    return GivenRights(counting(), limit, RANKS)


def shared(*refs: RefId, by: int = PEER, first: int = 1) -> Refs:
    return tuple((ref, ShareId(by, number)) for number, ref in enumerate(refs, first))


# Peers that are believed.


@pytest.mark.parametrize("make", [Rights, lambda of, limit: GivenRights(of, limit, RANKS)])
def test_values_that_a_peer_has_or_that_are_under_way_to_it_count(make: Any) -> None:
    assert make(counting(), None).excess(PEER, 1000 * (KEPT,)) is None
    rights = make(counting(), 3)
    assert rights.excess(PEER, (KEPT,)) is None
    assert rights.excess(PEER, (KEPT, KEPT)) == "has references to 3 values"
    assert rights.excess(OTHER, (KEPT, KEPT)) is None
    assert rights.excess(OTHER, (KEPT, KEPT, KEPT)) == "has references to 3 values"


@pytest.mark.parametrize("make", [Rights, lambda of, limit: GivenRights(of, limit, RANKS)])
def test_references_that_go_back_to_their_owner_have_a_limit_of_their_own(make: Any) -> None:
    made = counting()
    theirs = made.new_ref(PEER)
    made.creating(theirs)
    back = [made.share(theirs, PEER) for _ in range(2)]
    assert (made.held_by(PEER), made.returning_to(PEER)) == (2, 2)
    rights = make(made, 3)
    assert rights.excess(PEER, (KEPT, theirs)) is None
    assert rights.excess(PEER, (theirs, theirs)) == "has not confirmed 3 references to its own values"
    assert make(made, 2).excess(PEER, ()) is None
    made.unpin(back[0])
    assert made.returning_to(PEER) == 1
    assert rights.excess(PEER, (theirs, theirs)) is None


def test_a_peer_that_is_believed_may_name_and_say_everything() -> None:
    rights = Rights(counting(direct=False), 1)
    foreign = RefId(OTHER, STRANGER, -1)
    assert rights.complaint(Fetch(1, KEPT), PEER) is None
    assert rights.complaint(Create(1, foreign, None), PEER) is None
    assert rights.objection(shared(foreign, KEPT, by=OTHER), PEER) is None
    assert rights.is_modest(PEER, 1 << 40)
    assert rights.misdirected([foreign, KEPT], PEER) is None
    for notice in (Register(KEPT), Sweep((OTHER,)), Obituary(OTHER, "a", "b"), Recall((ShareId(OTHER, 1),))):
        assert rights.may_say(PEER, notice)


# Peers that may lie.


@pytest.mark.parametrize(
    ("refs", "wrong"),
    [
        ((), None),
        (shared(MADE, GIVEN), None),
        (shared(RefId(PEER, PEER, 7), RefId(PEER, ME, 8), RefId(PEER, OTHER, 9)), None),
        (shared(RefId(PEER, PEER, 0), first=0), None),
        (shared(RefId(PEER, PEER, LARGE - 1), first=LARGE - 1), None),
        (shared(MADE, by=OTHER), "a share of rank 2"),
        (shared(MADE, by=ME), "a share of rank 0"),
        (shared(RefId(PEER, STRANGER, 1)), "1/3.1, which no worker has made"),
        (shared(RefId(PEER, PEER, -1)), "1/1.-1, which no worker has made"),
        (shared(RefId(PEER, PEER, LARGE)), f"1/1.{LARGE}, which no worker has made"),
        (shared(RefId(PEER, PEER, 1), first=-1), "1/1.1, which no worker has made"),
        (shared(RefId(PEER, PEER, 1), first=LARGE), "1/1.1, which no worker has made"),
        (shared(RefId(OTHER, PEER, 1)), "2/1.1, whose owner has to give it"),
        (shared(KEPT), "0/0.2, which was not given to it"),
        (shared(OTHERS), "0/2.5, which was not given to it"),
        (shared(RefId(ME, PEER, 6)), "0/1.6, which was not given to it"),
        (shared(MADE, KEPT), "0/0.2, which was not given to it"),
    ],
)
def test_references_that_a_message_brings(refs: Refs, wrong: str | None) -> None:
    assert given().objection(refs, PEER) == wrong
    assert given().complaint(Call(1, None, refs), PEER) == wrong


def test_the_limit_of_references_to_values_of_a_peer() -> None:
    rights = given(4)
    theirs = [RefId(PEER, PEER, number) for number in range(5)]
    assert rights.objection(shared(*theirs), PEER) == "references to more than 4 values of its own"
    assert rights.objection(shared(*theirs[:4]), PEER) is None
    for ref, share in shared(*theirs[:3]):
        rights._counting.receive(ref, share)
        rights._counting.handle(PEER, Registered(ref))
    assert rights.objection(shared(theirs[3], first=9), PEER) is None
    assert rights.objection(shared(*theirs[3:], first=9), PEER) == "references to more than 4 values of its own"
    rights._counting.receive(*shared(theirs[3], first=9)[0])
    assert rights.objection(shared(MADE, GIVEN, first=20), PEER) is None, "our values are not values of its own"
    assert given(None).objection(shared(*theirs), PEER) is None


def test_the_limit_of_shares_that_a_peer_has_not_confirmed() -> None:
    rights = given(4)
    ref = RefId(PEER, PEER, 1)
    for _, share in shared(ref, ref, ref):
        rights._counting.receive(ref, share)
    assert rights.objection(shared(ref, first=9), PEER) is None
    wrong = "more than 4 shares of values that it has not confirmed"
    assert rights.objection(shared(ref, ref, first=9), PEER) == wrong
    rights._counting.handle(PEER, Registered(ref))
    assert rights.objection(shared(ref, ref, first=9), PEER) is None


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (Fetch(1, MADE), None),
        (Fetch(1, GIVEN), None),
        (Fetch(1, KEPT), "it was not given 0/0.2"),
        (Fetch(1, OTHERS), "it was not given 0/2.5"),
        (Fetch(1, RefId(PEER, PEER, 1)), "it was not given 1/1.1"),
        (Create(1, RefId(ME, PEER, 6), None), None),
        (Create(1, MADE, None), "0/1.5 is not its to make"),
        (Create(1, RefId(ME, OTHER, 6), None), "0/2.6 is not its to make"),
        (Create(1, RefId(ME, ME, 6), None), "0/0.6 is not its to make"),
        (Create(1, RefId(PEER, PEER, 6), None), "1/1.6 is not its to make"),
        (Create(1, RefId(OTHER, PEER, 6), None), "2/1.6 is not its to make"),
        (Create(1, RefId(ME, PEER, 6), None, shared(KEPT)), "0/0.2, which was not given to it"),
        (Call(1, None), None),
    ],
)
def test_values_that_a_request_asks_for(request_: Any, wrong: str | None) -> None:
    assert given().complaint(request_, PEER) == wrong


def test_a_worker_may_ask_itself_for_values_that_it_knows() -> None:
    assert given().complaint(Create(1, KEPT, None), ME) is None


def test_a_peer_that_leaves_gaps_in_its_numbers() -> None:
    """Each gap is remembered for good."""
    rights = GivenRights(Counting(ME, direct=True), None, RANKS)
    for number in range(10_000):
        rights._counting.own_for(RefId(ME, PEER, 2 * number), PEER)
    following = Create(1, RefId(ME, PEER, 20_000), None)
    assert rights.is_modest(PEER, 0)
    assert rights.complaint(following, PEER) is None
    rights._counting.own_for(following.ref, PEER)
    assert not rights.is_modest(PEER, 0)
    assert rights.is_modest(OTHER, 0)
    another = Create(1, RefId(ME, PEER, 20_002), None)
    assert rights.complaint(another, PEER) == "0/1.20002 leaves yet another gap in its numbers"


def test_notices_that_a_peer_does_not_take() -> None:
    assert given().is_modest(PEER, 100_000)
    assert not given().is_modest(PEER, 100_001)


PINNED = ShareId(ME, 1)
"""The share of `GIVEN`."""


@pytest.mark.parametrize(
    ("notice", "may"),
    [
        (Register(MADE), True),
        (Register(GIVEN), True),
        (Register(KEPT), False),
        (Register(RefId(PEER, PEER, 1)), False),
        (Release(MADE), True),
        (Release(KEPT), True),  # it is not listed for it, so this changes nothing
        (Release(RefId(PEER, PEER, 1)), False),
        (Registered(RefId(PEER, ME, 1)), True),
        (Registered(MADE), False),
        (Registered(RefId(OTHER, ME, 1)), False),
        (Unpin(PINNED), True),
        (Unpin(ShareId(ME, 77)), True),  # it was unpinned before
        (Recall((ShareId(PEER, 1), ShareId(PEER, 2))), True),
        (Recall((ShareId(PEER, 1), ShareId(OTHER, 2))), False),
        (Sweep((OTHER,)), False),
        (Swept((OTHER,)), False),
        (Obituary(OTHER, "a", "b"), False),
    ],
)
def test_notices_that_a_peer_may_send(notice: Notice, may: bool) -> None:
    assert given().may_say(PEER, notice) is may


def test_a_share_is_unpinned_by_its_receiver_only() -> None:
    assert not given().may_say(OTHER, Unpin(PINNED))


def test_references_that_this_worker_may_send() -> None:
    mine, theirs, foreign = KEPT, RefId(PEER, ME, 1), RefId(OTHER, ME, 1)
    assert given().misdirected([mine, theirs], PEER) is None
    assert given().misdirected([mine, foreign, theirs], PEER) == foreign
    assert given().misdirected([theirs, mine], OTHER) == theirs
