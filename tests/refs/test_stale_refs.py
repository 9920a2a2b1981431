"""References to values of a process that another one has replaced are refused at once, also by workers that get them
late.

A message may bring such a reference late: its sender knew of no replacement when the message was made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from mortal_group import PATIENCE, MortalGroup

from awaiting import await_events
from backhaul import rpc
from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Send, Void
from backhaul.refs.counting import Counting
from backhaul.rpc import RRef
from backhaul.wire.messages import Call, Register, Registered, Unpin

# The state machine.

OLD, NEW = 11, 22


def test_a_value_of_an_earlier_process_is_not_expected() -> None:
    owner = Counting(0, life=NEW)
    stale, early = RefId(0, 1, 5, OLD), RefId(0, 1, 6, NEW)
    assert owner.handle(2, Register(stale)) == [Send(2, Registered(stale, False))]
    assert owner.receive(stale, ShareId(2, 1)) == [Void(stale), Send(2, Unpin(ShareId(2, 1)))]
    assert owner.handle(2, Register(early)) == [Send(2, Registered(early, True))], "its creation is on the way"


def test_a_creator_that_does_not_know_the_owner_s_process() -> None:
    owner = Counting(0, life=NEW)
    unknown, mistaken = RefId(0, 1, 5), RefId(0, 1, 6, OLD)
    assert owner.handle(2, Register(unknown)) == [Send(2, Registered(unknown, True))]
    owner.own_for(mistaken, 1)
    assert owner.handle(2, Register(mistaken)) == [Send(2, Registered(mistaken, True))], "it was made here"


def test_references_name_the_process_of_their_owner() -> None:
    user = Counting(1, life=NEW)
    assert user.new_ref(0, OLD).life == OLD
    assert user.new_ref(1).life == NEW


# Workers.


@pytest.fixture
def group() -> Iterator[MortalGroup]:
    made = MortalGroup(["here", "here", "here"])
    yield made
    made.close()


def make() -> str:
    return "value"


def use(rref: RRef[Any]) -> str:
    try:
        rref.to_here()
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"
    return "used"


def test_a_reference_that_comes_late(group: MortalGroup) -> None:
    """The owner is replaced while the reference is on its way to a worker that knows the successor already."""
    with group.workers[2].as_current():
        rref = rpc.remote("worker1", make)
        assert rref.to_here() == "value"
        rpc.rpc_sync("worker0", make)
        group.faults.next("delay", Call)
        late = rpc.rpc_async("worker0", use, args=(rref,))
    group.kill(1)
    group.join(1)
    with group.workers[0].as_current():
        assert rpc.rpc_sync("worker1", make) == "value", "it has met the successor"
    began = time.monotonic()
    group.faults.release()
    assert "WorkerLostError: the value" in late.wait()
    assert time.monotonic() - began < PATIENCE / 2, "it has waited"
    with pytest.raises(rpc.WorkerLostError, match="is gone"), group.workers[2].as_current():
        rref.to_here()


def test_the_error_says_that_the_owner_is_gone(group: MortalGroup) -> None:
    mine = group.workers[0]
    with mine.as_current():
        rref = rpc.remote("worker1", make)
        assert rref.to_here() == "value"
    (old,) = [line for line in mine.agent.calling() if line.peer.name == "worker1"]
    group.kill(1)
    group.join(1)
    # Otherwise the next call may leave over the connection that is ending.
    assert await_events(mine, lambda: old.ended, PATIENCE)
    with mine.as_current():
        assert rpc.rpc_sync("worker1", make) == "value", "it has met the successor"
        # The first text if the successor's greeting came first, the second if the news of the death did.
        with pytest.raises(rpc.WorkerLostError, match=r"has its place and none of its values|is lost or has freed it"):
            rref.to_here()


def test_a_value_is_made_on_a_successor_that_the_creator_has_not_met(group: MortalGroup) -> None:
    with group.workers[0].as_current():
        assert rpc.rpc_sync("worker2", make) == "value"
    group.kill(1)
    group.join(1)
    with group.workers[0].as_current():
        assert rpc.remote("worker1", make).to_here() == "value"
