"""Findings: what waits for what in a cluster, as found by `stuck`, as data and in sentences."""

from __future__ import annotations

import msgspec

LASTING = 1.0
"""Seconds after which a wait is reported. In a healthy cluster, threads wait briefly all the time."""


class Node(msgspec.Struct, frozen=True):
    """A thread, or the end of a chain."""

    id: str
    worker: str
    title: str
    """Such as "main thread"."""
    does: str
    """Such as "waits for f on worker1"."""
    seconds: float | None = None
    kind: str = "thread"
    """For an end that is not a thread: the kind of end."""
    at: str = ""
    """The line of user code that the thread is at."""


class Edge(msgspec.Struct, frozen=True):
    """One thread waits for another, or for an end."""

    source: str
    target: str
    what: str


class Chain(msgspec.Struct, frozen=True):
    """What one waiting thread waits for, step by step."""

    end: str
    """"cycle", "lost", "blocked", "unknown", "late", "runs" or "shutdown"."""
    sentence: str
    nodes: tuple[str, ...]
    seconds: float
    """How long the first thread of the chain has waited."""


class Stuck(msgspec.Struct, frozen=True):
    """The waiting threads of a cluster, as one graph. ``str()`` describes it in sentences."""

    nodes: list[Node]
    edges: list[Edge]
    chains: list[Chain]
    """The worst first."""
    silent: dict[str, str]
    """The workers that gave no answer, and the reasons."""

    @property
    def lasting(self) -> list[Chain]:
        """Cycles, and chains that have lasted for a while. Workers that wait in shutdown() are normal and left out."""
        return [
            chain
            for chain in self.chains
            if chain.end == "cycle" or (chain.seconds >= LASTING and chain.end != "shutdown")
        ]

    @property
    def remark(self) -> str:
        """What there is to report besides `lasting`."""
        if not self.chains:
            return "No thread of any worker waits for another worker."
        ending = [chain for chain in self.chains if chain.end == "shutdown"]
        said = {chain.nodes[0] for chain in [*self.lasting, *ending]}
        short = len({chain.nodes[0] for chain in self.chains} - said)
        lines = []
        if short:
            some = "1 thread has" if short == 1 else f"{short} threads have"
            lines.append(f"{some} waited for less than {LASTING:g} s.")
        if len(ending) == 1:
            lines.append(ending[0].sentence)
        elif ending:
            lines.append(f"{len(ending)} workers wait in shutdown(){ending[0].sentence.partition('shutdown()')[2]}")
        return " ".join(lines)

    def __str__(self) -> str:
        lines = [f"{worker}: {reason}" for worker, reason in self.silent.items()]
        lines += [chain.sentence for chain in self.lasting]
        return "\n".join([*lines, self.remark] if self.remark else lines)
