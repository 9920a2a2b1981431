"""Who is in the group, and where: names <-> addresses through a c10d store.

Under a prefix, the store holds::

    group               a random name of the group; the first to come sets it
    count               dynamic groups: how many ids were given out
    member/<id>         the member's record; empty once it has left; ``ended`` once it has shut a fixed group down

A fixed group (``world_size`` given) is complete when `join` returns. A dynamic group is looked
up when a name or rank is not known yet.

Each worker that joins draws an **incarnation**: a name for this process in this role. A process that dies may be
replaced by another one of the same name and rank, whose record takes the place of the old one; of two that try, one
gets it, and while the old one lives none does. The others learn of it by its greeting, or look the record up when the
old process is not to be reached any more.

What the store says is not trusted: records are decoded by type, and a peer is believed
only after the greeting on its own connection.
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

from backhaul.devices.maps import Devices
from backhaul.errors import MisuseError, OptionError, RpcTimeoutError, UnknownWorkerError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Addresses
from backhaul.transport.processes import own_name

if TYPE_CHECKING:
    from torch.distributed import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1
# Those that wait for a large group ask the store about so often in a second, all of them together.
_ASKED_IN_A_SECOND = 1000
_MOST_RECORDS = 64  # that are asked for at once
_PATIENCE = 0.05
"""Between two looks for members, this share of the time waited so far: nobody is noticed much later than needed."""
_NAME_BYTES = 16
_INCARNATION_BYTES = 6
_RENEW_PAUSE = 5.0
_RENEWALS = 6
_STORE_SECONDS = 5.0
_ENDED = "ended"


class Member(msgspec.Struct, frozen=True):
    """A worker as the store knows it."""

    id: int
    name: str
    addresses: Addresses
    devices: Devices = Devices()
    incarnation: str = ""
    """Tells this process from others that have had its name and rank."""

    def __str__(self) -> str:
        process = f", process {self.addresses.pid}" if self.addresses.pid else ""
        return f"worker {self.name!r} (incarnation {self.incarnation or '?'}{process})"

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.id, self.name)


# Made once, at import: msgspec crashes if two threads are the first to decode a type.
_member_decoder = msgspec.json.Decoder(Member)


class Membership:
    """The members of one group, as seen by one of them. Thread-safe."""

    def __init__(
        self, store: Store, world_size: int | None, is_there: Callable[[Addresses], bool] = lambda addresses: True
    ) -> None:
        """``is_there`` says whether a worker still listens: the place of a dead one is free."""
        self._store = store
        self._is_there = is_there
        self.world_size = world_size
        self.group = ""
        self.incarnation = secrets.token_hex(_INCARNATION_BYTES)
        self.replaces = False
        """This worker has the place of one that was in the group before it, and has died or left."""
        self._lock = threading.Lock()
        self._by_id: dict[int, Member] = {}
        self._by_host: dict[str, dict[int, WorkerInfo]] = {}
        self._by_name: dict[str, Member] = {}
        self._me: Member | None = None
        self._store_is_gone = False
        self.store_is_renewable = bool(getattr(store, "renewable", False))
        """Whether a member hosts the store, so that it may be lost with that one and can be taken over."""
        self._renewing = threading.Lock()
        self._renew_at = 0.0  # not before

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
        """Enter the group, and wait until it is complete if it is a fixed one.

        ``check`` is called now and then meanwhile; it raises if there is no point in waiting any longer.

        Raises `OptionError` if the name or the rank is taken, `RpcTimeoutError` naming the ranks
        that did not come.
        """
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
        """Take this worker off the list. ``ended``: its fixed group is over, and is not to be joined again."""
        if self._me is not None and not self._store_is_gone:
            try:  # without a store, there is no list either
                left = _ENDED if ended and not self.dynamic else ""
                self._store.compare_set(f"member/{self._me.id}", _encode(self._me), left)
            except RuntimeError:
                self._store_is_gone = True

    def met(self, member: Member) -> Member | None:
        """A member has introduced itself. If it has taken the place of another process, what was known of that one."""
        with self._lock:
            known = self._by_id.get(member.id)
        if known is None or known.name != member.name:
            if self.dynamic:
                self._learn(member)
            return None
        if not member.incarnation or known.incarnation == member.incarnation:
            return None
        # Greetings do not tell about devices; a process in the same place has the same.
        self._learn(msgspec.structs.replace(member, devices=known.devices))
        return known if known.incarnation else None

    def members(self) -> list[WorkerInfo]:
        """All known members, by rank."""
        with self._lock:
            return sorted(member.info for member in self._by_id.values())

    def elsewhere(self, host: str) -> list[WorkerInfo]:
        """The known members on other machines than this one. Takes no time for the others."""
        with self._lock:
            return [info for each, there in self._by_host.items() if each != host for info in there.values()]

    def ranks(self) -> set[int]:
        """Their ranks."""
        with self._lock:
            return set(self._by_id)

    def devices(self) -> dict[str, Devices]:
        """What all known members have told about their devices, by name."""
        with self._lock:
            return {self._by_id[id].name: self._by_id[id].devices for id in sorted(self._by_id)}

    def known(self, info: WorkerInfo) -> Member | None:
        """What is known of a member now. Asks no store."""
        return self._look_up(info)

    def find(self, to: str | int | WorkerInfo) -> Member:
        """The member that ``to`` names. Raises `UnknownWorkerError` listing those that exist."""
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
        """The process that has taken the place of a member, if one has."""
        if self.dynamic:
            self.refresh()
            found = self._look_up(member.name)
        else:
            found = self._look_up(member.info)
            if found is None or found.incarnation == member.incarnation:
                found = self._look_again(member)
        return found if found is not None and found != member else None

    def _look_again(self, member: Member) -> Member | None:
        """The store's record of a member of a fixed group, which `met` is told of when that process greets."""
        if self._store_is_gone and not self.renew_store():
            return None
        key = f"member/{member.id}"
        try:
            record = self._ask_store(lambda: self._store.get(key) if self._store.check([key]) else b"")
        except RuntimeError as error:
            self._lose_store(error)
            return None
        found = self._decode(record)
        return found if found is not None and found.info == member.info else None

    def forget(self, id: int) -> None:
        """A member of a dynamic group has gone; it may come back elsewhere."""
        if self.dynamic and (self._me is None or id != self._me.id):
            with self._lock:
                member = self._by_id.pop(id, None)
                self._leave_host(member)
                if member is not None and self._by_name.get(member.name) is member:
                    del self._by_name[member.name]

    def refresh(self) -> None:
        """Read a dynamic group's list from the store, if that is still there.

        A store that a worker hosts goes with it. If no other can take it over, those who have met go on without; others
        cannot join any more.
        """
        if self._store_is_gone and not self.renew_store():
            return
        try:
            self._read_list()
        except RuntimeError as error:
            self._lose_store(error)

    def check_store(self, stopped: Callable[[float], bool] = lambda seconds: True) -> None:
        """A worker is lost: if the store is with it, take it over. May wait for a minute.

        Tries again if that fails, since no call of this worker may ever ask for the store, and newcomers do:
        ``stopped`` waits for so many seconds, and says whether there is no point in it any more.
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
        """The answer of the store. Raises RuntimeError if there is none: torch waits without an end for a lost host."""
        answers: list[T] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="store-question", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        if not answers:
            raise errors[0] if errors else RuntimeError(f"the store has not answered for {_STORE_SECONDS:g} s")
        return answers[0]

    def _lose_store(self, error: RuntimeError) -> None:
        self._store_is_gone = True
        if not self.renew_store():
            _log.warning("the store of this group is gone, so nobody can join it any more: %s", error)

    def renew_store(self) -> bool:
        """Write what is known of the group to a store in the place of one that is gone. False if there is none."""
        with self._renewing:
            if not self._store_is_gone:
                return True
            if not self.store_is_renewable or time.monotonic() < self._renew_at:
                return False
            try:
                store = self._store.renew()  # type: ignore[attr-defined]
                renewed = store is not None and self._publish(store)
            except RuntimeError:
                renewed = False
            if not renewed:
                self._renew_at = time.monotonic() + _RENEW_PAUSE
                return False
            self._store, self._store_is_gone = store, False
        _log.info("the store of this group was lost, and has been made anew")
        return True

    def _publish(self, store: Store) -> bool:
        """Write the group to a store that is new. False if another group is there."""
        if store.compare_set("group", "", self.group) != self.group.encode():
            return False
        with self._lock:
            members = list(self._by_id.values())
        for member in members:
            store.compare_set(f"member/{member.id}", "", _encode(member))
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
                member = self._decode(self._store.get(key))
                if member is not None and member.id == id:
                    present.add(id)
                    self._learn(member)
        for id in [id for id in list(self._by_id) if id not in present]:
            self.forget(id)

    def _join_group(self) -> str:
        """The group's name, which the first to come makes up."""
        found = self._store.compare_set("group", "", secrets.token_hex(_NAME_BYTES))
        if len(found) != 2 * _NAME_BYTES or not found.isalnum():
            raise MisuseError("the store's name of the group is not one; does another program use the store?")
        return found.decode("ascii")

    def _take_id(self, rank: int | None) -> int:
        """An id in a dynamic group: the given rank, or the next free one."""
        if rank is not None and rank < 0:
            raise OptionError(f"rank {rank} is negative")
        try:
            if rank is None:
                return self._store.add("count", 1) - 1
            # Ids given out automatically must not meet this one later.
            while (count := self._store.add("count", 0)) <= rank:
                self._store.add("count", rank + 1 - count)
        except (ValueError, IndexError, OverflowError) as error:  # what C++ makes of text that is no number
            raise MisuseError(
                f"the store's count of members is not one ({error}); does another program use the store?"
            ) from error
        return rank

    def _claim(self, me: Member) -> None:
        """Write the record of this worker, in place of that of a dead one if need be. Raises `OptionError`."""
        key, mine = f"member/{me.id}", _encode(me)
        self.replaces = self._store.check([key])
        found = self._store.compare_set(key, "", mine)
        before = self._decode(found)
        if before is not None and found != mine.encode() and not self.dynamic and not self._lives(before, me):
            if before.name != me.name:
                raise OptionError(
                    f"rank {me.id} belongs to worker {before.name!r}, which has died: only a worker of that name takes "
                    f"its place, not {me.name!r}"
                )
            found = self._store.compare_set(key, found.decode(), mine)
        if found != mine.encode():
            taken = self._decode(found)
            raise OptionError(
                f"rank {me.id} is taken by worker {taken.name if taken else '?'!r}; every worker needs its own"
            )

    def _lives(self, member: Member, me: Member) -> bool:
        """Whether the process of a record is there. It is not if this process listens where that one did."""
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
            # It died here. Another successor may have come first: then its record is not this one any more.
            self._store.compare_set(f"member/{member.id}", _encode(member), "")
            self.forget(member.id)

    def _gather(self, world_size: int, deadline: float, check: Callable[[], None]) -> None:
        """Wait until all are there.

        A look asks for the missing one of the lowest rank, and for those after it while they are there: all have to
        come, in whatever order. Looks number 1, 2, 4, 8 and so on ask for all, so that a record that is wrong is seen
        while others are missing. So n workers that wait for long ask the store about n log n times each.
        """
        missing = deque(id for id in range(world_size) if id not in self._by_id)
        longest = max(_LONGEST_PAUSE, world_size / _ASKED_IN_A_SECOND)
        start = time.monotonic()
        looks = 0
        while missing:
            check()
            looks += 1
            # Asked and not waited for: a store that waits in vain says so on standard error.
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
        """Those that have no record yet; the others are known then. Looks as far as the first of them, or at ``every``.

        Asks for several at once, twice as many after each time that all of them were there: a request is a round trip.
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
        """Whether this is a record of a member of a fixed group, which is known then."""
        if not record:
            return False
        if record == _ENDED.encode():
            raise MisuseError(f"this group has ended: rank {id} has shut it down")
        self._learn(self._member_of_rank(id, record))
        return True

    def _member_of_rank(self, id: int, record: bytes) -> Member:
        """The store's record of a member of a fixed group, checked."""
        member = self._decode(record)
        if member is None or member.id != id:
            raise MisuseError(f"the store's record of rank {id} is not one; does another program use the store?")
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
        """Holds ``_lock``."""
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

    @staticmethod
    def _decode(raw: bytes) -> Member | None:
        try:
            return _member_decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


