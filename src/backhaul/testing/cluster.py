"""InProcessCluster: several workers in this process, over the memory transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from backhaul.errors import OptionError
from backhaul.options import RpcOptions
from backhaul.testing.faults import Faults, FaultyTransport
from backhaul.testing.scheduler import Scheduler
from backhaul.transport.base import Transport
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.transport.stream import StreamTransport
from backhaul.worker import Worker


class InProcessCluster(Sequence[Worker]):
    """N workers named worker0, worker1, … that live in this process.

    - ``seed``: a `Scheduler` with this seed decides the order of messages; without it they arrive at once.
    - ``faults``: faults in the transport.
    - ``options``: for all workers, or a list with options for each.
    - ``sockets``: use unix sockets instead of the memory transport.

    Leaving the block shuts all workers down at once. Inside ``with worker.as_current():`` the functions
    of `backhaul.rpc` act for that worker. Remote functions run with their own worker as the current one.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int | None = None,
        faults: Faults | None = None,
        options: RpcOptions | Sequence[RpcOptions] | None = None,
        sockets: bool = False,
    ) -> None:
        if sockets and seed is not None:
            raise OptionError("a seed orders the messages of the memory transport; leave out sockets=True")
        self.network = Network() if seed is None else Scheduler(seed)
        self._faults = faults
        self._options = options
        self._sockets = sockets
        self._store = dist.HashStore()
        self._workers = self._join(size)

    def __getitem__(self, index: Any) -> Any:
        return self._workers[index]

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of a cluster with a seed."""
        if not isinstance(self.network, Scheduler):
            raise TypeError("this cluster has no scheduler; give it a seed")
        return self.network

    def __enter__(self) -> InProcessCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if isinstance(self.network, Scheduler):
            self.network.release()
        if self._faults is not None:
            self._faults.release()
        for worker in self._workers:
            if not worker.closed:
                worker.shutdown(graceful=False)

    def restart(self, rank: int) -> Worker:
        """End a worker at once, if it still runs, and make another one with its name and rank."""
        before = self._workers[rank]
        if not before.closed:
            before.shutdown(graceful=False)
        self._workers[rank] = self._make(rank, len(self._workers))
        return self._workers[rank]

    def _make(self, rank: int, size: int) -> Worker:
        worker = Worker(
            f"worker{rank}",
            rank,
            size,
            store=self._store,
            options=self._options_of(rank),
            transport=self._transport(rank),
        )
        if isinstance(self.network, Scheduler):
            self.network.attach(worker.agent)
        return worker

    def _options_of(self, rank: int) -> RpcOptions | None:
        return self._options[rank] if isinstance(self._options, Sequence) else self._options

    def _transport(self, rank: int = 0) -> Transport:
        options = self._options_of(rank) or RpcOptions()
        transport: Transport = StreamTransport(options) if self._sockets else MemoryTransport(self.network, options)
        return transport if self._faults is None else FaultyTransport(transport, self._faults)

    def _join(self, size: int) -> list[Worker]:
        """Make the workers concurrently: each constructor returns only when all have joined."""
        made: dict[int, Worker] = {}
        errors: list[BaseException] = []

        def make(rank: int) -> None:
            try:
                made[rank] = self._make(rank, size)
            except BaseException as error:  # raised below, on the caller's thread
                errors.append(error)

        threads = [
            threading.Thread(target=make, args=(rank,), name=f"backhaul-worker{rank}-join") for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            for worker in made.values():
                worker.shutdown(graceful=False)
            raise errors[0]
        return [made[rank] for rank in range(size)]
