"""Counting, one transition at a time: what each worker is told, and what it answers, word for word.

See `counting_scripts` for how to read the scripts.
"""

from __future__ import annotations

import random

import pytest
from counting_scripts import FROM_O, FROM_U, FROM_V, LINK, OTHER, O, Step, U, V, W, X, Y, do, hears, play

from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Confirm, Free, Send, Void
from backhaul.refs.counting import Counting
from backhaul.refs.numbers import Numbers
from backhaul.trust.rights import GivenRights
from backhaul.wire.messages import Recall, Register, Registered, Release, Sweep, Swept, Unpin


def assert_nothing_left(workers: dict[int, Counting], *ranks: int) -> None:
    for rank in ranks or workers:
        counting = workers[rank]
        assert (list(counting.owned), list(counting.used), counting.pinned) == ([], [], 0), "OUVW"[rank]
        assert not counting.sweeping
        assert not counting._sweeps._questions


CREATED: list[Step] = [
    (U, do.new_ref(O), X),
    (U, do.creating(X), None),
    (U, do.is_confirmed(X), False),
    (O, do.own_for(X, U), []),
    (U, do.created(X), [Confirm(X, True)]),
    (U, do.is_confirmed(X), True),
    (O, do.holders(X), {U}),
]
"""U has made a value on O, and both know it."""

SHARED: list[Step] = [
    (U, do.share(X, V, LINK), FROM_U),
    (U, do.drop(X), []),  # it is pinned
]
"""It is on its way to V, and U has no other use for it."""

DROPPED_BY_V: list[Step] = [
    (V, do.drop(X), [Send(O, Release(X))]),
    (O, hears(V, Release(X)), [Free(X)]),
]

