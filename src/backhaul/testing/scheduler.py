"""Scheduler: a network that uses a seed to decide which message arrives next.

Messages of one channel keep their order, as on a socket; everything else may happen in any order. The
scheduler delivers one message, waits until its effects have settled, and picks the next at
random among the channels that have one. With the same seed, a program that sends the
same messages gets the same order: `log` lists it.

"Settled" means that every delivered request has finished and its reply is sent, or it waits for a call of
its own; and that every reply has reached its waiting thread, callbacks included. Messages that arrive among
replies while no thread reads there stay unread. If a request
blocks in another way (a lock, an event), the scheduler waits at most `PATIENCE` seconds, since only another
message may free it; `guesses` counts how often that was necessary. The scheduler does not wait for coroutines.

The machine schedules the threads of a worker. So the order of messages is reproducible only if no
two threads send to one worker at the same moment, and no call is held back until a tick to leave with others.

The scheduler does not know threads of the test. Put ``with scheduler.hold():`` around
sends that must all be queued before the first is delivered. Or register a thread, with
``with scheduler.follow(agent):``, so that messages are delivered only while it waits for a reply.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.observing import (
    Began,
    Came,
    Drained,
    Ended,
    Event,
    HandedOut,
    LinkLost,
    Losing,
    Queued,
    Resumes,
    Sent,
    Starts,
    Stops,
    Waits,
)
from backhaul.agent.pending import Slot
from backhaul.transport.memory import END, MemoryChannel, Network

PATIENCE = 0.1
_LOOK = 0.005


class _Account:
    """One worker's unfinished activity."""

    def __init__(self) -> None:
        self.running = 0  # running requests and completions that do not wait
        self.awaited: list[Slot] = []  # what requests wait for

    def is_quiet(self) -> bool:
        return not self.running and not any(slot.done for slot in self.awaited)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.account = _Account()  # of this thread's worker
        self.running = 0  # requests and completions that this thread is in, since it began to wait
        self.waiting: list[int] = []  # the same for each of its waits: a waiting thread may run incoming messages
        self.owed = 0  # requests it has run, which count until their replies are sent


