"""View: the known state of a running cluster: workers, rates, traffic between them, latencies, passes. Pure.

`lookout` feeds it the workers' answers. It keeps a bounded history. Workers count up from their start, so
rates are differences of two answers. A lost worker stays in the view, with the time of its loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

HISTORY = 240
"""Points kept for each curve."""

WINDOW = 10.0
"""Seconds of calls that one point of a latency curve covers."""

_MOST_PASSES = 20
_MOST_FUNCTIONS = 100

Answer = Mapping[str, Any]


class Traffic(msgspec.Struct, frozen=True):
    """What one worker sends to another, per second."""

    sender: str
    receiver: str
    calls: float
    bytes: float


class Row(msgspec.Struct, frozen=True):
    """One worker, now."""

    name: str
    rank: int
    state: str = "unknown"
    """"live", "silent" (does not answer), "lost", or "unknown" (no answer yet)."""
    since: float | None = None
    """When the worker was lost or fell silent, in seconds since 1970."""
    reason: str = ""
    host: str = ""
    pid: int = 0
    seconds: float = 0.0
    calls_sent: float = 0.0
    """Per second, like the next three."""
    calls_served: float = 0.0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0
    processor: float = 0.0
    """Percent of one processor."""
    memory: int = 0
    running: list[dict[str, Any]] = []
    """The requests that the worker handles, oldest first."""
    waiting: list[dict[str, Any]] = []
    gates: int = 0
    contexts: int = 0
    passes: int = 0
    references: int = 0
    """Values that the worker keeps for references, and references that it has to values of others."""
    outstanding: int = 0
    threads: int = 0
    history: list[dict[str, float]] = []
    """Points of curves: ``at``, ``calls``, ``bytes``, ``processor``, ``memory``."""


class _Worker:
    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.state = "unknown"
        self.since: float | None = None
        self.reason = ""
        self.last: Answer | None = None
        self.before: Answer | None = None
        self.meter: Answer | None = None
        self.offset = 0.0
        self.at = 0.0  # time of the last answer
        self.history: deque[dict[str, float]] = deque(maxlen=HISTORY)

    @property
    def elapsed(self) -> float:
        if self.last is None or self.before is None:
            return 0.0
        return float(self.last["time"] - self.before["time"])

    def rate(self, *path: str) -> float:
        """The growth of a counter per second."""
        if self.last is None or self.before is None or self.elapsed <= 0:
            return 0.0
        return max(0.0, _at(self.last, path) - _at(self.before, path)) / self.elapsed

    def to_peer(self, peer: str, *names: str) -> float:
        """The growth of counters for one peer, per second."""
        if self.last is None or self.before is None or self.elapsed <= 0:
            return 0.0
        grown = _of_peer(self.last, peer, names) - _of_peer(self.before, peer, names)
        return max(0.0, grown) / self.elapsed


class View:
    """The known state of a cluster. Not thread-safe. The caller passes times, in seconds since 1970."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._totals: deque[tuple[float, dict[str, list[int]]]] = deque()
        self._curves: dict[str, deque[dict[str, float]]] = {}
        self._bounds: list[float] = []

    # Input.

    def met(self, name: str, rank: int) -> None:
        """Note that this worker exists."""
        if name not in self._workers:
            self._workers[name] = _Worker(name, rank)
        self._workers[name].rank = rank

    def left(self, present: Iterable[str]) -> None:
        """Set the members. Lost workers that are no longer members are forgotten."""
        known = set(present)
        for name in [name for name, each in self._workers.items() if each.state == "lost" and name not in known]:
            del self._workers[name]

    def answered(self, name: str, at: float, snapshot: Answer, meter: Answer | None = None, offset: float = 0) -> None:
        """Note a worker's figures. ``offset``: how many seconds its clock is ahead of ours."""
        worker = self._workers.get(name)
        if worker is None:  # the worker has left since the question
            return
        if worker.last is not None and worker.last["worker"].get("pid") != snapshot["worker"].get("pid"):
            worker.last = None  # another process has replaced it
        worker.before, worker.last = worker.last, snapshot
        worker.state, worker.since, worker.reason = "live", None, ""
        worker.meter, worker.offset, worker.at = meter, offset, at
        if worker.before is not None:
            worker.history.append(
                {
                    "at": at,
                    "calls": worker.rate("calls", "calls_sent") + worker.rate("calls", "calls_received"),
                    "bytes": self._bytes(worker, "sent", "shared") + self._bytes(worker, "received"),
                    "processor": 100 * worker.rate("process", "cpu"),
                    "memory": float(snapshot["process"]["memory"]),
                }
            )

    def failed(self, name: str, at: float, reason: str, *, lost: bool) -> None:
        """Note that a worker did not answer: it is ``lost``, or silent."""
        worker = self._workers.get(name)
        if worker is None:
            return
        state = "lost" if lost else "silent"
        if worker.state != state:
            worker.since = at
        worker.state, worker.reason = state, reason
        worker.before = worker.last  # no rates for this worker

    def tick(self, at: float) -> None:
        """Add a point to each latency curve."""
        totals: dict[str, list[int]] = {}
        for worker in self._workers.values():
            if worker.meter is None or worker.state == "lost":
                continue
            self._bounds = list(worker.meter["bounds"])
            for calls in worker.meter["calls"]:
                if calls["direction"] == "sent" and (calls["function"] in totals or len(totals) < _MOST_FUNCTIONS):
                    sums = totals.setdefault(calls["function"], [0] * len(calls["buckets"]))
                    totals[calls["function"]] = [a + b for a, b in zip(sums, calls["buckets"], strict=True)]
        self._totals.append((at, totals))
        while len(self._totals) > 2 and self._totals[1][0] <= at - WINDOW:
            self._totals.popleft()
        began, before = self._totals[0]
        for function, buckets in totals.items():
            old = before.get(function, [0] * len(buckets))
            grown = [max(0, new - past) for new, past in zip(buckets, old, strict=True)]
            if sum(grown):
                self._curves.setdefault(function, deque(maxlen=HISTORY)).append(
                    {
                        "at": at,
                        "calls": sum(grown) / (at - began) if at > began else 0.0,
                        "p50": quantile(self._bounds, grown, 0.5),
                        "p99": quantile(self._bounds, grown, 0.99),
                    }
                )

    # Output.

    def rows(self) -> list[Row]:
        """The workers, by rank."""
        return [self._row(worker) for worker in sorted(self._workers.values(), key=lambda each: each.rank)]

    def _row(self, worker: _Worker) -> Row:
        found = worker.last
        if found is None:
            return Row(worker.name, worker.rank, worker.state, worker.since, worker.reason)
        return Row(
            worker.name,
            worker.rank,
            worker.state,
            worker.since,
            worker.reason,
            host=found["worker"]["host"],
            pid=found["worker"]["pid"],
            seconds=found["worker"]["seconds"],
            calls_sent=worker.rate("calls", "calls_sent"),
            calls_served=worker.rate("calls", "calls_received"),
            bytes_sent=self._bytes(worker, "sent", "shared"),
            bytes_received=self._bytes(worker, "received"),
            processor=100 * worker.rate("process", "cpu"),
            memory=found["process"]["memory"],
            running=found["running"] if worker.state == "live" else [],
            waiting=found["waiting"] if worker.state == "live" else [],
            gates=found["autograd"]["gates"],
            contexts=found["autograd"]["contexts"],
            passes=found["autograd"]["passes"],
            references=found["references"]["owned"] + found["references"]["used"],
            outstanding=found["calls"]["outstanding"],
            threads=found["threads"]["all"],
            history=list(worker.history),
        )

    def _bytes(self, worker: _Worker, *names: str) -> float:
        peers = () if worker.last is None else worker.last["peers"]
        return sum(worker.to_peer(peer["name"], *names) for peer in peers)

    def traffic(self) -> list[Traffic]:
        """The traffic between each pair of workers."""
        found = []
        for worker in self._workers.values():
            if worker.state == "live" and worker.last is not None:
                for peer in worker.last["peers"]:
                    calls = worker.to_peer(peer["name"], "calls_sent")
                    size = worker.to_peer(peer["name"], "sent", "shared")
                    found.append(Traffic(worker.name, peer["name"], calls, size))
        return found

    def curves(self) -> dict[str, list[dict[str, float]]]:
        """For each function the points of its latency, as callers see it: ``at``, ``calls``, ``p50``, ``p99``."""
        return {function: list(points) for function, points in self._curves.items()}

    def passes(self, most: int = _MOST_PASSES) -> list[dict[str, Any]]:
        """The last backward passes, latest first, each with the shares of its workers; times are on this clock.

        A pass is ``complete`` if it has ended and all its workers have reported it.
        """
        asked = [worker.at for worker in self._workers.values() if worker.state == "live" and worker.meter is not None]
        found: dict[int, dict[str, Any]] = {}
        for worker in self._workers.values():
            for each in () if worker.meter is None else worker.meter["recent"]:
                one = found.setdefault(each["backward"], {"backward": each["backward"], "shares": []})
                share = _shifted(each, worker.offset)
                share["worker"] = worker.name
                one["shares"].append(share)
        for one in found.values():
            shares = one["shares"]
            own = [share for share in shares if share["started_here"]]
            ends = [share["ended"] for share in (own or shares)]
            one["context"] = shares[0]["context"]
            one["starter"] = own[0]["worker"] if own else None
            one["failed"] = any(share["failed"] for share in shares)
            one["began"] = min(share["began"] for share in shares)
            one["ended"] = None if None in ends else max(ends)
            one["complete"] = one["ended"] is not None and all(at >= one["ended"] for at in asked)
        return sorted(found.values(), key=lambda one: -one["began"])[:most]

    def contexts(self) -> list[dict[str, Any]]:
        """The live autograd contexts, latest first: their ids, workers, and how much each worker has recorded."""
        names = {worker.rank: worker.name for worker in self._workers.values()}
        found: dict[int, dict[str, Any]] = {}
        for worker in self._workers.values():
            if worker.last is None or worker.state == "lost":
                continue
            for each in worker.last["autograd"]["in_detail"]:
                initiator = names.get(each["initiator"], f"rank {each['initiator']}")
                one = found.setdefault(
                    each["context"],
                    {"context": each["context"], "initiator": initiator, "workers": [], "tensors": 0, "passes": 0},
                )
                one["workers"].append(worker.name)
                one["tensors"] += each["sends"]
                one["passes"] = max(one["passes"], len(each["passes"]))
        return sorted(found.values(), key=lambda one: -one["context"])


def quantile(bounds: Sequence[float], buckets: Sequence[int], share: float) -> float:
    """The latency below which this share of the calls lies, by linear interpolation inside buckets."""
    rank = share * sum(buckets)
    below = 0
    for number, count in enumerate(buckets):
        if count and below + count >= rank:
            low = bounds[number - 1] if number else 0.0
            if number >= len(bounds):
                return low
            return low + (bounds[number] - low) * (rank - below) / count
        below += count
    return 0.0


def _shifted(share: Mapping[str, Any], offset: float) -> dict[str, Any]:
    """A pass with its times on this clock."""

    def shift(each: Mapping[str, Any]) -> dict[str, Any]:
        times = {name: None if each[name] is None else each[name] - offset for name in ("began", "ended")}
        return {**each, **times}

    parts = {name: [shift(each) for each in share[name]] for name in ("runs", "gates", "waits")}
    return {**shift(share), **parts}


def _at(found: Any, path: Sequence[str]) -> float:
    for name in path:
        found = found[name]
    return float(found)


def _of_peer(snapshot: Answer, peer: str, names: Sequence[str]) -> float:
    return float(sum(each[name] for each in snapshot["peers"] if each["name"] == peer for name in names))
