"""Holdings: the references of one worker, to its own values and to those of others. The driver of `counting`.

`counting` decides; this file carries the decisions out. It keeps these rules:

- One lock guards the state machine and the tables here. While a thread holds it, nothing is sent, and no value is
  freed or completed.
- Notices leave and arrive through `correspondence`.
- A peer counts as dead when its incarnation is over (`agent.fates`), and everything that it sent has been read.
  A peer that merely cannot be reached keeps the references that it holds and the values that it owns. Once it answers
  again, the notices that were under way are repeated.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.membership import Member
from backhaul.agent.observing import RefFreed, RefMade
from backhaul.errors import (
    BackhaulError,
    MisuseError,
    NotInitializedError,
    ProtocolError,
    QuotaError,
    RpcTimeoutError,
    UnknownWorkerError,
    UnsendableError,
    WorkerLostError,
    fresh,
    kept,
)
from backhaul.ids import RefId, WorkerInfo, life_of
from backhaul.refs.actions import Action, Free, Seek, Send, Void
from backhaul.refs.cell import Cell
from backhaul.refs.correspondence import Correspondence
from backhaul.refs.counting import Counting
from backhaul.refs.losses import Names, lost_creation, lost_value, of_creation, stale
from backhaul.refs.seeking import Seeking
from backhaul.trust.rights import GivenRights, Rights
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Create, Notice, Notices, Obituary, Recall, Refs, Register, Registered, Sweep, Unpin

_log = logging.getLogger(__name__)

_SUCCESSOR_WAITS = 3.0
_IMMODEST = "the peer sends more notices about references than a worker has reason to"
_PROCESS_BITS = 30
_NUMBER_BITS = 32


class _Aftermath:
    """The decisions of the state machine that are carried out after the lock is released."""

    __slots__ = ("freed", "mail", "sought", "voided")

    def __init__(self) -> None:
        self.mail = False
        self.sought: list[Seek] = []
        self.voided: list[tuple[RefId, Cell]] = []
        self.freed: list[Cell | None] = []  # clearing this list frees their values


class Holdings:
    """One worker's values and references. The agent reports messages, notices and deaths to it. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self.me = agent.me
        self._agent = agent
        self._lock = threading.Lock()
        self._sweep_ended = threading.Condition(self._lock)
        self._trust = agent.trust
        # Distinguishes this process from others that have had its rank.
        process = secrets.randbits(_PROCESS_BITS) + 1
        # Peers that may not see our process need no ``life`` either: the owner lists what each of them was given.
        life = life_of(agent.membership.incarnation) if self._trust.shows else 0
        believes, limits = self._trust.believes, agent.options.limits
        # Guarded by _lock:
        self._counting = Counting(agent.me.id, first_number=process << _NUMBER_BITS, direct=not believes, life=life)
        limit = None if limits is None else limits.references
        self._rights = (
            Rights(self._counting, limit)
            if believes
            else GivenRights(self._counting, limit, {member.id for member in agent.members()})
        )
        self._post = Correspondence(agent, self._lock, process, self.info, self._examine)
        self._cells: dict[RefId, Cell] = {}  # values of ours
        self._gone: dict[RefId, BaseException] = {}  # why a value of another worker is not available
        self._creations: dict[RefId, Future[Any]] = {}  # under way
        self._names = Names()
        self._ended: weakref.WeakSet[Any] = weakref.WeakSet()  # connections; their requests may still be running
        self._closed = False
        self._left: list[str] | None = None  # what workers held that have left since `expect_none`
        self._dropped: deque[RefId] = deque()  # filled by finalizers, without the lock
        self._sweep_timer: threading.Timer | None = None
        self._seeking = Seeking(agent, self.info, self._not_found)
        agent.register(Notices, self._on_notices)
        agent.on_connection_ended.append(self._on_connection_ended)
        agent.on_connected.append(self._on_connected)
        agent.on_replaced.append(self._on_replaced)
        agent.fates.on_present.append(self._on_present)
        agent.fates.on_over.append(self._on_over)
        agent.idle_checks.append(self.idle)
        agent.execution.traffic = self
        agent.serving.arriving = self.arriving
        agent.watch.ticks.append(self._tick)

    # Values and references on this worker.

    def keep(self, cell: Cell) -> RefId:
        """Keep a value of this worker, and return a reference to it. The caller has one copy: see `dropped`."""
        with self._lock:
            ref = self._counting.new_ref(self.me.id)
            self._counting.own(ref)
            self._cells[ref] = cell
        if self._agent.observers:
            self._agent.observers.emit(RefMade(ref=str(ref)))
        return ref

    def cell(self, ref: RefId) -> Cell:
        """The cell of a value of ours, which may not be made yet.

        Raises `MisuseError` if the value does not exist any more, `WorkerLostError` if an earlier process had it, and
        `NotInitializedError` after shutdown.
        """
        with self._lock:
            if self._closed:
                raise NotInitializedError(f"worker {self.me.name!r} has been shut down, and its values are gone")
            cell = self._cells.get(ref)
            if cell is None:
                if not self._counting.expects(ref):
                    if self._counting.is_stale(ref):
                        raise stale(ref, self.me)
                    raise MisuseError(f"there is no value {ref} on worker {self.me.name!r} any more")
                cell = self._cells[ref] = Cell()
            return cell

    def hold(self, ref: RefId) -> bool:
        """Count one more copy here. False if the reference is unknown here."""
        with self._lock:
            return self._counting.hold(ref)

    def dropped(self, ref: RefId) -> None:
        """A copy of a reference is gone. Finalizers call this, so it takes no lock."""
        self._dropped.append(ref)
        if self._agent.watch.asleep and not self._closed:
            self._agent.watch.wake()

    def is_confirmed(self, ref: RefId) -> bool:
        with self._lock:
            return self._counting.is_confirmed(ref)

    def describe(self, ref: RefId) -> str:
        """The state of a reference, as text for people."""
        with self._lock:
            if ref in self._gone:
                return f"lost ({self._gone[ref]})"
            cell = self._cells.get(ref)
            if ref.owner != self.me.id:
                return "confirmed" if self._counting.is_confirmed(ref) else "not confirmed yet"
        return "being made" if cell is None or not cell.ready else "there"

    def require(self, ref: RefId) -> None:
        """Raise the reason if the value is known to be lost."""
        error = self._gone.get(ref)
        if error is not None:
            raise fresh(error)

    def info(self, rank: int) -> WorkerInfo:
        info = self._names.get(rank)
        if info is None:
            info = self._names[rank] = self._agent.membership.find(rank).info
        return info

    # Values that one worker makes for another.

    def new_ref(self, owner: WorkerInfo) -> RefId:
        """A new reference, of which there is no copy yet. Call `creating` next."""
        self._names[owner.id] = owner
        member = self._agent.membership.known(owner) if self._trust.shows else None
        life = 0 if member is None else life_of(member.incarnation)
        with self._lock:
            return self._counting.new_ref(owner.id, life)

    def creating(self, ref: RefId) -> None:
        """This worker is about to ask the owner for the value; the caller has one copy of the reference.

        Call `asked` next, or `never_asked`, or `created` with the error.
        """
        with self._lock:
            if ref.owner == self.me.id:
                self._counting.own(ref)
                self._cells[ref] = Cell()
            else:
                self._counting.creating(ref)

    def asked(self, ref: RefId, answer: Future[Any]) -> None:
        """The owner has been asked for the value. It answers once it has listed this worker."""
        with self._lock:
            self._creations[ref] = answer
        answer.when_done(lambda done: self._on_answer(ref, done))

    def never_asked(self, ref: RefId) -> None:
        """The request for the value could not be made."""
        with self._lock:
            self._counting.created(ref)

    def answer(self, ref: RefId) -> Future[Any] | None:
        """The future of the owner's answer; None if the answer has come, or this worker did not ask for the value."""
        return self._creations.get(ref)

    def creation(self, ref: RefId) -> Future[Any]:
        """A future that is done when the owner has answered."""
        with self._lock:
            future = self._creations.get(ref)
            gone = self._gone.get(ref)
        if future is None:
            future = Future()
            future.settle(None, gone)
        return future

    def own_for(self, ref: RefId, peer: WorkerInfo) -> Cell:
        """The cell for a value that a peer asks this worker to make."""
        with self._lock:
            cell = self._cells.setdefault(ref, Cell())
            after = self._apply([] if peer == self.me else self._counting.own_for(ref, peer.id))
        self._act(after)
        return cell

    def _on_answer(self, ref: RefId, done: Any) -> None:
        try:
            done.value()
        except Exception as error:  # not only ours: a MemoryError if the owner had no room for the request
            self.created(ref, error)
        else:
            self.created(ref, None)

    def created(self, ref: RefId, error: Exception | None) -> None:
        """The owner has answered or, with an error, nobody knows whether the owner makes the value."""
        with self._lock:
            if error is not None:  # before the pop: a thread that finds no creation then reads `_gone` without the lock
                self._gone[ref] = kept(of_creation(error), self.me.name)
            self._creations.pop(ref, None)
            cell = self._cells.get(ref)
            # A creation that timed out may have happened, so this worker stays listed for its copies, as in torch.
            lost = error is not None and not isinstance(error, RpcTimeoutError)
            after = self._apply(self._counting.created(ref, lost=lost))
        if error is not None and cell is not None:
            cell.fail(of_creation(error), self.me.name)
        self._act(after)

    # The agent's reports about messages: see agent.traffic.

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        names = [rref._ref for rref in attached]
        if (wrong := self._rights.misdirected(names, to.id)) is not None:
            raise self._indirect(attached[names.index(wrong)], to)
        with self._lock:
            if self._rights.is_full(to.id, len(names)):
                refs = None
            else:
                refs = tuple((ref, self._counting.share(ref, to.id, over)) for ref in names)
            late = over in self._ended
        if refs is None:
            raise self._over_quota(to, "references to more values")
        if late:  # the message will not leave, and `connection_ended`, which recalls shares, has run already
            self.stayed(refs)
        return refs

    def _indirect(self, rref: Any, to: WorkerInfo) -> UnsendableError:
        return UnsendableError(
            f"{rref!r} cannot go to worker {to.name!r}: in a federation a reference goes from its owner to "
            f"another worker and back. Let {rref.owner_name()!r} give it to {to.name!r}, or send the value"
        )

    def _over_quota(self, peer: WorkerInfo, what: str) -> QuotaError:
        return self._agent.permissions.over_quota(
            peer.name, what, f"worker {peer.name!r} has references to {self._rights.limit} values"
        )

    def stayed(self, refs: Refs) -> None:
        with self._lock:
            after = self._apply([action for _, share in refs for action in self._counting.unpin(share)])
        self._act(after)

    def arriving(self, refs: Refs, sender: WorkerInfo) -> None:
        with self._lock:
            wrong = self._rights.objection(refs, sender.id)
            after = self._receive(refs if wrong is None else ())
            modest = self._is_modest(sender.id)
        self._act(after)
        if wrong is not None:
            raise ProtocolError(wrong)
        if not modest:
            raise ProtocolError(_IMMODEST)

    def admit(self, request: Any, sender: WorkerInfo) -> None:
        makes = type(request) is Create
        with self._lock:
            wrong = self._rights.complaint(request, sender.id)
            full = makes and self._rights.is_full(sender.id, 1)
            if wrong is None and not full:
                if makes and not self._trust.believes:
                    self._counting.expects(request.ref)  # makes the entry, since later requests may name the value
                after = self._receive(getattr(request, "refs", ()))
            modest = self._is_modest(sender.id)
        if not modest:
            raise ProtocolError(_IMMODEST)
        if wrong is not None:
            raise self._agent.permissions.refuse(sender.name, f"a {type(request).__name__}", wrong)
        if full:
            raise self._over_quota(sender, "a value")
        self._act(after)

    def decline(self, refs: Refs, sender: WorkerInfo) -> None:
        with self._lock:
            after = self._apply([Send(sender.id, Unpin(share)) for _, share in refs if share.sharer == sender.id])
        self._agent.permissions.count(sender.name, len(refs))
        self._act(after)

    def _is_modest(self, rank: int) -> bool:
        """Whether a peer makes this worker remember only a bounded amount. The caller holds the lock."""
        return self._rights.is_modest(rank, self._post.waiting(rank))

    def _receive(self, refs: Refs) -> _Aftermath:
        """Receive these references. The caller holds the lock."""
        return self._apply([action for ref, share in refs for action in self._counting.receive(ref, share)])

    def arrived(self, refs: Refs) -> None:
        with self._lock:
            after = self._apply([action for ref, _ in refs for action in self._counting.drop(ref)])
        self._act(after)

    # Carrying out the decisions of the state machine.

    def _apply(self, actions: Iterable[Action]) -> _Aftermath:
        """Queue notices, and return what to do after the lock is released: see `_act`.

        The caller holds the lock, and has held it since ``actions`` were decided. Otherwise two threads could queue
        their notices in the wrong order.
        """
        after = _Aftermath()
        for action in actions:
            if isinstance(action, Send):
                self._post.add(action.to, action.notice)
                after.mail = True
            elif isinstance(action, Free):
                after.freed.append(self._cells.pop(action.ref, None))
                if self._agent.observers:
                    self._agent.observers.emit(RefFreed(ref=str(action.ref)))
            elif isinstance(action, Void):
                after.voided.append((action.ref, self._cells.setdefault(action.ref, Cell())))
            elif isinstance(action, Seek):
                after.sought.append(action)
            elif not action.exists and self._counting.knows(action.ref):
                self._gone.setdefault(action.ref, lost_value(action.ref, self._names))
        return after

    def _act(self, after: _Aftermath) -> None:
        """Carry out what is left to do, without the lock. Does not block."""
        for ref, cell in after.voided:
            cell.fail(self._lost_creation(ref), self.me.name)
        if after.mail:
            self._post.flush_later()
        for process in after.sought:
            self._seeking.seek(*process)
        after.freed.clear()

    def _on_notices(self, line: Line, envelope: Envelope) -> Frame:
        message: Notices = envelope.message
        actions: list[Action] = []
        disallowed: list[Notice] = []
        with self._lock:
            if self._post.accept(line.peer.id, message):
                for notice in message.notices:
                    if not self._rights.is_modest(line.peer.id, len(actions)):
                        break
                    if not self._rights.may_say(line.peer.id, notice):
                        disallowed.append(notice)
                        if isinstance(notice, Register):  # the peer cannot tell this from a value that does not exist
                            actions.append(Send(line.peer.id, Registered(notice.ref, False)))
                    elif not isinstance(notice, Obituary):
                        actions += self._counting.handle(line.peer.id, notice)
            after = self._apply(actions)
            if not self._counting.sweeping:
                self._sweep_ended.notify_all()
            modest = self._is_modest(line.peer.id)
        self._act(after)
        for notice in disallowed:
            self._agent.permissions.note(line.peer.name, f"a {type(notice).__name__}", getattr(notice, "ref", ""))
        if not modest:
            raise ProtocolError(_IMMODEST)
        if not self._trust.believes:
            recalled = sum(len(notice.shares) for notice in message.notices if isinstance(notice, Recall))
            self._agent.permissions.count(line.peer.name, recalled)
            return self._agent.answer(message.id, None)
        for notice in message.notices:
            if isinstance(notice, Obituary):
                self._believe(notice)
            elif isinstance(notice, Sweep):
                for rank in notice.dead:
                    self._examine(rank)
        return self._agent.answer(message.id, None)

    def _tick(self) -> bool:
        """Hand the dropped copies to another thread; True if there were any. The watch thread calls this."""
        if not self._dropped:
            return False
        self._agent.completions.add(self._drop_all)
        return True

    def _drop_all(self) -> None:
        actions: list[Action] = []
        with self._lock:
            while self._dropped:
                ref = self._dropped.popleft()
                actions += self._counting.drop(ref)
                if not self._counting.knows(ref):
                    self._gone.pop(ref, None)
            after = self._apply(actions)
        self._act(after)

    def _lost_creation(self, ref: RefId) -> BackhaulError:
        return stale(ref, self.me) if self._counting.is_stale(ref) else lost_creation(ref, self._names)

    # Deaths.

    def _on_connected(self, peer: WorkerInfo) -> None:
        """Wait until a successor may be given references: until no sweep about its predecessor is going on.

        Waits at most `_SUCCESSOR_WAITS` seconds.
        """
        with self._lock:
            self._names[peer.id] = peer
            if self._counting.is_dead(peer.id):
                self._sweep_ended.wait_for(lambda: self._closed or not self._counting.sweeping, _SUCCESSOR_WAITS)
            after = self._apply(self._counting.revived(peer.id))
        self._act(after)

    def _on_replaced(self, before: Member, after: Member) -> None:
        """Another process has the name and rank of a peer. The end of the old process has been handled already."""
        rank = before.id
        text = f"{before}, which had it, is over, and {after} has its place and none of its values. Make the value anew"
        with self._lock:
            life = life_of(after.incarnation) if self._trust.shows else 0
            self._names[rank] = after.info
            self._names.replaced[rank] = text, life
            for ref in self._counting.used:
                if ref.owner == rank and not (life and ref.life == life):
                    self._gone[ref] = lost_value(ref, self._names)

    def _on_connection_ended(self, connection: object, peer: WorkerInfo, _: WorkerLostError) -> None:
        with self._lock:
            self._ended.add(connection)
            after = self._apply(self._counting.connection_ended(connection))
        self._act(after)

    def _examine(self, rank: int) -> None:
        """Have a peer examined that may be dead. Does not block."""
        try:
            info = self.info(rank)
        except UnknownWorkerError:  # the peer left before this worker met it
            self._agent.pool.run(lambda: self._bury(rank))
        else:
            self._agent.fates.examine(info)

    def _believe(self, notice: Obituary) -> None:
        """Accept the word of a worker of this cluster that another worker has ended."""
        info = self._names.get(notice.rank)
        if info is not None and notice.incarnation:
            self._agent.fates.end_later(info, notice.reason, notice.incarnation)

    def _on_present(self, peer: WorkerInfo) -> None:
        """A peer answers: repeat the notices that may not have reached it."""
        self._post.repeat(peer.id)
        with self._lock:
            if self._closed:
                return
            after = self._apply(self._counting.lives(peer.id))
        self._act(after)

    def _on_over(self, peer: WorkerInfo, reason: str) -> None:
        link = self._agent.link(peer)
        member = self._agent.membership.known(peer)
        incarnation = link.fate.incarnation or ("" if member is None else member.incarnation)
        obituary = None
        if link.fate.certain and link.fate.incarnation:
            obituary = Obituary(peer.id, link.fate.incarnation, reason)
            # The kernel or the launcher tells the workers on the same machine. They tell those on other machines.
            if not self._agent.is_elsewhere(peer):
                self._spread(obituary)
        self._bury(peer.id, obituary, life_of(incarnation) if self._trust.shows else 0)

    def _spread(self, obituary: Obituary) -> None:
        """Tell connected workers on other machines that a worker of this machine has ended."""
        if not self._trust.believes:  # other workers would not believe this one either
            return
        far = self._agent.membership.elsewhere(self._agent.transport.addresses.host)
        far = [info for info in far if self._agent.link(info).up]
        with self._lock:
            after = self._apply([] if self._closed else [Send(info.id, obituary) for info in far])
        self._act(after)

    def _bury(self, rank: int, obituary: Obituary | None = None, life: int = 0) -> None:
        """A worker is dead, and everything that it sent has been read. ``life``: see `Counting.died`."""
        if self._agent.membership.dynamic:
            self._agent.membership.refresh()  # a sweep must ask every worker that was in the group
        with self._lock:
            if self._closed:
                return
            if self._left is not None:
                self._left += self._leaks(rank)
            self._counting.joined(*self._agent.membership.ranks())
            self._post.drop(rank)
            actions: list[Action] = []
            for action in self._counting.died(rank, life):
                if obituary is not None and isinstance(action, Send) and isinstance(action.notice, Sweep):
                    actions.append(Send(action.to, obituary))  # so that the receiver need not examine the dead worker
                actions.append(action)
            after = self._apply(actions)
            sweeping = self._counting.sweeping
            if not sweeping:
                self._sweep_ended.notify_all()
        self._act(after)
        if sweeping:
            self._limit_sweep()

    def _not_found(self, rank: int, life: int) -> None:
        """A process that has replaced a dead worker counts as dead, too: nothing can reach it."""
        with self._lock:
            after = self._apply(self._counting.died(rank, life) if self._counting.is_dead(rank) else [])
        self._act(after)

    def _limit_sweep(self) -> None:
        """Set a limit to the sweep: a worker that hangs must not keep alive the values that only dead workers held."""
        seconds = self._agent.options.lost_after
        with self._lock:
            if self._sweep_timer is not None or self._closed or seconds is None:
                return
            timer = self._sweep_timer = threading.Timer(seconds, self._give_up_sweep)
            timer.daemon = True
        timer.start()

    def _give_up_sweep(self) -> None:
        with self._lock:
            self._sweep_timer = None
            actions = self._counting.give_up_sweep()
            after = self._apply(actions)
            self._sweep_ended.notify_all()
        if actions:
            _log.warning("a worker did not say whether it has references from a dead one; the values may be freed now")
        self._act(after)

    # The end.

    def idle(self) -> bool:
        """Whether no creation, dropped copy or notice is under way."""
        with self._lock:
            return not (self._dropped or self._creations) and self._post.idle()

    def release_all(self) -> None:
        """Give up all references to values of others, even if there are copies here, because the group ends."""
        with self._lock:
            after = self._apply([action for ref in list(self._counting.used) for action in self._counting.abandon(ref)])
        self._act(after)

    def expect_none(self) -> None:
        """All workers give up their references now: `leaks` also has what a worker holds that leaves before it."""
        with self._lock:
            self._left = []

    def leaks(self) -> list[str]:
        """Values of ours for which other workers are listed, as text. Call it when no worker should be listed."""
        with self._lock:
            return [*(self._left or ()), *self._leaks()]

    def _leaks(self, only: int | None = None) -> list[str]:
        """Values of ours that others hold, or only that worker. Holds ``_lock``."""
        return [
            f"{ref} held by {', '.join(self.info(rank).name for rank in sorted(holders))}"
            for ref in self._counting.owned
            if (holders := {rank for rank in self._counting.holders(ref) if only in (None, rank)})
        ]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._post.close()
            self._sweep_ended.notify_all()
            cells = list(self._cells.values())
            self._cells.clear()
            timer, self._sweep_timer = self._sweep_timer, None
        if timer is not None:
            timer.cancel()
        self._seeking.close()
        cells.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    def counts(self) -> dict[str, int]:
        """The sizes of the tables, for tests and tools."""
        with self._lock:
            return {
                "owned": len(list(self._counting.owned)),
                "used": len(list(self._counting.used)),
                "pinned": self._counting.pinned,
                "values": len(self._cells),
                "shared": sum(bool(self._counting.holders(ref)) for ref in self._counting.owned),
                "holders": sum(len(self._counting.holders(ref)) for ref in self._counting.owned),
                "creations": len(self._creations),
                "unconfirmed": sum(not self._counting.is_confirmed(ref) for ref in self._counting.used),
            }
