"""StartedPass: a pass, at the worker that started it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from backhaul.agent.activity import Description
from backhaul.agent.agent import Agent
from backhaul.agent.listening import Listener
from backhaul.autograd.completion import Ledger
from backhaul.autograd.functions import ROOT, rank_of
from backhaul.autograd.graph import Component
from backhaul.autograd.local_pass import LocalPass


class StartedPass:
    """What the starter of a pass knows about it. Thread-safe."""

    def __init__(self, local: LocalPass, *, doubts: bool = False) -> None:
        """``doubts``: other workers may lie. See `completion.Ledger`."""
        self.local = local
        self._doubts = doubts
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._ledger = Ledger(doubts)
        self._resolving: Ledger | None = None
        self._askers: set[int] = set()
        self._resolved = False
        self._todo: deque[Component] = deque()
        self._error: BaseException | None = None
        self._over = False
        self.listener: Listener | None = None
        """The thread of `backward`, when it has begun to listen."""

    def ask(self, rank: int) -> tuple[bool, bool]:
        """Note that a worker wants the pass to be resolved. Returns ``(begin now, already resolved)``."""
        with self._lock:
            if self._resolved:
                return False, True
            self._askers.add(rank)
            begin = self._resolving is None
            if begin:
                self._resolving = Ledger(self._doubts)
            return begin, False

    def report(self, resolving: bool, consumed: Sequence[int], emitted: Sequence[int]) -> set[int]:
        """Enter a report. Returns the ranks of the workers to tell that the pass is resolved now."""
        with self._lock:
            if not resolving:
                self._over = self._ledger.report(consumed, emitted)
                if self._over:
                    self._notify()
                return set()
            if self._resolving is None or not self._resolving.report(consumed, emitted):
                return set()
            self._resolved = True
            return self._askers

    @property
    def busy(self) -> list[int]:
        """Ranks of the workers whose reports are missing, as far as this worker knows."""
        with self._lock:
            return sorted({rank_of(source) for source in self._ledger.open if source != ROOT})

    def describe(self) -> Description:
        """What the thread of `backward` waits for, for inspection."""
        backward = self.local.backward
        return {"kind": "pass", "context": backward.context, "backward": backward.id, "ranks": self.busy}

    def give(self, component: Component) -> None:
        """Queue a component for the thread that waits for the pass, and wake it."""
        with self._lock:
            self._todo.append(component)
            self._notify()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
                self._notify()

    def _notify(self) -> None:
        """Wake the thread of `backward`. The caller holds ``_lock``."""
        if self.listener is not None:
            self.listener.wake()

    def wait(
        self,
        agent: Agent,
        listener: Listener,
        deadline: float,
        run: Callable[[Component], None],
        every: float,
        check: Callable[[], None],
    ) -> bool:
        """Wait for the end of the pass. Returns True when it is over, False at the deadline; raises the pass's error.

        Meanwhile the thread reads from the workers of the context, handles the messages of this pass, runs the
        components that `give` queues, and calls ``check`` regularly.
        """
        next_check = time.monotonic() + every
        while True:
            if listener.arrived:
                agent.listeners.hear(listener)
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._over:
                    return True
                component = self._todo.popleft() if self._todo else None
            if component is not None:
                run(component)
            elif not listener.arrived:
                now = time.monotonic()
                if now >= deadline:
                    return False
                if now >= next_check:
                    next_check = now + every
                    check()
                agent.listeners.wait(listener, self._is_something, min(deadline, next_check) - now)

    def _is_something(self) -> bool:
        return self._error is not None or self._over or bool(self._todo)