def _encode(member: Member) -> str:
    return msgspec.json.encode(member).decode()


Look = Callable[[Addresses], bool | None]
"""Whether a worker listens at its addresses; None if its host does not answer."""


def goes_on(
    store: Store,
    rank: int,
    world_size: int,
    look: Look,
    moved_on: Callable[[], bool],
    patience: float,
    *,
    restarted: bool = False,
) -> bool:
    """Whether the fixed group that meets in this store is the one for a worker of that rank to join.

    It is not if that worker has shut it down, or if it has died and so have all others. A host that does not answer
    may be cut off for a moment: a worker that gave it up would wait in a group of its own, and the others for it. So it
    is looked for until ``patience`` seconds have passed, or ``moved_on`` says that others have left this group.
    ``restarted``: the launcher never starts one worker again without all others. Then a record of another process in
    this place is enough: what listens at the addresses of its group may be the next one, on the same ports.
    """
    deadline = time.monotonic() + patience
    while True:
        found = _look_at(store, rank, world_size, look, restarted=restarted)
        if found is not None:
            return found
        if time.monotonic() >= deadline or moved_on():
            return False
        time.sleep(_LONGEST_PAUSE)


def _look_at(store: Store, rank: int, world_size: int, look: Look, *, restarted: bool) -> bool | None:
    """`goes_on`, as far as can be seen now; None if nobody is there, and some may be."""
    came = store.check([f"member/{rank}"])
    mine = store.get(f"member/{rank}") if came else b""
    if mine == _ENDED.encode():
        return False
    before = Membership._decode(mine) if restarted else None
    if before is not None and before.addresses.process != own_name():
        return False
    found = silent = False
    for id in range(world_size):
        record = store.get(key) if store.check([key := f"member/{id}"]) else b""
        member = Membership._decode(record)
        if member is not None:
            there = look(member.addresses)
            if there:
                return True  # nearly always the first one
            silent = silent or (there is None and id != rank)
        if record == _ENDED.encode():
            return False
        found = found or member is not None
    if silent:
        return None
    return not came and not found
