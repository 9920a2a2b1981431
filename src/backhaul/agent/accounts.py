"""Accounts: what a worker has exchanged with each peer over all lines so far, and which errors occurred.

Each line keeps its own counters, without a lock. A line that has ended is kept until its counters are final. Then they
are added to the sums of its peer. So the figures of a peer only grow, whatever happens to its lines.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from backhaul.ids import GUEST, WorkerInfo

if TYPE_CHECKING:
    from backhaul.agent.line import Line

MOST_KINDS = 64
OTHERS = "(others)"
"""Stands for the kinds of errors beyond the first `MOST_KINDS`."""

_COUNTERS = ("calls_sent", "calls_settled", "calls_received", "calls_finished")

_FEW = 16

Exchange = dict[str, Any]


class Accounts:
    """See the module's docstring. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All guarded by _lock:
        self._lines: list[Line] = []
        self._fold_at = _FEW  # number of lines; it doubles, so that add() has a constant amortised cost
        self._past: dict[WorkerInfo, Exchange] = {}
        self._heard: dict[WorkerInfo, tuple[int, float]] = {}
        self._lost: Counter[WorkerInfo] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()

    def add(self, line: Line) -> None:
        """Count a new line that this worker or the peer has opened. Ignores the lines of guests."""
        if line.peer.id != GUEST:
            with self._lock:
                if len(self._lines) >= self._fold_at:
                    self._fold()
                    self._fold_at = 2 * len(self._lines) + _FEW
                self._lines.append(line)

    def lines(self) -> list[Line]:
        """The open lines, and the ended lines whose counters are not final."""
        with self._lock:
            return list(self._lines)

    def count_error(self, direction: str, error: BaseException) -> None:
        """Count an error. ``direction`` is ``sent`` or ``served`` for a call, or ``connect``."""
        key = (direction, type(error).__qualname__)
        with self._lock:
            if key not in self._errors and len(self._errors) >= MOST_KINDS:
                key = (direction, OTHERS)
            self._errors[key] += 1

    def count_lost(self, peer: WorkerInfo) -> None:
        """Count the loss of a peer: it left without a goodbye, or the connection broke."""
        with self._lock:
            self._lost[peer] += 1

    def errors(self) -> list[dict[str, Any]]:
        """The number of errors, by direction and type."""
        with self._lock:
            found = sorted(self._errors.items())
        return [{"direction": direction, "kind": kind, "count": count} for (direction, kind), count in found]

    def exchanges(self) -> list[Exchange]:
        """The figures of each peer, by rank.

        ``bytes`` has the bytes sent and received for each path. ``heard`` is for how many seconds nothing has come from
        the peer. It is measured between calls of this method, so it is None at the first call.
        """
        now = time.monotonic()
        with self._lock:
            self._fold()
            found = {peer: {**past, "bytes": _copy(past["bytes"])} for peer, past in self._past.items()}
            for line in self._lines:
                _add(found.setdefault(line.peer, _nothing()), line)
            for peer, exchange in found.items():
                exchange["heard"] = self._silence(peer, exchange["received"], now)
                exchange["lost"] = self._lost[peer]
            for line in self._lines:
                if not line.ended:
                    exchange = found[line.peer]
                    exchange["lines"] += 1
                    exchange["path"] = line.channel.path
                    exchange["outstanding"] += line.outstanding
                    exchange["silent"] = max(exchange["silent"], line.silent(now))
        order = sorted(found, key=lambda peer: (peer.id, peer.name))
        return [{"name": peer.name, "rank": peer.id, **found[peer]} for peer in order]

    def _silence(self, peer: WorkerInfo, received: int, now: float) -> float | None:
        before = self._heard.get(peer)
        if before is None or before[0] != received:
            self._heard[peer] = received, now
        return None if before is None else now - self._heard[peer][1]

    def _fold(self) -> None:
        left = []
        for line in self._lines:
            if line.ended and line.final:
                _add(self._past.setdefault(line.peer, _nothing()), line)
            else:
                left.append(line)
        self._lines = left


def _nothing() -> Exchange:
    counters: Exchange = dict.fromkeys(_COUNTERS, 0)
    now = {"lines": 0, "outstanding": 0, "silent": 0.0}
    return {"path": "", "sent": 0, "shared": 0, "received": 0, "bytes": {}, **counters, **now}


def _copy(paths: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {path: dict(each) for path, each in paths.items()}


def _add(exchange: Exchange, line: Line) -> None:
    channel = line.channel
    exchange["path"] = exchange["path"] or channel.path
    exchange["sent"] += channel.sent
    exchange["shared"] += channel.shared
    exchange["received"] += channel.received
    _add_bytes(exchange["bytes"], channel.path, channel.sent, channel.received)
    if channel.shared:
        _add_bytes(exchange["bytes"], "segment", channel.shared, 0)
    if channel.on_devices:
        _add_bytes(exchange["bytes"], "device", channel.on_devices, 0)
    exchange["calls_sent"] += line.calls_sent
    exchange["calls_settled"] += line.calls_settled
    exchange["calls_received"] += line.calls_started
    exchange["calls_finished"] += line.calls_finished


def _add_bytes(paths: dict[str, dict[str, int]], path: str, sent: int, received: int) -> None:
    each = paths.setdefault(path, {"sent": 0, "received": 0})
    each["sent"] += sent
    each["received"] += received
