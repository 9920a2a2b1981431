"""A seeded simulation of reference counting: random programs, on workers that lose connections and die.

Pure and single-threaded. One seed is one program::

    python tests/refs/simulation.py SEED        # replays it, and prints all that happened
    python tests/refs/simulation.py FROM TO     # runs many, and prints how much happened

Workers
-------
Each worker has a `Counting`, an `Outbox` and an `Inbox` for each peer, copies of references in the user's ``hands``,
references from messages that are not unpacked yet (``temps``), and values, which exist until `Free`.

This file is also the model of the driver, so it does what `Counting` requires of its driver:

- The actions that a method of `Counting` returns are in the outboxes before the next method is called.
- A connection is made when the first message is sent. Messages that were read may be handled later and in another
  order. Their references are received when the message is read, or later.
- The two ends of a broken connection notice the break at different times. Until then, what they write is lost. Then
  each end calls `connection_ended`, sends its unanswered notices again, gives up its unanswered creations, and opens
  a new connection, to see whether the other end lives.
- A worker learns of a death after it has received everything that the dead worker sent to it. A worker without a
  connection to the dead worker learns of it when it tries to send a message, or when a sweep asks about it.

`simulated_world` checks what counting promises.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, TypeAlias

from simulated_network import (
    Answer,
    Batch,
    Brought,
    Call,
    Connection,
    Create,
    Created,
    End,
    Queue,
    UserMessage,
)
from simulated_world import SimulationError, Worker, World

from backhaul.ids import RefId, ShareId
from backhaul.refs.counting import Counting
from backhaul.refs.mailbox import Inbox, Outbox
from backhaul.wire.messages import Recall, Sweep

__all__ = ["Simulation", "SimulationError", "run"]

_MOST_WORKERS = 5

Happening: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""A function to call, and its arguments."""


class Style:
    """The properties of the programs of a seed."""

    def __init__(self, random: Random) -> None:
        pick = random.choice
        self.pace = pick([0.4, 0.55, 0.7])  # the share of events that the program itself does not cause
        self.chance = pick([0.03, 0.3, 1.0])  # the other choices go by priorities: see `happen`
        self.breaks = pick([0.0, 0.03, 0.1])
        # A ring program passes references on from worker to worker, and none keeps them.
        self.ring = pick([True, False])
        self.length = random.randint(20, 120 if self.ring else 200)
        self.workers = pick([4, 4, 5] if self.ring else [2, 3, 4])
        self.references = pick([4, 20] if self.ring else [2, 4, 20])
        self.passing_on = 0.9 if self.ring else pick([0.0, 0.3])
        self.deaths = pick([1, 2, 3] if self.ring else [0, 1, 2])
        self.deaths_when_passing = pick([0.05, 0.3])


