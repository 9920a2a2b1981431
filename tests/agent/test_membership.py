"""Membership of fixed and dynamic groups, in threads over one store, and invalid contents of a store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch.distributed as dist
from counted_group import CountedStore

from backhaul.agent.member import Member
from backhaul.agent.membership import Membership
from backhaul.errors import BackhaulError, MisuseError, OptionError, RpcTimeoutError, UnknownWorkerError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Addresses

SOON = 10.0
PAST = 0.0


def soon() -> float:
    return time.monotonic() + SOON


def at(place: str) -> Addresses:
    return Addresses(memory=place)


def record(id: int, name: str) -> str:
    return msgspec.json.encode(Member(id, name, at(name))).decode()


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def memory() -> dist.Store:
    return dist.HashStore()


def gather(store: dist.Store, *names: str | None) -> list[Membership]:
    """A fixed group, each member on a thread of its own."""
    members = [Membership(store, len(names)) for _ in names]

    def join(rank: int) -> WorkerInfo:
        return members[rank].join(names[rank], rank, at(f"place {rank}"), soon())

    with ThreadPoolExecutor(len(names)) as threads:
        infos = list(threads.map(join, range(len(names))))
    assert infos == [WorkerInfo(rank, name or f"worker{rank}") for rank, name in enumerate(names)]
    return members


# Fixed groups.


def test_all_members_of_a_fixed_group_know_each_other(store: dist.Store) -> None:
    members = gather(store, "a", "b", None)
    for member in members:
        assert member.members() == [WorkerInfo(0, "a"), WorkerInfo(1, "b"), WorkerInfo(2, "worker2")]
        assert member.find("b").addresses == at("place 1")
        assert not member.dynamic
    assert len({member.group for member in members}) == 1
    assert members[0].group


def test_a_group_of_one(memory: dist.Store) -> None:
    assert gather(memory, "alone")[0].members() == [WorkerInfo(0, "alone")]


def test_two_groups_have_different_names() -> None:
    assert gather(dist.HashStore(), "a")[0].group != gather(dist.HashStore(), "a")[0].group


@pytest.mark.parametrize("rank", [None, -1, 2, 100])
def test_a_rank_out_of_range(memory: dist.Store, rank: int | None) -> None:
    with pytest.raises(OptionError, match=rf"rank {rank} is not in 0..1 \(world_size 2\)"):
        Membership(memory, 2).join("a", rank, at("x"), soon())


def test_a_rank_that_is_taken(memory: dist.Store) -> None:
    gather(memory, "a")
    with pytest.raises(OptionError, match="rank 0 is taken by worker 'a'; every worker needs its own"):
        Membership(memory, 1).join("b", 0, at("x"), soon())


def test_two_ranks_of_one_name(store: dist.Store) -> None:
    with pytest.raises(OptionError, match=r"the name 'same' is not unique: ranks . and . both have it"):
        gather(store, "same", "other", "same")


def test_a_name_that_equals_another_rank_s_default_is_refused(memory: dist.Store) -> None:
    with pytest.raises(OptionError, match="the name 'worker1' is not unique"):
        gather(memory, "worker1", None)


def test_the_ranks_that_did_not_come_are_named_and_no_others(memory: dist.Store) -> None:
    memory.set("member/2", record(2, "c"))
    with pytest.raises(RpcTimeoutError) as refusal:
        Membership(memory, 5).join("a", 0, at("x"), PAST)
    assert str(refusal.value).startswith("3 of 5 workers did not join in time: ranks 1, 3, 4; start them")


def test_all_but_one_came(memory: dist.Store) -> None:
    for rank in (1, 2, 3):
        memory.set(f"member/{rank}", record(rank, f"w{rank}"))
    with pytest.raises(RpcTimeoutError, match="1 of 5 workers did not join in time: ranks 4;"):
        Membership(memory, 5).join("a", 0, at("x"), PAST)


class Gone(Exception):
    pass


def test_joining_stops_when_its_check_raises(memory: dist.Store) -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Gone

    with pytest.raises(Gone):
        Membership(memory, 2).join("a", 0, at("x"), soon(), check)


def test_joining_waits_for_late_members(memory: dist.Store) -> None:
    waits = threading.Event()
    first = Membership(memory, 2)

    def late() -> None:
        assert waits.wait(SOON)
        Membership(memory, 2).join("b", 1, at("y"), soon())

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(late)
        first.join("a", 0, at("x"), soon(), waits.set)
        done.result()
    assert [info.name for info in first.members()] == ["a", "b"]


def test_a_member_that_left_a_fixed_group_is_still_known(memory: dist.Store) -> None:
    first, second = gather(memory, "a", "b")
    first.forget(1)
    second.leave()
    assert first.find("b").id == 1
    assert first.successor(first.find("b")) is None


# Finding.


def test_members_are_found_by_name_rank_or_info(memory: dist.Store) -> None:
    first, _ = gather(memory, "a", "b")
    for to in ("b", 1, WorkerInfo(1, "b")):
        found = first.find(to)
        assert (found.info, found.addresses) == (WorkerInfo(1, "b"), at("place 1"))
    assert first.find("a").info == WorkerInfo(0, "a")


@pytest.mark.parametrize(
    ("to", "what"),
    [
        ("c", "named 'c'"),
        ("", "named ''"),
        (2, "of rank 2"),
        (-1, "of rank -1"),
        (WorkerInfo(1, "a"), r"WorkerInfo\(id=1, name='a'\)"),
        (WorkerInfo(9, "z"), r"WorkerInfo\(id=9, name='z'\)"),
    ],
)
def test_the_error_for_an_unknown_worker_lists_the_members(memory: dist.Store, to: Any, what: str) -> None:
    first, _ = gather(memory, "a", "b")
    with pytest.raises(
        UnknownWorkerError,
        match=rf"there is no worker {what}; the workers of this group are 'a' \(rank 0\), 'b' \(rank 1",
    ):
        first.find(to)


def test_a_lookup_in_an_empty_group_says_so(memory: dist.Store) -> None:
    with pytest.raises(UnknownWorkerError, match="the workers of this group are none"):
        Membership(memory, None).find("a")


# Dynamic groups.


def enter(
    store: Any, name: str | None = None, rank: int | None = None, is_there: Callable[[Addresses], bool] | None = None
) -> Membership:
    member = Membership(store, None) if is_there is None else Membership(store, None, is_there)
    member.join(name, rank, at(name or "?"), soon())
    return member


def names(member: Membership) -> list[str]:
    member.refresh()
    return [info.name for info in member.members()]


def test_a_dynamic_group_gives_out_ranks(store: dist.Store) -> None:
    first, second, third = enter(store), enter(store, "b"), enter(store)
    assert first.dynamic
    assert first.find("b").id == 1
    assert third.members() == [WorkerInfo(0, "worker0"), WorkerInfo(1, "b"), WorkerInfo(2, "worker2")]
    assert first.group == second.group == third.group


def test_many_workers_join_a_dynamic_group_at_once(store: dist.Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        members = list(threads.map(lambda _: enter(store), range(8)))
    assert names(members[0]) == [f"worker{rank}" for rank in range(8)]


def test_a_given_rank_is_not_given_out_again(memory: dist.Store) -> None:
    enter(memory, "five", 5)
    assert enter(memory, "next").members()[-1] == WorkerInfo(6, "next")
    enter(memory, "one", 1)
    assert [info.id for info in enter(memory).members()] == [1, 5, 6, 7]


def test_a_negative_rank(memory: dist.Store) -> None:
    with pytest.raises(OptionError, match="rank -1 is negative"):
        enter(memory, "a", -1)


def test_newcomers_are_found_when_they_are_asked_for(memory: dist.Store) -> None:
    first = enter(memory, "a")
    enter(memory, "b")
    assert [info.name for info in first.members()] == ["a"]
    assert first.find("b").id == 1
    enter(memory, "c")
    assert first.find(2).name == "c"


def test_a_member_that_left_a_dynamic_group_is_unknown_to_all(store: dist.Store) -> None:
    first, second = enter(store, "a"), enter(store, "b")
    assert names(first) == ["a", "b"]
    second.leave()
    assert names(first) == ["a"]
    with pytest.raises(UnknownWorkerError):
        first.find("b")
    assert enter(store, "b").find("b").id == 2


def test_the_first_member_of_a_dynamic_group_may_leave(memory: dist.Store) -> None:
    first, second = enter(memory, "a"), enter(memory, "b")
    first.leave()
    assert names(second) == ["b"]
    third = enter(memory, "a", 0)
    assert third.group == second.group
    assert second.find("a").id == 0


def test_leaving_before_joining(memory: dist.Store) -> None:
    Membership(memory, None).leave()
    assert memory.add("count", 0) == 0


@pytest.mark.parametrize(("name", "rank"), [("a", None), ("a", 7), ("c", 0), (None, 0)])
def test_a_name_or_rank_of_a_living_member_is_refused(memory: dist.Store, name: str | None, rank: int | None) -> None:
    first = enter(memory, "a")
    with pytest.raises(OptionError, match="is not unique: 'a' of rank 0 is in the group already"):
        enter(memory, name, rank)
    assert first.find("a").addresses == at("a")
    assert names(first) == ["a"]


@pytest.mark.parametrize(("name", "rank"), [("a", None), ("a", 7), ("c", 0), ("a", 0)])
def test_the_place_of_a_dead_member_is_free(memory: dist.Store, name: str, rank: int | None) -> None:
    enter(memory, "a")
    asked = []
    second = enter(memory, name, rank, lambda addresses: bool(asked.append(addresses)))
    assert asked[0] == at("a")
    assert second.find(name).addresses == at(name)
    assert len(names(second)) == 1


def test_the_successor_of_a_dead_member(memory: dist.Store) -> None:
    watcher = enter(memory, "watcher")
    enter(memory, "a")
    before = watcher.find("a")
    assert watcher.successor(before) is None
    enter(memory, "a", is_there=lambda addresses: False)
    after = watcher.successor(before)
    assert after is not None
    assert (after.name, after.id) == ("a", 2)


def test_a_forgotten_member_is_looked_up_again(memory: dist.Store) -> None:
    first = enter(memory, "a")
    enter(memory, "b")
    first.find("b")
    first.forget(1)
    first.forget(1)
    assert [info.name for info in first.members()] == ["a"]
    assert first.find("b").id == 1


def test_a_member_does_not_forget_itself(memory: dist.Store) -> None:
    first = enter(memory, "a")
    first.forget(0)
    assert first.find("a").id == 0


class Interrupted:
    """A store whose user is interrupted, once, just before it writes a member's record."""

    def __init__(self, store: dist.Store, interruption: Callable[[], None]) -> None:
        self._store = store
        self._interruption: Callable[[], None] | None = interruption

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _interrupt(self, key: str) -> None:
        if key.startswith("member/") and self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            interruption()

    def set(self, key: str, value: str) -> None:
        self._interrupt(key)
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._interrupt(key)
        return self._store.compare_set(key, expected, desired)


