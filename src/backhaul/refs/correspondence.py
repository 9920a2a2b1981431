"""Correspondence: the notices of one worker about references, to all others and from them. It drives `mailbox`.

Notices are sent from a queue (`completions`), never from the thread that caused them: that may be a finalizer, or one
that reads a connection. A batch that cannot be sent or is not answered has its receiver examined. If the receiver turns
out to live, `repeat` sends the batch again.
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
    """Thread-safe. ``lock`` is that of the holdings: it also guards the boxes here, where a method says so."""

    def __init__(
        self,
        agent: Agent,
        lock: threading.Lock,
        process: int,
        info: Callable[[int], WorkerInfo],
        examine: Callable[[int], None],
    ) -> None:
        """``process`` tells this process from others that have had its rank. ``examine`` is told of silent peers."""
        self._agent = agent
        self._lock = lock
        self._process = process
        self._info = info
        self._examine = examine
        # Guarded by _lock:
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._flushing = False
        self._closed = False

    def add(self, to: int, notice: Notice) -> None:
        """Have a notice sent by the next `flush_later`. Holds the lock."""
        self._outboxes.setdefault(to, Outbox()).add(notice)

    def waiting(self, to: int) -> int:
        """How many notices that worker has not answered. Holds the lock."""
        box = self._outboxes.get(to)
        return 0 if box is None else len(box)

    def accept(self, peer: int, message: Notices) -> bool:
        """Whether a message of that worker is new. Holds the lock."""
        return self._inboxes.setdefault(peer, Inbox()).accept(message.number, message.process)

    def drop(self, to: int) -> None:
        """That worker is dead: throw away what is for it. Holds the lock."""
        if to in self._outboxes:
            self._outboxes[to].clear()

    def idle(self) -> bool:
        """Whether nothing is under way. Holds the lock."""
        return not any(map(len, self._outboxes.values()))

    def close(self) -> None:
        """Send nothing any more. Holds the lock."""
        self._closed = True

    def flush_later(self) -> None:
        """Send what has been added, on another thread."""
        with self._lock:
            if self._flushing or self._closed:
                return
            self._flushing = True
        self._agent.completions.add(self._flush)

    def repeat(self, to: int) -> None:
        """That worker answers again: repeat the batch that may not have reached it."""
        with self._lock:
            box = None if self._closed else self._outboxes.get(to)
            again = None if box is None else box.again()
        if again is not None:
            self._mail(to, *again)

    def _flush(self) -> None:
        with self._lock:
            self._flushing = False
            batches = [(to, batch) for to, box in self._outboxes.items() if (batch := box.next_batch()) is not None]
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
        self.flush_later()
