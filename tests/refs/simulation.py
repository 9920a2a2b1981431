"""A seeded simulation of reference counting: random programs on workers that lose messages, break and die.

Pure and single-threaded. One seed gives one program::

    python tests/refs/simulation.py SEED        # replays a seed and prints what happened
    python tests/refs/simulation.py FROM TO     # runs many

What is modelled
----------------
**Workers** have a `Counting`, an `Outbox` and an `Inbox` for each peer, user-visible copies of references
(``hands``), references of messages that are being unpacked (``temps``), and values that exist until `Free`.

**Connections** are made by one worker to another when it first has something to send; requests go one way, replies the
other. Each direction has two queues, *calls* and *mail*, which do not wait for each other. A message
of calls that has been read may be handled later, after others.

A connection may *break*: of each queue a random tail is lost, and the rest may arrive at any later time, also after
messages of a newer connection. Each end notices at a time of its own, and what it writes until then is lost.

**Deaths**: a worker stops. Of each of its queues a random tail is lost; what was on its way to it vanishes.
Another worker that has a connection with it learns of the death after it has handled everything that came
before the end. One without a connection learns nothing, until it tries to send something, or is asked in a sweep.

The judge
---------
A *claim* is what counting promises something to: a worker that has copies of a reference, or is unpacking
it, or a message under way that brings it to a living worker. Only one thing voids a claim: a message that the
receiver did not have when it was recalled. A reference that comes of such a message, and what is
made of it, is a claim only once the owner has confirmed it.

At all times: nothing is freed that has a claim; nobody with a claim is told that the value is gone, unless the
owner or its creation is. At the end, when all messages have arrived: what has a claim is there, its holders
are exactly those listed, and of everything else nothing is left anywhere.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple, TypeAlias

from backhaul.ids import RefId, ShareId
from backhaul.refs.counting import Action, Confirm, Counting, Free, Send, Void
from backhaul.refs.mailbox import Inbox, Outbox
from backhaul.wire.messages import Notice, Recall, Sweep

_MOST_WORKERS = 5
_LONGEST_TRACE = 60


class SimulationError(AssertionError):
    """Counting did not keep a promise. The text says which, and how to replay it."""


# -- messages ------------------------------------------------------------------------------------------


class Brought(NamedTuple):
    """A reference in a message. ``claim``: the sender had a claim when it sent it."""

    ref: RefId
    share: ShareId
    claim: bool


class Call(NamedTuple):
    brings: tuple[Brought, ...]


class Create(NamedTuple):
    ref: RefId
    brings: tuple[Brought, ...]


class Created(NamedTuple):
    ref: RefId
    brings: tuple[Brought, ...] = ()


class Batch(NamedTuple):
    number: int
    notices: tuple[Notice, ...]


class Answer(NamedTuple):
    number: int


class End(NamedTuple):
    """Nothing comes after it."""


Message = Call | Create | Created | Batch | Answer | End
_END = End()

Happening: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""What to call with what."""


class Queue:
    """One direction of calls, or of mail, of one connection."""

    __slots__ = ("connection", "ended", "items", "receiver", "sender")

    def __init__(self, connection: Connection, sender: int, receiver: int) -> None:
        self.connection = connection
        self.sender = sender
        self.receiver = receiver
        self.items: deque[Message] = deque()
        self.ended = False  # its end has been read


class Connection:
    """Made by ``opener``, whose requests it takes to ``acceptor``, and the replies back."""

    __slots__ = ("acceptor", "broken", "calls", "mail", "noticed", "number", "opener")

    def __init__(self, number: int, opener: int, acceptor: int) -> None:
        self.number = number
        self.opener = opener
        self.acceptor = acceptor
        self.broken = False
        self.noticed: set[int] = set()  # the ends that know that it is broken
        self.calls = {opener: Queue(self, opener, acceptor), acceptor: Queue(self, acceptor, opener)}
        self.mail = {opener: Queue(self, opener, acceptor), acceptor: Queue(self, acceptor, opener)}

    def queues(self) -> list[Queue]:
        return [*self.calls.values(), *self.mail.values()]

    def queues_from(self, sender: int) -> tuple[Queue, Queue]:
        return self.calls[sender], self.mail[sender]

    def other(self, end: int) -> int:
        return self.acceptor if end == self.opener else self.opener

    def __repr__(self) -> str:
        return f"{self.opener}->{self.acceptor}#{self.number}"