def test_one_of_two_workers_gets_a_rank_that_both_want(memory: dist.Store) -> None:
    """The second comes in while the first has found the rank free, and has not taken it yet."""
    winners: list[Membership] = []
    interrupted = Interrupted(memory, lambda: winners.append(enter(memory, "quick", 3)))
    with pytest.raises(OptionError, match="rank 3 is taken by worker 'quick'"):
        enter(interrupted, "slow", 3)
    assert winners[0].find(3).name == "quick"
    winners[0].refresh()
    assert winners[0].members() == [WorkerInfo(3, "quick")]


def test_one_of_two_successors_gets_the_rank_of_a_dead_member(memory: dist.Store) -> None:
    enter(memory, "dead", 3)
    died = at("dead")
    winners: list[Membership] = []
    interrupted = Interrupted(
        memory, lambda: winners.append(enter(memory, "quick", 3, lambda addresses: addresses != died))
    )
    with pytest.raises(OptionError, match="rank 3 is taken by worker 'quick'"):
        enter(interrupted, "slow", 3, lambda addresses: addresses != died)
    winners[0].refresh()
    assert winners[0].members() == [WorkerInfo(3, "quick")]


class Breaking:
    """A store that goes away with the process that hosted it."""

    def __init__(self, store: dist.Store, *, renewable: bool = False) -> None:
        self._store = store
        self.renewable = renewable
        self.gone = False

    def renew(self) -> None:
        """No member can host it yet."""

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize(("renewable", "until"), [(False, "any more"), (True, "until a member hosts it again")])
def test_members_that_have_met_need_no_store(
    memory: dist.Store, caplog: pytest.LogCaptureFixture, renewable: bool, until: str
) -> None:
    store = Breaking(memory, renewable=renewable)
    first = enter(store, "a")
    enter(store, "b")
    first.find("b")
    store.gone = True
    with caplog.at_level(logging.WARNING):
        with pytest.raises(UnknownWorkerError, match=r"the workers of this group are 'a' .*, 'b'"):
            first.find("c")
        with pytest.raises(UnknownWorkerError):
            first.find("d")
    assert first.find("b").id == 1
    assert caplog.text.count(f"the store of this group is gone, so no worker can join {until}: ") == 1
    first.leave()


