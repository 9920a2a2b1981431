"""Correspondence: sends and receives one worker's notices about references. It drives `mailbox`.

Notices are sent from a queue (`completions`), never by the thread that caused them, because that thread may run a
finalizer or read a connection. If a batch cannot be sent, or is not answered, its receiver is examined. If the receiver
turns out to live, `repeat` sends the batch again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.errors import BackhaulError
from backhaul.ids import WorkerInfo
from backhaul.refs.mailbox import Inbox, Outbox
from backhaul.wire.messages import Notice, Notices


class Correspondence:
    """The mailboxes of one worker. ``lock``, the lock of the tables, guards them.

    Some methods require that the caller holds the lock, and say so. The others take it. Thread-safe.
    """

    def __init__(
        self,
        agent: Agent,
        lock: threading.Lock,
        process: int,
        info: Callable[[int], WorkerInfo],
        examine: Callable[[int], None],
    ) -> None:
        """``process`` distinguishes this process from others that have had its rank.

        ``examine(rank)`` is called for a peer that does not answer.
        """
        self._agent = agent
        self._lock = lock
        self._process = process
        self._info = info
        self._examine = examine
        # Guarded by _lock:
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._news: dict[int, None] = {}  # the workers for which notices wait that no thread has tried to send yet
        self._flushing = False
        self._closed = False

    def add(self, to: int, notice: Notice) -> None:
        """Queue a notice for the next `flush_later`. The caller holds the lock."""
        self._outboxes.setdefault(to, Outbox()).add(notice)
        self._news[to] = None

    def waiting(self, to: int) -> int:
        """The number of notices that this worker has not answered. The caller holds the lock."""
        box = self._outboxes.get(to)
        return 0 if box is None else len(box)

    def accept(self, peer: int, message: Notices) -> bool:
        """Whether a message of that worker is new. The caller holds the lock."""
        return self._inboxes.setdefault(peer, Inbox()).accept(message.number, message.process)

    def drop(self, to: int) -> None:
        """Throw away all notices for a dead worker. The caller holds the lock."""
        if to in self._outboxes:
            self._outboxes[to].clear()

    def idle(self) -> bool:
        """Whether no notice waits or is under way. The caller holds the lock."""
        return not any(map(len, self._outboxes.values()))

    def close(self) -> None:
        """Send nothing from now on. The caller holds the lock."""
        self._closed = True

    def flush_later(self) -> None:
        """Have another thread send the queued notices. The caller does not hold the lock."""
        with self._lock:
            if self._flushing or self._closed:
                return
            self._flushing = True
        self._agent.completions.add(self._flush)

    def repeat(self, to: int) -> None:
        """Repeat the batch that may not have reached a worker, because the worker answers again."""
        with self._lock:
            box = None if self._closed else self._outboxes.get(to)
            again = None if box is None else box.again()
        if again is not None:
            self._mail(to, *again)

    def _flush(self) -> None:
        with self._lock:
            self._flushing = False
            news, self._news = self._news, {}
            # A worker that has not answered its last batch gets no batch now: its answer brings the next flush.
            batches = [(to, batch) for to in news if (batch := self._outboxes[to].next_batch()) is not None]
        for to, (number, notices) in batches:
            self._mail(to, number, notices)

    def _mail(self, to: int, number: int, notices: tuple[Notice, ...]) -> None:
        try:
            future = self._agent.ask_later(
                self._info(to), lambda id: Notices(id, self._process, number, notices), "notices", math.inf
            )
        except BackhaulError:
            self._examine(to)
            return
        future.when_done(lambda done: self._mailed(to, number, done))

    def _mailed(self, to: int, number: int, done: Any) -> None:
        try:
            done.value()
        except BackhaulError:
            self._examine(to)
            return
        with self._lock:
            box = self._outboxes.get(to)
            if box is not None:
                box.answered(number)
            more = bool(box)
            if more:
                self._news[to] = None
        if more:
            self.flush_later()
