"""Turns bytes into a script that drives one worker's reference counting as hostile peers would.

Worker 0 owns values, gives references away and gets some. Its peers 1 to 3 send whatever notices they like, about
values and shares that exist or that they make up. The only exception raised here is `Broken`, for an invariant that
does not hold.

Each step is an operation and three operands, a byte each. The first byte of a script says whether the peers are in a
federation. In a federation the driver (`refs.holdings`) gets only notices that `GivenRights.may_say` allows, and one
more rule must hold: a peer's notices change nothing that other peers have. Notices go through msgpack, as they come
from the wire.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec

from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Action, Free, Send
from backhaul.refs.counting import Counting
from backhaul.trust.rights import GivenRights
from backhaul.wire.messages import Notice, Recall, Register, Registered, Release, Sweep, Swept, Unpin

ME = 0
PEERS = (1, 2, 3)
STEP = 4
MAX_STEPS = 32
# Ranks and numbers that a peer may claim; msgpack has 64 bits for each.
_RANKS = (0, 1, 2, 3, 4, -1, 1 << 62, (1 << 64) - 1)
_NUMBERS = (0, 1, 2, 3, 4, 5, 6, -1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1, 1 << 32)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


class Broken(Exception):
    """An invariant of the state machine does not hold."""


class Script:
    """One worker, and its invariants."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.machine = Counting(ME, direct=strict)
        self.rights = GivenRights(self.machine, None, (ME, *PEERS))
        for peer in PEERS:
            self.machine.joined(peer)
        self.held: Counter[RefId] = Counter()  # copies here
        self.creating: list[RefId] = []  # whose owner has not answered
        self.shares: list[ShareId] = []
        self.listed: set[tuple[int, RefId]] = set()  # holders that have sent nothing since they were told so
        self.dead: set[int] = set()
        self.steps = 0
        self.operations = (
            self._own,
            self._drop,
            self._create,
            self._created,
            self._share,
            self._connection_ends,
            self._dies,
            self._revives,
            self._abandon,
            self._message,
            self._creation,
            *[self._notice] * 7,
        )
        self.told = (self._message, self._creation, self._notice)  # by the peer that the first operand names

    def step(self, operation: int, a: int, b: int, c: int) -> None:
        self.steps += 1
        run = self.operations[operation % len(self.operations)]
        if self.strict and run in self.told:
            before = self._of_others(PEERS[a % 3])
            run(a, b, c)
            if self._of_others(PEERS[a % 3], before) != before:
                raise Broken(f"rank {PEERS[a % 3]} has changed what others have")
        else:
            run(a, b, c)
        self.check()

    # Actions of this worker.

    def _own(self, a: int, b: int, c: int) -> None:
        ref = self.machine.new_ref(ME)
        self.machine.own(ref)
        self.held[ref] += 1

    def _drop(self, a: int, b: int, c: int) -> None:
        held = list(self.held)
        if held:
            ref = held[a % len(held)]
            self.held[ref] -= 1
            if not self.held[ref]:
                del self.held[ref]
            self.act(self.machine.drop(ref))

    def _create(self, a: int, b: int, c: int) -> None:
        ref = self.machine.new_ref(PEERS[a % 3])
        self.machine.creating(ref)
        self.held[ref] += 1
        self.creating.append(ref)

    def _created(self, a: int, b: int, c: int) -> None:
        if self.creating:
            self.act(self.machine.created(self.creating.pop(a % len(self.creating))))

    def _share(self, a: int, b: int, c: int) -> None:
        held = list(self.held)
        if held:
            ref, to = held[a % len(held)], PEERS[b % 3]
            if not self.strict or ref.owner in (ME, to):  # a federation's references go no further
                self.shares.append(self.machine.share(ref, to, c % 4))

    def _connection_ends(self, a: int, b: int, c: int) -> None:
        self.act(self.machine.connection_ended(a % 4))

    def _dies(self, a: int, b: int, c: int) -> None:
        peer = PEERS[a % 3]
        self.dead.add(peer)
        self.listed = {(other, ref) for other, ref in self.listed if other != peer}
        self.act(self.machine.died(peer))

    def _revives(self, a: int, b: int, c: int) -> None:
        peer = PEERS[a % 3]
        self.dead.discard(peer)
        self.act(self.machine.revived(peer))

    def _abandon(self, a: int, b: int, c: int) -> None:
        if b % 8 == 0:  # seldom: the group ends with it
            used = list(self.machine.used)
            if used:
                ref = used[a % len(used)]
                del self.held[ref]
                self.act(self.machine.abandon(ref))
        else:
            self.act(self.machine.give_up_sweep())

    # Actions of peers.

    def _message(self, a: int, b: int, c: int) -> None:
        """Receive a message with a reference, which is kept or dropped."""
        peer, ref, share = PEERS[a % 3], self._any_ref(b, c), self._any_share(c, b)
        if self.strict:
            share = ShareId(peer, share.number)
            if not (self.machine.may_use(peer, ref) if ref.owner == ME else ref.owner == peer):
                return
        actions = self.machine.receive(ref, share)
        if c & 1:
            if not self.machine.hold(ref):
                raise Broken(f"{ref} has come and is not known")
            self.held[ref] += 1
        self.act([*actions, *self.machine.drop(ref)])

    def _creation(self, a: int, b: int, c: int) -> None:
        peer = PEERS[a % 3]
        ref = RefId(ME, peer, _NUMBERS[b % len(_NUMBERS)])
        if not self.strict or self.machine.is_new(ref):
            self.act(self.machine.own_for(ref, peer))

    def _notice(self, a: int, b: int, c: int) -> None:
        peer = PEERS[a % 3]
        notice = _decoder.decode(_encoder.encode(self._made_up(a // 3, b, c)))
        if self.strict and not self.rights.may_say(peer, notice):
            return
        if isinstance(notice, Release):
            self.listed.discard((peer, notice.ref))
        actions = self.machine.handle(peer, notice)
        self.act(actions)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.notice, Registered) and action.notice.exists:
                self.listed.add((action.to, action.notice.ref))

    def _made_up(self, kind: int, b: int, c: int) -> Any:
        kinds = (
            lambda: Register(self._any_ref(b, c)),
            lambda: Registered(self._any_ref(b, c), bool(c & 1)),
            lambda: Unpin(self._any_share(b, c)),
            lambda: Release(self._any_ref(b, c)),
            lambda: Sweep(self._any_ranks(b)),
            lambda: Swept(self._any_ranks(b)),
            lambda: Recall((self._any_share(b, c), self._any_share(c, b))[: c % 3]),
        )
        return kinds[kind % len(kinds)]()

    def _any_ref(self, a: int, b: int) -> RefId:
        known = [*self.machine.owned, *self.machine.used]
        if known and a & 1:
            return known[b % len(known)]
        number = _NUMBERS[b // 4 % len(_NUMBERS)]
        return RefId(_RANKS[a // 2 % len(_RANKS)], _RANKS[(a // 16 + b) % len(_RANKS)], number)

    def _any_share(self, a: int, b: int) -> ShareId:
        if self.shares and a & 1:
            return self.shares[b % len(self.shares)]
        return ShareId(_RANKS[a // 2 % len(_RANKS)], _NUMBERS[b % len(_NUMBERS)])

    @staticmethod
    def _any_ranks(bits: int) -> tuple[int, ...]:
        return tuple(rank for place, rank in enumerate(_RANKS) if bits >> place & 1)

    # The invariants.

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Free):
                if self.held[action.ref]:
                    raise Broken(f"{action.ref} was freed, and is held here")
                holders = [peer for peer, ref in self.listed if ref == action.ref]
                if holders:
                    raise Broken(f"{action.ref} was freed, and {holders} are listed")
            elif isinstance(action, Send) and (action.to == ME or action.to in self.dead):
                raise Broken(f"a notice to {action.to}")

    def _of_others(self, peer: int, before: Any = None) -> Any:
        """The pins, entries of lists and references that do not concern this peer; only those known before."""
        machine = self.machine
        pins = {share: pin.to for share, pin in machine._pins.items() if pin.to != peer}
        lists = {(ref, user) for ref, entry in machine._owned.items() for user in entry.users if user != peer}
        used = {ref: entry.confirmed for ref, entry in machine._used.items() if ref.owner != peer}
        if before is not None:
            lists &= before[1]
        return pins, lists, used

    def check(self) -> None:
        machine = self.machine
        for ref in self.held:
            if not machine.knows(ref):
                raise Broken(f"{ref} is held here and not known")
        for ref, entry in machine._owned.items():
            if entry.idle():
                raise Broken(f"{ref} is kept for nobody")
        entries: dict[RefId, Any] = {**machine._owned, **machine._used}
        for share, pin in machine._pins.items():
            entry = machine._entry(pin.ref)
            if entry is None or share not in entry.pins:
                raise Broken(f"{share} pins {pin.ref}, which does not know it")
        pinned = sum(len(entry.pins) for entry in entries.values())
        if pinned != len(machine._pins):
            raise Broken(f"{pinned} pins in the entries, {len(machine._pins)} in all")
        for numbers in machine._created.values():
            bounds = [bound for pair in zip(numbers._starts, numbers._ends, strict=True) for bound in pair]
            if any(one >= other for one, other in pairwise(bounds)):
                raise Broken(f"ranges that meet: {bounds}")
        if len(entries) > 2 * self.steps or len(machine._sweeps._questions) > len(PEERS):
            raise Broken("more is kept than was told")


def play(data: bytes) -> None:
    """Run a script. Raises `Broken` if an invariant does not hold after one of its steps."""
    script = Script(strict=bool(data and data[0] & 1))
    for start in range(1, min(len(data) - STEP, STEP * MAX_STEPS) + 1, STEP):
        script.step(*data[start : start + STEP])
