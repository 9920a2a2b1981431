"""A worker of a large group, of Backhaul or of torch RPC. Imported once, before the workers are forked."""

from __future__ import annotations

import re
from typing import Any

import torch

from backhaul.bench.ports import BACKHAUL, backhaul_port, torch_has_rpc, torch_port
from backhaul.worker import current

_WIDTH = 16
_SECONDS = 600.0

torch_has_rpc()  # imports torch RPC before the fork


def nothing() -> None:
    pass


def number(value: int) -> int:
    return value


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


class Member:
    """One of ``size`` workers."""

    def __init__(self, system: str, rank: int, size: int, directory: str) -> None:
        torch.set_num_threads(1)
        self._system = system
        self._rank = rank
        names = [f"worker{each}" for each in range(size)]
        self._others = [name for name in names if name != names[rank]]
        if system == BACKHAUL:
            more: dict[str, Any] = {"rpc_timeout": _SECONDS, "connect_timeout": 120.0}
            self._port = backhaul_port(names[rank], names, directory, **more)
        else:
            self._port = torch_port(names[rank], names, directory, rpc_timeout=_SECONDS)
        self._rpc, self._autograd = self._port.rpc, self._port.autograd
        self._references: list[Any] = []

    def start(self) -> int | None:
        """Join the group; returns the number of this worker's connections then, if known."""
        self._port.join()
        if self._system != BACKHAUL:
            return None
        agent = current().agent
        return len(agent.calling()) + len(agent.serving.lines)

    def call_all(self) -> None:
        """Call every other worker, all at once."""
        for future in [self._rpc.rpc_async(other, nothing) for other in self._others]:
            future.wait()

    def refer_to_all(self) -> None:
        """Make a value on each other worker, keep a reference to it, and fetch it."""
        self._references = [self._rpc.remote(other, number, args=(self._rank,)) for other in self._others]
        if any(reference.to_here() != self._rank for reference in self._references):
            raise ValueError("a reference led to another value")

    def backward(self) -> None:
        """On the first worker: send a tensor through all others, then one backward over all of them."""
        if self._rank:
            return
        with self._autograd.context() as context:
            source = torch.ones(_WIDTH, requires_grad=True)
            futures = [self._rpc.rpc_async(other, double, args=(source,)) for other in self._others]
            self._autograd.backward(context, [torch.stack([future.wait() for future in futures]).sum()])
            gradient = self._autograd.get_gradients(context)[source]
        if not torch.equal(gradient, torch.full((_WIDTH,), 2.0 * len(self._others))):
            raise ValueError(f"another gradient: {gradient}")

    def memory(self) -> int:
        """The private memory of this process, in bytes."""
        with open("/proc/self/smaps_rollup") as file:
            found = re.findall(r"^Private_\w+:\s+(\d+) kB", file.read(), re.MULTILINE)
        return sum(map(int, found)) * 1024

    def shutdown(self) -> None:
        self._references.clear()
        self._rpc.shutdown()