def test_leaving_a_group_whose_store_is_gone(memory: dist.Store) -> None:
    store = Breaking(memory)
    first = enter(store, "a")
    store.gone = True
    first.leave()
    first.leave()
    assert first.find("a").id == 0


def test_a_newcomer_that_greets_is_known(memory: dist.Store) -> None:
    """A newcomer's greeting has its addresses, so no member has to ask the store."""
    first = enter(memory, "a")
    first.met(Member(5, "new", at("there")))
    assert first.find("new").addresses == at("there")
    fixed = gather(dist.HashStore(), "a")[0]
    fixed.met(Member(5, "new", at("there")))
    with pytest.raises(UnknownWorkerError):
        fixed.find("new")


# A store is not trusted.

GARBAGE = {
    "text": "garbage",
    "a number": "5",
    "null": "null",
    "no fields": "{}",
    "wrong types": '{"id": "1", "name": 5, "addresses": []}',
    "another id": record(7, "x"),
    "a huge id": '{"id": 99999999999999999999999, "name": "x", "addresses": {}}',
    "bad UTF-8": b'{"id": 1, "name": "\xff\xfe", "addresses": {}}',
    "not text": b"\x80\x81\x82",
    "nested without end": '{"other": ' + "[" * 100_000,
    "bad address": '{"id": 1, "name": "x", "addresses": {"tcp": ["127.0.0.1", "port"]}}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_an_invalid_record_fails_a_fixed_group(memory: dist.Store, name: str) -> None:
    memory.set("member/1", GARBAGE[name])
    with pytest.raises(
        MisuseError, match="the record of rank 1 in the store is invalid; does another program use the store"
    ):
        Membership(memory, 2).join("a", 0, at("x"), soon())


@pytest.mark.parametrize("name", GARBAGE)
def test_an_invalid_record_is_ignored_in_a_dynamic_group(memory: dist.Store, name: str) -> None:
    memory.add("count", 2)
    memory.set("member/1", GARBAGE[name])
    member = enter(memory, "a")
    assert names(member) == ["a"]
    with pytest.raises(UnknownWorkerError):
        member.find(1)
    enter(memory, "b")
    assert member.find("b").id == 3  # the rest of the list is read as usual


@pytest.mark.parametrize("name", GARBAGE)
def test_a_rank_with_an_invalid_record_is_taken(memory: dist.Store, name: str) -> None:
    memory.set("member/0", GARBAGE[name])
    with pytest.raises(OptionError, match="rank 0 is taken by worker "):
        Membership(memory, 1).join("a", 0, at("x"), soon())


@pytest.mark.parametrize("size", [1, None])
def test_an_invalid_group_name_is_refused(memory: dist.Store, size: int | None) -> None:
    memory.set("group", b"\xff\xfe")
    with pytest.raises(BackhaulError):
        Membership(memory, size).join("a", 0, at("x"), soon())


@pytest.mark.parametrize("count", ["many", "99999999999999999999999999"])
def test_an_invalid_count_is_refused(memory: dist.Store, count: str) -> None:
    memory.set("count", count)
    with pytest.raises(BackhaulError):
        enter(memory, "a")


def test_a_complete_group_is_read_in_few_requests() -> None:
    store = CountedStore()
    for rank in range(1, 1000):
        store.set(f"member/{rank}", record(rank, f"worker{rank}"))
    store.asked.clear()
    member = Membership(cast(dist.Store, store), 1000)
    member.join("worker0", 0, at("here"), soon())
    assert len(member.members()) == 1000
    assert store.asked.total() < 60


@pytest.mark.parametrize("absent", [1, 37, 64, 65, 129, 199])
def test_one_missing_rank_among_many_is_named(memory: dist.Store, absent: int) -> None:
    for rank in range(1, 200):
        if rank != absent:
            memory.set(f"member/{rank}", record(rank, f"worker{rank}"))
    with pytest.raises(RpcTimeoutError, match=f"1 of 200 workers did not join in time: ranks {absent};"):
        Membership(memory, 200).join("worker0", 0, at("here"), PAST)


def test_members_on_other_machines(memory: dist.Store) -> None:
    member = enter(memory, "a")
    assert member.elsewhere("") == []
    member.met(Member(7, "far", Addresses(host="there"), incarnation="first"))
    member.met(Member(8, "near", Addresses(host="")))
    assert member.elsewhere("") == [WorkerInfo(7, "far")]
    assert {info.id for info in member.elsewhere("there")} == {0, 8}
    member.met(Member(7, "far", Addresses(host=""), incarnation="second"))  # it has come back, on this machine
    assert member.elsewhere("") == []
    member.forget(7)
    assert {info.id for info in member.elsewhere("there")} == {0, 8}
