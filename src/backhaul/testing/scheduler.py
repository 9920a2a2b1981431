"""Scheduler: a network that decides by a seed which message arrives next.

Messages of one channel keep their order, as on a socket; everything else may happen in any order. The
scheduler delivers one message, waits until its effects have died down, and picks the next at
random among the channels that have one. With the same seed and a program that sends the
same messages, the same order comes out: `log` lists it.

"Died down" means that every request that was delivered is over, its reply sent, or waits for a call of
its own, and that every reply has reached who waits for it, callbacks included. A request that
blocks in another way (a lock, an event) is waited for at most `PATIENCE` seconds, since only another
message may free it. Coroutines are not waited for.

Threads of the test are not known to the scheduler. Put ``with scheduler.hold():`` around
sends that are all to be there before the first is delivered.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.news import Bell
from backhaul.agent.outbound import Outbound
from backhaul.agent.pending import Slot
from backhaul.agent.serving import Inbound
from backhaul.transport.base import Channel
from backhaul.transport.memory import END, MemoryChannel, Network
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame

PATIENCE = 0.1


class _ThreadState(threading.local):
    counted = False  # this thread runs a request or a completion
    owed = 0  # requests that it has run and that count until their replies are sent


class Scheduler(Network):
    """See the module's docstring. Use it through `InProcessCluster(n, seed=...)`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.log: list[str] = []
        """Names of the receiving channels, in the order of delivery."""
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        # All guarded by _changed:
        self._queues: dict[MemoryChannel, deque[bytes]] = {}
        self._unsettled: set[MemoryChannel] = set()  # delivered to, and not yet dealt with
        self._in_hand: Counter[MemoryChannel] = Counter()  # replies that were read and not yet handed out
        self._just_taken: Counter[MemoryChannel] = Counter()  # of those, by the read that is going on
        self._awaited: list[Slot] = []  # what requests wait for
        self._running = 0  # requests and completions that run and do not wait
        self._holds = 0
        self._free = False
        self._state = _ThreadState()
        self._thread = threading.Thread(target=self._deliver_all, name="backhaul-scheduler", daemon=True)
        self._thread.start()

    def attach(self, agent: Agent) -> None:
        """Count what this agent does. Before anybody connects to it."""
        agent.serving.handle = self._counting_requests(agent.serving.handle)
        agent.serving.on_pause = self._paused
        agent.completions.add = self._counting_jobs(agent.completions.add)  # type: ignore[method-assign, assignment]
        add_inbound, add_outbound = agent.serving.add, agent.watch.add

        def inbound_added(inbound: Inbound) -> None:
            inbound.reply = self._paying(inbound.reply)  # type: ignore[method-assign, assignment]
            add_inbound(inbound)

        def outbound_added(outbound: Outbound) -> None:
            self._follow(outbound)
            add_outbound(outbound)

        agent.serving.add = inbound_added  # type: ignore[method-assign]
        agent.watch.add = outbound_added  # type: ignore[method-assign]

    def _counting_requests(
        self, handle: Callable[[Inbound, Envelope], Frame | None]
    ) -> Callable[[Inbound, Envelope], Frame | None]:
        state = self._state

        def counted(inbound: Inbound, envelope: Envelope) -> Frame | None:
            frame: Frame | None = None
            self._count(1)
            state.counted = True
            try:
                frame = handle(inbound, envelope)
            finally:
                state.counted = False
                if frame is None:
                    self._count(-1)
                else:
                    state.owed += 1
            return frame

        return counted

    def _counting_jobs(self, add: Callable[[Callable[[], None]], None]) -> Callable[[Callable[[], None]], None]:
        state = self._state

        def added(job: Callable[[], None]) -> None:
            def counted() -> None:
                state.counted = True
                try:
                    job()
                finally:
                    state.counted = False
                    self._count(-1)

            self._count(1)
            add(counted)

        return added

    def _paying(self, reply: Callable[[Frame], None]) -> Callable[[Frame], None]:
        def replied(frame: Frame) -> None:
            try:
                reply(frame)
            finally:
                self._pay()

        return replied

    def _follow(self, outbound: Outbound) -> None:
        """Know which replies are on their way to whom."""
        wait, receive, settle_all, lose = outbound.wait, outbound._receive, outbound._settle_all, outbound.lose
        channel = _memory_channel(outbound._channel)
        state = self._state

        def waited(slot: Slot) -> None:
            if not state.counted:
                wait(slot)
                return
            self._pay()  # whoever takes the lead sends those replies, and reads only then
            with self._changed:
                self._awaited.append(slot)
                self._running -= 1
                self._changed.notify_all()
            try:
                wait(slot)
            finally:
                with self._changed:
                    self._awaited.remove(slot)
                    self._running += 1

        def received(timeout: float | None, bell: Bell | None = None) -> list[Slot]:
            finished = receive(timeout, bell)
            with self._changed:
                # Those that came too late for their call need nothing more.
                self._in_hand[channel] += len(finished) - self._just_taken.pop(channel, 0)
                self._changed.notify_all()
            return finished

        def settled(finished: list[Slot], **how: Any) -> None:
            replies = sum(slot.envelope is not None for slot in finished)
            try:
                settle_all(finished, **how)
            finally:
                with self._changed:
                    self._in_hand[channel] -= replies
                    self._changed.notify_all()

        def lost(reason: Exception) -> None:
            self._count(1)
            try:
                lose(reason)
            finally:
                self._count(-1)

        outbound.wait = waited  # type: ignore[method-assign]
        outbound._receive = received  # type: ignore[method-assign]
        outbound._settle_all = settled  # type: ignore[method-assign]
        outbound.lose = lost  # type: ignore[method-assign]

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
                self._changed.notify_all()

    def release(self) -> None:
        """From now on deliver at once: the test is over, and all that counts is to end it."""
        with self._changed:
            self._free = True
            self._changed.notify_all()
        self._thread.join()

    def post(self, to: MemoryChannel, data: bytes) -> None:
        with self._changed:
            if not self._free:
                self._queues.setdefault(to, deque()).append(data)
                self._changed.notify_all()
                return
        to.deliver(data)

    def reading(self, channel: MemoryChannel) -> None:
        self._settle(channel)

    def closed(self, channel: MemoryChannel) -> None:
        with self._changed:
            self._queues.pop(channel, None)
            self._in_hand.pop(channel, None)
        self._settle(channel)

    def taken(self, channel: MemoryChannel, count: int) -> None:
        if _has_replies(channel):
            with self._changed:
                self._in_hand[channel] += count
                self._just_taken[channel] += count
            self._settle(channel)

    def _settle(self, channel: MemoryChannel) -> None:
        with self._changed:
            self._unsettled.discard(channel)
            self._changed.notify_all()

    def _count(self, change: int) -> None:
        with self._changed:
            self._running += change
            self._changed.notify_all()

    def _pay(self) -> None:
        owed, self._state.owed = self._state.owed, 0
        if owed:
            self._count(-owed)

    def _paused(self, change: int) -> None:
        if self._state.counted:
            self._pay()
            self._count(change)

    def _quiet(self) -> bool:
        return (
            not self._running
            and not self._unsettled
            and not any(self._in_hand.values())
            and not any(slot.done for slot in self._awaited)
        )

    def _deliver_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._free or (self._queues and not self._holds))
                if not self._free:
                    deadline = time.monotonic() + PATIENCE
                    while not (self._free or self._quiet() or time.monotonic() >= deadline):
                        self._changed.wait(deadline - time.monotonic())
                    if self._holds and not self._free:
                        continue
                if self._free:
                    for channel, queue in self._queues.items():
                        for data in queue:
                            channel.deliver(data)
                    self._queues.clear()
                    return
                self._deliver_one()

    def _deliver_one(self) -> None:
        """Holds _changed. Channels are drawn by name: their order must not depend on memory addresses."""
        channels = sorted(self._queues, key=lambda channel: channel.name)
        if not channels:
            return
        channel = self._random.choice(channels)
        queue = self._queues[channel]
        data = queue.popleft()
        if not queue:
            del self._queues[channel]
        # Nobody may be there to read the end of a connection that nobody waits on.
        if data != END or not _has_replies(channel):
            self._unsettled.add(channel)
        self.log.append(channel.name)
        channel.deliver(data)


def _has_replies(channel: MemoryChannel) -> bool:
    """Whether it is the end that requests leave from."""
    return "->" in channel.name


def _memory_channel(channel: Channel) -> MemoryChannel:
    """The channel itself, without what a `FaultyTransport` put around it."""
    while not isinstance(channel, MemoryChannel):
        channel = channel._inside  # type: ignore[attr-defined]
    return channel
