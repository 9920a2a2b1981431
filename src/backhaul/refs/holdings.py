"""Holdings: the references of one worker, to its own values and to those of others. The driver of `counting`.

Users and messages come here. `tables` has the state, and carries out what `counting` decides about it. `deaths` reports
the ends of peers. Notices leave and arrive through `correspondence`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.observing import RefMade
from backhaul.errors import (
    MisuseError,
    NotInitializedError,
    ProtocolError,
    QuotaError,
    RpcTimeoutError,
    UnsendableError,
    fresh,
    kept,
)
from backhaul.ids import RefId, WorkerInfo, life_of
from backhaul.refs.actions import Action, Send
from backhaul.refs.cell import Cell
from backhaul.refs.deaths import Deaths
from backhaul.refs.losses import of_creation, stale
from backhaul.refs.tables import Aftermath, Tables
from backhaul.trust.rights import GivenRights, Rights
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Create, Notice, Notices, Obituary, Recall, Refs, Register, Registered, Sweep, Unpin

_IMMODEST = "the peer sends more notices about references than a worker has reason to"


class Holdings:
    """One worker's values and references. The agent reports messages and notices to it. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self.me = agent.me
        self._agent = agent
        self._trust = agent.trust
        self._tables = tables = Tables(
            agent, lambda rank: deaths.examine(rank), lambda rank, life: deaths.not_found(rank, life)
        )
        self._deaths = deaths = Deaths(agent, tables)
        self._lock = tables.lock
        # Guarded by _lock:
        self._counting = tables.counting
        limits = agent.options.limits
        limit = None if limits is None else limits.references
        self._rights = (
            Rights(self._counting, limit)
            if self._trust.believes
            else GivenRights(self._counting, limit, {member.id for member in agent.members()})
        )
        self._post = tables.post
        self._cells = tables.cells
        self._gone = tables.gone
        self._names = tables.names
        self._creations: dict[RefId, Future[Any]] = {}  # under way
        self._dropped: deque[RefId] = deque()  # filled by finalizers, without the lock
        agent.register(Notices, self._on_notices)
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
            if self._tables.closed:
                raise NotInitializedError(f"worker {self.me.name!r} has been shut down, and its values are gone")
            cell = self._cells.get(ref)
            if cell is None:
                if not self._counting.expects(ref):
                    if self._counting.is_stale(ref):
                        raise stale(ref, self.me)
                    raise MisuseError(f"there is no value {ref} on worker {self.me.name!r} any more: create it again")
                cell = self._cells[ref] = Cell()
            return cell

    def hold(self, ref: RefId) -> bool:
        """Count one more copy here. False if the reference is unknown here."""
        with self._lock:
            return self._counting.hold(ref)

    def dropped(self, ref: RefId) -> None:
        """A copy of a reference is gone. Finalizers call this, so it takes no lock."""
        self._dropped.append(ref)
        if self._agent.watch.asleep and not self._tables.closed:
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
        return self._tables.info(rank)

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
            after = self._tables.apply([] if peer == self.me else self._counting.own_for(ref, peer.id))
        self._tables.act(after)
        return cell

    def _on_answer(self, ref: RefId, done: Any) -> None:
        try:
            done.value()
        except Exception as error:  # not only ours: a MemoryError if the owner had no room for the request
            self.created(ref, error)
        else:
            self.created(ref, None)

    def created(self, ref: RefId, error: Exception | None) -> None:
        """The owner has answered. With ``error`` it has not, and this worker does not know whether the value will be
        made."""
        with self._lock:
            if error is not None:  # before the pop: a thread that finds no creation then reads `_gone` without the lock
                self._gone[ref] = kept(of_creation(error), self.me.name)
            self._creations.pop(ref, None)
            cell = self._cells.get(ref)
            # A creation that timed out may have happened, so this worker stays listed for its copies, as in torch.
            lost = error is not None and not isinstance(error, RpcTimeoutError)
            after = self._tables.apply(self._counting.created(ref, lost=lost))
        if error is not None and cell is not None:
            cell.fail(of_creation(error), self.me.name)
        self._tables.act(after)

    # The agent's reports about messages: see agent.traffic.

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        names = [rref._ref for rref in attached]
        if (wrong := self._rights.misdirected(names, to.id)) is not None:
            raise self._indirect(attached[names.index(wrong)], to)
        with self._lock:
            excess = self._rights.excess(to.id, names)
            refs: Refs = ()
            if excess is None:
                refs = tuple((ref, self._counting.share(ref, to.id, over)) for ref in names)
            late = over in self._deaths.ended
        if excess is not None:
            raise self._over_quota(to, "references to more values", excess)
        if late:  # the message will not leave, and `connection_ended`, which recalls shares, has run already
            self.stayed(refs)
        return refs

    def _indirect(self, rref: Any, to: WorkerInfo) -> UnsendableError:
        return UnsendableError(
            f"{rref!r} cannot go to worker {to.name!r}: in a federation a reference goes from its owner to "
            f"another worker and back. Let {rref.owner_name()!r} give it to {to.name!r}, or send the value"
        )

    def _over_quota(self, peer: WorkerInfo, what: str, excess: str) -> QuotaError:
        return self._agent.permissions.over_quota(peer.name, what, f"worker {peer.name!r} {excess}")

    def stayed(self, refs: Refs) -> None:
        with self._lock:
            after = self._tables.apply([action for _, share in refs for action in self._counting.unpin(share)])
        self._tables.act(after)

    def arriving(self, refs: Refs, sender: WorkerInfo) -> None:
        with self._lock:
            wrong = self._rights.objection(refs, sender.id)
            after = self._receive(refs if wrong is None else ())
            modest = self._is_modest(sender.id)
        self._tables.act(after)
        if wrong is not None:
            raise ProtocolError(wrong)
        if not modest:
            raise ProtocolError(_IMMODEST)

    def admit(self, request: Any, sender: WorkerInfo) -> None:
        makes = type(request) is Create
        with self._lock:
            wrong = self._rights.complaint(request, sender.id)
            excess = self._rights.excess(sender.id, (request.ref,)) if makes else None
            if wrong is None and excess is None:
                if makes and not self._trust.believes:
                    self._counting.expects(request.ref)  # makes the entry, since later requests may name the value
                after = self._receive(getattr(request, "refs", ()))
            modest = self._is_modest(sender.id)
        if not modest:
            raise ProtocolError(_IMMODEST)
        if wrong is not None:
            raise self._agent.permissions.refuse(sender.name, f"a {type(request).__name__}", wrong)
        if excess is not None:
            raise self._over_quota(sender, "a value", excess)
        self._tables.act(after)

    def decline(self, refs: Refs, sender: WorkerInfo) -> None:
        with self._lock:
            after = self._tables.apply(
                [Send(sender.id, Unpin(share)) for _, share in refs if share.sharer == sender.id]
            )
        self._agent.permissions.count(sender.name, len(refs))
        self._tables.act(after)

    def _is_modest(self, rank: int) -> bool:
        """Whether a peer makes this worker remember only a bounded amount. The caller holds the lock."""
        return self._rights.is_modest(rank, self._post.waiting(rank))

    def _receive(self, refs: Refs) -> Aftermath:
        """Receive these references. The caller holds the lock."""
        return self._tables.apply([action for ref, share in refs for action in self._counting.receive(ref, share)])

    def arrived(self, refs: Refs) -> None:
        with self._lock:
            after = self._tables.apply([action for ref, _ in refs for action in self._counting.drop(ref)])
        self._tables.act(after)

    # Notices and dropped copies.

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
            after = self._tables.apply(actions)
            if not self._counting.sweeping:
                self._tables.sweep_ended.notify_all()
            modest = self._is_modest(line.peer.id)
        self._tables.act(after)
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
                self._deaths.believe(notice)
            elif isinstance(notice, Sweep):
                for rank in notice.dead:
                    self._deaths.examine(rank)
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
            after = self._tables.apply(actions)
        self._tables.act(after)

    # The end.

    def idle(self) -> bool:
        """Whether no creation, dropped copy or notice is under way."""
        with self._lock:
            return not (self._dropped or self._creations) and self._post.idle()

    def release_all(self) -> None:
        """Give up all references to values of others, even if there are copies here, because the group ends."""
        with self._lock:
            after = self._tables.apply(
                [action for ref in list(self._counting.used) for action in self._counting.abandon(ref)]
            )
        self._tables.act(after)

    def expect_none(self) -> None:
        """All workers give up their references now. From now on `leaks` includes what a worker still holds when it
        leaves."""
        with self._lock:
            self._deaths.left = []

    def leaks(self) -> list[str]:
        """Values of ours for which other workers are listed, as text. Call it when no worker should be listed."""
        with self._lock:
            return [*(self._deaths.left or ()), *self._tables.held()]

    def close(self) -> None:
        self._tables.close()
        self._deaths.close()

    @property
    def closed(self) -> bool:
        return self._tables.closed

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
