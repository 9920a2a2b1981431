"""Line: one channel to a peer, and what is sent on it.

Between two workers there are up to two lines, one that each of them has opened. A line that this worker has opened is a
`calling.Calling`: its requests leave there, and the replies to them come there. A line that the peer has opened is
a `serving.Served`. Apart from that any message may come on either: whoever reads it sees that it is handled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from backhaul.agent.logs import link_logger
from backhaul.agent.observing import Sent
from backhaul.errors import RpcTimeoutError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Goodbye

if TYPE_CHECKING:
    from backhaul.agent.serving import Serving

_SEND_POLL = 0.1


def named(line: Line, envelope: Envelope) -> dict[str, Any]:
    """What observers are told about a message."""
    message = envelope.message
    return {"peer": line.peer.name, "kind": type(message).__name__, "call": getattr(message, "id", 0)}


class Line:
    """See the module's docstring. All methods are thread-safe."""

    def __init__(self, peer: WorkerInfo, channel: Channel, serving: Serving) -> None:
        self.peer = peer
        self.channel = channel
        self.descriptor = channel.fileno()
        """What observers know the line by."""
        self.said_goodbye = False
        self.calls_started = 0  # of the user's, that came here; written by the thread that reads
        self.calls_finished = 0  # guarded by _lock
        self._serving = serving
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._unflushed = False  # guarded by _sending: part of a frame has not left, and goes first

    # What a line that the peer has opened has none of.

    @property
    def calls_sent(self) -> int:
        """Calls of the user's that have left here."""
        return 0

    @property
    def calls_settled(self) -> int:
        """Those that are over."""
        return 0

    @property
    def outstanding(self) -> int:
        """How many requests await their reply."""
        return 0

    def silent(self, now: float) -> float:
        """For how many seconds the peer has not answered a ping; 0 if it owes no answer to one."""
        return 0.0

    @property
    def ended(self) -> bool:
        """The line has ended."""
        raise NotImplementedError

    @property
    def final(self) -> bool:
        """Everything that came or left here is over, so that nothing more is counted."""
        return self.calls_started <= self.calls_finished and self.calls_sent <= self.calls_settled

    def fileno(self) -> int:
        return self.channel.fileno()

    def reply(self, frame: Frame, count: int = 1) -> None:
        """Send one frame, or ``count`` joined ones, now, waiting for room if need be. A peer that is gone loses it."""
        try:
            with self._sending:
                if self._unflushed:
                    self._finish([frame])
                elif not self.channel.write(frame):
                    self._finish([])
        except ChannelClosed:
            link_logger(self.peer.name).debug("= a reply finds nobody")
        observers = self._serving.observers
        if observers.active:
            sent = Sent(peer=self.peer.name, line=self.descriptor, size=frame.size, replies=True, frames=count)
            observers.emit(sent)

    def reply_late(self, frame: Frame) -> None:
        """Send the reply to a call after its request has been handled."""
        self.reply(frame)
        self.count_finished()

    def count_finished(self) -> None:
        """A call that came here is over."""
        with self._lock:
            self.calls_finished += 1
        if self._serving.guard is not None:
            self._serving.guard.finished(self.peer)

    def _finish(self, later: Sequence[Frame]) -> None:
        """Finish the frame that did not fit, and then send these. Holds ``_sending``."""
        handling = self._serving.about_to_wait()
        try:
            self._push()
            for frame in later:
                if not self.channel.write(frame):
                    self._push()
        finally:
            if handling:
                self._serving.resumed()

    def _push(self) -> None:
        """Holds ``_sending``."""
        self._unflushed = True
        while not self.channel.flush():
            self.channel.wait(read=False, write=True, timeout=None)
        self._unflushed = False

    def try_send(self, frame: Frame) -> bool:
        """Send a frame if that can be done without waiting. False if not, or if the channel has ended."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._unflushed:
                return False
            self._unflushed = not self.channel.write(frame)
            return True
        except ChannelClosed:
            return False  # the next read says so, too
        finally:
            self._sending.release()

    def say_goodbye(self) -> None:
        """Tell the peer that this worker leaves, if that can be done without waiting."""
        self.try_send(encode(Goodbye()))

    def shutdown(self) -> None:
        """End the channel now; whoever reads it notices."""
        self.channel.shutdown()

    def close(self) -> None:
        """Free the channel. Nobody reads it any more, and it has been shut down."""
        with self._sending:
            self.channel.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptor, and leave the connection to the parent."""
        self.channel.close()


def push(channel: Channel, patience: float, deadline: float, meanwhile: Callable[[], bool], peer: WorkerInfo) -> None:
    """Finish a frame that did not fit.

    ``meanwhile`` reads what is there and says whether it could; so two workers that send to each other do not both
    wait for room. Raises `RpcTimeoutError` at the deadline, `ChannelClosed` if the peer takes nothing for too long.
    """
    heard = time.monotonic()
    while not channel.flush():
        now = time.monotonic()
        if now - heard > patience:
            raise ChannelClosed(f"it has taken nothing of a message for {patience:g} s")
        if now >= deadline:
            raise RpcTimeoutError(
                f"worker {peer.name!r} did not take all of a message in time: RPC ran for more than set timeout"
            )
        reads = meanwhile()
        if channel.wait(read=reads, write=True, timeout=min(_SEND_POLL, deadline - now)):
            heard = now
