"""Guard: checks the messages of peers that are not fully trusted, before they are handled.

The reading thread asks the guard about each message in the order of arrival, before another thread can take over the
reading. So a request that makes a value is checked, and its creator listed, before any later request that names that
value.

The guard counts the calls of each peer over all connections: if a peer hangs up and comes back, its calls that still
run count.
"""

from __future__ import annotations

import ctypes
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
_ANSWERED = (Call, Fetch)  # not Create: it is answered before its function runs, and is over when the function ends
_WAITS = (AwaitReady, AwaitEnd)
# A peer awaits each stage of a shutdown once, and again after a broken connection.
_MAX_WAITS = 64
_LONGEST_PAUSE = 2.0
# glibc keeps freed memory of this size for each thread that has used some. So dropped replies can add up to what 64
# calls return, unless the memory is given back. None where libc has no such function.
_give_memory_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
_DROPPED_BYTES = 64 << 20


class Guard:
    """Decides for each message of a peer whether it is handled. Thread-safe."""

    def __init__(self, execution: Execution, permissions: Permissions, quotas: Quotas) -> None:
        self._execution = execution
        self._permissions = permissions
        self._quotas = quotas
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._calls: Counter[int] = Counter()  # rank -> number of its calls that are being served
        self._bytes: Counter[int] = Counter()  # rank -> bytes of the requests of these calls, with their tensors
        self._waits: Counter[int] = Counter()
        self._dropped = 0  # bytes of replies that were dropped since memory was last given back

    def __call__(self, line: Line, envelope: Envelope) -> Frame | None:
        """The answer to a refused message; None if the message may be handled.

        If it raises, the caller must end the connection.
        """
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
                raise ProtocolError("a Failed message has references, but this kind of message may not bring any")
        elif isinstance(message, _WAITS):
            with self._lock:
                self._waits[line.peer.id] += 1
                if self._waits[line.peer.id] > _MAX_WAITS:
                    raise ProtocolError(f"the peer has asked more than {_MAX_WAITS} times for the end of the group")
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
                f"calls of this peer with {taken} bytes are under way, and the limit is {room}",
            )

    def pause(self, peer: WorkerInfo) -> float:
        """The seconds to stop reading from a peer that is refused too often; 0 for any other peer."""
        return min(_LONGEST_PAUSE, self._permissions.refusals.wait(peer.name, time.monotonic()))

    def charges(self, message: Any) -> bool:
        """Whether a message counts in the quota until its reply has left."""
        return isinstance(message, _ANSWERED)

    def finished(self, peer: WorkerInfo, count: int = 1) -> None:
        """Note that ``count`` calls of that peer are over."""
        with self._lock:
            self._calls[peer.id] -= count

    def let_go(self, peer: WorkerInfo, size: int) -> None:
        """Note that a call of that peer has run, so that the ``size`` bytes of its request are free."""
        with self._lock:
            self._bytes[peer.id] -= size

    def refuse_reply(self, line: Line, frame: Frame, waiting: int) -> Frame:
        """The failure to send instead of a reply, because ``waiting`` bytes for this peer are not sent yet."""
        (message, size), *_ = messages(frame)
        with self._lock:
            self._dropped += size
            gives_back = self._dropped >= _DROPPED_BYTES
            if gives_back:
                self._dropped = 0
        if gives_back and _give_memory_back is not None:
            _give_memory_back(0)
        error = self._permissions.over_quota(
            line.peer.name,
            f"a reply of {size} bytes",
            f"{waiting} bytes of replies wait for this peer to read them (option max_unsent_bytes)",
        )
        if refs := getattr(message, "refs", ()):
            self._execution.traffic.stayed(refs)
        return self._execution.failure(message.id, error, line)
