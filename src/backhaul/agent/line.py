"""Line: one channel to a peer, and the frames that are sent on it.

Two workers share up to two lines, because each of them may open one. A line that this worker has opened is a
`calling.Calling`: this worker's requests leave on it, and their replies come back on it. A line that the peer has
opened is a `serving.Served`. Any other message may come on either line, and the thread that reads the message has it
handled.

If the channel accepts a frame at once, the sending thread writes it. A frame that does not fit waits in the `outbox`,
and one thread *pumps*: it writes whenever there is room. No thread holds a lock while it waits to send. So a large
message does not delay a small one, and deadlines hold whatever else is being sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from backhaul.agent.activity import Description, Wait
from backhaul.agent.logs import link_logger
from backhaul.agent.observing import Sent
from backhaul.agent.outbox import Departure, Outbox
from backhaul.agent.waiting import Waiter
from backhaul.errors import ProtocolError, RpcTimeoutError
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.lanes import SMALL, has_calls, may_pass
from backhaul.wire.messages import Goodbye

if TYPE_CHECKING:
    from backhaul.agent.serving import Admission, Serving

_SEND_POLL = 0.1
_SLICES_AT_ONCE = 4  # after these, threads that wait to send get their turn


def named(line: Line, envelope: Envelope) -> dict[str, Any]:
    """The fields that name a message in observers' events."""
    message = envelope.message
    return {"peer": line.peer.name, "kind": type(message).__name__, "call": getattr(message, "id", 0)}


class Stalled(ChannelClosed):
    """The peer accepts none of the bytes that are sent."""