class Worker:
    """One worker, as its driver and its user see it."""

    def __init__(self, rank: int, counting: Counting, outbox: type[Outbox], inbox: type[Inbox]) -> None:
        self.rank = rank
        self.counting = counting
        self.new_outbox = outbox
        self.new_inbox = inbox
        self.alive = True
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.outbound: dict[int, Connection] = {}
        self.hands: Counter[RefId] = Counter()
        self.temps: Counter[RefId] = Counter()
        self.claims: set[RefId] = set()
        self.gone: set[RefId] = set()  # of which the owner has said so
        self.values: set[RefId] = set()
        self.creating: dict[RefId, Connection] = {}  # not acknowledged
        self.todo: list[tuple[Connection | None, int, Message]] = []  # read and not yet handled: over what, of whom
        self.dead: set[int] = set()  # whose deaths this worker knows of
        self.suspects: set[int] = set()  # of whom it has been asked in a sweep
        self.arrived: set[ShareId] = set()
        self.recalled: set[ShareId] = set()  # before they arrived

    def has(self, ref: RefId) -> bool:
        return bool(self.hands[ref] or self.temps[ref])


# -- the world -----------------------------------------------------------------------------------------


class Simulation:
    """One random program. `run` raises `SimulationError`."""

    def __init__(
        self,
        seed: int,
        counting: type[Counting] = Counting,
        outbox: type[Outbox] = Outbox,
        inbox: type[Inbox] = Inbox,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.trace: list[tuple[Any, ...]] = []
        self._parts = counting, outbox, inbox
        self.workers: dict[int, Worker] = {}
        self.connections: list[Connection] = []
        self.made = 0  # connections
        self.refs: list[RefId] = []
        self.under_way: set[RefId] = set()  # creations that may still arrive
        self.lost: set[RefId] = set()  # creations that never will
        self.failed: set[RefId] = set()  # creations of which the creator does not know whether they happened
        self.slow: dict[Any, bool] = {}
        pick = self.random.choice
        self.slowness = {kind: pick([0.0, 0.2, 0.5, 0.8]) for kind in ("calls", "mail", "worker")}
        self.most_refs = pick([2, 4, 100])
        self.drops_after_share = pick([0.0, 0.5, 1.0])
        self.passes_on = pick([0.0, 0.3])
        self.mortality = pick([0.0, 0.1, 0.3])
        self.mortals = pick([0, 0, 1, 1, 2, 3])
        self.size = pick([2, 3, 4, 4, 5])
        self.potato = pick([False, True])
        if self.potato:
            self.size = pick([4, 5])
            self.most_refs = 2
            self.drops_after_share = 1.0
            self.passes_on = 0.9
            self.mortals = pick([1, 2, 3])
            self.mortality = pick([0.1, 0.3, 0.6])
        self.deaths = 0
        self.breaks = 0
        self.steps = 0

    def run(self) -> None:
        random = self.random
        for _ in range(self.size):
            self.join()
        length = random.randint(10, 200)
        pace = random.choice([0.4, 0.6, 0.75])  # how much of what happens is delivery
        risk = random.choice([0.0, 0.05, 0.15])
        for _ in range(length):
            if random.random() < pace:
                self.happen()
            elif random.random() < risk:
                self.break_something()
            elif random.random() < 0.03:
                self.kill(random.choice(self.living()))
            else:
                self.program_step()
        self.settle()
        self.check_all()
        for ref in self.refs:
            if random.random() < 0.5:
                self.drop_all(ref)
        self.settle()
        self.check_all()
        if random.random() < 0.3:
            self.end_group()
        for ref in self.refs:
            self.drop_all(ref)
        self.settle()
        self.check_all()
        self.check_empty()

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def log(self, *what: Any) -> None:
        self.trace.append(what)

    # -- what the network and the drivers do -------------------------------------------------------

    def happenings(self) -> list[Happening]:
        """All that can happen next without anybody's will."""
        found: list[Happening] = []
        workers = self.workers
        for connection in self.connections:
            for queue in connection.queues():
                if queue.items and workers[queue.receiver].alive:
                    found.append((self.deliver, (queue,)))
            if connection.broken:
                for end in (connection.opener, connection.acceptor):
                    if end not in connection.noticed and workers[end].alive:
                        found.append((self.notice_break, (workers[end], connection)))
        for worker in workers.values():
            if not worker.alive:
                continue
            found += [(self.handle, (worker, at)) for at in range(len(worker.todo))]
            found += [(self.unpack, (worker, ref)) for ref in worker.temps]
            found += [(self.post_batch, (worker, to)) for to, box in worker.outboxes.items() if _has_news(box)]
            for other in workers.values():
                if not other.alive and other.rank not in worker.dead and self.has_read_all(worker, other.rank):
                    found.append((self.learn_death, (worker, other.rank)))
            found += [(self.examine, (worker, rank)) for rank in worker.suspects]
        return found

    def happen(self) -> bool:
        found = self.happenings()
        if not found:
            return False
        self.steps += 1
        act, args = self.random.choice(found)
        for _ in range(5):
            if self.is_slow(act, args[0]):
                act, args = self.random.choice(found)
        act(*args)
        return True

    def is_slow(self, act: Callable[..., None], what: Queue | Worker) -> bool:
        """Some things are slow in a program, and others fast: that makes for the longest detours."""
        if isinstance(what, Queue):
            kind = "mail" if what is what.connection.mail[what.sender] else "calls"
            which: Any = kind, what.sender, what.receiver, what.connection.broken and what.connection
        else:
            kind = "worker"
            which = act.__name__, what.rank
        if which not in self.slow:
            self.slow[which] = self.random.random() < self.slowness[kind]
        return self.slow[which]

    def settle(self) -> None:
        """Let everything happen that is under way."""
        self.passes_on = 0.0
        limit = self.steps + 20_000
        while self.happen():
            if self.steps > limit:
                raise self.failure("it never comes to rest")

    def connect(self, opener: Worker, to: int) -> Connection:
        connection = opener.outbound.get(to)
        if connection is None:
            self.made += 1
            connection = opener.outbound[to] = Connection(self.made, opener.rank, to)
            self.connections.append(connection)
            if not self.workers[to].alive:
                connection.broken = True
                connection.noticed |= {opener.rank, to}
                for queue in connection.queues_from(to):
                    queue.items.append(_END)
        return connection

    def post(self, sender: Worker, queue: Queue, message: Message) -> None:
        """Write a message; it may not arrive."""
        if queue.connection.broken:
            self.log("lost", queue.connection, message)
            self.note_loss(message)
        else:
            queue.items.append(message)

    def note_loss(self, message: Message) -> None:
        if isinstance(message, Create):
            self.under_way.discard(message.ref)
            self.lost.add(message.ref)

    def deliver(self, queue: Queue) -> None:
        worker = self.workers[queue.receiver]
        message = queue.items.popleft()
        if isinstance(message, End):
            queue.ended = True
            self.forget_if_over(queue.connection)
        elif isinstance(message, Batch):
            self.take_batch(worker, queue.connection, queue.sender, message)
        elif isinstance(message, Answer):
            self.log("answered", worker.rank, queue.sender, message.number)
            if queue.sender in worker.outboxes:
                worker.outboxes[queue.sender].answered(message.number)
        else:
            worker.todo.append((queue.connection, queue.sender, message))
            if self.random.random() < 0.7:
                self.handle(worker, len(worker.todo) - 1)

    def forget_if_over(self, connection: Connection) -> None:
        ends = connection.opener, connection.acceptor
        if all(self.workers[end].alive for end in ends) and len(connection.noticed) == 2:
            if all(queue.ended for queue in connection.queues()):
                self.connections.remove(connection)

    def take_batch(self, worker: Worker, connection: Connection, sender: int, batch: Batch) -> None:
        if worker.inboxes.setdefault(sender, worker.new_inbox()).accept(batch.number):
            for notice in batch.notices:
                self.log("notice", sender, worker.rank, notice)
                if isinstance(notice, Recall):
                    worker.recalled |= set(notice.shares) - worker.arrived
                elif isinstance(notice, Sweep):
                    worker.suspects |= set(notice.dead) - worker.dead
                self.act(worker, worker.counting.handle(sender, notice))
        else:
            self.log("again", sender, worker.rank, batch.number)
        if worker.rank not in connection.noticed:
            self.post(worker, connection.mail[worker.rank], Answer(batch.number))

    def post_batch(self, worker: Worker, to: int) -> None:
        batch = worker.outboxes[to].next_batch()
        if batch is not None:
            self.post(worker, self.connect(worker, to).mail[worker.rank], Batch(*batch))

    def post_again(self, worker: Worker, to: int) -> None:
        batch = worker.outboxes[to].again()
        if batch is not None:
            self.post(worker, self.connect(worker, to).mail[worker.rank], Batch(*batch))

    def handle(self, worker: Worker, at: int) -> None:
        connection, sender, message = worker.todo.pop(at)
        self.log("handle", worker.rank, sender, message)
        if isinstance(message, Created):
            if worker.creating.get(message.ref) is connection:
                del worker.creating[message.ref]
                self.act(worker, worker.counting.created(message.ref))
        elif isinstance(message, Create):
            self.under_way.discard(message.ref)
            worker.values.add(message.ref)
            self.act(worker, worker.counting.own_for(message.ref, message.ref.creator))
        for brought in message.brings:  # type: ignore[union-attr]
            self.receive(worker, brought)
        if isinstance(message, Create) and connection is not None:
            # The reply may bring a reference, too.
            refs = [ref for ref in worker.hands if self.random.random() < 0.1]
            brings = tuple(self.share(worker, ref, sender, connection) for ref in refs)
            self.reply(worker, connection, Created(message.ref, brings))

    def reply(self, worker: Worker, connection: Connection, message: Call | Created) -> None:
        if worker.rank in connection.noticed:
            for brought in message.brings:
                self.log("not written", worker.rank, brought)
                self.act(worker, worker.counting.unpin(brought.share))
        else:
            self.post(worker, connection.calls[worker.rank], message)

    def receive(self, worker: Worker, brought: Brought) -> None:
        ref = brought.ref
        worker.temps[ref] += 1
        worker.arrived.add(brought.share)
        if brought.claim and brought.share not in worker.recalled:
            worker.claims.add(ref)
        listed = ref not in worker.gone and worker.counting.is_confirmed(ref)
        actions = worker.counting.receive(ref, brought.share)
        if Void(ref) in actions:
            if ref in worker.claims and ref not in self.lost:
                raise self.failure(f"worker {worker.rank} receives {ref}, which is gone", ref)
        elif listed or ref.owner == worker.rank:
            worker.claims.add(ref)
        self.act(worker, actions)

    def unpack(self, worker: Worker, ref: RefId) -> None:
        """The user gets some copies of what a message brought."""
        for _ in range(1 if self.potato else self.random.choice([0, 1, 1, 2])):
            self.hold(worker, ref)
        if worker.hands[ref] and self.random.random() < self.passes_on:
            self.send(worker, [ref])
            while worker.hands[ref]:
                self.drop(worker, ref)
            if not worker.counting.is_confirmed(ref) and self.random.random() < self.mortality:
                self.kill(worker)
                return
        worker.temps[ref] -= 1
        if not worker.temps[ref]:
            del worker.temps[ref]
        self.dropped(worker, ref)

    def notice_break(self, worker: Worker, connection: Connection) -> None:
        """One end of a broken connection sees that it is."""
        peer = connection.other(worker.rank)
        self.log("notices", worker.rank, connection)
        connection.noticed.add(worker.rank)
        self.act(worker, worker.counting.connection_ended(connection))
        if connection.opener == worker.rank:
            if worker.outbound.get(peer) is connection:
                del worker.outbound[peer]
            self.fail_creations(worker, lambda over: over is connection)
            if peer in worker.outboxes:
                self.post_again(worker, peer)
        self.connect(worker, peer)  # to see whether it lives, and when it dies
        self.forget_if_over(connection)

    def fail_creations(self, worker: Worker, which: Callable[[Connection], bool]) -> None:
        """The user learns that it is not known whether these happened."""
        for ref in [ref for ref, over in worker.creating.items() if which(over)]:
            del worker.creating[ref]
            self.failed.add(ref)
            self.log("in doubt", worker.rank, ref)
            self.act(worker, worker.counting.created(ref))
            if worker.hands[ref] and self.random.random() < 0.5:
                self.drop(worker, ref)

    # -- deaths ------------------------------------------------------------------------------------

    def kill(self, worker: Worker) -> None:
        if self.deaths == self.mortals or len(self.living()) == 1:
            return
        self.log("dies", worker.rank)
        self.deaths += 1
        worker.alive = False
        for connection in self.connections:
            if worker.rank not in (connection.opener, connection.acceptor):
                continue
            connection.broken = True
            for queue in connection.queues_from(worker.rank):
                self.cut(queue)
            for queue in connection.queues_from(connection.other(worker.rank)):
                for message in queue.items:
                    self.note_loss(message)
                queue.items.clear()
        for _, _, message in worker.todo:
            self.note_loss(message)

    def cut(self, queue: Queue) -> None:
        """Lose a random tail of what is under way."""
        if queue.ended:
            return
        items = list(queue.items)
        if items and items[-1] is _END:
            items.pop()
        kept = self.random.randint(0, len(items)) if self.random.random() < 0.7 else len(items)
        for message in items[kept:]:
            self.log("lost", queue.connection, message)
            self.note_loss(message)
        queue.items = deque([*items[:kept], _END])

    def has_read_all(self, worker: Worker, dead: int) -> bool:
        """Everything that a dead worker sent to this one has been handled, and there was a connection to see it by."""
        ended = [
            queue.ended
            for connection in self.connections
            if dead in (connection.opener, connection.acceptor) and connection.other(dead) == worker.rank
            for queue in connection.queues_from(dead)
        ]
        return bool(ended) and all(ended) and all(sender != dead for _, sender, _ in worker.todo)

    def learn_death(self, worker: Worker, dead: int) -> None:
        self.log("learns death", worker.rank, dead)
        worker.suspects.discard(dead)
        worker.outbound.pop(dead, None)
        first = self.random.random() < 0.5
        if first:
            self.fail_creations(worker, lambda over: over.acceptor == dead)
        for connection in list(self.connections):
            if {connection.opener, connection.acceptor} == {worker.rank, dead}:
                if first:
                    self.act(worker, worker.counting.connection_ended(connection))
                connection.noticed.add(worker.rank)
        worker.outboxes.pop(dead, None)
        worker.dead.add(dead)
        self.act(worker, worker.counting.died(dead))
        self.fail_creations(worker, lambda over: over.acceptor == dead)

    def examine(self, worker: Worker, rank: int) -> None:
        """Somebody says that this one is dead: try to reach it."""
        worker.suspects.discard(rank)
        if self.workers[rank].alive:
            raise self.failure(f"worker {worker.rank} is asked whether {rank} is dead, which lives")
        if rank not in worker.dead:
            self.connect(worker, rank)

    # -- connections break ---------------------------------------------------------------------------

    def break_something(self) -> None:
        sound = [connection for connection in self.connections if not connection.broken]
        if not sound:
            return
        connection = self.random.choice(sound)
        self.log("breaks", connection)
        self.breaks += 1
        connection.broken = True
        for queue in connection.queues():
            self.cut(queue)

    # -- programs ------------------------------------------------------------------------------------

    def program_step(self) -> None:
        random = self.random
        worker = random.choice(self.living())
        refs = list(worker.hands)
        step = random.random()
        if not refs or (step < 0.25 and len(self.refs) < self.most_refs):
            self.create_remote(worker, random.choice(list(self.workers)))
        elif step < 0.60:
            refs = random.sample(refs, min(len(refs), random.choice([1, 1, 2])))
            self.send(worker, refs)
            if random.random() < self.drops_after_share:
                for ref in refs:
                    while worker.hands[ref]:
                        self.drop(worker, ref)
        elif step < 0.65:
            self.hold(worker, random.choice(refs))
        elif step < 0.90:
            self.drop(worker, random.choice(refs))
        elif step < 0.97:
            self.use(worker, random.choice(refs))
        elif step < 0.99:
            for to in list(worker.outboxes):
                self.post_again(worker, to)
        elif len(self.workers) < _MOST_WORKERS:
            self.join()

    def join(self) -> None:
        counting, outbox, inbox = self._parts
        worker = Worker(len(self.workers), counting(len(self.workers)), outbox, inbox)
        self.log("joins", worker.rank)
        for other in self.workers.values():
            if other.alive:
                other.counting.joined(worker.rank)
            if other.alive or self.random.random() < 0.5:  # or nobody has said yet that it is dead
                worker.counting.joined(other.rank)
        self.workers[worker.rank] = worker

    def create_local(self, worker: Worker) -> None:
        ref = worker.counting.new_ref(worker.rank)
        self.log("own", worker.rank, ref)
        self.refs.append(ref)
        worker.counting.own(ref)
        worker.values.add(ref)
        worker.hands[ref] += 1
        worker.claims.add(ref)

    def create_remote(self, worker: Worker, owner: int) -> None:
        if owner == worker.rank or owner in worker.dead:
            self.create_local(worker)
            return
        connection = self.connect(worker, owner)
        ref = worker.counting.new_ref(owner)
        self.log("create", worker.rank, ref)
        args = [arg for arg in worker.hands if self.random.random() < 0.1]
        brings = tuple(self.share(worker, arg, owner, connection) for arg in args)
        self.refs.append(ref)
        worker.counting.creating(ref)
        worker.hands[ref] += 1
        worker.claims.add(ref)
        self.under_way.add(ref)
        worker.creating[ref] = connection
        message = Create(ref, brings)
        if self.random.random() < 0.05:
            self.note_loss(message)
            for brought in brings:
                self.log("not written", worker.rank, brought)
                self.act(worker, worker.counting.unpin(brought.share))
            del worker.creating[ref]
            self.failed.add(ref)
            self.act(worker, worker.counting.created(ref))
            self.drop(worker, ref)
        else:
            self.post(worker, connection.calls[worker.rank], message)

    def share(self, worker: Worker, ref: RefId, to: int, over: Connection | None) -> Brought:
        brought = Brought(ref, worker.counting.share(ref, to, over), ref in worker.claims)
        self.log("share", worker.rank, to, over, brought)
        return brought

    def send(self, worker: Worker, refs: list[RefId]) -> None:
        """A call that takes references somewhere, or the late reply to one."""
        ranks = list(self.workers)
        if self.potato:
            ranks = [rank for rank in ranks if rank not in (worker.rank, refs[0].owner) and rank not in worker.dead]
        to = self.random.choice(ranks or list(self.workers))
        if to == worker.rank:
            brings = tuple(self.share(worker, ref, to, None) for ref in refs)
            worker.todo.append((None, to, Call(brings)))
            return
        inbound = [
            connection
            for connection in self.connections
            if connection.acceptor == worker.rank and connection.opener == to and self.workers[to].alive
        ]
        if inbound and self.random.random() < 0.4:
            connection = self.random.choice(inbound)
            brings = tuple(self.share(worker, ref, to, connection) for ref in refs)
            self.reply(worker, connection, Call(brings))
            return
        if to in worker.dead:
            for ref in refs:
                self.share(worker, ref, to, None)
            return
        connection = self.connect(worker, to)
        brings = tuple(self.share(worker, ref, to, connection) for ref in refs)
        if self.random.random() < 0.05:
            for brought in brings:
                self.log("not written", worker.rank, brought)
                self.act(worker, worker.counting.unpin(brought.share))
        else:
            self.post(worker, connection.calls[worker.rank], Call(brings))

    def hold(self, worker: Worker, ref: RefId) -> None:
        if not worker.counting.hold(ref):
            raise self.failure(f"worker {worker.rank} has {ref}, and counting knows nothing of it", ref)
        worker.hands[ref] += 1

    def drop(self, worker: Worker, ref: RefId) -> None:
        self.log("drop", worker.rank, ref)
        worker.hands[ref] -= 1
        if not worker.hands[ref]:
            del worker.hands[ref]
        self.dropped(worker, ref)

    def dropped(self, worker: Worker, ref: RefId) -> None:
        if not worker.has(ref):
            worker.claims.discard(ref)
        self.act(worker, worker.counting.drop(ref))
        if not worker.counting.knows(ref):
            worker.gone.discard(ref)

    def use(self, worker: Worker, ref: RefId) -> None:
        """What `to_here` would find."""
        owner = self.workers[ref.owner]
        if ref in worker.claims and owner.alive and ref not in self.lost | self.under_way and ref not in owner.values:
            raise self.failure(f"worker {worker.rank} uses {ref}, which is not there", ref)

    def drop_all(self, ref: RefId) -> None:
        for worker in self.living():
            while worker.hands[ref]:
                self.drop(worker, ref)
            del worker.hands[ref]

    def end_group(self) -> None:
        """All give up what they have, and the finalizers run later."""
        for worker in self.living():
            for ref in list(worker.counting.used):
                worker.claims.discard(ref)
                self.act(worker, worker.counting.abandon(ref))

    # -- the judge -----------------------------------------------------------------------------------

    def act(self, worker: Worker, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.to == worker.rank or action.to in worker.dead:
                    raise self.failure(f"worker {worker.rank} is to send {action.notice} to {action.to}")
                worker.outboxes.setdefault(action.to, worker.new_outbox()).add(action.notice)
                continue
            self.log("action", worker.rank, action)
            ref = action.ref
            if isinstance(action, Free):
                self.check_free(worker, ref)
                worker.values.discard(ref)
            elif isinstance(action, Void):
                if ref in self.under_way and ref not in self.failed and self.workers[ref.creator].alive:
                    raise self.failure(f"worker {worker.rank} gives up {ref}, which is being created", ref)
            elif isinstance(action, Confirm):
                self.check_confirm(worker, action)

    def check_free(self, owner: Worker, ref: RefId) -> None:
        if ref in self.lost:
            return  # there never was a value
        for worker in self.living():
            if ref in worker.claims:
                raise self.failure(f"{ref} is freed, but worker {worker.rank} has it", ref)
            queued = [message for _, _, message in worker.todo]
            for connection in self.connections:
                if worker.rank in (connection.opener, connection.acceptor):
                    for queue in connection.queues_from(connection.other(worker.rank)):
                        queued += queue.items
            for message in queued:
                for brought in getattr(message, "brings", ()):
                    if brought.ref == ref and brought.claim and brought.share not in worker.recalled:
                        raise self.failure(f"{ref} is freed, but is on its way to worker {worker.rank}", ref)

    def check_confirm(self, worker: Worker, action: Confirm) -> None:
        ref = action.ref
        if action.exists:
            if worker.has(ref):
                worker.claims.add(ref)
            return
        if ref.owner not in worker.dead and ref in worker.claims:
            if ref not in self.lost or self.workers[ref.creator].alive:
                raise self.failure(f"worker {worker.rank} has {ref} and is told that it is gone", ref)
        worker.claims.discard(ref)
        if worker.counting.knows(ref):
            worker.gone.add(ref)

    def check_all(self) -> None:
        """Nothing is under way: what has a claim is there, and nothing else."""
        living = self.living()
        for worker in living:
            counting, rank = worker.counting, worker.rank
            for ref in worker.hands:
                self.use(worker, ref)
                if not counting.is_confirmed(ref):
                    raise self.failure(f"worker {rank} has {ref}, which was never confirmed", ref)
            self.expect(set(counting.used), {ref for ref in worker.hands if ref.owner != rank}, f"used by {rank}")
            if counting.pinned:
                raise self.failure(f"worker {rank} has {counting.pinned} pins left", *_pinned(counting))
            left = {to: len(box) for to, box in worker.outboxes.items() if len(box)}
            if left:
                raise self.failure(f"worker {rank} has notices left for {left}")
            if counting.sweeping or counting._questions:
                raise self.failure(f"worker {rank} is still sweeping, or asked")
            held: dict[RefId, set[int]] = {}
            for user in living:
                for ref in user.hands:
                    if ref.owner == rank and (user is worker or ref in user.claims):
                        held.setdefault(ref, set()).add(user.rank)
            # Of a creation that was lost, the owner may have heard from others or not at all.
            owned = set(counting.owned)
            self.expect(owned - set(held), set(), f"too much owned by {rank}")
            self.expect(set(held) - owned - self.lost, set(), f"missing at {rank}")
            for ref in owned:
                missing = self.lost & {ref} and {ref.creator}
                self.expect(counting.holders(ref) | missing, held[ref] - {rank} | missing, f"listed for {ref}", ref)
            self.expect(worker.values - set(held), set(), f"values of {rank}")

    def check_empty(self) -> None:
        for worker in self.living():
            for creator, numbers in worker.counting._settled.items():
                if self.workers[creator].alive and len(numbers) > 1:
                    raise self.failure(f"worker {worker.rank} still awaits a creation of {creator}: {numbers}")

    def expect(self, found: set[Any], expected: set[Any], what: str, *about: RefId) -> None:
        if found != expected:
            more = [ref for ref in found ^ expected if isinstance(ref, RefId)]
            raise self.failure(f"{what}: {_show(found)}, not {_show(expected)}", *about, *more)

    # -- failures ------------------------------------------------------------------------------------

    def failure(self, what: str, *about: RefId) -> SimulationError:
        lines = [" ".join(map(_show, event)) for event in self.trace if self._concerns(event, set(about))]
        if len(lines) > _LONGEST_TRACE:
            lines = [f"... {len(lines) - _LONGEST_TRACE} lines ...", *lines[-_LONGEST_TRACE:]]
        text = "\n    ".join([f"{what}", *lines])
        return SimulationError(f"{text}\nreplay: python tests/refs/simulation.py {self.seed}")

    def _concerns(self, event: tuple[Any, ...], about: set[RefId]) -> bool:
        if event[0] in ("answered", "again"):
            return False
        shares = {
            brought.share
            for other in self.trace
            if other[0] == "share" and isinstance(brought := other[-1], Brought) and brought.ref in about
        }
        named = about | shares
        return not named or event[0] in ("dies", "breaks", "learns death", "notices") or _mentions(event, named)


def _mentions(thing: Any, named: set[Any]) -> bool:
    if isinstance(thing, RefId | ShareId):
        return thing in named
    if isinstance(thing, Sweep):
        return True
    if isinstance(thing, tuple):
        return any(_mentions(part, named) for part in thing)
    fields = getattr(thing, "__struct_fields__", ())
    return any(_mentions(getattr(thing, field), named) for field in fields)


def _has_news(box: Outbox) -> bool:
    return bool(box._waiting and not box._under_way)


def _pinned(counting: Counting) -> list[RefId]:
    return [pin.ref for pin in counting._pins.values()]


def _show(thing: Any) -> str:
    """Short, for people."""
    if isinstance(thing, ShareId):
        return f"s{thing.sharer}.{thing.number}"
    if isinstance(thing, Brought):
        return f"{thing.ref}({_show(thing.share)}{'' if thing.claim else ' without claim'})"
    if isinstance(thing, str | int | RefId | Connection):
        return str(thing)
    if isinstance(thing, set):
        return "{" + ", ".join(sorted(map(_show, thing))) + "}"
    if type(thing) is tuple:
        return "(" + ", ".join(map(_show, thing)) + ")"
    if isinstance(thing, tuple):
        return f"{type(thing).__name__}({', '.join(map(_show, thing))})"
    if hasattr(thing, "__struct_fields__"):
        fields = [getattr(thing, field) for field in thing.__struct_fields__]
        return f"{type(thing).__name__}({', '.join(map(_show, fields))})"
    return str(thing)


def main(arguments: list[str]) -> None:
    seeds = [int(argument) for argument in arguments] or [0, 1000]
    if len(seeds) == 1:
        simulation = Simulation(seeds[0])
        try:
            simulation.run()
        finally:
            for event in simulation.trace:
                print(" ".join(map(_show, event)))
        return
    totals: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in range(*seeds):
        simulation = Simulation(seed)
        simulation.run()
        totals.update(
            programs=1,
            steps=simulation.steps,
            references=len(simulation.refs),
            deaths=simulation.deaths,
            breaks=simulation.breaks,
        )
    seconds = time.perf_counter() - start
    print(", ".join(f"{count:,} {what}" for what, count in totals.items()), f"in {seconds:.1f} s, all kept")


if __name__ == "__main__":
    main(sys.argv[1:])
