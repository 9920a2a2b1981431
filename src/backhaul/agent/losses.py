"""Losses: handles the end of connections and peers, finds the cause, and tells the layers above.

A broken connection says little about the cause. A launcher may report how the processes that it started ended. If such
a report is expected, the worker waits for it for a moment, so that an error can say "killed by SIGKILL" instead of
"broken pipe".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from backhaul.agent.endings import Ending
from backhaul.agent.logs import link_logger
from backhaul.errors import ProtocolError, UnknownWorkerError, WorkerLostError
from backhaul.ids import GUEST, Addresses, WorkerInfo

if TYPE_CHECKING:
    import threading

    from backhaul.agent.agent import Agent
    from backhaul.agent.line import Line
    from backhaul.agent.link import Link
    from backhaul.agent.member import Member
    from backhaul.agent.serving import Served
    from backhaul.wire.decoder import Envelope

_REPLACEMENT_SECONDS = 300.0
"""How long a shutdown waits for a restarted worker. The launcher ends all workers if the restart fails for good."""


class Losses:
    """The losses of one agent. Thread-safe."""

    def __init__(self, agent: Agent, lock: threading.Lock) -> None:
        """``lock`` guards the agent's links."""
        self._agent = agent
        self._lock = lock

    def explain(self, peer: WorkerInfo, lost: WorkerLostError, then: Callable[[WorkerLostError], None]) -> None:
        """Call ``then`` with the loss of a peer and its cause.

        Calls it at once on this thread. If the launcher is about to report, calls it soon on a pool thread instead.
        """
        if not self._agent.endings.expected:  # nearly always
            then(lost)
            return
        process = self.process_of(self._agent.membership.known(peer))
        if process is None or lost.explained:
            then(lost)
        elif self._agent.endings.is_awaited(process):
            try:
                self._agent.pool.run(lambda: then(_because(lost, self._agent.endings.wait(process))))
            except RuntimeError:  # no thread is available
                then(lost)
        else:
            then(_because(lost, self._agent.endings.of(process)))

    def read_news(self) -> None:
        """Lose the workers whose ends the launcher has reported. Called by the watch thread."""
        ended = {ending.process: ending for ending in self._agent.endings.read()}
        if not ended:
            return
        for info in self._agent.members():
            member = self._agent.membership.known(info)
            process = self.process_of(member)
            if member is not None and info != self._agent.me and process in ended:
                self._ended(member, ended[process])

    def _ended(self, member: Member, ending: Ending) -> None:
        """Lose a member whose process has ended."""
        info = member.info
        lost = WorkerLostError(f"worker {info.name!r} is lost: it {ending.ending}", info.name)
        lost.explained = True
        self._agent.presence.lost(info, lost)
        link = self._agent.known_link(info.id)
        if link is not None and (line := link.open) is not None:
            line.lose(lost)
        self._agent.fates.end_later(info, f"it {ending.ending}", member.incarnation)

    def told(self, peer: WorkerInfo, error: WorkerLostError) -> None:
        """Tell the user that a peer is suspected or over, unless this worker is leaving."""
        if not self._agent.leaving:
            self._agent.presence.lost(peer, error)

    def calling_ended(self, line: Line, error: WorkerLostError) -> None:
        self._count(self._agent.link(line.peer))
        self._connection_ended(line, line.peer, error)

    def served_ended(self, served: Served, error: Exception) -> None:
        if served.peer.id == GUEST:
            return
        if not self._agent.trust.believes and isinstance(error, ProtocolError):
            self._agent.penalties.wrong(served.peer.name, time.monotonic())
        peer, name = served.peer, served.peer.name
        how = "has left the group" if served.said_goodbye else f"is lost: {error}"
        lost = WorkerLostError(f"worker {name!r} {how}", name)
        lost.explained = served.said_goodbye
        link = self._agent.link(peer)
        link.ended(served)

        def end(lost: WorkerLostError) -> None:
            self._count(link)
            self._connection_ended(served, peer, lost)

        self.explain(peer, lost, end)

    def _count(self, link: Link) -> None:
        """Count a lost peer if its last line has ended without a goodbye. Also checks the store that it may host."""
        with self._lock:
            lost = link.goes_down() and not self._agent.closed.is_set()
        if lost:
            self._agent.accounts.count_lost(link.peer)
            if self._agent.membership.store_is_renewable:
                with contextlib.suppress(RuntimeError):  # no thread is available; the next use of the store notices
                    self._agent.pool.run(partial(self._agent.membership.check_store, self._agent.closed.wait))

    def _connection_ended(self, connection: object, peer: WorkerInfo, error: WorkerLostError) -> None:
        if self._agent.closed.is_set():
            return
        link_logger(peer.name).debug("= %s", error)
        for callback in list(self._agent.on_connection_ended):
            callback(connection, peer, error)
        self._agent.fates.examine(peer)

    def on_goodbye(self, line: Line, envelope: Envelope) -> None:
        line.said_goodbye = True  # a goodbye may come on either line
        link = self._agent.known_link(line.peer.id)
        if link is not None:
            link.left = True
        self._agent.membership.forget(line.peer.id)
        if not self._agent.leaving and line.peer.id != GUEST:
            gone = WorkerLostError(f"worker {line.peer.name!r} has left the group", line.peer.name)
            self._agent.presence.lost(line.peer, gone)
        if self._agent.closed.is_set():  # this worker is ending all of its lines itself
            return
        if link is not None and (calling := link.open) is not None:
            name = line.peer.name
            left = WorkerLostError(f"worker {name!r} has left the group", name)
            left.explained = True
            self._agent.pool.run(lambda: calling.lose(left))

    def process_of(self, member: Member | None) -> str | None:
        """The process of a member; None if the launcher of this worker cannot know how it ends."""
        if member is None or not self._may_be_told(member.addresses):
            return None
        return member.addresses.process or None

    def _may_be_told(self, addresses: Addresses) -> bool:
        """Whether the launcher of this worker may know how a process ends."""
        here = addresses.host == self._agent.transport.addresses.host
        return self._agent.endings.expected and (here or self._agent.endings.of_all_hosts)

    def how_ended(self, info: WorkerInfo) -> str | None:
        """How the process of a worker ended. None unless the machine, the launcher or the engine says that it ended."""
        addresses = self._agent.link(info).addresses
        if addresses is None:
            try:
                addresses = self._agent.membership.find(info).addresses
            except UnknownWorkerError:
                return "it has left the group"
        ending = self._agent.endings.of(addresses.process)
        if ending is None and not self._agent.transport.is_over(addresses):
            ending = self._agent.ask_engine(addresses)
            if ending is None:
                return None
        elif ending is None:
            told = self._agent.endings.wait(addresses.process) if self._may_be_told(addresses) else None
            ending = told or self._agent.ask_engine(addresses)
        return "its process has ended" if ending is None else f"it {ending.ending}"

    def is_elsewhere(self, info: WorkerInfo) -> bool:
        """Whether a worker is known to be on another machine."""
        member = self._agent.membership.known(info)
        addresses = self._agent.link(info).addresses if member is None else member.addresses
        return addresses is not None and addresses.host != self._agent.transport.addresses.host

    def is_replaced(self, info: WorkerInfo) -> bool:
        """Whether the launcher or engine replaces the process of a dead worker; True once the replacement has come."""
        member = self._agent.membership.find(info)
        process = self.process_of(member)
        ending = self._agent.ask_engine(member.addresses) if process is None else self._agent.endings.wait(process)
        if ending is None or not ending.replaced:
            return False

        def came() -> bool:
            known = self._agent.membership.known(info)
            return self._agent.closed.is_set() or (known is not None and known.incarnation != member.incarnation)

        handling = self._agent.serving.about_to_wait()
        try:
            with self._agent.presence.changed:
                has_come = self._agent.presence.changed.wait_for(came, _REPLACEMENT_SECONDS)
            return has_come and not self._agent.closed.is_set()
        finally:
            if handling:
                self._agent.serving.resumed()


def _because(lost: WorkerLostError, ending: Ending | None) -> WorkerLostError:
    """The loss of a worker, with its cause if the launcher has reported it."""
    if ending is None:
        return lost
    found = WorkerLostError(f"worker {lost.worker!r} is lost: it {ending.ending}", lost.worker)
    found.explained = True
    return found