class Scheduler(Network):
    """See the module's docstring. Use it through `InProcessCluster(n, seed=...)`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.log: list[str] = []
        """Names of the receiving channels, in the order of delivery."""
        self.guesses = 0
        """How many messages were delivered although the effects of earlier ones may not have settled: the
        order may differ next time."""
        self.before_delivery: list[Callable[[], None]] = []
        """Called before each delivery, on the scheduler's thread, when the effects of the last one have settled."""
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        # All guarded by _changed:
        self._queues: dict[MemoryChannel, deque[bytes]] = {}
        self._unhandled: set[MemoryChannel] = set()  # channels with a delivered but unhandled message
        # By descriptor of the channel:
        self._in_hand: Counter[int] = Counter()  # messages read among replies but not yet handed out
        self._just_taken: Counter[int] = Counter()  # of those, by the current read
        self._delayed: dict[MemoryChannel, int] = {}  # for how many deliveries to others
        self._closed: weakref.WeakSet[MemoryChannel] = weakref.WeakSet()
        self._accounts: dict[Agent, _Account] = {}
        self._holds = 0
        self._free = False
        self._waits_since = 0.0  # when the oldest undelivered message was sent
        self._idlers = 0  # threads in `await_idle`
        self._state = _ThreadState()
        self._thread = threading.Thread(target=self._deliver_all, name="backhaul-scheduler", daemon=True)
        self._thread.start()

    def attach(self, agent: Agent) -> None:
        """Count this agent's activity. Call before anyone connects to it."""
        account = self._accounts[agent] = _Account()

        def observe(event: Event) -> None:
            act = _ACTS.get(type(event))
            if act is not None:
                self._state.account = account
                act(self, event)

        agent.observers.add(observe)

    def detach(self, agent: Agent) -> None:
        """Stop waiting for this agent's activity: the agent is dead, and its activity ends without events."""
        with self._changed:
            self._accounts.pop(agent, None)
            self._notice()

    def _began(self, _: Event) -> None:
        self._state.running += 1
        self._count(1)

    def _ended(self, event: Ended) -> None:
        self._state.running -= 1
        if event.replies:
            self._state.owed += 1
        else:
            self._count(-1)

    def _queued(self, _: Event) -> None:
        self._count(1)

    def _starts(self, _: Event) -> None:
        self._state.running += 1

    def _stops(self, _: Event) -> None:
        self._state.running -= 1
        self._count(-1)

    def _sent(self, event: Sent) -> None:
        if event.replies:
            self._pay()

    def _waits(self, event: Waits) -> None:
        running, self._state.running = self._state.running, 0
        self._state.waiting.append(running)
        if running:
            self._pay()  # the new leader thread sends those replies before it reads
            with self._changed:
                if event.slot is not None:
                    self._state.account.awaited.append(event.slot)
                self._state.account.running -= running
                self._notice()

    def _resumes(self, event: Resumes) -> None:
        running = self._state.running = self._state.waiting.pop()
        if running:
            with self._changed:
                if event.slot is not None:
                    self._state.account.awaited.remove(event.slot)
                self._state.account.running += running

    def _came(self, event: Came) -> None:
        with self._changed:
            # Replies that came too late for their call need no further handling.
            self._in_hand[event.line] += event.count - self._just_taken.pop(event.line, 0)
            self._notice()

    def _handed_out(self, event: HandedOut) -> None:
        with self._changed:
            self._in_hand[event.line] -= event.count
            self._notice()

    def _losing(self, _: Event) -> None:
        self._count(1)

    def _lost(self, event: LinkLost) -> None:
        if not event.served:
            self._count(-1)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Deliver nothing inside this block."""
        with self._changed:
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._notice()

    @contextmanager
    def follow(self, agent: Agent) -> Iterator[None]:
        """Count the calling thread as a request of this agent: deliveries happen only while it waits for a reply."""
        self._state.account = self._accounts[agent]
        self._state.running += 1
        self._count(1)
        try:
            yield
        finally:
            self._state.running -= 1
            self._count(-1)

    def idle(self) -> bool:
        """Whether nothing is in flight, and the effects of all deliveries have settled.

        Messages that arrived among replies, and that no thread waits for any more, may stay unread.
        """
        with self._changed:
            return self._is_idle()

    def await_idle(self, seconds: float) -> bool:
        """Wait until the network is `idle`. Returns False at the timeout."""
        with self._changed:
            self._idlers += 1
            try:
                return self._changed.wait_for(self._is_idle, seconds)
            finally:
                self._idlers -= 1

    def _is_idle(self) -> bool:
        unread = any(not _has_replies(channel) for channel in self._unhandled)
        return not (self._queues or unread) and all(account.is_quiet() for account in self._accounts.values())

    def describe(self) -> str:
        """What keeps the network from being idle, for people."""
        with self._changed:
            waiting = {channel.name: len(queue) for channel, queue in self._queues.items()}
            unread = [channel.name for channel in self._unhandled]
            busy = {
                agent.me.name: account.running for agent, account in self._accounts.items() if not account.is_quiet()
            }
        return f"on the way: {waiting}; not read: {unread}; running: {busy}"

    def release(self) -> None:
        """From now on deliver at once: the test is over and only needs to end."""
        with self._changed:
            self._free = True
            self._notice()
        self._thread.join()

    def delay(self, channel: MemoryChannel, deliveries: int) -> None:
        """Deliver this many messages on other channels, if there are as many, before the next one on this channel."""
        with self._changed:
            self._delayed[channel] = deliveries

    def drop(self, channel: MemoryChannel) -> None:
        """Lose the messages in flight to this channel."""
        with self._changed:
            self._queues.pop(channel, None)
            self._notice()

    def end(self, channel: MemoryChannel) -> None:
        """End the connection, at both ends. Its effects settle before the next message is delivered."""
        ends = [end for end in (channel, channel.peer) if end is not None]
        with self._changed:
            # If no thread waits on a connection, none notices its end.
            self._unhandled.update(end for end in ends if end not in self._closed and not _has_replies(end))
        for end in ends:
            end.shutdown()

    def post(self, to: MemoryChannel, data: bytes) -> None:
        with self._changed:
            if to in self._closed:
                return  # no thread would read it
            if not self._free:
                if not self._queues:
                    self._waits_since = time.monotonic()
                self._queues.setdefault(to, deque()).append(data)
                self._notice()
                return
        to.deliver(data)

    def _drained(self, event: Drained) -> None:
        with self._changed:
            # Messages that arrived after the thread handled the previous one are still unread.
            for channel in [each for each in self._unhandled if each.fileno() == event.line and not each.unread]:
                self._unhandled.discard(channel)
                self._notice()

    def closed(self, channel: MemoryChannel) -> None:
        with self._changed:
            self._queues.pop(channel, None)
            self._delayed.pop(channel, None)
            self._closed.add(channel)
            self._in_hand.pop(channel.fileno(), None)
        self._handled(channel)

    def taken(self, channel: MemoryChannel, count: int) -> None:
        if _has_replies(channel):
            with self._changed:
                self._in_hand[channel.fileno()] += count
                self._just_taken[channel.fileno()] += count
            self._handled(channel)

    def _handled(self, channel: MemoryChannel) -> None:
        with self._changed:
            self._unhandled.discard(channel)
            self._notice()

    def _count(self, change: int) -> None:
        with self._changed:
            self._state.account.running += change
            self._notice()

    def _pay(self) -> None:
        owed, self._state.owed = self._state.owed, 0
        if owed:
            self._count(-owed)

    def _quiet(self) -> bool:
        return (
            not any(self._in_hand.values())
            and all(account.is_quiet() for account in self._accounts.values())
            and not (self._unhandled and any(map(self._will_be_read, self._unhandled)))
        )

    def _will_be_read(self, channel: MemoryChannel) -> bool:
        """Whether some thread reads the delivered message. Call only when no request runs, so that none is about to."""
        if not _has_replies(channel):
            return True
        for agent in self._accounts:
            for line in agent.calling():
                if line.descriptor == channel.fileno():
                    return line.being_read() or line.futures > 0 or agent.watch.will_read(line)
        return False

    def _can_deliver(self) -> bool:
        """Holds _changed."""
        return self._free or bool(self._queues and not self._holds and self._quiet())

    def _notice(self) -> None:
        """Wake the threads for which the change makes a difference. Call with _changed held.

        Most changes make no difference, and waking a thread costs more than the rest of a delivery.
        """
        if self._can_deliver() or (self._idlers and self._is_idle()):
            self._changed.notify_all()

    def _await_delivery(self) -> None:
        """Wait until something can be delivered, or has waited for `PATIENCE`. Call with _changed held.

        No event announces that a thread stops reading, so this polls now and then.
        """
        while not self._can_deliver():
            self._changed.wait(_LOOK if self._queues and not self._holds else PATIENCE)
            if self._queues and not self._holds and time.monotonic() >= self._waits_since + PATIENCE:
                self.guesses += not self._can_deliver()
                return

    def _deliver_all(self) -> None:
        while True:
            with self._changed:
                self._await_delivery()
                if self._free:
                    for channel, queue in self._queues.items():
                        for data in queue:
                            channel.deliver(data)
                    self._queues.clear()
                    return
                if not self.before_delivery:
                    if not self._holds:
                        self._deliver_one()
                    continue
            for callback in self.before_delivery:
                callback()
            with self._changed:
                if not self._free:
                    self._await_delivery()
                if not (self._holds or self._free):
                    self._deliver_one()

    def _deliver_one(self) -> None:
        """Call with _changed held. Channels are drawn by name: their order must not depend on memory addresses."""
        channels = sorted(self._queues, key=lambda channel: channel.name)
        if not channels:
            return
        channels = [channel for channel in channels if not self._delayed.get(channel)] or channels
        for delayed in list(self._delayed):
            self._delayed[delayed] -= 1
            if self._delayed[delayed] <= 0:
                del self._delayed[delayed]
        channel = self._random.choice(channels)
        queue = self._queues[channel]
        data = queue.popleft()
        if not queue:
            del self._queues[channel]
        self._waits_since = time.monotonic()
        # If no thread waits on a connection, none reads its end.
        if data != END or not _has_replies(channel):
            self._unhandled.add(channel)
        self.log.append(channel.name)
        channel.deliver(data)
        self._notice()  # it may be the last message, with no thread to read it


def _has_replies(channel: MemoryChannel) -> bool:
    """Whether requests leave from this end of the connection."""
    return "->" in channel.name


_ACTS: dict[type[Event], Callable[[Scheduler, Any], None]] = {
    Began: Scheduler._began,
    Ended: Scheduler._ended,
    Sent: Scheduler._sent,
    Queued: Scheduler._queued,
    Starts: Scheduler._starts,
    Stops: Scheduler._stops,
    Waits: Scheduler._waits,
    Resumes: Scheduler._resumes,
    Came: Scheduler._came,
    Drained: Scheduler._drained,
    HandedOut: Scheduler._handed_out,
    Losing: Scheduler._losing,
    LinkLost: Scheduler._lost,
}