class Simulation(World):
    """One random program. `run` raises `SimulationError`."""

    def __init__(
        self,
        seed: int,
        counting: type[Counting] = Counting,
        outbox: type[Outbox] = Outbox,
        inbox: type[Inbox] = Inbox,
    ) -> None:
        super().__init__(seed, outbox)
        self.counting, self.inbox = counting, inbox
        self.style = Style(self.random)
        self.refs: list[RefId] = []
        self.sent_over: dict[ShareId, Connection] = {}
        self.priorities: dict[Any, float] = {}
        self.tally: Counter[str] = Counter(programs=1)

    def run(self) -> None:
        random, style = self.random, self.style
        for _ in range(style.workers):
            self.join()
        for _ in range(style.length):
            if random.random() < style.pace:
                self.happen()
            elif random.random() < style.breaks:
                self.break_something()
            elif random.random() < 0.03:
                self.kill(random.choice(self.living()))
            else:
                self.do_something()
        style.passing_on = 0.0
        self.settle(stale=random.random() < 0.5)
        for ref in self.refs:
            if random.random() < 0.5:
                self.drop_all(ref)
        self.settle(stale=random.random() < 0.5)
        if random.random() < 0.3:
            self.end_group()
        for ref in self.refs:
            self.drop_all(ref)
        self.settle(stale=False)
        self.settle(stale=True)
        for ref in self.refs:
            self.drop_all(ref)
        self.settle(stale=True)
        self.check_empty()

    def happenings(self, stale: bool = True) -> list[Happening]:
        """All that can happen next. Unless ``stale``, messages in broken connections wait."""
        workers = self.workers
        found: list[Happening] = [
            (self.deliver, (queue,)) for queue in self.network.filled if stale or not self.is_stale(queue)
        ]
        for connection in self.network.broken:
            for end in connection.ends:
                if end not in connection.noticed:
                    found.append((self.notice_end, (workers[end], connection)))
        dead = [worker.rank for worker in workers.values() if not worker.alive]
        for worker in workers.values():
            if worker.alive:
                found += [(self.handle, (worker, at)) for at in range(len(worker.todo))]
                found += [(self.unpack, (worker, ref)) for ref in worker.temps]
                found += [(self.post_batch, (worker, to)) for to, box in worker.outboxes.items() if _has_news(box)]
                found += [(self.examine, (worker, rank)) for rank in worker.suspects]
                found += [(self.learn_death, (worker, rank)) for rank in dead if self.can_learn(worker, rank)]
        return found

    def happen(self, stale: bool = True) -> bool:
        """Let one of these happen. False if there is none.

        To find the races that need several long delays at once, it is not enough to choose at random: most
        choices go by priorities, which are random but stay the same for a while.
        """
        found = self.happenings(stale)
        if not found:
            return False
        self.tally["steps"] += 1
        if self.random.random() < self.style.chance:
            act, args = self.random.choice(found)
        else:
            act, args = max(found, key=self.priority)
            if self.random.random() < 0.05:
                self.priorities[self.lane((act, args))] = -self.random.random()
        act(*args)
        return True

    def priority(self, happening: Happening) -> float:
        lane = self.lane(happening)
        priority = self.priorities.get(lane)
        if priority is None:
            priority = self.priorities[lane] = self.random.random()
        return priority

    def lane(self, happening: Happening) -> Any:
        """A key: happenings with the same key share a priority."""
        act, (first, *_) = happening
        if isinstance(first, Queue):
            return (
                first.sender,
                first.receiver,
                first.is_mail,
                first.connection.number if first.connection.broken else 0,
            )
        return act.__name__, first.rank

    def settle(self, stale: bool) -> None:
        """Let everything happen that can, and check the final state."""
        limit = self.tally["steps"] + 20_000
        while self.happen(stale):
            if self.tally["steps"] > limit:
                raise self.failure("it never comes to rest")
        self.check_all()

    def connect(self, opener: Worker, to: int) -> Connection:
        connection = opener.outbound.get(to)
        if connection is None:
            connection = opener.outbound[to] = self.network.connect(opener.rank, to)
            if connection.broken:
                self.network.notice(connection, opener.rank)
        return connection

    def break_something(self) -> None:
        sound = list(self.network.sound)
        busy = [connection for connection in sound if any(queue.items for queue in connection.queues)]
        if sound:
            connection = self.random.choice(busy or sound)
            self.trace.add(connection, "breaks")
            self.tally["breaks"] += 1
            self.network.break_(connection)

    def is_stale(self, queue: Queue) -> bool:
        """Whether the queue belongs to a broken connection that both ends, alive, have given up."""
        connection = queue.connection
        return connection.noticed == set(connection.ends) and all(self.workers[end].alive for end in connection.ends)

    def notice_end(self, worker: Worker, connection: Connection) -> None:
        peer = connection.other(worker.rank)
        self.trace.add(worker.rank, "notices end of", connection)
        self.network.notice(connection, worker.rank)
        self.act(worker, worker.counting.connection_ended(connection))
        if connection.opener == worker.rank:
            if worker.outbound.get(peer) is connection:
                del worker.outbound[peer]
            self.give_up_creations(worker, lambda over: over is connection)
            self.post_again(worker, peer)
        self.connect(worker, peer)

    def give_up_creations(self, worker: Worker, which: Callable[[Connection], bool]) -> None:
        for ref in [ref for ref, over in worker.creating.items() if which(over)]:
            self.give_up_creation(worker, ref)

    def give_up_creation(self, worker: Worker, ref: RefId) -> None:
        self.trace.add(worker.rank, "gives up", ref)
        del worker.creating[ref]
        self.in_doubt.add(ref)
        self.act(worker, worker.counting.created(ref, lost=True))
        worker.claims.discard(ref)  # its uses raise from now on
        if worker.counting.knows(ref):
            worker.gone.add(ref)
        if worker.hands[ref] and self.random.random() < 0.5:
            self.drop(worker, ref)

    def deliver(self, queue: Queue) -> None:
        worker, sender = self.workers[queue.receiver], queue.sender
        message = self.network.take(queue)
        if isinstance(message, Batch):
            self.take_batch(worker, queue.connection, sender, message)
        elif isinstance(message, Answer):
            if sender in worker.outboxes:
                worker.outboxes[sender].answered(message.number)
        elif not isinstance(message, End):
            if self.random.random() < 0.5:
                self.receive(worker, message)
                message = message._replace(brings=())
                if isinstance(message, Call):
                    return
            worker.todo.append((queue.connection, sender, message))
            if self.random.random() < 0.7:
                self.handle(worker, len(worker.todo) - 1)

    def handle(self, worker: Worker, at: int) -> None:
        connection, sender, message = worker.todo.pop(at)
        self.trace.add(worker.rank, "handles from", sender, message)
        self.receive(worker, message)
        if isinstance(message, Created):
            if worker.creating.get(message.ref) is connection:
                del worker.creating[message.ref]
                self.act(worker, worker.counting.created(message.ref))
        elif isinstance(message, Create) and connection is not None:
            self.under_way.discard(message.ref)
            worker.values.add(message.ref)
            self.act(worker, worker.counting.own_for(message.ref, sender))
            refs = [ref for ref in worker.hands if self.random.random() < 0.1]
            self.reply(worker, connection, Created(message.ref, self.share(worker, refs, sender, connection)))

    def receive(self, worker: Worker, message: UserMessage) -> None:
        for brought in message.brings:
            ref = brought.ref
            self.trace.add(worker.rank, "receives", brought)
            worker.received.add(brought.share)
            worker.temps[ref] += 1
            listed = worker.counting.is_confirmed(ref) and ref not in worker.gone
            given_up = ref.creator == worker.rank and ref in self.in_doubt and ref in worker.gone
            if listed or (brought.claim and brought.share not in worker.recalled and not given_up):
                worker.claims.add(ref)
            self.act(worker, worker.counting.receive(ref, brought.share))
            if ref.owner == worker.rank and ref not in worker.gone:
                worker.claims.add(ref)

    def unpack(self, worker: Worker, ref: RefId) -> None:
        """Give the user some copies of the references from a message."""
        passing_on = self.random.random() < self.style.passing_on
        for _ in range(1 if passing_on else self.random.choice([0, 1, 1, 2])):
            self.hold(worker, ref)
        _take_one(worker.temps, ref)
        self.dropped(worker, ref)
        if passing_on:
            self.send(worker, [ref])
            self.drop(worker, ref)
            if not worker.counting.is_confirmed(ref) and self.random.random() < self.style.deaths_when_passing:
                self.kill(worker)

    def reply(self, worker: Worker, connection: Connection, message: Call | Created) -> None:
        if worker.rank in connection.noticed:
            self.cannot_write(worker, message)
        else:
            self.network.post(connection.calls[worker.rank], message)

    def cannot_write(self, worker: Worker, message: UserMessage) -> None:
        self.trace.add(worker.rank, "cannot write", message)
        for brought in message.brings:
            self.act(worker, worker.counting.unpin(brought.share))

    def post_batch(self, worker: Worker, to: int) -> None:
        self._post(worker, to, worker.outboxes[to].next_batch())

    def post_again(self, worker: Worker, to: int) -> None:
        if to in worker.outboxes:
            self._post(worker, to, worker.outboxes[to].again())

    def _post(self, worker: Worker, to: int, batch: tuple[int, Any] | None) -> None:
        if batch is not None:
            self.network.post(self.connect(worker, to).mail[worker.rank], Batch(*batch))

    def take_batch(self, worker: Worker, connection: Connection, sender: int, batch: Batch) -> None:
        if worker.inboxes.setdefault(sender, self.inbox()).accept(batch.number):
            for notice in batch.notices:
                self.trace.add(worker.rank, "is told by", sender, notice)
                if isinstance(notice, Recall):
                    lost = {
                        share for share in notice.shares if share in self.sent_over and self.sent_over[share].broken
                    }
                    worker.recalled |= lost - worker.received
                elif isinstance(notice, Sweep):
                    worker.suspects |= set(notice.dead) - worker.dead
                self.act(worker, worker.counting.handle(sender, notice))
        if worker.rank not in connection.noticed:
            self.network.post(connection.mail[worker.rank], Answer(batch.number))

    def kill(self, worker: Worker) -> None:
        if self.tally["deaths"] == self.style.deaths or len(self.living()) == 1:
            return
        self.trace.add(worker.rank, "dies")
        self.tally["deaths"] += 1
        worker.alive = False
        self.network.kill(worker.rank)
        for connection, _, message in worker.todo:
            if connection is not None:
                self.message_lost(connection, message)

    def can_learn(self, worker: Worker, dead: int) -> bool:
        """Whether there was a connection and everything that came over it has been handled."""
        connections = self.network.between(worker.rank, dead)
        return (
            bool(connections)
            and dead not in worker.dead
            and all(queue.ended for connection in connections for queue in connection.queues_from(dead))
            and not any(sender == dead and _matters(message) for _, sender, message in worker.todo)
        )

    def learn_death(self, worker: Worker, dead: int) -> None:
        self.trace.add(worker.rank, "learns death of", dead)
        worker.suspects.discard(dead)
        connections = self.network.between(worker.rank, dead)
        if self.random.random() < 0.5:
            for connection in connections:
                self.act(worker, worker.counting.connection_ended(connection))
            self.give_up_creations(worker, lambda over: over.acceptor == dead)
        for connection in connections:
            self.network.notice(connection, worker.rank)
        worker.outbound.pop(dead, None)
        worker.outboxes.pop(dead, None)
        worker.dead.add(dead)
        self.act(worker, worker.counting.died(dead))
        self.give_up_creations(worker, lambda over: over.acceptor == dead)

    def examine(self, worker: Worker, rank: int) -> None:
        """Try to reach a worker that another worker considers dead."""
        worker.suspects.discard(rank)
        if rank not in worker.dead:
            self.connect(worker, rank)

    def do_something(self) -> None:
        random = self.random
        worker = random.choice(self.living())
        refs = list(worker.hands)
        step = random.random()
        if step < 0.01:
            self.join()
        elif step < 0.04:
            self.post_again(worker, random.choice(list(self.workers)))
        elif step < 0.25 or not refs:
            if len(self.refs) < self.style.references or not any(other.hands for other in self.living()):
                self.create(worker, random.choice(list(self.workers)))
        elif step < 0.60:
            refs = random.sample(refs, min(len(refs), random.choice([1, 1, 2])))
            self.send(worker, refs)
            for ref in refs:
                if self.style.ring or random.random() < 0.3:
                    self.drop(worker, ref)
        elif step < 0.65:
            self.hold(worker, random.choice(refs))
        elif step < 0.90:
            self.drop(worker, random.choice(refs))
        else:
            self.use(worker, random.choice(refs))

    def join(self) -> None:
        if len(self.workers) == _MOST_WORKERS:
            return
        newcomer = Worker(len(self.workers), self.counting(len(self.workers)))
        self.trace.add(newcomer.rank, "joins")
        for other in self.workers.values():
            if other.alive:
                other.counting.joined(newcomer.rank)
            if other.alive or self.random.random() < 0.5:  # its death may not be known to all
                newcomer.counting.joined(other.rank)
        self.workers[newcomer.rank] = newcomer

    def create(self, worker: Worker, owner: int) -> None:
        if owner in worker.dead:
            return
        counting = worker.counting
        ref = counting.new_ref(owner)
        self.trace.add(worker.rank, "creates", ref)
        self.tally["references"] += 1
        self.refs.append(ref)
        worker.hands[ref] += 1
        worker.claims.add(ref)
        if owner == worker.rank:
            counting.own(ref)
            worker.values.add(ref)
            return
        counting.creating(ref)
        self.under_way.add(ref)
        connection = worker.creating[ref] = self.connect(worker, owner)
        args = [arg for arg in worker.hands if self.random.random() < 0.1]
        message = Create(ref, self.share(worker, args, owner, connection))
        if self.random.random() < 0.05:
            self.cannot_write(worker, message)
            self.message_lost(connection, message)
            self.give_up_creation(worker, ref)
        else:
            self.network.post(connection.calls[worker.rank], message)

    def send(self, worker: Worker, refs: list[RefId]) -> None:
        """A call, or the result of one, that brings references to another worker."""
        ranks = list(self.workers)
        if self.style.ring:
            strangers = [rank for rank in ranks if rank not in (worker.rank, refs[0].owner, *worker.dead)]
            ranks = strangers or ranks
        to = self.random.choice(ranks)
        if to == worker.rank:
            worker.todo.append((None, to, Call(self.share(worker, refs, to, None))))
            return
        if to in worker.dead:
            self.share(worker, refs, to, None)  # a possible result of a race between two threads
            return
        inbound = [connection for connection in self.network.between(worker.rank, to) if connection.opener == to]
        if inbound and self.random.random() < 0.4:
            connection = self.random.choice(inbound)
            self.reply(worker, connection, Call(self.share(worker, refs, to, connection)))
            return
        connection = self.connect(worker, to)
        message = Call(self.share(worker, refs, to, connection))
        if self.random.random() < 0.05:
            self.cannot_write(worker, message)
        else:
            self.network.post(connection.calls[worker.rank], message)

    def share(self, worker: Worker, refs: Iterable[RefId], to: int, over: Connection | None) -> tuple[Brought, ...]:
        brings = tuple(Brought(ref, worker.counting.share(ref, to, over), ref in worker.claims) for ref in refs)
        for brought in brings:
            if over is not None:
                self.sent_over[brought.share] = over
            self.trace.add(worker.rank, "shares with", to, brought, "over", over or "nothing")
        return brings

    def hold(self, worker: Worker, ref: RefId) -> None:
        if not worker.counting.hold(ref):
            raise self.failure(f"worker {worker.rank} has {ref}, and counting knows nothing of it", ref)
        worker.hands[ref] += 1

    def drop(self, worker: Worker, ref: RefId) -> None:
        self.trace.add(worker.rank, "drops", ref)
        _take_one(worker.hands, ref)
        self.dropped(worker, ref)

    def dropped(self, worker: Worker, ref: RefId) -> None:
        if not worker.has(ref):
            worker.claims.discard(ref)
        self.act(worker, worker.counting.drop(ref))
        if not worker.counting.knows(ref):
            worker.gone.discard(ref)

    def drop_all(self, ref: RefId) -> None:
        for worker in self.living():
            while worker.hands[ref]:
                self.drop(worker, ref)

    def end_group(self) -> None:
        """All workers give up their references; the finalizers run later."""
        for worker in self.living():
            for ref in list(worker.counting.used):
                worker.claims.discard(ref)
                self.act(worker, worker.counting.abandon(ref))


def _has_news(box: Outbox) -> bool:
    return bool(box._waiting and not box._under_way)


def _matters(message: UserMessage) -> bool:
    return bool(message.brings) or isinstance(message, Create)


def _take_one(copies: Counter[RefId], ref: RefId) -> None:
    copies[ref] -= 1
    if not copies[ref]:
        del copies[ref]


def run(seeds: Iterable[int], **parts: Any) -> Counter[str]:
    """Run programs. Returns how much happened in them."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed, **parts)
        simulation.run()
        tally += simulation.tally
    return tally


def main(arguments: list[str]) -> None:
    if len(arguments) == 1:
        simulation = Simulation(int(arguments[0]))
        try:
            simulation.run()
        finally:
            print(*simulation.trace.lines(), sep="\n")
    else:
        start = time.perf_counter()
        tally = run(range(*map(int, arguments)))
        seconds = time.perf_counter() - start
        print(", ".join(f"{count:,} {what}" for what, count in tally.items()), f"in {seconds:.0f} s: no promise broken")


if __name__ == "__main__":
    main(sys.argv[1:])
