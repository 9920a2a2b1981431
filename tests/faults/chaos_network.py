"""A group in a simulated world whose connections break, whose pairs lose sight of each other, and whose workers die.

A seed decides which message arrives next. Faults happen after given numbers of messages.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import torch.distributed as dist
from turns_world import here

from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport
from backhaul.transport.memory import MemoryChannel, MemoryTransport, Network
from backhaul.worker import Worker

_HASTE = 0.25
"""How many messages arrive while threads still work on earlier ones."""


class Messages(Network):
    """Like `testing.Scheduler`: messages of one channel keep their order, and a seed decides the rest.

    In a simulated world it is known when a message has had all its effects: all threads wait. So nothing must be
    counted or guessed. Some messages are delivered before that.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.log: list[str] = []
        """Names of the receiving channels, in the order of delivery."""
        self.before_delivery: list[Callable[[], None]] = []
        """Called before each delivery, on a separate thread."""
        self._random = Random(seed)
        self._queues: dict[MemoryChannel, deque[bytes]] = {}
        self._delayed: dict[MemoryChannel, int] = {}  # the number of other deliveries that come first
        self._closed: weakref.WeakSet[MemoryChannel] = weakref.WeakSet()
        self._posted = threading.Event()
        self._released = False
        self._thread = threading.Thread(target=self._deliver_all, name="messages", daemon=True)
        self._thread.start()

    def await_idle(self, seconds: float) -> bool:
        """Wait until no message is on its way and all threads wait. Returns False at the timeout."""
        deadline = here().now + seconds
        while here().now < deadline:
            here().linger()
            if not self._queues:
                return True
        return False

    def describe(self) -> str:
        """The messages on their way, as text."""
        return f"on the way: { {channel.name: len(queue) for channel, queue in self._queues.items()} }"

    def release(self) -> None:
        """From now on deliver at once, because the program is over and only has to end."""
        self._released = True
        self._posted.set()
        self._thread.join()

    def delay(self, channel: MemoryChannel, deliveries: int) -> None:
        """Let ``deliveries`` messages on other channels, if any, arrive before the next one on this channel."""
        self._delayed[channel] = deliveries

    def drop(self, channel: MemoryChannel) -> None:
        """Drop the messages on their way to this channel."""
        self._queues.pop(channel, None)

    def end(self, channel: MemoryChannel) -> None:
        """End the connection, at both ends."""
        for end in (channel, channel.peer):
            if end is not None:
                end.shutdown()

    def post(self, to: MemoryChannel, data: bytes) -> None:
        if to in self._closed:
            return  # no thread would read it
        if self._released:
            to.deliver(data)
            return
        self._queues.setdefault(to, deque()).append(data)
        self._posted.set()

    def closed(self, channel: MemoryChannel) -> None:
        self._queues.pop(channel, None)
        self._delayed.pop(channel, None)
        self._closed.add(channel)

    def _deliver_all(self) -> None:
        while not self._released:
            if not self._queues:
                self._posted.clear()
                self._posted.wait()
                continue
            if self._random.random() >= _HASTE:
                here().linger()
            for callback in self.before_delivery:
                callback()
            if self._queues and not self._released:
                self._deliver_one()
        for channel, queue in self._queues.items():
            for data in queue:
                channel.deliver(data)
        self._queues.clear()

    def _deliver_one(self) -> None:
        channels = sorted(self._queues, key=lambda channel: channel.name)
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
        self.log.append(channel.name)
        channel.deliver(data)


class _Transport(Transport):
    """A worker's place in the network, which asks `Group` whether it can reach the others."""

    def __init__(self, group: Group, rank: int, options: RpcOptions) -> None:
        self.inside = MemoryTransport(group.messages, options)
        self._group = group
        self._rank = rank

    def listen(self) -> Sequence[Listener]:
        return self.inside.listen()

    @property
    def addresses(self) -> Addresses:
        return self.inside.addresses

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        self._group.require_way(self, hello.to_id)
        channel, welcome = self.inside.connect(addresses, hello, deadline)
        assert isinstance(channel, MemoryChannel)
        self._group.connected(self._rank, hello.to_id, channel)
        return channel, welcome

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        return self.inside.is_listening(addresses, deadline)

    def is_over(self, addresses: Addresses) -> bool:
        return self.inside.is_over(addresses)

    def close(self) -> None:
        self.inside.close()

    def abandon(self) -> None:
        self.inside.abandon()


