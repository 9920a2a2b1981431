"""Routes: the links with all peers, and the line on which a message leaves for a worker.

A link's line for requests is opened on first use (`connecting`). If another process has replaced the worker, the route
leads to its successor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from backhaul.agent.calling import Calling
from backhaul.agent.link import Link
from backhaul.agent.reading import Reading
from backhaul.errors import ForkedError, NotInitializedError, WorkerLostError
from backhaul.ids import WorkerInfo

if TYPE_CHECKING:
    from backhaul.agent.connecting import Connecting
    from backhaul.agent.membership import Membership
    from backhaul.agent.serving import Serving

_CUT_OFF_SECONDS = 2.0

To = str | int | WorkerInfo


class Routes:
    """One worker's links with its peers. All methods are thread-safe."""

    def __init__(
        self, me: WorkerInfo, membership: Membership, connecting: Connecting, serving: Serving, lock: threading.Lock
    ) -> None:
        """``lock`` guards the links, and what else happens when a connection begins or ends."""
        self.me = me
        self.membership = membership
        self.connecting = connecting
        self.serving = serving
        self.closed = threading.Event()
        self.forked = False
        self._links: dict[int, Link] = {}
        self._routes: dict[To, Link] = {}
        self._lock = lock

    def _route(self, to: To, deadline: float, *, suspected: bool = False) -> Calling:
        """The line for requests to a worker, opened if necessary. ``suspected``: see `insist`."""
        link = self._routes.get(to)
        if link is not None and (line := link.open) is not None and not self.forked:
            return line
        self.require_usable()
        member = self.membership.find(to)
        try:
            line = self.connecting.line_to(member, deadline, suspected=suspected)
        except WorkerLostError:
            # Another process may have replaced the worker since this process last heard of it.
            successor = self.membership.successor(member)
            if successor is None:
                raise
            member = successor
            line = self.connecting.line_to(member, deadline)
        self._routes[to] = self._links[member.id]
        return line

    def require_usable(self) -> None:
        """Raise `ForkedError` or `NotInitializedError` if this agent cannot make calls."""
        if self.forked:
            raise ForkedError(
                f"this process was forked from worker {self.me.name!r} and cannot use its connections; call init_rpc "
                "in the child with a name of its own, or start processes with the 'spawn' method"
            )
        if self.closed.is_set():
            raise NotInitializedError(f"worker {self.me.name!r} has been shut down; call init_rpc again")

    def link(self, peer: WorkerInfo) -> Link:
        """The link with a peer, created if necessary. The same rank under another name is another peer."""
        with self._lock:
            link = self._links.get(peer.id)
            if link is None or link.peer != peer:
                link = self._links[peer.id] = Link(peer)
            return link

    def known_link(self, rank: int) -> Link | None:
        """The link with the peer of this rank, if there is one."""
        return self._links.get(rank)

    def calling(self) -> list[Calling]:
        """The lines that this worker has opened and not lost."""
        return [line for link in list(self._links.values()) if (line := link.open) is not None]

    def _lines_to(self, ranks: Iterable[int]) -> list[Reading]:
        """The open lines to these workers."""
        links = map(self._links.get, ranks)
        return [line for link in links if link is not None and (line := link.open) is not None]

    def is_connected(self, rank: int) -> bool:
        """Whether messages to the worker of this rank can leave without a new connection."""
        link = self._links.get(rank)
        return link is not None and link.open is not None

    def connected(self, rank: int) -> WorkerInfo | None:
        """The worker of this rank if messages to it can leave without a new connection, else None."""
        link = self._links.get(rank)
        return None if link is None or link.open is None else link.peer

    def reach(self, to: To, seconds: float) -> WorkerInfo:
        """Open the line for requests to a worker, if there is none. Returns the worker that answered."""
        return self._route(to, time.monotonic() + seconds).peer

    def cut_off(self, rank: int) -> None:
        """End the connections with a worker that counts as dead. Returns when they have been read to the end."""
        link = self._links.get(rank)
        name = "" if link is None else link.peer.name
        self._end_lines(rank, WorkerLostError(f"worker {name!r} is lost: it does not answer", name))

    def _end_lines(self, rank: int, lost: WorkerLostError) -> None:
        """End the connections with a worker. Returns when they have been read to the end."""
        link = self._links.get(rank)
        if link is not None and (line := link.open) is not None:
            line.lose(lost)
        for served in self.serving.lines_of(rank):
            served.shutdown()
            served.over.wait(_CUT_OFF_SECONDS)
