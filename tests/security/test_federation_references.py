"""Peers of a federation that lie about references: those of others, those that do not exist, and their values."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import exposed
import pytest
import torch
from exposed import Account
from liars import Liar, attack, federation, is_refused, is_value, liar, without_pauses

from backhaul import rpc
from backhaul.errors import QuotaError, RefusedError
from backhaul.ids import RefId, ShareId
from backhaul.options import Quotas
from backhaul.refs.counting import Counting
from backhaul.testing import InProcessCluster
from backhaul.trust.rights import GivenRights
from backhaul.wire import trees
from backhaul.wire.messages import (
    Create,
    Fetch,
    Notice,
    Notices,
    Recall,
    Register,
    Registered,
    Release,
    Result,
    Sweep,
    Swept,
    Unpin,
)


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with federation() as made:
        yield made


def eventually(check: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if check():
            return True
        threading.Event().wait(0.005)
    return False


def tree_of(ref: RefId) -> Any:
    return [trees.EXTENSION, "rref", [trees.TUPLE, ref.owner, ref.creator, ref.number]]


def tell(peer: Liar, *notices: Notice) -> None:
    """Send notices, and return when they are handled."""
    tell.number += 1  # type: ignore[attr-defined]
    assert isinstance(peer.ask(Notices, 1, tell.number, notices), Result)  # type: ignore[attr-defined]


tell.number = 0  # type: ignore[attr-defined]


def held_by_the_good_peer(workers: InProcessCluster) -> rpc.RRef[Any]:
    """A value of worker0 that worker1 has a reference to."""
    with workers[1].as_current():
        account = rpc.remote("worker0", Account, (7,))
        assert account.rpc_sync().deposit(0) == 7
    return account


def still_good(workers: InProcessCluster, account: rpc.RRef[Any]) -> bool:
    with workers[1].as_current():
        return bool(account.rpc_sync().deposit(0) == 7)


def given_to(peer: Liar, value: Any) -> tuple[RefId, ShareId]:
    """A reference that the victim sends to the liar, which does not confirm it."""
    answer = peer.call("exposed:give", value)
    ((ref, share),) = answer.refs
    return ref, share


def test_references_of_others_and_guessed_ones_give_one_answer(workers: InProcessCluster) -> None:
    account = held_by_the_good_peer(workers)
    theirs = account._ref
    guesses = [
        theirs,
        RefId(0, 1, theirs.number + 1),
        RefId(0, 1, theirs.number - 1),
        RefId(0, 0, theirs.number),
        RefId(0, 2, 1),
        RefId(0, 2, theirs.number),
        RefId(1, 1, 1),
        RefId(2, 2, 1),
        RefId(-1, -1, -1),
        RefId(2**62, 2**62, 2**62),
    ]
    with liar(workers) as peer, attack(workers):
        for ref in guesses:
            assert is_refused(peer.ask(Fetch, ref)), ref
            for refs in ((), ((ref, ShareId(2, 1)),), ((ref, ShareId(1, 1)),)):
                method = peer.call(
                    "backhaul.refs.proxy:invoke", tree_of(ref), "deposit", [trees.TUPLE, 5], {}, refs=refs
                )
                if ref.owner == 2 and refs and refs[0][1].sharer == 2:
                    # Its own reference, which it may send. Its value is not here.
                    assert is_refused(method)
                    continue
                assert is_refused(method), ref
                assert is_refused(peer.call("exposed:value_of", tree_of(ref), refs=refs)), ref
                assert is_refused(peer.call("exposed:echo", [trees.LIST, tree_of(ref)], refs=refs)), ref
        assert still_good(workers, account)


@pytest.mark.long
def test_a_hundred_thousand_guesses(workers: InProcessCluster) -> None:
    """Most of them are notices, a thousand in each message."""
    account = held_by_the_good_peer(workers)
    without_pauses(workers[0])
    random.seed(0)
    near = account._ref.number
    before = workers[0].references.counts()
    with liar(workers) as peer, attack(workers):
        start = time.monotonic()
        for _ in range(100):
            numbers = [random.choice((near, near + random.randrange(-1000, 1000), random.getrandbits(62)))
                       for _ in range(1000)]  # fmt: skip
            refs = [RefId(0, random.choice((0, 1)), number) for number in numbers]
            tell(peer, *map(Register, refs), *map(Release, refs))
            assert is_refused(peer.ask(Fetch, refs[0]))
        assert time.monotonic() - start < 20.0
        assert still_good(workers, account)
    assert workers[0].references.counts()["holders"] == before["holders"]
    assert workers[0].references.counts()["values"] == before["values"]


def test_a_peer_cannot_strike_off_another_holder(workers: InProcessCluster) -> None:
    account = held_by_the_good_peer(workers)
    with liar(workers) as peer, attack(workers):
        tell(
            peer,
            Release(account._ref),
            Register(account._ref),
            Registered(account._ref, False),
            Unpin(ShareId(0, 1)),
            Unpin(ShareId(1, 1)),
            Sweep((1,)),
            Swept((1,)),
            Recall((ShareId(1, 1),)),
        )
        assert is_refused(peer.ask(Fetch, account._ref))  # registering did not help
        assert still_good(workers, account)
    assert workers[1].agent.is_connected(0)


def test_a_peer_cannot_confirm_a_share_of_another(workers: InProcessCluster) -> None:
    """While a reference is on its way to one peer, another confirms it. That would free the value too early."""
    with liar(workers) as peer, liar(workers, rank=1) as good:
        ref, share = given_to(good, 5)
        tell(peer, Unpin(share), *(Unpin(ShareId(0, share.number + near)) for near in range(-3, 4)))
        assert is_value(good.ask(Fetch, ref), 5)
        tell(good, Register(ref))
        tell(good, Unpin(share))
        assert is_value(good.ask(Fetch, ref), 5)


def test_only_the_owner_can_say_that_a_value_is_gone(workers: InProcessCluster) -> None:
    """worker0 has a reference to a value of worker1, and worker2 says that the value is gone."""
    with workers[0].as_current():
        theirs = rpc.rpc_sync("worker1", exposed.give, ("theirs",))
        with liar(workers) as peer, attack(workers):
            tell(peer, Registered(theirs._ref, False), Release(theirs._ref), Register(theirs._ref))
        assert theirs.to_here() == "theirs"


def test_a_reference_that_was_given_back_cannot_be_used(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        ref, share = given_to(peer, 5)
        assert is_value(peer.ask(Fetch, ref), 5)
        tell(peer, Register(ref), Unpin(share))
        assert is_value(peer.ask(Fetch, ref), 5)
        tell(peer, Release(ref))
        assert is_refused(peer.ask(Fetch, ref))
        tell(peer, Register(ref))
        assert is_refused(peer.ask(Fetch, ref))
    assert eventually(lambda: workers[0].references.counts()["values"] == 0)


def test_a_peer_creates_only_new_values_of_its_own(workers: InProcessCluster) -> None:
    call = [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, 4], {}]
    with liar(workers) as peer, attack(workers):
        assert isinstance(peer.ask(Create, RefId(0, 2, 1), call), Result)
        assert is_value(peer.ask(Fetch, RefId(0, 2, 1)), 8)
        for ref in (RefId(0, 2, 1), RefId(0, 1, 5), RefId(0, 0, 5), RefId(1, 2, 5), RefId(2, 2, 5)):
            assert is_refused(peer.ask(Create, ref, call)), ref  # it exists already, or is not its own
        hidden = [trees.TUPLE, [trees.NAMED, "exposed:hidden"], [trees.TUPLE, 4], {}]
        assert isinstance(peer.ask(Create, RefId(0, 2, 2), hidden), Result)
        assert is_refused(peer.ask(Fetch, RefId(0, 2, 2)))
        tell(peer, Release(RefId(0, 2, 1)))
        assert is_refused(peer.ask(Create, RefId(0, 2, 1), call))  # and never again


def test_a_request_may_follow_the_one_that_makes_its_value(workers: InProcessCluster) -> None:
    """Both requests are sent before either is answered."""
    gate = exposed.gates["made"] = threading.Event()
    with liar(workers) as peer:
        call = [trees.TUPLE, [trees.NAMED, "exposed:wait"], [trees.TUPLE, "made"], {}]
        peer.send(Create(1, RefId(0, 2, 1), call))
        peer.send(Fetch(2, RefId(0, 2, 1)))
        assert isinstance(peer.receive(), Result)
        gate.set()
        assert is_value(peer.receive(), "made")


def test_gaps_in_the_numbers_of_creations(workers: InProcessCluster) -> None:
    """Remembering which exist takes a few bytes, unless every other number is missing."""
    with liar(workers) as peer, attack(workers):
        for number in range(1, 11):
            releases = [Release(RefId(0, 2, 2 * (4000 * number + each))) for each in range(4000)]
            peer.send(Notices(number, 9, number, tuple(releases)))
        assert peer.is_cut_off()


def test_malformed_method_calls_are_refused(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        ref, _ = given_to(peer, 5)
        mine = tree_of(ref)
        given = ((ref, ShareId(2, 9)),)
        for arguments in (
            (),
            (mine,),
            (mine, "deposit"),
            (mine, "deposit", [trees.TUPLE], {}, 1),
            (mine, 7, [trees.TUPLE], {}),
            (mine, "deposit", [trees.LIST], {}),
            (mine, "deposit", [trees.TUPLE], [trees.LIST]),
            (5, "deposit", [trees.TUPLE], {}),
            ([trees.NAMED, "exposed:Account"], "title", [trees.TUPLE], {}),
            (mine, "bit_length", [trees.TUPLE], {}),
            (mine, "__class__", [trees.TUPLE], {}),
        ):
            assert is_refused(peer.call("backhaul.refs.proxy:invoke", *arguments, refs=given)), arguments


def test_a_reference_to_a_missing_value_of_the_peer(workers: InProcessCluster) -> None:
    """An exposed function gets the reference, and its call fails because there is no value. Nothing else fails."""
    with liar(workers) as peer, attack(workers):
        ref = RefId(2, 2, 123)
        answer = peer.call("exposed:value_of", tree_of(ref), refs=((ref, ShareId(2, 1)),))
        assert answer.type_name in ("backhaul.errors.RefusedError", "backhaul.errors.WorkerLostError")


# Quotas.


def test_the_quota_of_references_to_our_values() -> None:
    with federation(quotas=Quotas(references=10)) as workers:
        with liar(workers) as peer, attack(workers):
            given = [given_to(peer, number) for number in range(10)]
            answer = peer.call("exposed:give", 1)
            assert answer.type_name == "backhaul.errors.QuotaError"
            assert "worker 'worker2' has references to 10 values" in answer.text
            call = [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, 4], {}]
            assert peer.ask(Create, RefId(0, 2, 1), call).type_name == "backhaul.errors.QuotaError"
            tell(peer, *(Unpin(share) for _, share in given[:5]))
            assert isinstance(peer.ask(Create, RefId(0, 2, 1), call), Result)
        assert eventually(lambda: workers[0].references.counts()["values"] <= 6)


def test_the_quota_of_references_to_their_values() -> None:
    with federation(quotas=Quotas(references=10)) as workers, liar(workers) as peer, attack(workers):
        refs = tuple((RefId(2, 2, number), ShareId(2, number)) for number in range(11))
        assert is_refused(peer.call("exposed:double", 1, refs=refs))
        assert is_value(peer.call("exposed:double", 1, refs=refs[:10]), 2)


def test_an_honest_peer_beyond_its_quota_keeps_what_it_has() -> None:
    with federation(quotas=Quotas(references=30, calls=2)) as workers, workers[1].as_current():
        mine = rpc.RRef("mine")
        gate = exposed.gates["full"] = threading.Event()
        waiting = [rpc.rpc_async("worker0", exposed.wait, ("full",)) for _ in range(2)]
        for _ in range(20):
            with pytest.raises(QuotaError, match="2 calls of this peer are under way"):
                rpc.rpc_sync("worker0", exposed.value_of, (mine,))
        gate.set()
        assert [each.wait() for each in waiting] == ["full", "full"]
        # A refused message has left no pin.
        assert eventually(lambda: workers[1].references.counts()["pinned"] == 0)
        accounts = [rpc.remote("worker0", Account, (number,)) for number in range(30)]
        assert [account.rpc_sync().deposit(1) for account in accounts] == list(range(1, 31))
        with pytest.raises(QuotaError):
            rpc.remote("worker0", Account).rpc_sync().deposit(1)
        # References on their way count too, until the owner has unpinned them.
        assert eventually(lambda: workers[1].references.counts()["pinned"] == 0)
        assert [account.rpc_sync().deposit(1) for account in accounts] == list(range(2, 32))


def test_a_worker_whose_peer_has_all_references_of_its_quota_may_still_use_those_of_the_peer() -> None:
    with federation(quotas=Quotas(references=10)) as workers, workers[1].as_current():
        account = rpc.remote("worker0", Account, (0,))
        with workers[0].as_current():
            kept = []
            for number in range(10):
                kept.append(rpc.rpc_sync("worker1", exposed.give, (number,)))
                # A value on its way counts until the receiver has confirmed it.
                assert eventually(lambda: workers[1].references.counts()["pinned"] == 0)
        with pytest.raises(QuotaError, match="worker 'worker0' has references to 10 values"):
            rpc.rpc_sync("worker0", exposed.value_of, (rpc.RRef("one more"),))
        assert [account.rpc_sync().deposit(1) for _ in range(10)] == list(range(1, 11))
        del kept


def test_all_references_of_a_dead_peer_are_given_back(workers: InProcessCluster) -> None:
    """No other worker is asked, because this worker gave the peer all its references."""
    with workers[2].as_current():
        kept = [rpc.remote("worker0", Account, (number,)) for number in range(3)]
        assert [each.rpc_sync().deposit(0) for each in kept] == [0, 1, 2]
        given = rpc.rpc_sync("worker0", exposed.give, (1,))
    assert workers[0].references.counts()["values"] == 4
    workers[2].shutdown(graceful=False)
    assert eventually(lambda: workers[0].references.counts()["values"] == 0)
    del kept, given
    assert workers[1].rpc_sync("worker0", exposed.double, (1,)) == 2


# What the state machine allows.

MINE = RefId(0, 0, 1)


def owner_of_one() -> tuple[Counting, ShareId]:
    """Rank 0, with a value that it has sent to rank 1."""
    owner = Counting(0, direct=True)
    owner.own(MINE)
    return owner, owner.share(MINE, 1)


def test_only_the_owner_and_the_given_peers_may_use_a_value() -> None:
    owner, share = owner_of_one()
    assert [owner.may_use(peer, MINE) for peer in range(3)] == [True, True, False]
    assert not owner.may_use(1, RefId(0, 0, 2))
    assert not owner.may_use(1, RefId(1, 0, 1))
    owner.handle(1, Register(MINE))
    owner.handle(1, Unpin(share))
    assert owner.may_use(1, MINE)
    assert owner.held_by(1) == 1
    owner.handle(1, Release(MINE))
    assert not owner.may_use(1, MINE)
    assert owner.held_by(1) == 0


@pytest.mark.parametrize(
    ("peer", "notice", "allowed"),
    [
        (1, Register(MINE), True),
        (2, Register(MINE), False),
        (1, Register(RefId(0, 0, 2)), False),
        (1, Register(RefId(1, 0, 1)), False),
        (1, Unpin(ShareId(0, 1)), True),
        (2, Unpin(ShareId(0, 1)), False),
        (2, Unpin(ShareId(0, 99)), True),  # no effect
        (2, Release(MINE), True),  # its own
        (2, Release(RefId(1, 2, 1)), False),
        (1, Registered(RefId(1, 1, 1)), True),
        (2, Registered(RefId(1, 1, 1)), False),
        (1, Sweep((2,)), False),
        (1, Swept((2,)), False),
        (1, Recall((ShareId(1, 1),)), True),
        (1, Recall((ShareId(1, 1), ShareId(2, 1))), False),
    ],
)
def test_which_notices_a_peer_may_send(peer: int, notice: Notice, allowed: bool) -> None:
    owner, _ = owner_of_one()
    assert GivenRights(owner, None, range(3)).may_say(peer, notice) is allowed


def test_dead_holders_are_struck_off_at_once() -> None:
    owner, _ = owner_of_one()
    owner.handle(1, Register(MINE))
    owner.joined(1)
    owner.joined(2)
    owner.drop(MINE)
    assert [type(action).__name__ for action in owner.died(1)] == ["Free"]
    assert not owner.sweeping


def test_a_tensor_by_reference(workers: InProcessCluster) -> None:
    with workers[1].as_current():
        rref = rpc.remote("worker0", exposed.double, (torch.ones(2),))
        assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
        with pytest.raises(RefusedError):
            rref.backward()
