"""The state of a `simulation`, and the checks of what counting promises.

A *claim* on a value belongs to a worker that has a reference to it, or to a message that brings a reference to a living
worker. A claim is void only if the message was on a broken connection and was recalled before it arrived. A reference
from such a message, and each copy of it, becomes a claim when the owner confirms it.

At every step: no value with a claim is freed. A worker with a claim is told that the value is gone only if the owner is
dead, or if the message that should have created the value is lost.

When nothing can happen any more: each value with claims exists, and its owner lists exactly the workers that have one.
No other entries, pins, notices or sweeps are left. Messages in a broken connection may arrive before or after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

from simulated_network import Connection, Create, Message, Network, UserMessage
from simulated_trace import Trace, show

from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Action, Free, Send, Void
from backhaul.refs.counting import Counting
from backhaul.refs.mailbox import Inbox, Outbox


class SimulationError(AssertionError):
    """A check of counting has failed. The text says which, and how to replay the program."""


class Worker:
    """One worker, as its driver and its user see it."""

    def __init__(self, rank: int, counting: Counting) -> None:
        self.rank = rank
        self.counting = counting
        self.alive = True
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.outbound: dict[int, Connection] = {}
        self.todo: list[tuple[Connection | None, int, UserMessage]] = []  # messages that were read, with their senders
        self.creating: dict[RefId, Connection] = {}  # not answered yet
        self.dead: set[int] = set()  # ranks that this worker knows to be dead
        self.suspects: set[int] = set()  # ranks that a sweep has asked about
        self.values: set[RefId] = set()
        self.hands: Counter[RefId] = Counter()
        self.temps: Counter[RefId] = Counter()
        # For the judge:
        self.claims: set[RefId] = set()
        self.gone: set[RefId] = set()  # entries without a value
        self.received: set[ShareId] = set()
        self.recalled: set[ShareId] = set()  # before they were received

    def has(self, ref: RefId) -> bool:
        return bool(self.hands[ref] or self.temps[ref])


class World:
    """Workers, the network between them, and what is known of each creation."""

    def __init__(self, seed: int, outbox: type[Outbox]) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.outbox = outbox
        self.trace = Trace()
        self.network = Network(self.random, self.message_lost)
        self.workers: dict[int, Worker] = {}
        # Creations:
        self.under_way: set[RefId] = set()
        self.lost: set[RefId] = set()  # those that never arrive
        self.in_doubt: set[RefId] = set()  # those that the creator has given up

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def message_lost(self, connection: Connection, message: Message) -> None:
        self.trace.add(connection, "loses", message)
        if isinstance(message, Create):
            self.under_way.discard(message.ref)
            self.lost.add(message.ref)

    def use(self, worker: Worker, ref: RefId) -> None:
        """Check what `to_here` would find."""
        owner = self.workers[ref.owner]
        is_there = ref in owner.values or ref in self.under_way or ref in self.lost
        if ref in worker.claims and owner.alive and not is_there:
            raise self.failure(f"worker {worker.rank} uses {ref}, which is not there", ref)

    def act(self, worker: Worker, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.to == worker.rank or action.to in worker.dead:
                    raise self.failure(f"worker {worker.rank} is to tell {action.to} {show(action.notice)}")
                worker.outboxes.setdefault(action.to, self.outbox()).add(action.notice)
                continue
            self.trace.add(worker.rank, "has to", action)
            if isinstance(action, Free):
                self.check_free(action.ref)
                worker.values.discard(action.ref)
            elif isinstance(action, Void):
                self.check_void(worker, action.ref)
            elif not action.exists:
                self.check_gone(worker, action.ref)
            elif worker.has(action.ref):
                worker.claims.add(action.ref)

    def check_free(self, ref: RefId) -> None:
        if ref in self.lost:
            return  # there never was a value
        for worker in self.living():
            if ref in worker.claims:
                raise self.failure(f"{ref} is freed, but worker {worker.rank} has it", ref)
            self.check_messages(worker, ref, [message for _, _, message in worker.todo])
        for queue in self.network.filled:
            self.check_messages(self.workers[queue.receiver], ref, queue.items)

    def check_messages(self, receiver: Worker, ref: RefId, messages: Iterable[Message]) -> None:
        for message in messages:
            for brought in message.brings if isinstance(message, UserMessage) else ():
                if brought.ref == ref and brought.claim and brought.share not in receiver.recalled:
                    raise self.failure(f"{ref} is freed, but is on its way to worker {receiver.rank}", ref)

    def check_void(self, worker: Worker, ref: RefId) -> None:
        """Check that a worker gives up only a value that will not come."""
        if ref in self.under_way and ref not in self.in_doubt and self.workers[ref.creator].alive:
            raise self.failure(f"worker {worker.rank} gives up {ref}, which is being created", ref)
        if worker.counting.expects(ref):
            return  # it is an entry that others registered for
        if ref in worker.claims and ref not in self.lost:
            raise self.failure(f"worker {worker.rank} receives {ref}, which is gone", ref)
        worker.claims.discard(ref)
        worker.gone.add(ref)

    def check_gone(self, worker: Worker, ref: RefId) -> None:
        never_made = ref in self.lost and not self.workers[ref.creator].alive
        if ref in worker.claims and ref.owner not in worker.dead and not never_made:
            raise self.failure(f"worker {worker.rank} has {ref} and is told that it is gone", ref)
        worker.claims.discard(ref)
        if worker.counting.knows(ref):
            worker.gone.add(ref)

    def check_all(self) -> None:
        """Check the end, when nothing can happen any more: values with claims exist, and nothing else is left."""
        living = self.living()
        # The owner may have heard of a creation that did not arrive from other workers, or not at all.
        missing = self.lost | self.under_way
        for worker in living:
            rank, counting = worker.rank, worker.counting
            for ref in worker.hands:
                self.use(worker, ref)
                if not counting.is_confirmed(ref) and not (ref.owner == rank and ref in worker.gone):
                    raise self.failure(f"worker {rank} has {ref}, which was never confirmed", ref)
            self.compare(f"used by {rank}", set(counting.used), {ref for ref in worker.hands if ref.owner != rank})
            self.compare(f"pins of {rank}", {pin.ref for pin in counting._pins.values()}, set())
            self.compare(
                f"peers that {rank} has news for", {to for to, box in worker.outboxes.items() if len(box)}, set()
            )
            if counting.sweeping or counting._sweeps._questions:
                raise self.failure(f"worker {rank} still sweeps, or is asked")
            held: dict[RefId, set[int]] = {ref: set() for ref in worker.hands if ref.owner == rank}
            for user in living:
                for ref in user.claims:
                    if ref.owner == rank and user is not worker:
                        held.setdefault(ref, set()).add(user.rank)
            owned = set(counting.owned)
            self.compare(f"owned without a claim by {rank}", owned - set(held), set())
            self.compare(f"missing at {rank}", set(held) - owned - missing, set())
            self.compare(f"values without an entry at {rank}", worker.values - owned, set())
            for ref in owned:
                known = {ref.creator} if ref in missing else set()
                self.compare(f"listed for {ref}", counting.holders(ref) - known, held[ref] - known, ref)

    def compare(self, what: str, found: set[Any], expected: set[Any], *about: RefId) -> None:
        if found != expected:
            refs = [ref for ref in found ^ expected if isinstance(ref, RefId)]
            raise self.failure(f"{what}: {show(found)}, not {show(expected)}", *about, *refs)

    def check_empty(self) -> None:
        """Check that owners do not remember creations one by one."""
        for worker in self.living():
            for creator, numbers in worker.counting._created.items():
                if len(numbers) > 1 and creator not in worker.dead:
                    raise self.failure(f"worker {worker.rank} waits for a creation by {creator}")

    def failure(self, what: str, *about: RefId) -> SimulationError:
        lines = "\n    ".join([what, *self.trace.lines(*about)])
        return SimulationError(f"{lines}\nreplay: python tests/refs/simulation.py {self.seed}")
