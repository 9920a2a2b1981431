"""A group in one process whose connections break, whose pairs lose sight of each other, and whose workers die.

What happens is tied to the number of messages that were delivered, not to the clock, and the scheduler decides the
order of messages: so a seed makes the same things happen in the same places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome
from backhaul.testing.scheduler import Scheduler
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport
from backhaul.transport.memory import MemoryChannel, MemoryTransport
from backhaul.worker import Worker


class _Transport(Transport):
    """A worker's place in the network, which asks `Group` whether it can reach the others."""

    def __init__(self, group: Group, rank: int, options: RpcOptions) -> None:
        self.inside = MemoryTransport(group.scheduler, options)
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
    """Workers of a dynamic group. Some are dead."""

    def __init__(self, size: int, seed: int, options: RpcOptions) -> None:
        self.scheduler = Scheduler(seed)
        self.workers: dict[int, Worker] = {}
        """The living."""
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
        """A worker comes, or takes the place of one that is dead."""
        transport = _Transport(self, rank, self._options)
        with self._lock:
            self._transports[rank] = transport
        worker = Worker(f"worker{rank}", rank, None, store=self._store, options=self._options, transport=transport)
        self.scheduler.attach(worker.agent)
        self.workers[rank] = worker

    def kill(self, rank: int) -> None:
        """The worker is gone in the middle of what it does: it says no goodbye, and stays on the list of members."""
        worker = self.workers.pop(rank)
        with self._lock:
            transport = self._transports.pop(rank)
            taken = self._take(lambda pair: rank in pair)
        transport.inside.close()
        for _, _, channel in taken:
            self.scheduler.end(channel)
        self._dead.append(worker)
        self.scheduler.detach(worker.agent)
        worker.agent.close(0.0)
        worker.references.close()
        worker.autograd.close()
        worker.inspection.close()
        for source, _, channel in taken:
            own = channel if source == rank else channel.peer
            if own is not None:
                self.scheduler.closed(own)

    def cut(self, a: int, b: int, *, lose: bool) -> None:
        """End all connections between two workers; ``lose``: with what is on its way."""
        pair = frozenset((a, b))
        with self._lock:
            taken = self._take(lambda other: other == pair)
        for _, _, channel in taken:
            if lose:
                self.scheduler.drop(channel)
                if channel.peer is not None:
                    self.scheduler.drop(channel.peer)
            self.scheduler.end(channel)

    def part(self, a: int, b: int) -> None:
        """The same; and no connection can be made until `heal`. So both suspect each other, and neither is dead."""
        with self._lock:
            self._parted.add(frozenset((a, b)))
        self.cut(a, b, lose=True)

    def heal(self, a: int | None = None, b: int | None = None) -> None:
        """Let connections be made again, between these two or all; those who suspect another look again at once."""
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
            self.scheduler.delay(channel, deliveries)

    def close(self) -> None:
        self.scheduler.release()
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
        """Holds the lock."""
        taken = [entry for entry in self._channels if which(frozenset(entry[:2]))]
        self._channels = [entry for entry in self._channels if entry not in taken]
        return taken
