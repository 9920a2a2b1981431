"""Deaths: what the ends of connections and processes mean for one worker's references.

A peer counts as dead when its incarnation is over (`agent.fates`), and everything that it sent has been read. A peer
that merely cannot be reached keeps the references that it holds and the values that it owns. Once it answers again, the
notices that were under way are repeated.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.member import Member
from backhaul.errors import UnknownWorkerError, WorkerLostError
from backhaul.ids import WorkerInfo, life_of
from backhaul.refs.actions import Action, Send
from backhaul.refs.losses import lost_value
from backhaul.refs.tables import Tables
from backhaul.wire.messages import Obituary, Sweep

_log = logging.getLogger(__name__)

_SUCCESSOR_WAITS = 3.0


class Deaths:
    """See the module's docstring. The agent reports to it. Thread-safe."""

    def __init__(self, agent: Agent, tables: Tables) -> None:
        self._agent = agent
        self._trust = agent.trust
        self._tables = tables
        self._lock = tables.lock
        # Guarded by _lock:
        self._counting = tables.counting
        self._post = tables.post
        self._names = tables.names
        self.ended: weakref.WeakSet[Any] = weakref.WeakSet()
        """Connections that have ended. Their requests may still be running."""
        self.left: list[str] | None = None
        """The references that workers still held when they left, as text. None until `Holdings.expect_none`: before
        that, no check needs them."""
        self._sweep_timer: threading.Timer | None = None
        agent.on_connection_ended.append(self._on_connection_ended)
        agent.on_connected.append(self._on_connected)
        agent.on_replaced.append(self._on_replaced)
        agent.fates.on_present.append(self._on_present)
        agent.fates.on_over.append(self._on_over)

    def _on_connected(self, peer: WorkerInfo) -> None:
        """Wait until a successor may be given references: until no sweep about its predecessor is going on.

        Waits at most `_SUCCESSOR_WAITS` seconds.
        """
        with self._lock:
            self._names[peer.id] = peer
            if self._counting.is_dead(peer.id):
                self._tables.sweep_ended.wait_for(
                    lambda: self._tables.closed or not self._counting.sweeping, _SUCCESSOR_WAITS
                )
            after = self._tables.apply(self._counting.revived(peer.id))
        self._tables.act(after)

    def _on_replaced(self, before: Member, after: Member) -> None:
        """Another process has the name and rank of a peer. The end of the old process has been handled already."""
        rank = before.id
        text = f"{before}, which had it, is over, and {after} has its place and none of its values. Create it again"
        with self._lock:
            life = life_of(after.incarnation) if self._trust.shows else 0
            self._names[rank] = after.info
            self._names.replaced[rank] = text, life
            for ref in self._counting.used:
                if ref.owner == rank and not (life and ref.life == life):
                    self._tables.gone[ref] = lost_value(ref, self._names)

    def _on_connection_ended(self, connection: object, peer: WorkerInfo, _: WorkerLostError) -> None:
        with self._lock:
            self.ended.add(connection)
            after = self._tables.apply(self._counting.connection_ended(connection))
        self._tables.act(after)

    def examine(self, rank: int) -> None:
        """Have a peer examined that may be dead. Does not block."""
        try:
            info = self._tables.info(rank)
        except UnknownWorkerError:  # the peer left before this worker met it
            self._agent.pool.run(lambda: self.bury(rank))
        else:
            self._agent.fates.examine(info)

    def believe(self, notice: Obituary) -> None:
        """Accept the word of a worker of this cluster that another worker has ended."""
        info = self._names.get(notice.rank)
        if info is not None and notice.incarnation:
            self._agent.fates.end_later(info, notice.reason, notice.incarnation)

    def _on_present(self, peer: WorkerInfo) -> None:
        """A peer answers: repeat the notices that may not have reached it."""
        self._post.repeat(peer.id)
        with self._lock:
            if self._tables.closed:
                return
            after = self._tables.apply(self._counting.lives(peer.id))
        self._tables.act(after)

    def _on_over(self, peer: WorkerInfo, reason: str) -> None:
        link = self._agent.link(peer)
        member = self._agent.membership.known(peer)
        incarnation = link.fate.incarnation or ("" if member is None else member.incarnation)
        obituary = None
        if link.fate.certain and link.fate.incarnation:
            obituary = Obituary(peer.id, link.fate.incarnation, reason)
            # The kernel or the launcher tells the workers on the same machine. They tell those on other machines.
            if not self._agent.is_elsewhere(peer):
                self._spread(obituary)
        self.bury(peer.id, obituary, life_of(incarnation) if self._trust.shows else 0)

    def _spread(self, obituary: Obituary) -> None:
        """Tell connected workers on other machines that a worker of this machine has ended."""
        if not self._trust.believes:  # other workers would not believe this one either
            return
        far = self._agent.membership.elsewhere(self._agent.transport.addresses.host)
        far = [info for info in far if self._agent.link(info).up]
        with self._lock:
            after = self._tables.apply([] if self._tables.closed else [Send(info.id, obituary) for info in far])
        self._tables.act(after)

    def bury(self, rank: int, obituary: Obituary | None = None, life: int = 0) -> None:
        """A worker is dead, and everything that it sent has been read. ``life``: see `Counting.died`."""
        if self._agent.membership.dynamic:
            self._agent.membership.refresh()  # a sweep must ask every worker that was in the group
        with self._lock:
            if self._tables.closed:
                return
            if self.left is not None:
                self.left += self._tables.held(rank)
            self._counting.joined(*self._agent.membership.ranks())
            self._post.drop(rank)
            actions: list[Action] = []
            for action in self._counting.died(rank, life):
                if obituary is not None and isinstance(action, Send) and isinstance(action.notice, Sweep):
                    actions.append(Send(action.to, obituary))  # so that the receiver need not examine the dead worker
                actions.append(action)
            after = self._tables.apply(actions)
            sweeping = self._counting.sweeping
            if not sweeping:
                self._tables.sweep_ended.notify_all()
        self._tables.act(after)
        if sweeping:
            self._limit_sweep()

    def not_found(self, rank: int, life: int) -> None:
        """A process that has replaced a dead worker counts as dead, too: nothing can reach it."""
        with self._lock:
            after = self._tables.apply(self._counting.died(rank, life) if self._counting.is_dead(rank) else [])
        self._tables.act(after)

    def _limit_sweep(self) -> None:
        """Set a limit to the sweep: a worker that hangs must not keep alive the values that only dead workers held."""
        seconds = self._agent.options.lost_after
        with self._lock:
            if self._sweep_timer is not None or self._tables.closed or seconds is None:
                return
            timer = self._sweep_timer = threading.Timer(seconds, self._give_up_sweep)
            timer.daemon = True
        timer.start()

    def _give_up_sweep(self) -> None:
        with self._lock:
            self._sweep_timer = None
            actions = self._counting.give_up_sweep()
            after = self._tables.apply(actions)
            self._tables.sweep_ended.notify_all()
        if actions:
            _log.warning("a worker did not say whether it has references from a dead one; the values may be freed now")
        self._tables.act(after)

    def close(self) -> None:
        with self._lock:
            timer, self._sweep_timer = self._sweep_timer, None
        if timer is not None:
            timer.cancel()
