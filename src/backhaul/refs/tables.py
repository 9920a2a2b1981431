"""Tables: one worker's values and references under one lock, and how decisions about them are carried out.

`counting` decides; `Tables` carries the decisions out. One lock guards the state machine and the tables. While a thread
holds it, nothing is sent, and no value is freed or completed. So a decision is carried out in two steps: `apply` queues
notices and changes the tables under the lock, and `act` does the rest after the lock is released.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable

from backhaul.agent.agent import Agent
from backhaul.agent.observing import RefFreed
from backhaul.errors import BackhaulError
from backhaul.ids import RefId, WorkerInfo, life_of
from backhaul.refs.actions import Action, Free, Seek, Send, Void
from backhaul.refs.cell import Cell
from backhaul.refs.correspondence import Correspondence
from backhaul.refs.counting import Counting
from backhaul.refs.losses import Names, lost_creation, lost_value, stale
from backhaul.refs.seeking import Seeking

_PROCESS_BITS = 30
_NUMBER_BITS = 32


class Aftermath:
    """The decisions of the state machine that are carried out after the lock is released."""

    __slots__ = ("freed", "mail", "sought", "voided")

    def __init__(self) -> None:
        self.mail = False
        self.sought: list[Seek] = []
        self.voided: list[tuple[RefId, Cell]] = []
        self.freed: list[Cell | None] = []  # clearing this list frees their values


class Tables:
    """See the module's docstring. ``lock`` guards all fields, except where a method says otherwise."""

    def __init__(self, agent: Agent, examine: Callable[[int], None], not_found: Callable[[int, int], None]) -> None:
        """``examine(rank)`` is called for a peer that does not answer a notice.

        ``not_found(rank, life)`` is called for a process that has replaced a dead worker and cannot be reached.
        """
        self.me = agent.me
        self._agent = agent
        self.lock = threading.Lock()
        self.sweep_ended = threading.Condition(self.lock)
        # Distinguishes this process from others that have had its rank.
        process = secrets.randbits(_PROCESS_BITS) + 1
        trust = agent.trust
        # Peers that may not see our process do not need ``life``: the owner lists which values each of them was given.
        life = life_of(agent.membership.incarnation) if trust.shows else 0
        self.counting = Counting(
            agent.me.id, first_number=process << _NUMBER_BITS, direct=not trust.believes, life=life
        )
        self.post = Correspondence(agent, self.lock, process, self.info, examine)
        self.cells: dict[RefId, Cell] = {}
        """Values of ours."""
        self.gone: dict[RefId, BaseException] = {}
        """Why a value of another worker is not available."""
        self.names = Names()
        self.closed = False
        self._seeking = Seeking(agent, self.info, not_found)

    def info(self, rank: int) -> WorkerInfo:
        """The worker of this rank. Takes no lock. Raises `UnknownWorkerError`."""
        info = self.names.get(rank)
        if info is None:
            info = self.names[rank] = self._agent.membership.find(rank).info
        return info

    def apply(self, actions: Iterable[Action]) -> Aftermath:
        """Queue notices, and return what to do after the lock is released: see `act`.

        The caller holds the lock, and has held it since ``actions`` were decided. Otherwise two threads could queue
        their notices in the wrong order.
        """
        after = Aftermath()
        for action in actions:
            if isinstance(action, Send):
                self.post.add(action.to, action.notice)
                after.mail = True
            elif isinstance(action, Free):
                after.freed.append(self.cells.pop(action.ref, None))
                if self._agent.observers:
                    self._agent.observers.emit(RefFreed(ref=str(action.ref)))
            elif isinstance(action, Void):
                after.voided.append((action.ref, self.cells.setdefault(action.ref, Cell())))
            elif isinstance(action, Seek):
                after.sought.append(action)
            elif not action.exists and self.counting.knows(action.ref):
                self.gone.setdefault(action.ref, lost_value(action.ref, self.names))
        return after

    def act(self, after: Aftermath) -> None:
        """Carry out what is left to do, without the lock. Does not block."""
        for ref, cell in after.voided:
            cell.fail(self._lost_creation(ref), self.me.name)
        if after.mail:
            self.post.flush_later()
        for process in after.sought:
            self._seeking.seek(*process)
        after.freed.clear()

    def _lost_creation(self, ref: RefId) -> BackhaulError:
        return stale(ref, self.me) if self.counting.is_stale(ref) else lost_creation(ref, self.names)

    def held(self, only: int | None = None) -> list[str]:
        """Values of ours that others hold, or only that worker, as text. The caller holds the lock."""
        return [
            f"{ref} held by {', '.join(self.info(rank).name for rank in sorted(holders))}"
            for ref in self.counting.owned
            if (holders := {rank for rank in self.counting.holders(ref) if only in (None, rank)})
        ]

    def close(self) -> None:
        """Forget the values, and send nothing from now on. Takes the lock."""
        with self.lock:
            self.closed = True
            self.post.close()
            self.sweep_ended.notify_all()
            cells = list(self.cells.values())
            self.cells.clear()
        self._seeking.close()
        cells.clear()
