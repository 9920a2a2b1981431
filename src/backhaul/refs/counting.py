"""Which workers hold a reference, and when the owner may free its value. A pure state machine.

Theory of operation
-------------------
**Listing.** The owner of a value lists the workers that hold references to it. It does not know how many
copies each worker has: a worker counts its own copies and tells the owner only about the first and
the last. A dead worker is simply struck off the lists.

A worker that has a reference to another worker's value is a *user* of that value. The entry of a user
goes through these states::

    registering ──(the owner has listed us)──> confirmed ──(last copy gone)──> Release, forgotten

**Sharing.** When a message takes a reference from a *sharer* to a *receiver*, the receiver is not
listed yet, and the sharer may drop its own reference at once. Then the owner would free the value too
early. So the sharer *pins* its entry for each share. The receiver asks the owner to list it
(`Register`); the owner answers (`Registered`); then the receiver tells the sharer (`Unpin`). A pinned entry
is not released. A receiver that is confirmed already, or is the owner, unpins at once::

    sharer ───── message with the reference ─────> receiver
    (pinned)                                        │ Register
       │                                 owner <────┘
       │                                   └─────> receiver   Registered
       └<────────────────── Unpin ──────────────────┘

At every moment a listed worker, or the owner itself, keeps the value alive: the sharer until the
receiver is listed, the receiver from then on.

**Lost shares.** When a connection breaks and both its ends live, the sharer cannot know which of the last messages
have arrived. It sends the receiver a `Recall`: notices survive a broken connection. The receiver unpins each of these
shares, except those that it will unpin anyway once the owner has listed it. A message may still come later, from the
buffers of the old connection. No pin covers it any more. That is safe: the owner tells the receiver whether the value
is still there, as it tells every worker that registers. No thread waits for that message, because its call has already
failed at the caller.

**Creation.** The message that creates a remote value also lists its creator, and the reply confirms the creator. The
creator sends `Release` only after that. If the creator never learns whether the message arrived, it still sends
`Release`, as soon as nothing is pinned. It does so even while it has copies, because they are useless now, and other
workers may wait for the value.

The creator may share the reference at once. So a `Register`, or the reference itself, can reach the owner before the
creation does. The owner then makes the entry and lists the creator. Later the value follows, or the creator's
`Release`. Once either has come, the creation is over. The owner remembers which creations are over. So it knows for a
reference without an entry whether the value is still to come or has been freed.

**Lives.** A worker that died may be replaced: another process has its rank. So a reference also names the process of
its owner (``life``). A value of an earlier process will not come, and a death takes the values of one process only. A
reference to a value of the new process may come while we have not met that process, or still consider the old one
alive. Then it registers once we have met the new process (`Seek`, `revived`).

**Deaths.** Dead workers are struck off the lists. A dead worker may have passed a reference on. Then this worker first
asks the living workers whether such a reference is under way: see `sweeps`.

**Assumptions.** Between two living workers, notices arrive in order and exactly once. `mailbox` ensures that, over
connections that may break. Nothing is assumed about their order relative to calls.

**Direct references.** Where peers may lie, a reference goes only from its owner to a user and back (``direct``). So a
dead worker cannot have passed a reference on, and no sweep is needed: dead workers are struck off at once, and a peer
has no reason to send a `Sweep`. If a worker was given a reference, the owner has listed that worker, or has a pin
towards it (`may_use`). `trust.rights` relies on that.

Methods return the messages to send and the values to free; they do nothing else. One driver calls them, under one lock,
and holds the lock until the messages are in their outboxes. Otherwise a `Register` could overtake the `Release` that
was decided before it, and the owner would strike off a worker that has just got the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Action, Confirm, Free, Seek, Send, Void
from backhaul.refs.entries import Owned, Pin, Pins, Used
from backhaul.refs.numbers import Numbers
from backhaul.refs.sweeps import Sweeps
from backhaul.wire.messages import Notice, Recall, Register, Registered, Release, Sweep, Swept, Unpin


class Counting:
    """The references of one worker, whose rank is ``me``: those to its own values, and those to values of others.

    Not thread-safe: the driver's lock guards it.
    """

    def __init__(self, me: int, first_number: int = 0, *, direct: bool = False, life: int = 0) -> None:
        """``first_number`` must be far from that of every other process that ever has this rank.

        ``life`` must differ from that of every such process; 0 means that lives are not compared. With ``direct``,
        references go only from their owner to a user and back.
        """
        self.me = me
        self.life = life
        self._direct = direct
        self._first_number = first_number
        self._owned: dict[RefId, Owned] = {}
        self._used: dict[RefId, Used] = {}
        self._pins = Pins()
        self._refs: dict[int, int] = {}  # owner -> the last number; one count for each owner keeps `Numbers` short
        self._shares = first_number
        self._listed: Counter[int] = Counter()  # worker -> number of our entries that list it
        self._to_unpin: dict[ShareId, RefId] = {}  # the shares of all references that are registering
        self._unconfirmed: Counter[int] = Counter()  # worker -> number of these shares that came from it
        self._used_of: Counter[int] = Counter()  # owner -> number of its values that are used here
        self._created: dict[int, Numbers] = {}  # creator -> its creations here that have come, or never will
        self._sweeps = Sweeps(me)
        self._dead = self._sweeps.dead
        self._lives: dict[int, int] = {}  # dead worker -> the life of the process that died; 0 if that is not known

    @property
    def owned(self) -> Iterable[RefId]:
        return self._owned.keys()

    @property
    def used(self) -> Iterable[RefId]:
        return self._used.keys()

    def holders(self, ref: RefId) -> set[int]:
        """The workers that are listed for a value of ours."""
        entry = self._owned.get(ref)
        return set() if entry is None else set(entry.users)

    def is_confirmed(self, ref: RefId) -> bool:
        entry = self._used.get(ref)
        return entry.confirmed if entry is not None else ref in self._owned

    def knows(self, ref: RefId) -> bool:
        return self._entry(ref) is not None

    @property
    def pinned(self) -> int:
        return len(self._pins)

    def may_use(self, peer: int, ref: RefId) -> bool:
        """Whether that worker was given a value of ours and has not released it."""
        entry = self._owned.get(ref)
        if entry is None or ref.owner != self.me:
            return False
        return peer == self.me or peer in entry.users or self._pins.is_under_way(ref, peer)

    def held_by(self, peer: int) -> int:
        """The number of references to values of ours that this worker has, including those under way to it.

        References to values of third workers count, too, while they are under way to it. References to its own values
        never count.
        """
        return self._listed[peer] + self._pins.towards(peer) - self._pins.returning(peer)

    def returning_to(self, owner: int) -> int:
        """The number of references to values of that worker that go back to it and may not have arrived."""
        return self._pins.returning(owner)

    def used_of(self, owner: int) -> int:
        """The number of values of that worker that are used here."""
        return self._used_of[owner]

    def unconfirmed_of(self, peer: int) -> int:
        """The number of shares from that worker that we unpin once the owner has listed us."""
        return self._unconfirmed[peer]

    def fragments(self, creator: int) -> int:
        """The number of separate ranges in the numbers of that worker's creations here. An honest worker makes few."""
        return len(self._created.get(creator, ()))

    def is_new(self, ref: RefId) -> bool:
        """Whether a value of ours is unknown here: it has no entry, and its creation is not over."""
        return ref not in self._owned and ref.number not in self._created.get(ref.creator, ())

    def shared_with(self, share: ShareId) -> int | None:
        """The receiver of a share that is pinned here."""
        pin = self._pins.get(share)
        return None if pin is None else pin.to

    def new_ref(self, owner: int, life: int = 0) -> RefId:
        """A name for a new value. ``life`` is that of its owner, if the owner is another worker.

        For a value of another worker, call `creating` and `created` next.
        """
        number = self._refs[owner] = self._refs.get(owner, self._first_number) + 1
        return RefId(owner, self.me, number, self.life if owner == self.me else life)

    def own(self, ref: RefId) -> None:
        """This worker has made a value of its own; the caller has one copy."""
        self._owned.setdefault(ref, Owned()).copies += 1

    def own_for(self, ref: RefId, creator: int) -> list[Action]:
        """A value of ours is about to be made for ``creator``.

        If the result contains a `Free`, no worker needs the value any more.
        """
        entry = self._owned.setdefault(ref, Owned())
        entry.expected = False
        if creator not in self._dead and self._note_created(ref):
            self._list(entry, creator)
        return self._free_if_idle(ref)

    def creating(self, ref: RefId) -> None:
        """A creation is on its way to the owner; the caller has one copy."""
        entry = self._used.get(ref)  # there is one if a peer has invented a reference of this name
        (self._use(ref) if entry is None else entry).copies += 1

    def created(self, ref: RefId, *, lost: bool = False) -> list[Action]:
        """The owner has confirmed the creation; with ``lost`` it has not, and the creation may or may not have
        happened. Call it once."""
        entry = self._used.get(ref)
        if entry is not None:
            entry.lost = lost
        return self._confirm(ref, exists=True)

    def hold(self, ref: RefId) -> bool:
        """Count one more copy here. False if the reference is unknown here."""
        entry = self._entry(ref)
        if entry is None:
            return False
        entry.copies += 1
        return True

    def drop(self, ref: RefId) -> list[Action]:
        """Count one copy fewer here."""
        entry = self._entry(ref)
        if entry is None or not entry.copies:
            return []  # `abandon` has set the count to 0
        entry.copies -= 1
        return self._leave_if_idle(ref)

    def abandon(self, ref: RefId) -> list[Action]:
        """Give up a reference even if there are copies of it here, because the group ends."""
        entry = self._used.get(ref)
        if entry is None:
            return []
        entry.copies = 0
        for share in entry.pins:
            self._pins.take(share)
        entry.pins.clear()
        return self._leave_if_idle(ref)

    def share(self, ref: RefId, to: int, over: Hashable = None) -> ShareId:
        """Pin a reference that is about to be sent, and return the id of its share.

        ``over`` is the connection that will carry it. When that connection ends, call `connection_ended` with the same
        object.
        """
        self._shares += 1
        share = ShareId(self.me, self._shares)
        entry = self._entry(ref)
        if entry is not None and to not in self._dead:
            entry.pins.add(share)
            self._pins.add(share, Pin(ref, to, over))
        return share

    def unpin(self, share: ShareId) -> list[Action]:
        """The receiver has the reference, or the message was never sent."""
        pin = self._pins.take(share)
        if pin is None:
            return []
        entry = self._entry(pin.ref)
        if entry is not None:
            entry.pins.discard(share)
        return self._leave_if_idle(pin.ref)

    def connection_ended(self, over: Hashable) -> list[Action]:
        """Nothing more is written to this connection. What was written may have arrived, be lost, or arrive later."""
        lost = self._pins.connection_ended(over)
        return self._tell(self._pins[lost[0]].to, Recall(tuple(lost))) if lost else []

    def receive(self, ref: RefId, share: ShareId) -> list[Action]:
        """A message has brought a reference. It counts as one copy until the caller calls `drop`."""
        if ref.owner == self.me:
            gone = not self.expects(ref)
            entry = self._owned.setdefault(ref, Owned())
            entry.gone = gone
            entry.copies += 1
            return [*([Void(ref)] if gone else []), *self._tell(share.sharer, Unpin(share))]
        used = self._used.get(ref)
        is_new = used is None
        if used is None:
            used = self._use(ref)
        used.copies += 1
        if used.confirmed:
            return self._tell(share.sharer, Unpin(share))
        if share not in self._to_unpin:
            used.to_unpin[share] = None
            self._to_unpin[share] = ref
            self._unconfirmed[share.sharer] += 1
        if ref.owner not in self._dead:
            return self._tell(ref.owner, Register(ref)) if is_new else []
        if _is_of(ref, self._lives[ref.owner]):
            return self._confirm(ref, exists=False)
        return [Seek(ref.owner, ref.life)] if is_new else []

    def handle(self, peer: int, notice: Notice) -> list[Action]:
        """A notice has come from ``peer``."""
        if isinstance(notice, Register):
            return self._on_register(peer, notice.ref)
        if isinstance(notice, Registered):
            return self._confirm(notice.ref, notice.exists)
        if isinstance(notice, Unpin):
            return self.unpin(notice.share)
        if isinstance(notice, Release):
            return self._on_release(peer, notice.ref)
        if isinstance(notice, Sweep):
            return self._on_sweep(peer, notice.dead)
        if isinstance(notice, Recall):
            return self._on_recall(peer, notice.shares)
        if isinstance(notice, Swept):
            return self._on_swept(peer, notice.dead)
        return []  # an `Obituary`, which the driver handles

    def _on_register(self, peer: int, ref: RefId) -> list[Action]:
        exists = ref.owner == self.me and self.expects(ref)
        if exists and peer not in self._dead:
            self._list(self._owned[ref], peer)
        return self._tell(peer, Registered(ref, exists))

    def expects(self, ref: RefId) -> bool:
        """Whether a value of ours exists, or will be made.

        If its creation is still to come, this makes the entry and lists the creator.
        """
        known = self._owned.get(ref)
        if known is not None:
            return not known.gone
        if self.is_stale(ref):
            return False
        if ref.creator == self.me or ref.creator in self._dead or ref.number in self._created.get(ref.creator, ()):
            return False
        entry = self._owned[ref] = Owned()
        entry.expected = True
        self._list(entry, ref.creator)  # the creator sends `Release` in the end, even if its creation never arrives
        return True

    def is_stale(self, ref: RefId) -> bool:
        """Whether a reference names a value of an earlier process that had our rank."""
        return ref.owner == self.me and ref.life not in (0, self.life) and self.life != 0

    def _note_created(self, ref: RefId) -> bool:
        """Note that a creation has come, or never will. False if that was already noted."""
        created = self._created.setdefault(ref.creator, Numbers())
        if ref.number in created:
            return False
        created.add(ref.number)
        return True

    def _on_release(self, peer: int, ref: RefId) -> list[Action]:
        if ref.owner != self.me:
            return []  # this worker lists nobody for the values of others
        early = ref.creator == peer and self._note_created(ref)
        entry = self._owned.get(ref)
        if entry is None:
            return []
        self._strike_off(entry, {peer})
        return [*(self._void(ref) if early else []), *self._free_if_idle(ref)]

    def _void(self, ref: RefId) -> list[Action]:
        self._owned[ref].expected = False
        return [Void(ref)]

    def _on_recall(self, peer: int, shares: tuple[ShareId, ...]) -> list[Action]:
        return [action for share in shares if share not in self._to_unpin for action in self._tell(peer, Unpin(share))]

    def _confirm(self, ref: RefId, exists: bool) -> list[Action]:
        entry = self._used.get(ref)
        if entry is None or entry.confirmed:
            return []
        entry.confirmed = True
        shares, entry.to_unpin = entry.to_unpin, {}
        actions: list[Action] = [Confirm(ref, exists)]
        for share in shares:
            del self._to_unpin[share]
            self._unconfirmed[share.sharer] -= 1
            actions += self._tell(share.sharer, Unpin(share))
        actions += self._leave_if_idle(ref)
        self._sweeps.confirmed(ref)
        return actions + self._answer_sweeps()

    def joined(self, *workers: int) -> None:
        """These workers are in the group and, as far as we know, alive.

        Before `died`, call this with all workers that were in the group at any time before the death.
        """
        self._sweeps.joined(workers)

    def died(self, worker: int, life: int = 0) -> list[Action]:
        """A worker is dead, and everything that it sent to us has been read.

        That is, `receive` and `own_for` have been called for all of it. ``life`` is that of the process, if known. If
        the worker was dead already, this is a process that we have looked for (`Seek`).
        """
        if worker == self.me:
            return []
        if worker in self._dead:
            return self._lose_values(worker, life) if life else []
        self._sweeps.died(worker)
        self._lives[worker] = life
        actions: list[Action] = []
        for ref in [ref for ref, entry in self._owned.items() if ref.creator == worker and entry.expected]:
            actions += self._void(ref)
        actions += self._lose_values(worker, life)
        others = {ref.life: None for ref in self._used if ref.owner == worker and not _is_of(ref, life)}
        actions += [Seek(worker, other) for other in others]
        if self._direct:
            actions += self._strike_off_the_dead()
        elif self._sweeps.going_on or self._concerned(worker):
            actions += self._start_sweep()
        return actions + self._answer_sweeps()

    def _lose_values(self, worker: int, life: int) -> list[Action]:
        """The values that a process owned are lost."""
        actions: list[Action] = []
        for ref, used in [(ref, used) for ref, used in self._used.items() if ref.owner == worker and _is_of(ref, life)]:
            actions += [Confirm(ref, False)] if used.confirmed else self._confirm(ref, exists=False)
        return actions

    def revived(self, worker: int) -> list[Action]:
        """A worker that we considered dead is back, or another process has taken its place.

        The references that it held are dropped. Those that it is given from now on count. Those that we were given to
        its values register now.
        """
        if worker not in self._dead:
            return []
        actions = self.give_up_sweep()  # the sweep was about references that the worker held before
        self._sweeps.revived(worker)
        del self._lives[worker]
        for ref in [ref for ref in self._registering() if ref.owner == worker]:
            actions += self._tell(worker, Register(ref))
        return actions

    def is_dead(self, worker: int) -> bool:
        return worker in self._dead

    def lives(self, worker: int) -> list[Action]:
        """A worker answers. If a peer's `Sweep` names it as dead, the peer is mistaken or means a predecessor.

        Nothing that a predecessor sent is under way to us: its connections were read to the end when this worker came.
        """
        self._sweeps.lives(worker)
        return self._answer_sweeps()

    def _concerned(self, worker: int) -> bool:
        return self._pins.towards(worker) > 0 or any(worker in entry.users for entry in self._owned.values())

    def _start_sweep(self) -> list[Action]:
        """Ask the living workers about all dead ones. Replaces a sweep that is going on."""
        questions = self._sweeps.begin()
        return [Send(worker, question) for worker, question in questions] or self._strike_off_the_dead()

    def _on_swept(self, peer: int, dead: tuple[int, ...]) -> list[Action]:
        return self._strike_off_the_dead() if self._sweeps.answered(peer, dead) else []

    def give_up_sweep(self) -> list[Action]:
        """Stop waiting for a worker that does not answer: values that only dead workers held must be freed some day."""
        return self._strike_off_the_dead() if self._sweeps.end() else []

    @property
    def sweeping(self) -> bool:
        return self._sweeps.going_on

    def _strike_off_the_dead(self) -> list[Action]:
        actions: list[Action] = []
        for share in self._pins.of_any(self._dead):
            actions += self.unpin(share)
        for ref, entry in list(self._owned.items()):
            self._strike_off(entry, self._dead)
            actions += self._free_if_idle(ref)
        return actions

    def _on_sweep(self, peer: int, dead: tuple[int, ...]) -> list[Action]:
        self._sweeps.asked(peer, dead)
        return self._answer_sweeps()

    def _answer_sweeps(self) -> list[Action]:
        answers = self._sweeps.answers(self._registering)
        return [action for peer, answer in answers for action in self._tell(peer, answer)]

    def _registering(self) -> set[RefId]:
        return {ref for ref, entry in self._used.items() if entry.to_unpin}

    def _list(self, entry: Owned, user: int) -> None:
        if user not in entry.users:
            entry.users.add(user)
            self._listed[user] += 1

    def _strike_off(self, entry: Owned, users: set[int]) -> None:
        for user in entry.users & users:
            entry.users.discard(user)
            self._listed[user] -= 1

    def _use(self, ref: RefId) -> Used:
        if ref not in self._used:
            self._used_of[ref.owner] += 1
        entry = self._used[ref] = Used()
        return entry

    def _entry(self, ref: RefId) -> Owned | Used | None:
        return self._owned.get(ref) if ref.owner == self.me else self._used.get(ref)

    def _leave_if_idle(self, ref: RefId) -> list[Action]:
        if ref.owner == self.me:
            return self._free_if_idle(ref)
        entry = self._used.get(ref)
        if entry is None or not entry.is_useless():
            return []
        if not entry.copies:
            del self._used[ref]
            self._used_of[ref.owner] -= 1
        released, entry.released = entry.released, True
        return [] if released else self._tell(ref.owner, Release(ref))

    def _free_if_idle(self, ref: RefId) -> list[Action]:
        entry = self._owned.get(ref)
        if entry is None or not entry.idle():
            return []
        del self._owned[ref]
        return [Free(ref)]

    def _tell(self, to: int, notice: Notice) -> list[Action]:
        """Send a notice, unless the worker is dead. A notice to this worker itself is handled here."""
        if to == self.me:
            return self.handle(self.me, notice)
        return [] if to in self._dead else [Send(to, notice)]


def _is_of(ref: RefId, life: int) -> bool:
    """Whether a value belongs to the process with this life. 0 stands for any."""
    return 0 in (ref.life, life) or ref.life == life
