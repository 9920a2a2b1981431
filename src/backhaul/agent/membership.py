"""Membership: which workers are in the group, and their addresses, through a c10d store.

Under a prefix, the store holds::

    group               a random name of the group; the first worker sets it
    count               dynamic groups: how many ids have been given out
    member/<id>         the member's record; empty once it has left; ``ended`` once it has shut a fixed group down

A fixed group (``world_size`` given) is complete when `join` returns. In a dynamic group, this worker reads the list of
members from the store when a name or rank is not known yet.

Each worker that joins draws an **incarnation**: a random name for this process in this role. Another process of the
same name and rank may replace a process that has died; its record replaces the old record. If two processes try, only
one succeeds. While the old process lives, none succeeds. The other workers learn of the replacement by its greeting, or
read its record when they can no longer reach the old process.

The contents of the store are not trusted: records are decoded by type, and a peer is trusted only after the greeting on
its own connection.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backhaul.agent.exits import awaited_at_exit
from backhaul.agent.member import ENDED, Member, decoded, encoded
from backhaul.devices.maps import Devices
from backhaul.errors import (
    BackhaulError,
    MisuseError,
    OptionError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Addresses

if TYPE_CHECKING:
    from torch.distributed import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1
# All workers that wait for a large group together ask the store about this often in a second.
_ASKED_IN_A_SECOND = 1000
_MOST_RECORDS = 64  # in one request to the store
_PATIENCE = 0.05
"""The pause between two looks, as a share of the time waited so far: it bounds the relative delay of a notice."""
_NAME_BYTES = 16
_INCARNATION_BYTES = 6
_RENEW_PAUSE = 5.0
_RENEWALS = 6
_STORE_SECONDS = 5.0


class Membership:
    """The members of one group, as seen by one of them. Thread-safe."""

    def __init__(
        self, store: Store, world_size: int | None, is_there: Callable[[Addresses], bool] = lambda addresses: True
    ) -> None:
        """``is_there`` says whether a worker still listens. If not, another process may take its place."""
        self._store = store
        self._is_there = is_there
        self.world_size = world_size
        self.group = ""
        self.incarnation = secrets.token_hex(_INCARNATION_BYTES)
        self.replaces = False
        """This worker has taken the place of an earlier worker that died or left."""
        self._lock = threading.Lock()
        self._by_id: dict[int, Member] = {}
        self._by_host: dict[str, dict[int, WorkerInfo]] = {}
        self._by_name: dict[str, Member] = {}
        self._me: Member | None = None
        self._store_is_gone = False
        self.store_is_renewable = bool(getattr(store, "renewable", False))
        """Whether a member hosts the store. Such a store is lost with its host, and another member can take it over."""
        self._renewing = threading.Lock()
        self._renew_at = 0.0  # the earliest time of the next attempt

    @property
    def dynamic(self) -> bool:
        return self.world_size is None

    def join(
        self,
        name: str | None,
        rank: int | None,
        addresses: Addresses,
        deadline: float,
        check: Callable[[], None] = lambda: None,
        devices: Devices = Devices(),  # noqa: B008 it is frozen
    ) -> WorkerInfo:
        """Enter the group and return this worker's info. Waits until a fixed group is complete.

        ``check`` is called now and then during the wait, and raises if further waiting is pointless.

        Raises `OptionError` if the name or the rank is taken, `MisuseError` if the store has other contents,
        `RpcTimeoutError` with the ranks that did not join in time, and `WorkerLostError` if the store is lost.
        """
        try:
            return self._enter(name, rank, addresses, deadline, check, devices)
        except BackhaulError:
            raise
        except RuntimeError as error:
            raise WorkerLostError(
                "the group's store was lost before all workers had joined: the process that hosts it (rank 0, unless a "
                "launcher does) has ended or is unreachable; start the group again. The store's error: "
                + str(error).partition("\n")[0]  # C++ frames follow
            ) from error

    def _enter(
        self,
        name: str | None,
        rank: int | None,
        addresses: Addresses,
        deadline: float,
        check: Callable[[], None],
        devices: Devices,
    ) -> WorkerInfo:
        self.group = self._join_group()
        if self.world_size is None:
            rank = self._take_id(rank)
            name = f"worker{rank}" if name is None else name
            self.refresh()
            self._refuse_taken(name, rank)
        elif rank is None or not 0 <= rank < self.world_size:
            raise OptionError(f"rank {rank} is not in 0..{self.world_size - 1} (world_size {self.world_size})")
        me = Member(rank, f"worker{rank}" if name is None else name, addresses, devices, self.incarnation)
        self._claim(me)
        self._me = me
        self._learn(me)
        if self.world_size is not None:
            self._gather(self.world_size, deadline, check)
        return me.info

    def leave(self, *, ended: bool = False) -> None:
        """Take this worker off the list. ``ended``: its fixed group is over, and no worker may join it again."""
        if self._me is not None and not self._store_is_gone:
            try:  # if the store is gone, so is the list
                left = ENDED if ended and not self.dynamic else ""
                self._store.compare_set(f"member/{self._me.id}", encoded(self._me), left)
            except RuntimeError:
                self._store_is_gone = True

    def met(self, member: Member) -> Member | None:
        """Note that a member has greeted. Returns the old member if it has replaced another process, else None."""
        with self._lock:
            known = self._by_id.get(member.id)
        if known is None or known.name != member.name:
            if self.dynamic:
                self._learn(member)
            return None
        if not member.incarnation or known.incarnation == member.incarnation:
            return None
        # Greetings do not carry devices. A replacement has the same devices as the old process.
        self._learn(msgspec.structs.replace(member, devices=known.devices))
        return known if known.incarnation else None

    def members(self) -> list[WorkerInfo]:
        """All known members, by rank."""
        with self._lock:
            return sorted(member.info for member in self._by_id.values())

    def elsewhere(self, host: str) -> list[WorkerInfo]:
        """The known members that are not on ``host``. The cost does not depend on the members on ``host``."""
        with self._lock:
            return [info for each, there in self._by_host.items() if each != host for info in there.values()]

    def ranks(self) -> set[int]:
        """The ranks of all known members."""
        with self._lock:
            return set(self._by_id)

    def devices(self) -> dict[str, Devices]:
        """The devices of all known members, by name."""
        with self._lock:
            return {self._by_id[id].name: self._by_id[id].devices for id in sorted(self._by_id)}

    def known(self, info: WorkerInfo) -> Member | None:
        """What is known of a member now, without asking the store."""
        return self._look_up(info)

    def find(self, to: str | int | WorkerInfo) -> Member:
        """The member that ``to`` names. Raises `UnknownWorkerError` with a list of the existing workers."""
        if isinstance(to, bool) or not isinstance(to, str | int | WorkerInfo):
            raise OptionError(f"a worker is given by name, rank or WorkerInfo, not by {to!r}")
        member = self._look_up(to)
        if member is None and self.dynamic:
            self.refresh()
            member = self._look_up(to)
        if member is None:
            what = f"of rank {to}" if isinstance(to, int) else f"named {to!r}" if isinstance(to, str) else f"{to}"
            names = ", ".join(f"{info.name!r} (rank {info.id})" for info in self.members())
            raise UnknownWorkerError(
                f"could not find destination: there is no worker {what}; "
                f"the workers of this group are {names or 'none'}"
            )
        return member

    def successor(self, member: Member) -> Member | None:
        """The process that has taken the place of a member, if there is one. May ask the store."""
        if self.dynamic:
            self.refresh()
            found = self._look_up(member.name)
        else:
            found = self._look_up(member.info)
            if found is None or found.incarnation == member.incarnation:
                found = self._look_again(member)
        return found if found is not None and found != member else None

    def _look_again(self, member: Member) -> Member | None:
        """The store's record of a member of a fixed group. Not stored here: `met` does that when the process greets."""
        if self._store_is_gone and not self.renew_store():
            return None
        key = f"member/{member.id}"
        try:
            record = self._ask_store(lambda: self._store.get(key) if self._store.check([key]) else b"")
        except RuntimeError as error:
            self._lose_store(error)
            return None
        found = decoded(record)
        return found if found is not None and found.info == member.info else None

    def forget(self, id: int) -> None:
        """Forget a member of a dynamic group that has gone. It may come back at another address."""
        if self.dynamic and (self._me is None or id != self._me.id):
            with self._lock:
                member = self._by_id.pop(id, None)
                self._leave_host(member)
                if member is not None and self._by_name.get(member.name) is member:
                    del self._by_name[member.name]

    def refresh(self) -> None:
        """Read the list of a dynamic group from the store, if the store still exists.

        A store that a worker hosts is lost with that worker. If no other worker can take the store over, the workers
        that know each other continue without it, and no new worker can join.
        """
        if self._store_is_gone and not self.renew_store():
            return
        try:
            with awaited_at_exit(_STORE_SECONDS):
                self._read_list()
        except RuntimeError as error:
            self._lose_store(error)

    def check_store(self, stopped: Callable[[float], bool] = lambda seconds: True) -> None:
        """Take the store over if it was lost with a worker. May wait for a minute.

        Tries again after a failure. Newcomers need the store, and perhaps no later call of this worker would ask for
        it. ``stopped(seconds)`` waits, and returns True if further attempts are pointless.
        """
        for _ in range(_RENEWALS):
            self._check_store_once()
            if not self._store_is_gone or stopped(_RENEW_PAUSE):
                return

    def _check_store_once(self) -> None:
        if self._store_is_gone:
            self.renew_store()
            return
        try:
            self._ask_store(lambda: self._store.check(["group"]))
        except RuntimeError as error:
            self._lose_store(error)

    def _ask_store(self, question: Callable[[], T]) -> T:
        """The answer of the store. Raises RuntimeError if none comes in time: torch waits forever for a lost host."""
        answers: list[T] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                errors.append(error)
            finally:
                over.set()

        with awaited_at_exit(_STORE_SECONDS) as over:
            threading.Thread(target=ask, name="store-question", daemon=True).start()
            over.wait(_STORE_SECONDS)
        if not answers:
            raise errors[0] if errors else RuntimeError(f"the store has not answered for {_STORE_SECONDS:g} s")
        return answers[0]

    def _lose_store(self, error: RuntimeError) -> None:
        self._store_is_gone = True
        if not self.renew_store():
            until = "until a member hosts it again" if self.store_is_renewable else "any more"
            _log.warning("the store of this group is gone, so no worker can join %s: %s", until, error)

    def renew_store(self) -> bool:
        """Replace a lost store, and write what is known of the group to it. False if no new store is available."""
        with self._renewing:
            if not self._store_is_gone:
                return True
            if not self.store_is_renewable or time.monotonic() < self._renew_at:
                return False
            try:
                with awaited_at_exit(_STORE_SECONDS):
                    store = self._store.renew()  # type: ignore[attr-defined]
                    renewed = store is not None and self._publish(store)
            except RuntimeError:
                renewed = False
            if not renewed:
                self._renew_at = time.monotonic() + _RENEW_PAUSE
                return False
            self._store, self._store_is_gone = store, False
        _log.info("the store of this group was lost and has been replaced")
        return True

    def _publish(self, store: Store) -> bool:
        """Write the group to a new store. False if the store belongs to another group."""
        if store.compare_set("group", "", self.group) != self.group.encode():
            return False
        with self._lock:
            members = list(self._by_id.values())
        for member in members:
            store.compare_set(f"member/{member.id}", "", encoded(member))
        if self.dynamic:
            following = 1 + max((member.id for member in members), default=-1)
            while (count := store.add("count", 0)) < following:
                store.add("count", following - count)
        return True

    def _read_list(self) -> None:
        count = self._store.add("count", 0)
        present = set()
        for id in range(count):
            key = f"member/{id}"
            if self._store.check([key]):
                member = decoded(self._store.get(key))
                if member is not None and member.id == id:
                    present.add(id)
                    self._learn(member)
        for id in [id for id in list(self._by_id) if id not in present]:
            self.forget(id)

    def _join_group(self) -> str:
        """The name of the group. The first worker makes it up."""
        found = self._store.compare_set("group", "", secrets.token_hex(_NAME_BYTES))
        if len(found) != 2 * _NAME_BYTES or not found.isalnum():
            raise MisuseError("the group name in the store is invalid; does another program use the store?")
        return found.decode("ascii")

    def _take_id(self, rank: int | None) -> int:
        """An id in a dynamic group: the given rank, or the next free one."""
        if rank is not None and rank < 0:
            raise OptionError(f"rank {rank} is negative")
        try:
            if rank is None:
                return self._store.add("count", 1) - 1
            # Ids that are given out automatically later must not collide with this one.
            while (count := self._store.add("count", 0)) <= rank:
                self._store.add("count", rank + 1 - count)
        except (ValueError, IndexError, OverflowError) as error:  # what C++ raises for text that is not a number
            raise MisuseError(
                f"the member count in the store is invalid ({error}); does another program use the store?"
            ) from error
        return rank

    def _claim(self, me: Member) -> None:
        """Write the record of this worker, and replace the record of a dead one. Raises `OptionError` if taken."""
        key, mine = f"member/{me.id}", encoded(me)
        self.replaces = self._store.check([key])
        found = self._store.compare_set(key, "", mine)
        before = decoded(found)
        if before is not None and found != mine.encode() and not self.dynamic and not self._lives(before, me):
            if before.name != me.name:
                raise OptionError(
                    f"rank {me.id} belongs to worker {before.name!r}, which has died: only a worker of that name takes "
                    f"its place, not {me.name!r}"
                )
            found = self._store.compare_set(key, found.decode(), mine)
        if found != mine.encode():
            taken = decoded(found)
            raise OptionError(
                f"rank {me.id} is taken by worker {taken.name if taken else '?'!r}; every worker needs its own"
            )

    def _lives(self, member: Member, me: Member) -> bool:
        """Whether the process of a record still runs. It does not if this process listens at its old address."""
        here, there = me.addresses, member.addresses
        if here.host == there.host and there.tcp is not None and here.tcp == there.tcp:
            return False
        return self._is_there(there)

    def _refuse_taken(self, name: str, rank: int) -> None:
        for member in list(self._by_id.values()):
            if member.name != name and member.id != rank:
                continue
            if self._is_there(member.addresses):
                raise OptionError(
                    f"worker {name!r} of rank {rank} is not unique: {member.name!r} of rank {member.id} is in the "
                    "group already, and every worker needs a name and a rank of its own"
                )
            # The member is dead. If another successor came first, the record differs and compare_set does nothing.
            self._store.compare_set(f"member/{member.id}", encoded(member), "")
            self.forget(member.id)

    def _gather(self, world_size: int, deadline: float, check: Callable[[], None]) -> None:
        """Wait until all members have joined.

        A look asks for the missing member of the lowest rank, and goes on with the next ranks as long as it finds them.
        That is enough, because all members must come, in whatever order. Looks number 1, 2, 4, 8 and so on ask for all
        missing members, so that a wrong record is noticed while others are missing. So each of n workers that wait for
        long asks the store about n log n times.
        """
        missing = deque(id for id in range(world_size) if id not in self._by_id)
        longest = max(_LONGEST_PAUSE, world_size / _ASKED_IN_A_SECOND)
        start = time.monotonic()
        looks = 0
        while missing:
            check()
            looks += 1
            # Poll with check() instead of wait(): a store whose wait times out writes to standard error.
            before = len(missing)
            missing = self._still_missing(missing, every=looks & (looks - 1) == 0)
            came = before - len(missing)
            now = time.monotonic()
            if missing and now > deadline:
                absent = self._still_missing(missing, every=True)
                if not absent:
                    return
                raise RpcTimeoutError(
                    f"{len(absent)} of {world_size} workers did not join in time: ranks "
                    f"{', '.join(map(str, absent))}; start them, or check that all use the same init_method"
                )
            if not came:
                time.sleep(min(max(_PATIENCE * (now - start), _SHORTEST_PAUSE), longest))

    def _still_missing(self, missing: deque[int], *, every: bool) -> deque[int]:
        """The ranks that have no record yet. Learns the members that have one.

        Stops at the first missing rank, or looks at ``every`` rank. Each request is a round trip, so it asks for
        several ranks at once, and doubles their number each time that all of them were there.
        """
        ahead, left = deque(missing), deque[int]()
        count = 1
        while ahead and (every or not left):
            ids = list(itertools.islice(ahead, count))
            keys = [f"member/{id}" for id in ids]
            if self._store.check(keys):
                records = self._store.multi_get(keys)
                left += (id for id, record in zip(ids, records, strict=True) if not self._has_come(id, record))
                count = min(2 * count, _MOST_RECORDS)
            elif count > 1:
                count //= 2
                continue
            else:
                left += ids
            for _ in ids:
                ahead.popleft()
        return left + ahead

    def _has_come(self, id: int, record: bytes) -> bool:
        """Whether the record is not empty. Then learns the member of a fixed group. Raises if the record is wrong."""
        if not record:
            return False
        if record == ENDED.encode():
            raise MisuseError(f"this group has ended: rank {id} has shut it down")
        self._learn(self._member_of_rank(id, record))
        return True

    def _member_of_rank(self, id: int, record: bytes) -> Member:
        """Decode and check the record of a member of a fixed group. Raises `MisuseError` or `OptionError`."""
        member = decoded(record)
        if member is None or member.id != id:
            raise MisuseError(f"the record of rank {id} in the store is invalid; does another program use the store?")
        other = self._by_name.get(member.name)
        if other is not None and other.id != id:
            raise OptionError(
                f"the name {member.name!r} is not unique: ranks {other.id} and {id} both have it, and every worker "
                "needs its own"
            )
        return member

    def _learn(self, member: Member) -> None:
        with self._lock:
            self._leave_host(self._by_id.get(member.id))
            self._by_id[member.id] = member
            self._by_name[member.name] = member
            self._by_host.setdefault(member.addresses.host, {})[member.id] = member.info

    def _leave_host(self, member: Member | None) -> None:
        """The caller holds ``_lock``."""
        if member is not None:
            there = self._by_host[member.addresses.host]
            del there[member.id]
            if not there:
                del self._by_host[member.addresses.host]

    def _look_up(self, to: str | int | WorkerInfo) -> Member | None:
        if isinstance(to, str):
            return self._by_name.get(to)
        if isinstance(to, int):
            return self._by_id.get(to)
        member = self._by_id.get(to.id)
        return member if member is not None and member.name == to.name else None
