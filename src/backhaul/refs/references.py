"""References: the driver of `counting` for one worker. Values, notices, deaths.

`counting` decides; this file carries it out. The rules that it keeps:

- One lock guards the state machine and the tables here. Nothing is sent, and no value is freed or
  completed, while it is held.
- Notices are sent from a queue (`completions`), never from the thread that caused them: that may be a
  finalizer, or one that reads a connection.
- A peer counts as dead when it cannot be reached any more and everything that it sent has been read.
  A broken connection to a living peer is made again, and what was under way in notices is repeated.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from backhaul.agent.agent import Agent, To, name_for_people
from backhaul.agent.execution import Execution, follow
from backhaul.agent.future import Future
from backhaul.agent.serving import Inbound
from backhaul.errors import (
    BackhaulError,
    MisuseError,
    NotInitializedError,
    ProtocolError,
    RpcTimeoutError,
    WorkerLostError,
    fresh,
    kept,
)
from backhaul.ids import RefId, WorkerInfo
from backhaul.refs.cell import Cell
from backhaul.refs.counting import Action, Counting, Free, Send, Void
from backhaul.refs.mailbox import Inbox, Outbox
from backhaul.refs.proxy import invoke, type_of
from backhaul.refs.rref import RRef
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Create, Fetch, Notice, Notices, Refs, Sweep
from backhaul.wire.trees import Packing, Unpacking
from backhaul.wire.values import Codec

_log = logging.getLogger(__name__)

_PROBE_SECONDS = 2.0
_SWEEP_SECONDS = 3.0
_PROCESS_BITS = 30
_NUMBER_BITS = 32


class _Aftermath:
    """What is left to do after the state machine has decided, and the lock is released."""

    __slots__ = ("freed", "mail", "voided")

    def __init__(self) -> None:
        self.mail = False
        self.voided: list[tuple[RefId, Cell]] = []
        self.freed: list[Cell | None] = []  # their values go when this list does


class References:
    """One worker's references, to its own values and to those of others. Thread-safe."""

    def __init__(self, agent: Agent, codec: Codec, seconds: Callable[[float], float]) -> None:
        """``seconds`` turns a user's timeout into seconds."""
        self.me = agent.me
        self.execution: Execution = agent.execution
        self._agent = agent
        self._seconds = seconds
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._process = secrets.randbits(_PROCESS_BITS) + 1  # tells this process from others that have had its rank
        self._counting = Counting(agent.me.id, first_number=self._process << _NUMBER_BITS)
        self._cells: dict[RefId, Cell] = {}  # values of ours
        self._gone: dict[RefId, BaseException] = {}  # why a value of others cannot be had
        self._creations: dict[RefId, Future[Any]] = {}  # under way
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._names: dict[int, WorkerInfo] = {}
        self._examining: set[int] = set()
        self._flushing = False
        self._closed = False
        self._dropped: deque[RefId] = deque()  # filled by finalizers, without the lock
        self._sweep_timer: threading.Timer | None = None
        codec.register(RRef, "rref", self._lower, self._lift)
        agent.register(Create, self._on_create)
        agent.register(Fetch, self._on_fetch)
        agent.register(Notices, self._on_notices)
        agent.on_connection_ended.append(self._on_connection_ended)
        agent.on_connected.append(self._on_connected)
        agent.idle_checks.append(self.idle)
        agent.execution.traffic = self
        agent.serving.arriving = self.arriving
        agent.watch.ticks.append(self._tick)

    # What an RRef asks for.

    def keep(self, value: Any) -> RefId:
        """Keep a value of this worker's; the caller has a copy of the reference."""
        cell = Cell()
        cell.set(value)
        with self._lock:
            ref = self._counting.new_ref(self.me.id)
            self._counting.own(ref)
            self._cells[ref] = cell
        return ref

    def dropped(self, ref: RefId) -> None:
        """A copy of a reference is gone. Called by finalizers."""
        self._dropped.append(ref)
        if self._agent.watch.asleep and not self._closed:
            self._agent.watch.wake()

    def owner(self, ref: RefId) -> WorkerInfo:
        return self.me if ref.owner == self.me.id else self._info(ref.owner)

    def is_confirmed(self, ref: RefId) -> bool:
        with self._lock:
            return self._counting.is_confirmed(ref)

    def describe(self, ref: RefId) -> str:
        """The state of a reference, for people."""
        with self._lock:
            if ref in self._gone:
                return f"lost ({self._gone[ref]})"
            cell = self._cells.get(ref)
            if ref.owner != self.me.id:
                return "confirmed" if self._counting.is_confirmed(ref) else "not confirmed yet"
        return "being made" if cell is None or not cell.ready else "there"

    def creation(self, ref: RefId) -> Future[Any]:
        with self._lock:
            future = self._creations.get(ref)
            gone = self._gone.get(ref)
        if future is None:
            future = Future()
            future.settle(None, gone)
        return future

    def fetch(self, ref: RefId, timeout: float) -> Any:
        """The value, or a copy of it."""
        seconds = self._seconds(timeout)
        if ref.owner == self.me.id:
            return self._local(ref, time.monotonic() + seconds)
        self._await_creation(ref, seconds)
        self._require(ref)
        to = self._info(ref.owner)
        return self._agent.ask_now(to, lambda id, mark: Fetch(id, ref, mark), f"to_here of {ref}", seconds)

    def local_value(self, ref: RefId) -> Any:
        return self._local(ref, time.monotonic() + self._seconds(-1.0))

    def use(self, ref: RefId, run: Callable[[Cell], None]) -> None:
        """Run ``run(cell)`` once a value of ours is there: now, or on a thread of the pool."""
        cell = self._cell(ref)
        if cell.when_ready(lambda: self._agent.pool.run(lambda: run(cell))):
            run(cell)

    def remote(
        self, to: To, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> RRef[Any]:
        """A reference to the value of a function that ``to`` runs."""
        owner = self._agent.membership.find(to).info
        self._names[owner.id] = owner
        with self._lock:
            ref = self._counting.new_ref(owner.id)
        send = self._agent.prepare(
            owner,
            (function, tuple(args), dict(kwargs)),
            lambda id, tree, refs, mark: Create(id, ref, tree, refs, mark),
        )
        with self._lock:
            if owner == self.me:
                self._counting.own(ref)
                self._cells[ref] = Cell()
            else:
                self._counting.creating(ref)
        rref: RRef[Any] = RRef._made(self, ref)
        try:
            created = send(name_for_people(function), self._seconds(timeout))
        except (WorkerLostError, RpcTimeoutError) as error:
            self._created(ref, error)
            return rref
        except BaseException:
            with self._lock:
                self._counting.created(ref)
            raise
        with self._lock:
            self._creations[ref] = created
        created.when_done(lambda done: self._on_created(ref, done))
        return rref

    def call_method(self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Any:
        self._await_creation(rref._ref, self._seconds(timeout))
        self._require(rref._ref)
        arguments = (rref, name, args, kwargs)
        return self._agent.call(rref.owner(), invoke, arguments, {}, self._seconds(timeout), f"method {name}")

    def call_method_async(self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Future[Any]:
        self._require(rref._ref)
        arguments = (rref, name, args, kwargs)
        return self._agent.call_async(rref.owner(), invoke, arguments, {}, self._seconds(timeout), f"method {name}")

    def remote_method(self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        self._require(rref._ref)
        return self.remote(rref.owner(), invoke, (rref, name, args, kwargs), {}, timeout)

    def type_of(self, rref: RRef[Any], timeout: float, blocking: bool) -> Any:
        self._require(rref._ref)
        call = self._agent.call if blocking else self._agent.call_async
        return call(rref.owner(), type_of, (rref,), {}, self._seconds(timeout))

    # What the agent tells about messages: see agent.traffic.

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        with self._lock:
            return tuple((rref._ref, self._counting.share(rref._ref, to.id, over)) for rref in attached)

    def stayed(self, refs: Refs) -> None:
        with self._lock:
            after = self._apply([action for _, share in refs for action in self._counting.unpin(share)])
        self._act(after)

    def arriving(self, refs: Refs) -> None:
        with self._lock:
            after = self._apply([action for ref, share in refs for action in self._counting.receive(ref, share)])
        self._act(after)

    def arrived(self, refs: Refs) -> None:
        with self._lock:
            after = self._apply([action for ref, _ in refs for action in self._counting.drop(ref)])
        self._act(after)

    def _lower(self, rref: RRef[Any], packing: Packing) -> Any:
        if rref._references is not self:
            raise MisuseError(f"{rref!r} belongs to another worker of this process, or to one that was shut down")
        self._require(rref._ref)
        if not any(other._ref == rref._ref for other in packing.attached):
            packing.attached.append(rref)
        ref = rref._ref
        return ref.owner, ref.creator, ref.number

    def _lift(self, value: Any, unpacking: Unpacking) -> RRef[Any]:
        if type(value) is not tuple or len(value) != 3 or not all(type(part) is int for part in value):
            raise ProtocolError("a reference that is none")
        ref = RefId(*value)
        with self._lock:
            if not self._counting.hold(ref):
                raise ProtocolError(f"a reference {ref} that the message does not announce")
        return RRef._made(self, ref)

    # Requests of peers.

    def _on_create(self, inbound: Inbound, envelope: Envelope) -> Frame | None:
        message: Create = envelope.message
        ref, peer = message.ref, inbound.peer
        if ref.owner != self.me.id or ref.creator != peer.id:
            raise ProtocolError(f"a creation of {ref} by rank {peer.id} on rank {self.me.id}")
        with self._lock:
            cell = self._cells.setdefault(ref, Cell())
            after = self._apply([] if peer == self.me else self._counting.own_for(ref, peer.id))
        self._act(after)
        inbound.calls_started += 1
        # Before the function runs: the creator is listed, and that is all it waits for.
        inbound.reply(self._agent.answer(message.id, None))
        try:
            value, later = self.execution.execute(envelope, peer)
        except BaseException as error:
            cell.fail(error, self.me.name)
            inbound.count_finished()
            return None
        if later:
            follow(value, lambda done: self._finish(cell, done, inbound))
        else:
            cell.set(value)
            inbound.count_finished()
        return None

    def _finish(self, cell: Cell, done: Any, inbound: Inbound) -> None:
        try:
            value = done.value()
        except BaseException as error:
            cell.fail(error, self.me.name)
        else:
            cell.set(value)
        inbound.count_finished()

    def _on_fetch(self, inbound: Inbound, envelope: Envelope) -> Frame | None:
        id, ref, asked = envelope.message.id, envelope.message.ref, envelope.message.mark
        inbound.calls_started += 1
        try:
            cell = self._cell(ref)
        except BackhaulError as error:
            inbound.count_finished()
            return self.execution.failure(id, error, inbound)

        def answer() -> Frame:
            try:
                if (error := cell.error) is not None:
                    return self.execution.failure(id, error, inbound)
                return self.execution.result(id, cell.get(), inbound, asked)
            except BaseException as unsendable:
                return self.execution.failure(id, unsendable, inbound)
            finally:
                inbound.count_finished()

        if cell.when_ready(lambda: inbound.reply(answer())):
            return answer()
        return None

    def _on_notices(self, inbound: Inbound, envelope: Envelope) -> Frame:
        message: Notices = envelope.message
        actions: list[Action] = []
        with self._lock:
            if self._inboxes.setdefault(inbound.peer.id, Inbox()).accept(message.number, message.process):
                for notice in message.notices:
                    actions += self._counting.handle(inbound.peer.id, notice)
            after = self._apply(actions)
        self._act(after)
        for notice in message.notices:
            if isinstance(notice, Sweep):
                for rank in notice.dead:
                    self._examine_later(rank)
        return self._agent.answer(message.id, None)

    # Acting on what the state machine decides.

    def _apply(self, actions: Iterable[Action]) -> _Aftermath:
        """Holds the lock, the same that ``actions`` were decided under: two threads must not swap their notices."""
        after = _Aftermath()
        for action in actions:
            if isinstance(action, Send):
                self._outboxes.setdefault(action.to, Outbox()).add(action.notice)
                after.mail = True
            elif isinstance(action, Free):
                after.freed.append(self._cells.pop(action.ref, None))
            elif isinstance(action, Void):
                after.voided.append((action.ref, self._cells.setdefault(action.ref, Cell())))
            elif not action.exists and self._counting.knows(action.ref):
                self._gone.setdefault(action.ref, self._lost_value(action.ref))
        return after

    def _act(self, after: _Aftermath) -> None:
        """Do what is left to do without the lock. Waits for nobody."""
        for ref, cell in after.voided:
            cell.fail(self._lost_creation(ref), self.me.name)
        if after.mail:
            self._flush_later()
        after.freed.clear()

    def _flush_later(self) -> None:
        with self._lock:
            if self._flushing or self._closed:
                return
            self._flushing = True
        self._agent.completions.add(self._flush)

    def _flush(self) -> None:
        with self._lock:
            self._flushing = False
            batches = [(to, batch) for to, box in self._outboxes.items() if (batch := box.next_batch()) is not None]
        for to, (number, notices) in batches:
            self._mail(to, number, notices)

    def _mail(self, to: int, number: int, notices: tuple[Notice, ...]) -> None:
        try:
            future = self._agent.ask_later(
                self._info(to), lambda id: Notices(id, self._process, number, notices), "notices", math.inf
            )
        except BackhaulError:
            self._examine_later(to)
            return
        future.when_done(lambda done: self._mailed(to, number, done))

    def _mailed(self, to: int, number: int, done: Any) -> None:
        try:
            done.value()
        except BackhaulError:
            self._examine_later(to)
            return
        with self._lock:
            box = self._outboxes.get(to)
            if box is not None:
                box.answered(number)
        self._flush_later()

    def _tick(self) -> bool:
        """Called by the watch thread."""
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

    def _on_created(self, ref: RefId, done: Any) -> None:
        try:
            done.value()
        except BackhaulError as error:
            self._created(ref, error)
        else:
            self._created(ref, None)

    def _created(self, ref: RefId, error: BackhaulError | None) -> None:
        with self._lock:
            self._creations.pop(ref, None)
            if error is not None and ref.owner != self.me.id:
                self._gone[ref] = kept(error, self.me.name)
            cell = self._cells.get(ref)
            after = self._apply(self._counting.created(ref))
        if error is not None and cell is not None:
            cell.fail(error, self.me.name)
        self._act(after)

    # Deaths.

    def _on_connected(self, peer: WorkerInfo) -> None:
        with self._lock:
            self._names[peer.id] = peer
            after = self._apply(self._counting.revived(peer.id))
        self._act(after)

    def _on_connection_ended(self, connection: object, peer: WorkerInfo, _: WorkerLostError) -> None:
        with self._lock:
            after = self._apply(self._counting.connection_ended(connection))
        self._act(after)
        self._examine_later(peer.id)

    def _examine_later(self, rank: int) -> None:
        with self._lock:
            if rank == self.me.id or rank in self._examining or self._closed:
                return
            self._examining.add(rank)
        self._agent.pool.run(lambda: self._examine(rank))

    def _examine(self, rank: int) -> None:
        """Find out whether a peer that seems lost is dead, and act on it."""
        alive = self._is_alive(rank)
        if not alive and self._agent.membership.dynamic:
            self._agent.membership.refresh()  # a sweep has to ask all who were there
        with self._lock:
            self._examining.discard(rank)
            if self._closed:
                return
            for info in self._agent.members():
                self._counting.joined(info.id)
            if alive:
                actions: list[Action] = []
                box = self._outboxes.get(rank)
                again = None if box is None else box.again()
            else:
                if rank in self._outboxes:
                    self._outboxes[rank].clear()
                again = None
                actions = self._counting.died(rank)
            after = self._apply(actions)
            sweeping = self._counting.sweeping
        if again is not None:
            self._mail(rank, *again)
        self._act(after)
        if sweeping:
            self._limit_sweep()

    def _is_alive(self, rank: int) -> bool:
        """Whether the peer answers. Returns False only after all that it sent has been read."""
        try:
            if self._agent.is_reachable(self._info(rank), _PROBE_SECONDS):
                return True
        except BackhaulError:
            pass
        self._agent.cut_off(rank)
        return False

    def _limit_sweep(self) -> None:
        """A worker that hangs must not keep for ever what only the dead held."""
        with self._lock:
            if self._sweep_timer is not None or self._closed:
                return
            timer = self._sweep_timer = threading.Timer(_SWEEP_SECONDS, self._give_up_sweep)
            timer.daemon = True
        timer.start()

    def _give_up_sweep(self) -> None:
        with self._lock:
            self._sweep_timer = None
            actions = self._counting.give_up_sweep()
            after = self._apply(actions)
        if actions:
            _log.warning("some worker did not say whether it has references from a dead one; they may be freed now")
        self._act(after)

    # The end.

    def idle(self) -> bool:
        """Nothing about references is under way."""
        with self._lock:
            return not (self._dropped or self._creations or any(map(len, self._outboxes.values())))

    def release_all(self) -> None:
        """Give up all references to values of others, whoever still has copies: the group ends."""
        with self._lock:
            after = self._apply([action for ref in list(self._counting.used) for action in self._counting.abandon(ref)])
        self._act(after)

    def leaks(self) -> list[str]:
        """Values of ours that others are listed for, at a time when nobody should be."""
        with self._lock:
            return [
                f"{ref} held by {', '.join(self._info(rank).name for rank in sorted(holders))}"
                for ref in self._counting.owned
                if (holders := self._counting.holders(ref))
            ]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            cells = list(self._cells.values())
            self._cells.clear()
            timer, self._sweep_timer = self._sweep_timer, None
        if timer is not None:
            timer.cancel()
        cells.clear()

    def counts(self) -> dict[str, int]:
        """How much there is of what; for tests and tools."""
        with self._lock:
            return {
                "owned": len(list(self._counting.owned)),
                "used": len(list(self._counting.used)),
                "pinned": self._counting.pinned,
                "values": len(self._cells),
            }

    def _cell(self, ref: RefId) -> Cell:
        with self._lock:
            if self._closed:
                raise NotInitializedError(f"worker {self.me.name!r} has been shut down, and its values are gone")
            cell = self._cells.get(ref)
            if cell is None:
                if not self._counting.expects(ref):
                    raise MisuseError(f"there is no value {ref} on worker {self.me.name!r} any more")
                cell = self._cells[ref] = Cell()
            return cell

    def _local(self, ref: RefId, deadline: float) -> Any:
        cell = self._cell(ref)
        if not cell.ready:
            handling = self._agent.serving.about_to_wait()
            try:
                if not cell.wait(deadline):
                    raise RpcTimeoutError(f"RPC ran for more than set timeout: the value {ref} has not been made yet")
            finally:
                if handling:
                    self._agent.serving.resumed()
        return cell.get()

    def _await_creation(self, ref: RefId, seconds: float) -> None:
        """Wait for the owner to confirm a creation of ours, and raise what went wrong with it.

        Otherwise a request for a value whose creation was lost on the way would wait for it on the owner.
        """
        creation = self._creations.get(ref)
        if creation is None:
            return
        if seconds >= self._seconds(-1.0):
            creation.wait()
            return
        over = threading.Event()
        creation.when_done(lambda _: over.set())
        if not over.wait(seconds):
            raise RpcTimeoutError(f"RPC ran for more than set timeout: the creation of {ref} is not confirmed yet")
        creation.wait()

    def _require(self, ref: RefId) -> None:
        """Raise if the value is known to be unreachable."""
        error = self._gone.get(ref)
        if error is not None:
            raise fresh(error)

    def _info(self, rank: int) -> WorkerInfo:
        info = self._names.get(rank)
        if info is None:
            info = self._names[rank] = self._agent.membership.find(rank).info
        return info

    def _lost_creation(self, ref: RefId) -> BackhaulError:
        info = self._names.get(ref.creator)
        name = f"rank {ref.creator}" if info is None else info.name
        return WorkerLostError(f"the value {ref} will not be made: the request of worker {name!r} for it is lost", name)

    def _lost_value(self, ref: RefId) -> BackhaulError:
        """Holds the lock."""
        info = self._names.get(ref.owner)
        name = f"rank {ref.owner}" if info is None else info.name
        return WorkerLostError(f"the value {ref} is gone: its owner, worker {name!r}, is lost or has freed it", name)