ENDING_WITH_NOTHING: dict[str, list[Step]] = {
    "a local value": [
        (O, do.new_ref(O), Y),
        (O, do.own(Y), None),
        (O, do.is_confirmed(Y), True),
        (O, do.hold(Y), True),
        (O, do.drop(Y), []),
        (O, do.drop(Y), [Free(Y)]),
        (O, do.hold(Y), False),
        (O, do.drop(Y), []),
        (O, do.is_confirmed(Y), False),
    ],
    "a creation": [
        *CREATED,
        (U, do.hold(X), True),
        (U, do.drop(X), []),
        (U, do.drop(X), [Send(O, Release(X))]),
        (U, do.hold(X), False),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "share and drop": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (O, do.holders(X), {U, V}),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),
        *DROPPED_BY_V,
    ],
    "the receiver drops it before it is listed": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (V, do.drop(X), []),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U)), Send(O, Release(X))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(V, Release(X)), []),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "two shares, one registration": [
        *CREATED,
        *SHARED,
        (U, do.hold(X), True),
        (U, do.share(X, V, LINK), ShareId(U, 2)),
        (U, do.drop(X), []),
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (V, do.receive(X, ShareId(U, 2)), []),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U)), Send(U, Unpin(ShareId(U, 2)))]),
        (U, hears(V, Unpin(FROM_U)), []),
        (U, hears(V, Unpin(ShareId(U, 2))), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),
        (V, do.drop(X), []),
        *DROPPED_BY_V,
    ],
    "share with a worker that has it": [
        *CREATED,
        (U, do.share(X, V), FROM_U),
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), []),
        (V, do.share(X, U), FROM_V),
        (V, do.drop(X), []),
        (U, do.receive(X, FROM_V), [Send(V, Unpin(FROM_V))]),
        (V, hears(U, Unpin(FROM_V)), [Send(O, Release(X))]),
        (O, hears(V, Release(X)), []),
        (U, do.drop(X), []),
        (U, do.drop(X), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "share with the owner": [
        *CREATED,
        (U, do.share(X, O), FROM_U),
        (U, do.drop(X), []),
        (O, do.receive(X, FROM_U), [Send(U, Unpin(FROM_U))]),
        (U, hears(O, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),  # the message still has it
        (O, do.drop(X), [Free(X)]),
    ],
    "the owner shares": [
        (O, do.own(Y), None),
        (O, do.share(Y, V), FROM_O),
        (O, do.drop(Y), []),
        (V, do.receive(Y, FROM_O), [Send(O, Register(Y))]),
        (O, hears(V, Register(Y)), [Send(V, Registered(Y))]),
        (V, hears(O, Registered(Y)), [Confirm(Y, True), Send(O, Unpin(FROM_O))]),
        (O, hears(V, Unpin(FROM_O)), []),
        (V, do.drop(Y), [Send(O, Release(Y))]),
        (O, hears(V, Release(Y)), [Free(Y)]),
    ],
    "share with oneself": [
        *CREATED,
        (U, do.share(X, U), FROM_U),
        (U, do.drop(X), []),
        (U, do.receive(X, FROM_U), []),
        (U, do.drop(X), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "share with oneself before the creation is confirmed": [
        (U, do.creating(X), None),
        (U, do.share(X, U), FROM_U),
        (U, do.receive(X, FROM_U), []),
        (U, do.drop(X), []),
        (U, do.drop(X), []),
        (O, do.own_for(X, U), []),
        (U, do.created(X), [Confirm(X, True), Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "the owner shares with itself": [
        (O, do.own(Y), None),
        (O, do.share(Y, O), FROM_O),
        (O, do.drop(Y), []),
        (O, do.receive(Y, FROM_O), []),
        (O, do.drop(Y), [Free(Y)]),
    ],
    "a message that could not be sent": [
        *CREATED,
        *SHARED,
        (U, do.unpin(FROM_U), [Send(O, Release(X))]),
        (U, do.unpin(FROM_U), []),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "registered before the creation comes": [
        (U, do.creating(X), None),
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (O, do.holders(X), {U, V}),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U))]),
        (V, do.drop(X), [Send(O, Release(X))]),
        (O, hears(V, Release(X)), []),  # U will have it
        (O, do.own_for(X, U), []),
        (U, hears(V, Unpin(FROM_U)), []),
        (U, do.created(X), [Confirm(X, True), Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "the reference reaches the owner before the creation": [
        (U, do.creating(X), None),
        (U, do.share(X, O), FROM_U),
        (U, do.drop(X), []),
        (O, do.receive(X, FROM_U), [Send(U, Unpin(FROM_U))]),
        (O, do.own_for(X, U), []),
        (U, hears(O, Unpin(FROM_U)), []),
        (U, do.created(X), [Confirm(X, True), Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),
        (O, do.drop(X), [Free(X)]),
    ],
    "released before the creation comes": [
        (U, do.creating(X), None),
        (U, do.drop(X), []),
        (U, do.created(X), [Confirm(X, True), Send(O, Release(X))]),  # its connection broke
        (O, hears(U, Release(X)), []),
        (O, do.own_for(X, U), [Free(X)]),
    ],
    "lost while its creator has a copy": [
        (U, do.creating(X), None),
        (U, do.share(X, O), FROM_U),
        (O, do.receive(X, FROM_U), [Send(U, Unpin(FROM_U))]),
        (U, do.created(X, lost=True), [Confirm(X, True)]),
        (U, hears(O, Unpin(FROM_U)), [Send(O, Release(X))]),  # or the owner would wait for it
        (O, hears(U, Release(X)), [Void(X)]),
        (U, do.knows(X), True),
        (U, do.drop(X), []),
        (U, do.knows(X), False),
        (O, do.drop(X), [Free(X)]),
    ],
    "lost, and it comes all the same": [
        (U, do.creating(X), None),
        (U, do.created(X, lost=True), [Confirm(X, True), Send(O, Release(X))]),
        (O, do.own_for(X, U), []),
        (O, hears(U, Release(X)), [Free(X)]),
        (U, do.drop(X), []),
    ],
    "given up by its creator, and never comes": [
        (U, do.creating(X), None),
        *SHARED,
        (U, do.created(X), [Confirm(X, True)]),
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Void(X)]),
        (O, do.expects(X), True),
        *DROPPED_BY_V,
        (O, do.expects(X), False),
    ],
    "given up by its creator, and comes after all": [
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (O, hears(U, Release(X)), [Void(X)]),
        (O, do.own_for(X, U), []),
        (O, do.holders(X), {V}),
        (O, hears(V, Release(X)), [Free(X)]),
    ],
    "lost with its connection": [
        *CREATED,
        *SHARED,
        (U, do.connection_ended(OTHER), []),
        (U, do.connection_ended(LINK), [Send(V, Recall((FROM_U,)))]),
        (U, do.connection_ended(LINK), []),
        (V, hears(U, Recall((FROM_U,))), [Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
    ],
    "recalled when it has come": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (U, do.connection_ended(LINK), [Send(V, Recall((FROM_U,)))]),
        (V, hears(U, Recall((FROM_U,))), []),  # not before it is listed
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),
        *DROPPED_BY_V,
    ],
    "recalled, and comes when the value is gone": [
        *CREATED,
        *SHARED,
        (U, do.connection_ended(LINK), [Send(V, Recall((FROM_U,)))]),
        (V, hears(U, Recall((FROM_U,))), [Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (O, hears(V, Register(X)), [Send(V, Registered(X, False))]),
        (V, hears(O, Registered(X, False)), [Confirm(X, False), Send(U, Unpin(FROM_U))]),
        (U, hears(V, Unpin(FROM_U)), []),
        (V, do.drop(X), [Send(O, Release(X))]),
        (O, hears(V, Release(X)), []),
    ],
    "recalled, and comes to the owner when the value is gone": [
        *CREATED,
        (U, do.share(X, O, LINK), FROM_U),
        (U, do.drop(X), []),
        (U, do.connection_ended(LINK), [Send(O, Recall((FROM_U,)))]),
        (O, hears(U, Recall((FROM_U,))), [Send(U, Unpin(FROM_U))]),
        (U, hears(O, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), [Free(X)]),
        (O, do.receive(X, FROM_U), [Void(X), Send(U, Unpin(FROM_U))]),
        (O, do.expects(X), False),
        (O, do.hold(X), True),
        (O, do.drop(X), []),
        (O, do.drop(X), [Free(X)]),
    ],
    "abandoned": [
        *CREATED,
        *SHARED,
        (U, do.abandon(X), [Send(O, Release(X))]),
        (U, do.drop(X), []),
        (U, do.abandon(X), []),
        (O, hears(U, Release(X)), [Free(X)]),
        (U, hears(V, Unpin(FROM_U)), []),
    ],
    "abandoned before it is listed": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (V, do.abandon(X), []),
        (V, do.drop(X), []),  # its finalizer comes later
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U)), Send(O, Release(X))]),
        (U, hears(V, Unpin(FROM_U)), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),
        (O, hears(V, Release(X)), [Free(X)]),
    ],
    "what nobody knows": [
        (U, do.knows(X), False),
        (U, do.is_confirmed(X), False),
        (U, do.share(X, V), FROM_U),  # not pinned
        (U, hears(O, Registered(X)), []),
        (O, hears(V, Register(Y)), [Send(V, Registered(Y, False))]),
        (O, do.holders(Y), set()),
    ],
}


@pytest.mark.parametrize("script", ENDING_WITH_NOTHING.values(), ids=ENDING_WITH_NOTHING.keys())
def test_nothing_is_left_after_a_script(script: list[Step]) -> None:
    assert_nothing_left(play(script))


DEATHS: dict[str, list[Step]] = {
    "of the only holder": [
        *CREATED,
        (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
        (V, hears(O, Sweep((U,))), []),  # not before it has read U's connections to the end
        (V, do.died(U), [Send(O, Swept((U,)))]),
        (W, do.died(U), []),
        (W, hears(O, Sweep((U,))), [Send(O, Swept((U,)))]),
        (O, hears(V, Swept((U,))), []),
        (O, hears(W, Swept((U,))), [Free(X)]),
        (O, do.died(U), []),
        (O, hears(W, Swept((U,))), []),
    ],
    "of the sharer, before the receiver is listed": [
        *CREATED,
        *SHARED,
        (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
        (W, do.died(U), []),
        (W, hears(O, Sweep((U,))), [Send(O, Swept((U,)))]),
        (O, hears(W, Swept((U,))), []),
        (V, hears(O, Sweep((U,))), []),
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (V, do.died(U), []),  # it waits for O
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(O, Swept((U,)))]),  # and U is not told
        (O, hears(V, Swept((U,))), []),
        (O, do.holders(X), {V}),
        *DROPPED_BY_V,
    ],
    "of the sharer, known to the receiver when it is listed": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
        (V, hears(O, Sweep((U,))), []),
        (V, hears(O, Registered(X)), [Confirm(X, True), Send(U, Unpin(FROM_U))]),  # U is dead and does not get it
        (V, do.died(U), [Send(O, Swept((U,)))]),
        (O, hears(V, Swept((U,))), []),
        (O, hears(W, Swept((U,))), []),
        *DROPPED_BY_V,
    ],
    "of the receiver, after it passed the reference on": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),  # which is lost
        (V, do.share(X, W), FROM_V),
        (O, do.died(V), []),  # it is not listed, and O has no pin
        (U, do.died(V), [Send(O, Sweep((V,))), Send(W, Sweep((V,)))]),
        (O, hears(U, Sweep((V,))), [Send(U, Swept((V,)))]),
        (U, hears(O, Swept((V,))), []),
        (W, do.receive(X, FROM_V), [Send(O, Register(X))]),
        (W, do.died(V), []),
        (W, hears(U, Sweep((V,))), []),
        (O, hears(W, Register(X)), [Send(W, Registered(X))]),
        (W, hears(O, Registered(X)), [Confirm(X, True), Send(U, Swept((V,)))]),
        (U, hears(W, Swept((V,))), [Send(O, Release(X))]),
        (O, hears(U, Release(X)), []),
        (W, do.drop(X), [Send(O, Release(X))]),
        (O, hears(W, Release(X)), [Free(X)]),
    ],
    "of two in a chain": [
        *CREATED,
        *SHARED,
        (V, do.receive(X, FROM_U), [Send(O, Register(X))]),  # which is lost
        (V, do.share(X, W), FROM_V),
        (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
        (W, do.died(U), []),
        (W, hears(O, Sweep((U,))), [Send(O, Swept((U,)))]),
        (O, do.died(V), [Send(W, Sweep((U, V)))]),
        (O, hears(W, Swept((U,))), []),  # the answer to the smaller question says nothing about V
        (W, hears(O, Sweep((U, V))), []),
        (W, do.receive(X, FROM_V), [Send(O, Register(X))]),
        (W, do.died(V), []),
        (O, hears(W, Register(X)), [Send(W, Registered(X))]),
        (W, hears(O, Registered(X)), [Confirm(X, True), Send(O, Swept((U, V)))]),
        (O, hears(W, Swept((U, V))), []),
        (O, do.holders(X), {W}),
        (W, do.drop(X), [Send(O, Release(X))]),
        (O, hears(W, Release(X)), [Free(X)]),
    ],
    "of all others": [
        *CREATED,
        (O, do.died(V), []),
        (O, do.died(W), []),
        (O, do.died(U), [Free(X)]),  # no worker is left to ask
        (O, do.died(O), []),
        (O, do.joined(V), None),  # late news of a dead worker
        (O, hears(V, Register(X)), []),
    ],
    "of the creator, before its creation came": [
        (O, hears(V, Register(X)), [Send(V, Registered(X))]),
        (O, do.died(U), [Void(X), Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
        (O, hears(W, Register(X)), [Send(W, Registered(X))]),
        (O, hears(V, Swept((U,))), []),
        (O, hears(W, Swept((U,))), []),
        (O, do.holders(X), {V, W}),
        (O, hears(V, Release(X)), []),
        (O, hears(W, Release(X)), [Free(X)]),
        (O, hears(V, Register(X)), [Send(V, Registered(X, False))]),
        (O, do.own_for(X, U), [Free(X)]),  # it is handled too late to matter
    ],
    "of a worker that has asked": [
        (W, hears(V, Sweep((U,))), []),
        (W, do.died(V), []),
        (W, do.died(U), []),  # the worker that asked is dead
    ],
    "of one more, while another is asked about": [
        (W, hears(V, Sweep((U,))), []),
        (W, hears(V, Sweep((O, U))), []),
        (W, do.died(U), []),
        (W, do.died(O), [Send(V, Swept((O, U)))]),  # one answer, to the last question
    ],
}


@pytest.mark.parametrize("script", DEATHS.values(), ids=DEATHS.keys())
def test_nothing_of_a_dead_worker_is_left_after_a_script(script: list[Step]) -> None:
    workers = play(script)
    dead = {rank for counting in workers.values() for rank in counting._dead}
    assert_nothing_left(workers, *(set(workers) - dead))


def test_the_owner_s_death_confirms_that_its_values_are_gone() -> None:
    workers = play(
        CREATED,
        SHARED,
        [
            (U, do.hold(X), True),
            (V, do.receive(X, FROM_U), [Send(O, Register(X))]),
            (V, do.died(O), [Confirm(X, False), Send(U, Unpin(FROM_U))]),
            (U, do.died(O), [Confirm(X, False)]),
            (U, hears(V, Unpin(FROM_U)), []),
            (U, do.share(X, W), ShareId(U, 2)),
            (U, do.share(X, O), ShareId(U, 3)),  # a race with its death: it is not pinned
            (W, do.died(O), []),
            (W, do.receive(X, ShareId(U, 2)), [Confirm(X, False), Send(U, Unpin(ShareId(U, 2)))]),
            (W, do.receive(X, ShareId(U, 2)), [Send(U, Unpin(ShareId(U, 2)))]),
            (U, hears(W, Unpin(ShareId(U, 2))), []),
            (U, do.is_confirmed(X), True),
            (U, do.drop(X), []),  # the owner is dead
            (V, do.drop(X), []),
            (W, do.drop(X), []),
            (W, do.drop(X), []),
        ],
    )
    assert_nothing_left(workers, U, V, W)


def test_a_sweep_that_is_given_up_frees_the_values_of_the_dead_holder() -> None:
    workers = play(
        CREATED,
        [
            (O, do.give_up_sweep(), []),
            (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
            (O, hears(V, Swept((U,))), []),
            (O, do.give_up_sweep(), [Free(X)]),
            (O, hears(W, Swept((U,))), []),  # late
        ],
    )
    assert_nothing_left(workers, O)


def test_a_sweep_does_not_wait_for_workers_that_join_during_it() -> None:
    counting = Counting(O)
    counting.joined(U)
    counting.joined(V)
    counting.own_for(X, U)
    assert counting.died(U) == [Send(V, Sweep((U,)))]
    counting.joined(W)
    assert counting.sweeping
    assert counting.handle(V, Swept((U,))) == [Free(X)]
    assert not counting.sweeping


def test_a_worker_that_comes_back_has_nothing_and_can_be_given_something() -> None:
    new = RefId(O, U, 2)
    workers = play(
        CREATED,
        [
            (O, do.revived(U), []),  # it was never dead
            (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
            (O, do.revived(U), [Free(X)]),
            (O, hears(V, Register(X)), [Send(V, Registered(X, False))]),
            (O, do.own_for(new, U), []),
            (O, do.share(new, U), FROM_O),
            (O, hears(U, Unpin(FROM_O)), []),
            (O, do.died(U), [Send(V, Sweep((U,))), Send(W, Sweep((U,)))]),
            (O, do.give_up_sweep(), [Free(new)]),
        ],
    )
    assert_nothing_left(workers, O)


def test_references_are_numbered_for_each_owner() -> None:
    counting = Counting(U, first_number=100)
    assert [counting.new_ref(owner) for owner in (O, V, O)] == [RefId(O, U, 101), RefId(V, U, 101), RefId(O, U, 102)]
    counting.creating(RefId(O, U, 101))
    assert counting.share(RefId(O, U, 101), V) == ShareId(U, 101)


def test_many_creations_are_remembered_as_one_range() -> None:
    counting = Counting(O)
    for number in range(1, 1001):
        counting.own_for(RefId(O, U, number), U)
        counting.handle(U, Release(RefId(O, U, number)))
    assert len(counting._created[U]) == 1
    assert not counting.expects(RefId(O, U, 500))
    assert counting.expects(RefId(O, U, 1001))


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_remembered_in_any_order(seed: int) -> None:
    order = random.Random(seed).sample(range(30), 30)
    numbers = Numbers()
    for count, number in enumerate(order, 1):
        assert number not in numbers
        numbers.add(number)
        assert {n for n in range(-1, 31) if n in numbers} == set(order[:count])
        assert len(numbers) == sum(n not in numbers for n in (m + 1 for m in order[:count]))
    assert len(numbers) == 1


def test_a_sweep_about_a_worker_that_lives_is_answered() -> None:
    """The worker that asks is mistaken, or means a predecessor of that worker."""
    counting = Counting(1)
    assert counting.handle(0, Sweep((2, 3))) == []
    assert counting.lives(2) == []
    assert counting.died(3) == [Send(0, Swept((2, 3)))]
    assert counting.lives(2) == []


def test_a_worker_that_lives_is_not_treated_as_dead() -> None:
    counting = Counting(1)
    counting.joined(2)
    counting.handle(0, Sweep((2,)))
    assert counting.lives(2) == [Send(0, Swept((2,)))]
    assert not counting.is_dead(2)
    ref = RefId(1, 1, 1)
    counting.own(ref)
    counting.share(ref, 2)
    counting.drop(ref)
    assert ref in counting.owned
    assert counting.is_dead(2) is False
    counting.died(2)
    assert counting.is_dead(2)


# Shares of what its owner has not confirmed.


def test_a_share_that_comes_twice_is_unpinned_once() -> None:
    user = Counting(1, direct=True)
    ref, share = RefId(0, 0, 1), ShareId(0, 5)
    assert user.receive(ref, share) == [Send(0, Register(ref))]
    assert user.receive(ref, share) == []
    assert user.unconfirmed_of(0) == 1
    assert user.handle(0, Recall((share, ShareId(0, 6)))) == [Send(0, Unpin(ShareId(0, 6)))]
    assert [each.notice for each in user.handle(0, Registered(ref)) if isinstance(each, Send)] == [Unpin(share)]
    assert user.unconfirmed_of(0) == 0
    assert user.handle(0, Recall((share,))) == [Send(0, Unpin(share))]


def test_a_peer_s_unconfirmed_shares_are_limited() -> None:
    user = Counting(1, direct=True)
    rights = GivenRights(user, 10, ranks=(0, 1))
    ref = RefId(0, 0, 1)
    for number in range(10):
        assert rights.objection(((ref, ShareId(0, number)),), 0) is None
        user.receive(ref, ShareId(0, number))
    assert rights.objection(((ref, ShareId(0, 10)),), 0) == "more than 10 shares of values that it has not confirmed"
    user.handle(0, Registered(ref))
    assert rights.objection(((ref, ShareId(0, 10)),), 0) is None


@pytest.mark.parametrize(
    ("ref", "number"),
    [(RefId(0, 7, 1), 1), (RefId(0, -1, 1), 1), (RefId(0, 0, -1), 1), (RefId(0, 0, 1 << 63), 1), (RefId(0, 0, 1), -1)],
)
def test_references_that_no_worker_can_have_made_are_refused(ref: RefId, number: int) -> None:
    rights = GivenRights(Counting(1, direct=True), None, ranks=(0, 1))
    assert rights.objection(((ref, ShareId(0, number)),), 0) == f"{ref}, which no worker has made"


def test_the_owner_knows_the_receivers_of_a_value_while_it_is_pinned() -> None:
    owner = Counting(0, direct=True)
    ref = owner.new_ref(0)
    owner.own(ref)
    first, second = owner.share(ref, 1), owner.share(ref, 1)
    owner.unpin(first)
    assert owner.may_use(1, ref)
    assert not owner.may_use(2, ref)
    owner.unpin(second)
    assert not owner.may_use(1, ref)