class Line:
    """See the module's docstring. All methods are thread-safe."""

    def __init__(self, peer: WorkerInfo, channel: Channel, serving: Serving) -> None:
        self.peer = peer
        self.channel = channel
        self.descriptor = channel.fileno()
        """Identifies the line to observers."""
        self.said_goodbye = False
        self.calls_started = 0  # user calls received here; written by the reading thread
        self.calls_finished = 0  # guarded by _lock
        self.offered = 0
        """Bytes of replies that count already, because a thread is about to write them. Only `Serving` changes it."""
        self._serving = serving
        self._observers = serving.observers
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        # Pumping threads take _turn before _sending, and so do all others while frames wait. This makes _sending fair.
        self._turn = threading.Lock()
        # Guarded by _sending:
        self._unflushed = False  # part of a frame has not left, and must leave first
        self._fills = False  # that part waited for a device when a thread last wrote
        self._outbox: Outbox[Waiter] = Outbox(serving.max_unsent_bytes)
        self._dead: str | None = None  # why sending has ended; None while it works

    # Defaults for a line that the peer has opened: no requests leave on it.

    @property
    def calls_sent(self) -> int:
        """How many user calls have left on this line."""
        return 0

    @property
    def calls_settled(self) -> int:
        """How many of those calls are over."""
        return 0

    @property
    def outstanding(self) -> int:
        """How many requests await their reply."""
        return 0

    def silent(self, now: float) -> float:
        """For how many seconds a ping has gone unanswered; 0 if none has."""
        return 0.0

    def waits(self) -> list[tuple[int, Wait]]:
        """The threads that wait for replies on this line, and what each one waits for."""
        return []

    @property
    def ended(self) -> bool:
        """Whether the line has ended."""
        raise NotImplementedError

    @property
    def broken(self) -> bool:
        """Whether nothing more leaves on this line. True before the upper layers are told of its end."""
        return self._dead is not None

    @property
    def final(self) -> bool:
        """Whether all calls on this line are over, so that its counts no longer change."""
        return self.calls_started <= self.calls_finished and self.calls_sent <= self.calls_settled

    def fileno(self) -> int:
        return self.channel.fileno()

    # Sending. No thread waits while it holds ``_sending``.

    def reply(self, frame: Frame, count: int = 1, releases: int = 0, *, late: bool = False) -> None:
        """Send one frame, or ``count`` joined frames. Drops the frame if the peer is gone.

        Waits until the frame has left if it refers to memory that may change, or if the outbox is full.
        ``releases``: how many calls to release from the peer's quota when the frame has left. ``late``: see
        `send_late`.
        """
        afterwards = None
        offered = 0
        if releases and (guard := self._serving.guard) is not None:
            afterwards = partial(guard.finished, self.peer, releases)
            if frame.keep:
                frame, offered = self._offer(frame, guard)
        departure = None
        try:
            if self._unflushed:
                with self._turn:
                    self._sending.acquire()
            else:
                self._sending.acquire()
            try:
                if self._unflushed or not self.channel.write(frame):
                    departure = self._depart(frame, waits=not late, copies=late, afterwards=afterwards)
                    duty = self._outbox.take_duty()
            finally:
                self._sending.release()
                if offered:
                    self._serving.withdraw(self, offered)
            if departure is not None:
                self._see_off(departure, duty, math.inf)
            elif afterwards is not None:
                afterwards()
        except (ChannelClosed, ProtocolError) as error:
            link_logger(self.peer.name).debug("= a reply is dropped: the peer is gone")
            if departure is not None:
                self._broke(error)
            elif afterwards is not None:
                afterwards()
        if self._observers:
            sent = Sent(peer=self.peer.name, line=self.descriptor, size=frame.size, replies=True, frames=count)
            self._observers.emit(sent)

    def reply_late(self, frame: Frame, size: int = 0) -> None:
        """Send the reply to a call whose request, of ``size`` bytes, was handled earlier. Never waits."""
        if (guard := self._serving.guard) is not None:  # first: the peer may call again as soon as the reply arrives
            guard.let_go(self.peer, size)
        self.send_late(frame, releases=1)
        self.count_finished(releases=False)

    def send_late(self, frame: Frame, releases: int = 0) -> None:
        """`reply` without waiting: what does not fit is copied and leaves later. For a thread that others wait for."""
        self.reply(frame, 1, releases, late=True)

    def count_finished(self, size: int = 0, *, releases: bool = True) -> None:
        """Note that a call received in a request of ``size`` bytes is over.

        Without ``releases`` the call counts against the peer's quota until its reply has left.
        """
        with self._lock:
            self.calls_finished += 1
        if (guard := self._serving.guard) is not None:
            guard.let_go(self.peer, size)
            if releases:
                guard.finished(self.peer)

    def try_send(self, frame: Frame) -> bool:
        """Send a small frame without waiting, ahead of large frames. False if the channel has ended."""
        try:
            with self._turn, self._sending:
                departure = self._put(frame, waits=False)
                duty = departure is not None and self._outbox.take_duty()
        except ChannelClosed:
            return False  # the next read notices it, too
        if duty:
            self._pump_elsewhere()
        return True

    def send_held(self) -> bool:
        """Send the held frames without waiting. False if some bytes have not left and no thread is sending them."""
        return self.send_rest()

    def send_rest(self) -> bool:
        """Make sure that a thread sends the unsent bytes, without waiting. False if no thread is available."""
        if not self._unflushed:
            return True
        with self._sending:
            duty = self._unflushed and self._dead is None and self._outbox.take_duty()
        return not duty or self._pump_elsewhere()

    def await_room(self) -> None:
        """Wait until the outbox is no longer full. The peer's next request must not begin before."""
        while self._outbox.full:
            waiter = Waiter()
            with self._sending:
                waits = self._outbox.await_room(waiter)
            if waits:
                with self._serving.activity.waits(partial(self._describe_room, self._outbox.waiting, math.inf)):
                    waiter.sleep(math.inf)

    @property
    def retains(self) -> bool:
        """Whether a frame, or a part of one, has not left."""
        return self._unflushed

    @property
    def unsent(self) -> int:
        """How many bytes wait behind the frame under way."""
        return self._outbox.waiting

    @property
    def under_way(self) -> int:
        """The size in bytes of the frame that is partly sent; 0 if there is none."""
        departure = self._outbox.under_way
        return 0 if departure is None else departure.frame.size

    def _offer(self, frame: Frame, guard: Admission) -> tuple[Frame, int]:
        """The reply to a call, and its size, which counts until `Serving.withdraw`.

        If too many reply bytes to this peer are unsent, a refusal that does not count.
        """
        waiting = self._serving.offer(self, frame.size)
        return (guard.refuse_reply(self, frame, waiting), 0) if waiting else (frame, frame.size)

    def _put(self, frame: Frame, *, waits: bool) -> Departure | None:
        """Write a frame, or queue it behind others. None if it has left. The caller holds ``_sending``."""
        if not self._unflushed and self.channel.write(frame):
            return None
        return self._depart(frame, waits=waits)

    def _depart(
        self,
        frame: Frame,
        *,
        waits: bool,
        stays: bool = False,
        copies: bool = False,
        afterwards: Callable[[], None] | None = None,
    ) -> Departure:
        """Queue a frame that the channel has not accepted, or not completely. The caller holds ``_sending``.

        ``waits``: the sending thread can wait for the frame. ``stays``: that thread has nothing else to do until the
        frame has left. ``copies``: the thread cannot wait, so the frame is copied; if memory is short, or the frame is
        filling, the thread waits after all.
        """
        if self._dead is not None:
            raise ChannelClosed(self._dead)
        begun = not self._unflushed
        if copies and frame.holds and frame.filling is not None:
            waits = True
        elif copies and frame.holds:
            try:
                if begun:
                    self.channel.copy_unsent()
                else:
                    frame = _copy(frame)
            except MemoryError:
                waits = True
        passes = not begun and may_pass(frame)
        departure = Departure(frame, passes, has_calls(frame), afterwards=afterwards)
        if begun:
            self._unflushed = True
            self._outbox.begin(departure)
            waits = waits and (frame.holds or (stays and frame.filling is not None))
        else:
            waits = self._outbox.add(departure) and waits
        if waits:
            departure.waiter = Waiter()
        return departure

    def _see_off(self, departure: Departure, duty: bool, deadline: float) -> None:
        """Wait for a frame if necessary. ``duty``: the calling thread must pump, or have another thread pump.

        Raises `RpcTimeoutError` at the deadline, and `ChannelClosed` if the channel ends.
        """
        if departure.waiter is None:
            if duty:
                self._pump_elsewhere()
            return
        try:
            handling = self._serving.about_to_wait()
        except RuntimeError:  # no thread is available to take over this thread's lead
            handling = False
        try:
            departure.pumps = departure.pumps or duty
            with self._serving.activity.waits(partial(self._describe_room, departure.frame.size, deadline)):
                self._await_departure(departure, departure.waiter, deadline)
        except BaseException:
            self._give_up(departure)  # after an interrupt, another thread must pump
            raise
        finally:
            if handling:
                self._serving.resumed()

    def _await_departure(self, departure: Departure, waiter: Waiter, deadline: float) -> None:
        while not departure.left:
            if departure.lost:
                raise ChannelClosed(self._dead or "the connection ended")
            if departure.pumps:
                in_time = self._pump(departure, deadline)
            else:
                in_time = waiter.sleep(max(0.0, deadline - time.monotonic()))
            if not in_time and self._give_up(departure):
                what = (
                    f"a GPU has not computed all tensors of a message to worker {self.peer.name!r} in time"
                    if self._fills
                    else f"worker {self.peer.name!r} did not take all of a message in time"
                )
                raise RpcTimeoutError(f"{what}: RPC ran for more than set timeout")

    def _describe_room(self, size: int, deadline: float) -> Description:
        """Describes the wait of a thread whose message does not fit."""
        return {"kind": "room", "peer": self.peer.name, "bytes": size, "deadline": deadline}

    def _give_up(self, departure: Departure) -> bool:
        """Stop waiting for a frame. A frame that has begun to leave still leaves: the peer needs all of it.

        False if the frame has left, is lost, or was given up before.
        """
        with self._sending:
            if departure.left or departure.lost or departure.waiter is None:
                return False
            self._outbox.give_up(departure)
            pumps, departure.pumps = departure.pumps, False
        if pumps:
            self._stop_pumping(departure)
        return True

    # Pumping: writing whenever there is room.

    def _pump(self, departure: Departure | None, deadline: float) -> bool:
        """Write until the given frame has left, or all frames if None. The caller has the duty to pump.

        Returns False at the deadline; the caller then still has the duty. Meanwhile `_read_meanwhile` reads, so two
        workers that send to each other do not both wait for room. Raises `ChannelClosed` if the channel ends or the
        peer accepts nothing for too long.
        """
        moved = time.monotonic()
        arrived = self.channel.way().arrived
        try:
            while True:
                with self._turn:
                    self._sending.acquire()
                left: list[Departure] = []
                try:
                    if self._dead is not None:
                        raise ChannelClosed(self._dead)
                    progress = self._advance(left)
                    room = self._outbox.take_room()
                finally:
                    self._sending.release()
                    _tell(left)
                for waiter in room:
                    waiter.wake()
                if progress == "done":
                    return True
                if departure is not None and departure.left:
                    self._stop_pumping(departure)
                    return True
                now = time.monotonic()
                self._fills = self.channel.fills
                if now >= deadline:
                    return False
                if progress == "room":
                    moved = now
                    continue
                if self._fills:  # the peer is not to blame
                    moved = now
                if now - moved > self._serving.patience:
                    way = self.channel.way()
                    if way.arrived <= arrived:
                        raise Stalled(f"it has taken nothing of a message for {self._serving.patience:g} s")
                    arrived, moved = way.arrived, now
                reads = self._read_meanwhile()
                if self.channel.wait(read=reads, write=True, timeout=min(_SEND_POLL, deadline - now)):
                    moved = now
        except Exception as error:
            self._end_sending(str(error))
            raise

    def _advance(self, left: list[Departure]) -> Literal["done", "room", "full"]:
        """Write without waiting. Appends each frame that has left to ``left``. The caller holds ``_sending``."""
        channel, outbox = self.channel, self._outbox
        slices = interjected = 0
        out = not channel.between and channel.flush()
        while True:
            if out:
                if (done := outbox.left()) is not None:
                    left.append(done)
                following = outbox.next()
                if following is None:
                    self._unflushed = outbox.pumped = False
                    return "done"
                out = channel.write(following.frame)
            elif channel.between:
                if (done := outbox.passed()) is not None:
                    left.append(done)
                if interjected < SMALL and (small := outbox.next_small()) is not None:
                    interjected += small.frame.size
                    channel.interject(small.frame)
                elif channel.awaits:
                    return "full"
                elif slices == _SLICES_AT_ONCE:
                    return "room"
                else:
                    slices += 1
                    interjected = 0
                    out = channel.flush()
            else:
                return "full"

    def _stop_pumping(self, departure: Departure) -> None:
        """Stop pumping in this thread. Another thread takes over if anything is left to send."""
        with self._sending:
            if not self._unflushed or self._dead is not None:
                return
            successor = self._outbox.hand_over(departure)
            waiter = None if successor is None else successor.waiter
        if waiter is None:
            self._pump_elsewhere()
        else:
            waiter.wake()

    def _pump_elsewhere(self) -> bool:
        """Pass the duty to pump to the pool. False if no thread is available: the watch thread then tries again."""
        try:
            self._serving.pool.run(self._pump_alone)
        except RuntimeError:  # no thread is available
            with self._sending:
                self._outbox.pumped = False
            self._serving.watch.remind(self)
            return False
        return True

    def _pump_alone(self) -> None:
        try:
            self._pump(None, math.inf)
        except (ChannelClosed, ProtocolError) as error:
            self._broke(error)

    def _read_meanwhile(self) -> bool:
        """Read what has arrived while this thread waits for room. False if this thread must not read."""
        return False

    def _broke(self, error: Exception) -> None:
        """Handle a failure to send that no waiting thread can report."""
        raise NotImplementedError

    def _end_sending(self, reason: str) -> None:
        """Stop sending for good: the channel has ended, perhaps in the middle of a frame. Fails all queued frames."""
        with self._sending:
            self._dead = self._dead or reason
            self._unflushed = True
            lost = self._outbox.lose()
            room = self._outbox.take_room()
        _tell(lost)
        for waiter in room:
            waiter.wake()

    # The end.

    def say_goodbye(self) -> None:
        """Tell the peer that this worker leaves. Never waits, and ignores a channel that has ended."""
        self.try_send(encode(Goodbye()))

    def shutdown(self) -> None:
        """End the channel now. The reading thread notices."""
        self.channel.shutdown()

    def close(self) -> None:
        """Free the channel. It must be shut down, and no thread may still read it."""
        self._end_sending("the connection ended")
        with self._sending:
            self.channel.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptor without ending the parent's connection."""
        self.channel.close()


def _tell(departures: list[Departure]) -> None:
    """Wake the threads that wait for departures that have left or are lost, and run ``afterwards``."""
    for departure in departures:
        if departure.waiter is not None:
            departure.waiter.wake()
        if departure.afterwards is not None:
            departure.afterwards()


def _copy(frame: Frame) -> Frame:
    """A copy of the frame that owns its memory."""
    if not frame.holds:
        return frame
    return Frame([bytes(piece) for piece in frame.pieces], frame.size, frame.keep, frame.places)
