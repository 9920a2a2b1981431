"""Lookout: polls the workers of a cluster, and keeps a `View` of them.

One thread polls each worker, over its own connection, so a worker that hangs or dies delays no other. Each thread keeps
asking until its worker answers, or the lookout is closed. The lookout also finds and polls newcomers to a dynamic
group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from backhaul.errors import BackhaulError, RemoteError, WorkerLostError
from backhaul.seeing.asking import PATIENCE, Answers, ask_guests, failure, side_by_side
from backhaul.seeing.findings import Stuck
from backhaul.seeing.guest import Guest, Member, members
from backhaul.seeing.stuck import explain
from backhaul.seeing.view import View
from backhaul.transport.base import Transport

_MEMBERS_EVERY = 3
"""How many rounds pass between questions for the members of the group."""


class Lookout:
    """See the module's docstring. Close it, or use it in a ``with`` block. Thread-safe."""

    def __init__(
        self, found: Sequence[Member], transport: Transport, interval: float = 1.0, *, metered: bool = False
    ) -> None:
        """``metered``: also ask for latencies and passes, which the workers then start to count."""
        self._transport = transport
        self._interval = interval
        self._metered = metered
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._view = View()
        self._members: dict[str, Member] = {}
        self._threads: list[threading.Thread] = []
        self._asked: set[str] = set()
        self._changed = threading.Condition(self._lock)
        for member in found:
            self._meet(member)
        self._start("backhaul-lookout", self._keep_up)

    def __enter__(self) -> Lookout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop polling. Waits for questions in progress, but not for workers that hang."""
        self._closed.set()
        deadline = time.monotonic() + 2 * PATIENCE + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def look(self) -> View:
        """The view. Read it only inside ``with lookout.reading:``."""
        return self._view

    @property
    def reading(self) -> threading.Condition:
        """Hold it to keep the view unchanged. It is notified after each answer."""
        return self._changed

    def wait_until(self, is_true: Callable[[View], Any], seconds: float) -> bool:
        """Wait until ``is_true(view)``, which is checked after each answer. Returns False at the timeout."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: is_true(self._view), seconds))

    def ask(self, worker: str, topic: str, **arguments: Any) -> Any:
        """The answer of one worker, over a new connection. Raises as `Guest.ask` does."""
        with self._lock:
            member = self._members.get(worker)
        if member is None:
            raise WorkerLostError(f"there is no worker {worker!r}", worker)
        guest = Guest(member.addresses, self._transport, PATIENCE)
        try:
            return guest.ask(topic, PATIENCE, **arguments)
        finally:
            guest.close()

    def ask_all(self, *topics: str) -> Answers:
        """The answers of all workers, asked side by side."""
        with self._lock:
            found = list(self._members.values())
        return ask_guests(found, self._transport, topics)

    def ask_each(self, workers: Iterable[str], topic: str, **arguments: Any) -> dict[str, Any]:
        """The answers of some workers, asked side by side. Workers that do not answer are left out."""
        found = side_by_side(
            {name: partial(self._ask_one, name, topic, arguments) for name in workers}, seconds=2 * PATIENCE
        )
        return {name: answer[topic] for name, answer in found.items() if topic in answer}

    def _ask_one(self, worker: str, topic: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {topic: self.ask(worker, topic, **arguments)}

    def stuck(self) -> Stuck:
        """What each waiting thread waits for, now."""
        return explain(self.ask_all("threads", "snapshot"))

    def name_of(self, rank: int) -> str | None:
        with self._lock:
            return next((each.info.name for each in self._members.values() if each.info.id == rank), None)

    # The threads.

    def _start(self, name: str, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _meet(self, member: Member) -> None:
        name = member.info.name
        with self._lock:
            self._members[name] = member
            self._view.met(name, member.info.id)
            begin = name not in self._asked
            self._asked.add(name)
        if begin:
            self._start(f"backhaul-lookout-{name}", self._watch, name)

    def _watch(self, name: str) -> None:
        """Poll one worker until the lookout is closed."""
        guest: Guest | None = None
        while not self._closed.is_set():
            try:
                if guest is None:
                    with self._lock:
                        member = self._members.get(name)
                    if member is None:
                        break
                    guest = Guest(member.addresses, self._transport, PATIENCE)
                self._take(name, guest)
            except BackhaulError as error:
                if guest is not None:
                    guest.close()
                    guest = None
                told = failure(error)
                with self._changed:
                    self._view.failed(name, time.time(), told["error"], lost=bool(told.get("lost")))
                    self._changed.notify_all()
            self._closed.wait(self._interval)
        if guest is not None:
            guest.close()
        with self._lock:
            self._asked.discard(name)

    def _take(self, name: str, guest: Guest) -> None:
        before = time.time()
        clock = guest.ask("clock", PATIENCE)
        after = time.time()
        offset = clock["time"] / 1e9 - (before + after) / 2
        if abs(offset) <= after - before:  # within the error of the measurement
            offset = 0.0
        snapshot = guest.ask("snapshot", PATIENCE)
        meter = None
        if self._metered:
            try:
                meter = guest.ask("meter", PATIENCE)
            except RemoteError:
                meter = None  # this worker has no meter
        with self._changed:
            self._view.answered(name, after, snapshot, meter, offset)
            self._changed.notify_all()

    def _keep_up(self) -> None:
        """Add points to curves, and look for new members."""
        rounds = 0
        while not self._closed.wait(self._interval):
            with self._lock:
                self._view.tick(time.time())
            rounds += 1
            if rounds % _MEMBERS_EVERY == 0:
                self._look_for_members()

    def _look_for_members(self) -> None:
        with self._lock:
            live = [row.name for row in self._view.rows() if row.state == "live"]
            known = dict(self._members)
        for name in live:
            try:
                guest = Guest(known[name].addresses, self._transport, PATIENCE)
                try:
                    found = members(guest)
                finally:
                    guest.close()
            except BackhaulError:
                continue  # another member can answer too
            present = {member.info.name for member in found}
            for member in found:
                self._meet(member)
            with self._lock:
                self._view.left(present)
                lost = {row.name for row in self._view.rows()}
                self._members = {each: member for each, member in self._members.items() if each in lost}
            return
