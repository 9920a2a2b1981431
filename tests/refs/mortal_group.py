"""A group in one process whose workers can be killed and replaced, and may live on several machines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome
from backhaul.testing.faults import Faults, FaultyTransport
from backhaul.transport.base import Addresses, Channel, Listener, Transport
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.worker import Worker

PATIENCE = 30.0


class _Sited(Transport):
    """A transport on a machine. Its kernel knows which processes of that machine have ended, and nothing about other
    machines."""

    def __init__(self, inside: MemoryTransport, machine: str) -> None:
        self._inside = inside
        self._machine = machine

    def listen(self) -> Sequence[Listener]:
        return self._inside.listen()

    @property
    def addresses(self) -> Addresses:
        return msgspec.structs.replace(self._inside.addresses, host=self._machine)

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        return self._inside.connect(addresses, hello, deadline)

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        return self._inside.is_listening(addresses, deadline)

    def is_over(self, addresses: Addresses) -> bool:
        return addresses.host == self._machine and self._inside.is_over(addresses)

    def close(self) -> None:
        self._inside.close()

    def abandon(self) -> None:
        self._inside.abandon()


class MortalGroup:
    """Workers of a dynamic group, one for each of ``machines``; the last one sends through `faults`."""

    def __init__(self, machines: Sequence[str]) -> None:
        self.faults = Faults(delay_seconds=None)
        self.workers: dict[int, Worker] = {}
        """The living."""
        self._machines = machines
        self._network = Network()
        self._store = dist.HashStore()
        self._transports: dict[int, MemoryTransport] = {}
        self._dead: list[Worker] = []
        for rank in range(len(machines)):
            self.join(rank)

    def join(self, rank: int) -> None:
        """Add a worker, or replace a dead one."""
        options = RpcOptions(rpc_timeout=PATIENCE, unresponsive_after=None)
        inside = self._transports[rank] = MemoryTransport(self._network, options)
        transport: Transport = _Sited(inside, self._machines[rank])
        if rank == len(self._machines) - 1:
            transport = FaultyTransport(transport, self.faults)
        self.workers[rank] = Worker(
            f"worker{rank}", rank, None, store=self._store, options=options, transport=transport
        )

    def kill(self, rank: int) -> None:
        """Kill a worker in the middle of its work. It sends no goodbye, and stays on the list of members."""
        worker = self.workers.pop(rank)
        self._dead.append(worker)
        self._transports[rank].close()
        for line in [*worker.agent.calling(), *worker.agent.serving.lines]:
            line.shutdown()
        worker.agent.close(0.0)
        worker.references.close()
        worker.autograd.close()
        worker.inspection.close()

    def close(self) -> None:
        self.faults.release()
        for worker in [*self.workers.values(), *self._dead]:
            if not worker.closed:
                worker.shutdown(graceful=False)
