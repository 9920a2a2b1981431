"""Guard: judges what peers ask for before it is handled, where they are not trusted with everything.

The reading thread asks it about each message, in the order of reading and before it can lose the lead: a request that
makes a value is judged, and its maker listed, before any later request that names that value.

It counts the calls of each peer, over all connections: a peer that hangs up and comes back has not finished those that
still run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from backhaul.errors import ProtocolError, RefusedError
from backhaul.ids import WorkerInfo
from backhaul.trust.permissions import Permissions
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.lanes import messages
from backhaul.wire.messages import AwaitEnd, AwaitReady, Call, Create, Failed, Fetch

if TYPE_CHECKING:
    from backhaul.agent.execution import Execution
    from backhaul.agent.line import Line
    from backhaul.options import Quotas

_REQUESTS = (Call, Create, Fetch)
_ANSWERED = (Call, Fetch)  # a creation is answered before it runs, and is over when it has run
_WAITS = (AwaitReady, AwaitEnd)
# Each stage of a shutdown is awaited once, and again after a broken connection.
_MAX_WAITS = 64
_LONGEST_PAUSE = 2.0


class Guard:
    """Thread-safe."""

    def __init__(self, execution: Execution, permissions: Permissions, quotas: Quotas) -> None:
        self._execution = execution
        self._permissions = permissions
        self._quotas = quotas
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._calls: Counter[int] = Counter()  # by rank: how many are being served
        self._bytes: Counter[int] = Counter()  # of the requests that these are, tensors included
        self._waits: Counter[int] = Counter()

    def __call__(self, line: Line, envelope: Envelope) -> Frame | None:
        """What to answer instead of handling a message, if it is refused. Raises if the connection is to end."""
        message = envelope.message
        if isinstance(message, _REQUESTS):
            try:
                size = 0 if isinstance(message, Fetch) else envelope.size
                self._begin(line.peer, size)
                try:
                    self._execution.traffic.admit(message, line.peer)
                except BaseException:
                    self.finished(line.peer)
                    self.let_go(line.peer, size)
                    raise
            except RefusedError as error:
                if refs := getattr(message, "refs", ()):
                    self._execution.traffic.decline(refs, line.peer)
                return self._execution.failure(message.id, error, line)
        elif isinstance(message, Failed):
            if message.refs:
                raise ProtocolError("references in a message that has none")
        elif isinstance(message, _WAITS):
            with self._lock:
                self._waits[line.peer.id] += 1
                if self._waits[line.peer.id] > _MAX_WAITS:
                    raise ProtocolError(f"it has asked {_MAX_WAITS} times for the end of the group")
        return None

    def _begin(self, peer: WorkerInfo, size: int) -> None:
        limit, room = self._quotas.calls, self._quotas.request_bytes
        with self._lock:
            full = self._calls[peer.id] >= limit
            taken = self._bytes[peer.id]
            large = taken + size > room
            if not (full or large):
                self._calls[peer.id] += 1
                self._bytes[peer.id] += size
        if full:
            raise self._permissions.over_quota(peer.name, "a call", f"{limit} calls of this peer are under way")
        if large:
            raise self._permissions.over_quota(
                peer.name,
                f"a call of {size} bytes",
                f"calls of this peer with {taken} bytes are under way, and {room} may be",
            )

    def pause(self, peer: WorkerInfo) -> float:
        """How many seconds not to read from a peer, since it is refused all the time."""
        return min(_LONGEST_PAUSE, self._permissions.refusals.wait(peer.name, time.monotonic()))

    def charges(self, message: Any) -> bool:
        """Whether a message counts in the quota until its reply has left."""
        return isinstance(message, _ANSWERED)

    def finished(self, peer: WorkerInfo, count: int = 1) -> None:
        """``count`` calls of that peer are over."""
        with self._lock:
            self._calls[peer.id] -= count

    def let_go(self, peer: WorkerInfo, size: int) -> None:
        """A call of that peer, whose request had that many bytes, has run."""
        with self._lock:
            self._bytes[peer.id] -= size

    def refuse_reply(self, line: Line, frame: Frame, waiting: int) -> Frame:
        """What to answer instead of a reply, because that many bytes for this peer wait to be sent."""
        (message, size), *_ = messages(frame)
        error = self._permissions.over_quota(
            line.peer.name,
            f"a reply of {size} bytes",
            f"{waiting} bytes of replies wait for this peer to read them (option max_unsent_bytes)",
        )
        if refs := getattr(message, "refs", ()):
            self._execution.traffic.stayed(refs)
        return self._execution.failure(message.id, error, line)