class Group:
    """The workers of a dynamic group. Some may be dead."""

    def __init__(self, size: int, seed: int, options: RpcOptions) -> None:
        self.messages = Messages(seed)
        self.workers: dict[int, Worker] = {}
        """The living workers."""
        self._options = options
        self._store = dist.HashStore()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._channels: list[tuple[int, int, MemoryChannel]] = []  # from, to, the end at the first
        self._parted: set[frozenset[int]] = set()
        self._transports: dict[int, _Transport] = {}
        self._dead: list[Worker] = []
        for rank in range(size):
            self.join(rank)

    def join(self, rank: int) -> None:
        """Let a worker join, or replace a dead one."""
        transport = _Transport(self, rank, self._options)
        with self._lock:
            self._transports[rank] = transport
        worker = Worker(f"worker{rank}", rank, None, store=self._store, options=self._options, transport=transport)
        self.workers[rank] = worker

    def kill(self, rank: int) -> None:
        """Kill a worker in the middle of its work. It sends no goodbye, and stays in the list of members."""
        worker = self.workers.pop(rank)
        with self._lock:
            transport = self._transports.pop(rank)
            taken = self._take(lambda pair: rank in pair)
        transport.inside.close()
        for _, _, channel in taken:
            self.messages.end(channel)
        self._dead.append(worker)
        worker.agent.close(0.0)
        worker.references.close()
        worker.autograd.close()
        worker.inspection.close()
        for source, _, channel in taken:
            own = channel if source == rank else channel.peer
            if own is not None:
                self.messages.closed(own)

    def cut(self, a: int, b: int, *, lose: bool) -> None:
        """End all connections between two workers. ``lose``: drop the messages on their way."""
        pair = frozenset((a, b))
        with self._lock:
            taken = self._take(lambda other: other == pair)
        for _, _, channel in taken:
            if lose:
                self.messages.drop(channel)
                if channel.peer is not None:
                    self.messages.drop(channel.peer)
            self.messages.end(channel)

    def part(self, a: int, b: int) -> None:
        """`cut`, and allow no new connections until `heal`. So both suspect each other, and neither is dead."""
        with self._lock:
            self._parted.add(frozenset((a, b)))
        self.cut(a, b, lose=True)

    def heal(self, a: int | None = None, b: int | None = None) -> None:
        """Allow connections again, between these two workers or all. Workers that suspect another check it at once."""
        with self._lock:
            healed = set(self._parted) if a is None or b is None else {frozenset((a, b))} & self._parted
            self._parted -= healed
        for pair in healed:
            for rank in pair:
                worker = self.workers.get(rank)
                (other,) = pair - {rank}
                peer = self.workers.get(other)
                if worker is not None and peer is not None:
                    worker.agent.fates.examine(peer.info)

    def delay(self, a: int, b: int, deliveries: int) -> None:
        with self._lock:
            found = [channel for *pair, channel in self._channels if set(pair) == {a, b}]
        for channel in found:
            self.messages.delay(channel, deliveries)

    def close(self) -> None:
        self.messages.release()
        self.heal()
        for worker in [*self.workers.values(), *self._dead]:
            if not worker.closed:
                worker.shutdown(graceful=False)

    # For transports.

    def require_way(self, transport: _Transport, to: int) -> None:
        with self._lock:
            ranks = [rank for rank, each in self._transports.items() if each is transport]
            if not ranks:
                raise ChannelClosed("this worker is dead")
            if frozenset((ranks[0], to)) in self._parted:
                raise ChannelClosed("there is no way")

    def connected(self, a: int, b: int, channel: MemoryChannel) -> None:
        with self._lock:
            self._channels.append((a, b, channel))
            gone = frozenset((a, b)) in self._parted or a not in self._transports
        if gone:
            channel.close()
            raise ChannelClosed("there is no way")

    def _take(self, which: Callable[[frozenset[int]], bool]) -> list[tuple[int, int, MemoryChannel]]:
        """The caller holds the lock."""
        taken = [entry for entry in self._channels if which(frozenset(entry[:2]))]
        self._channels = [entry for entry in self._channels if entry not in taken]
        return taken
