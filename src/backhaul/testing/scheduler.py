"""Scheduler: a network that decides by a seed which message arrives next.

Messages of one channel keep their order, as on a socket; everything else may happen in any order. The
scheduler delivers one message, waits until its effects have died down, and picks the next at
random among the channels that have one. With the same seed and a program that sends the
same messages, the same order comes out: `log` lists it.

"Died down" means that every request that was delivered is over or waits for a call of its
own. A request that blocks in another way (a lock, an event) is waited for at most
`PATIENCE` seconds, since only another message may free it.

Threads of the test are not known to the scheduler. Put ``with scheduler.hold():`` around
sends that are all to be there before the first is delivered.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from backhaul.agent.agent import Agent
from backhaul.agent.serving import Inbound
from backhaul.transport.memory import MemoryChannel, Network
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame

PATIENCE = 0.1


class _ThreadState(threading.local):
    depth = 0  # requests of which this thread runs one, or waits inside
    unsettled: MemoryChannel | None = None


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
        self._running = 0  # requests that run and do not wait
        self._holds = 0
        self._free = False
        self._state = _ThreadState()
        self._thread = threading.Thread(target=self._deliver_all, name="backhaul-scheduler", daemon=True)
        self._thread.start()

    def attach(self, agent: Agent) -> None:
        """Count this agent's requests."""
        handle = agent.serving.handle
        state = self._state

        def counted(inbound: Inbound, envelope: Envelope) -> Frame | None:
            self._count(1)
            state.depth += 1
            try:
                return handle(inbound, envelope)
            finally:
                state.depth -= 1
                self._count(-1)

        agent.serving.handle = counted
        agent.serving.on_activity = self._count

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
        self._settle(channel)

    def taken(self, channel: MemoryChannel) -> None:
        if channel.name.count("->"):
            # A reply. If a request waits for it, the request's going on settles it.
            if self._state.depth:
                self._state.unsettled = channel
            else:
                self._settle(channel)

    def _settle(self, channel: MemoryChannel) -> None:
        with self._changed:
            self._unsettled.discard(channel)
            self._changed.notify_all()

    def _count(self, change: int) -> None:
        with self._changed:
            self._running += change
            channel, self._state.unsettled = self._state.unsettled, None
            if channel is not None:
                self._unsettled.discard(channel)
            self._changed.notify_all()

    def _quiet(self) -> bool:
        return not self._running and not self._unsettled

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
        self._unsettled.add(channel)
        self.log.append(channel.name)
        channel.deliver(data)
