"""Leading: one thread at a time reads some served lines, and runs their requests itself.

Theory of operation
-------------------
A `Lead` is a set of lines and the role of leading them. The **leader** is a pool thread: it waits for bytes on all
lines of the lead, reads, and runs each request on the spot, so a short request costs no hand-over between threads. Two
leaders would compete for the interpreter, and for the right to stay awake. So all lines of a worker share one lead, as
long as their requests are short.

A request may be long, though, and must not keep other peers waiting:

- **A request that waits for a call of its own** keeps the lead at first. Its thread waits for the reply and for the
  other lines at once, and passes the lead on when a request arrives (`Serving.about_to_wait`). Most replies arrive
  first, and then no other thread was woken.
- **A request that keeps the leader busy** loses the lead at a tick of the watch thread (`Serving.tick`).
- **A line whose messages take long on average** gets a lead of its own (`Pace`): its requests then run beside those of
  other peers, if there are processors for them. It comes back when its messages are short again.
- **A line whose peer does not read its replies** gets a lead of its own as well, since its next request must wait.

If peers are not fully trusted, every line has a lead of its own from the beginning: no peer can delay another, and the
guard may slow one down.

The old leader finishes its request alone, replies, and returns to the pool.

Replies to requests that came in one read leave in one write. They are held while more requests of that line are ready,
but not for long: the peer could go on with the first one meanwhile. A thread that takes over the lead sends them first.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from backhaul.agent.line import named
from backhaul.agent.observing import Began, Drained, Encoded, Ended, Read
from backhaul.agent.role import Role
from backhaul.transport.awake import Rhythm, poll_awake
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, is_failure, join
from backhaul.wire.messages import Call, Create, Fetch

if TYPE_CHECKING:
    from backhaul.agent.serving import Served, Serving

_MAX_HELD = 64
_MAX_HELD_BYTES = 256 * 1024
_MAX_HELD_SECONDS = 0.001
_REQUESTS = (Call, Create, Fetch)

SLOW = 0.0005
"""The number of seconds from which a message counts as long.

Waking another thread, and passing the interpreter from thread to thread, costs 0.05 to 0.1 ms. Longer messages gain
from running side by side: the time that they spend outside the interpreter. Most of a short message is spent in it,
however many processors there are, and lines that are led apart only take it from each other.
"""


class Pace:
    """How long the messages of a line keep its leader, on average. Pure.

    The mean covers the last few messages, so a single long one, on a busy machine, does not make the line slow.
    """

    MEMORY = 4

    __slots__ = ("_long", "_mean", "_short", "_spent")

    def __init__(self, slow: float) -> None:
        """``slow``: the mean from which the line counts as slow. Below 0.4 times that it is quick again."""
        self._long = slow
        self._short = 0.4 * slow
        self._mean = 0.0
        self._spent = 0.0

    def spent(self, seconds: float) -> None:
        """Note time for a message that is not over, such as for reading a part of it."""
        self._spent += seconds

    def handled(self, seconds: float) -> None:
        """Note the last part of the time for a message."""
        self._mean += (self._spent + seconds - self._mean) / self.MEMORY
        self._spent = 0.0

    @property
    def slow(self) -> bool:
        """Whether the line is slow. A message that is only partly read counts, too."""
        return self._mean > self._long or self._spent > self.MEMORY * self._long

    @property
    def quick(self) -> bool:
        return self._mean < self._short and self._spent < self._short


class Lead:
    """Some lines, and the role of leading them. See the module's docstring. Thread-safe."""

    def __init__(self, serving: Serving, most_awake: float, alone: Served | None = None) -> None:
        """``alone``: the only line that this lead will ever have. Otherwise it gets lines by `adopt`."""
        self._serving = serving
        self._alone = alone
        self._rhythm = Rhythm()
        self._most_awake = most_awake
        self._lock = threading.Lock()
        # Guarded by _lock, except for what only the leader uses:
        self._role: Role[Any] = Role()
        self._lines: dict[int, Served] = {} if alone is None else {alone.descriptor: alone}
        self._epoll: select.epoll | None = None  # exists while a shared lead has lines
        self._came: deque[int] = deque()  # descriptors of lines that can be read; the leader's
        self._out: list[Frame] = []  # held replies of the line at hand
        self._out_bytes = 0
        self._out_since = 0.0  # when the first of them was made
        self._out_charged = 0  # how many of them count against the quota
        self._ahead: Envelope | None = None  # the next message of the line at hand, if it has been taken already
        self._problem: Exception | None = None  # raised by taking it
        self._runner = 0  # the leader's thread
        self.line = alone
        """The line at hand: the leader handles its messages, or did so last."""
        self.began = 0.0
        """When the leader began, or resumed, its request."""
        self.waits = False
        """The leader's request waits for a call of its own. Its thread watches the lines, so no tick has to help."""

    @property
    def turn(self) -> int:
        """The number of requests begun so far."""
        return self._role.turn

    @property
    def busy(self) -> bool:
        """Whether the leader is running a request."""
        return self._role.busy

    def fileno(self) -> int:
        """A descriptor that is readable if a line is; -1 if there is none. For the leader."""
        return -1 if self._epoll is None else self._epoll.fileno()

    def adopt(self, line: Served) -> None:
        """Add a line, and lead it from now on."""
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
            self._lines[line.descriptor] = line
            self._epoll.register(line.descriptor, select.EPOLLIN)
            token = self._role.take()
        if token:
            try:
                self._serving.pool.run(lambda: self._lead(token))
            except BaseException:
                with self._lock:
                    self._role.release(token)
                self._forget(line)
                raise

    def start(self) -> None:
        """Lead the only line of this lead on a pool thread, beginning with what has been read from it."""
        with self._lock:
            token = self._role.take()
        if token:
            self._serving.pool.run(lambda: self._lead(token, self._alone))

    def abandon(self) -> None:
        """In a forked child: close the descriptor."""
        if self._epoll is not None:
            self._epoll.close()

    # The leader.

    def _lead(self, token: int, line: Served | None = None) -> None:
        """Read and run requests until the lead is passed on, or no line is left. Begins with a line that was read."""
        self._runner = threading.get_ident()
        while True:
            if line is None:
                line = self._await(token)
                if line is None:
                    return
            try:
                leads = self._serve(line, token)
            except Exception as error:
                leads = self._failed(line, token, error)
            if not leads:
                return
            line = None

    def _await(self, token: int) -> Served | None:
        """Wait for bytes, and read them. Returns the line that was read; None if there is no line left."""
        return self._await_any(token) if self._alone is None else self._await_one(self._alone, token)

    def _await_any(self, token: int) -> Served | None:
        while True:
            while self._came:
                line = self._lines.get(self._came.popleft())
                if line is not None and self._read(line, token, 0):
                    return line
            with self._lock:
                epoll, over = self._epoll, not self._lines
                if over:  # a new line makes a new epoll, and finds a new leader
                    self._epoll = None
                    self._role.release(token)
            if epoll is None:
                return None
            if over:
                epoll.close()
                return None
            # No timeout is given, because the unit differs: seconds for epoll, milliseconds for poll.
            ready = poll_awake(epoll.poll, self._rhythm, None, self._most_awake)
            self._came.extend(descriptor for descriptor, _ in ready)

    def _await_one(self, line: Served, token: int) -> Served | None:
        serving = self._serving
        if serving.guard is not None:
            if pause := serving.guard.pause(line.peer):
                time.sleep(pause)
        elif line.pace.quick and not line.is_full and self._give_back(line):
            return None
        while not self._read(line, token, None):
            if not self._lines:
                return None
        return line

    def _give_back(self, line: Served) -> bool:
        """Have the only line of this lead led together with others. False if no thread is available for that."""
        try:
            self._serving.lead_together(line)
        except RuntimeError:
            line.lead = self
            return False
        with self._lock:
            self._role.end()
        self._serving.active.discard(self)
        return True

    def _read(self, line: Served, token: int, timeout: float | None) -> bool:
        """Read a line. False if nothing came, or if the line has ended, so that this lead no longer has it."""
        start = time.monotonic()
        try:
            came = line.channel.read(timeout)
        except Exception as error:
            self._failed(line, token, error)
            return False
        if timeout == 0:
            line.pace.spent(time.monotonic() - start)
        if came and self._serving.observers:
            self._serving.observers.emit(Read(peer=line.peer.name, line=line.descriptor))
        return came

    def _serve(self, line: Served, token: int) -> bool:
        """Run the requests that have been read from a line. False if the lead has been passed on."""
        serving = self._serving
        state = serving.state
        watch = serving.watch
        channel = line.channel
        role = self._role
        handle = serving.handle
        observers = serving.observers
        guard = serving.guard
        shared = self._alone is None
        charged = 0
        lead = (self, token)
        peer = line.peer
        note = state.note
        self.line = line
        while True:
            if self._ahead is not None or self._problem is not None:
                envelope = self._take_ahead()
            elif line.is_full and shared and self._part(line, token):
                return True
            else:
                envelope = channel.next()
            if envelope is None:
                break
            if line.is_full and isinstance(envelope.message, _REQUESTS) and not shared:
                self._send_held(token)
                line.await_room()
            if guard is not None:
                refused = guard(line, envelope)
                if refused is not None:
                    line.reply(refused)
                    continue
                charged = guard.charges(envelope.message)
            elif getattr(envelope.message, "refs", ()):
                # Before this thread can lose the lead: the next message must not overtake these references.
                serving.arriving(envelope.message.refs, peer)
            # First: a tick must not take a request that has just begun for an old one.
            began = self.began = time.monotonic()
            role.begin()
            serving.active.add(self)
            state.lead = lead
            state.handling = True
            if watch.asleep:
                watch.wake()
            note.handles = (peer, envelope, began)
            frame = self._handle_observed(line, envelope) if observers else handle(line, envelope)
            note.handles = None
            if frame is not None and frame.keep:
                # The frame refers to the user's own tensors, which this thread's next request may change. So the
                # frame leaves first. If it must wait for room, this thread passes on the lead.
                self._send_held(token)
                line.reply(frame, releases=charged)
                frame = None
            state.handling = False
            state.lead = None
            now = time.monotonic()
            with self._lock:
                leading = role.finish(token)
                if leading and frame is not None:
                    if not self._out:
                        self._out_since = now
                    self._out.append(frame)
                    self._out_bytes += frame.size
                    self._out_charged += charged
            if leading:
                line.pace.handled(now - self.began)
            else:
                serving.detached.discard(threading.get_ident())
                serving.finished += 1
                if frame is not None:
                    line.reply(frame, releases=charged)
                return False
            if self._out and (
                now - self._out_since >= _MAX_HELD_SECONDS
                or len(self._out) >= _MAX_HELD
                or self._out_bytes >= _MAX_HELD_BYTES
            ):
                self._send_held(token)
        if self._out:
            self._send_held(token)
        if observers:
            observers.emit(Drained(peer=peer.name, line=line.descriptor))
        if shared and line.pace.slow and len(self._lines) > 1:
            self._part(line, token)
        return True

    def _handle_observed(self, line: Served, envelope: Envelope) -> Frame | None:
        observers = self._serving.observers
        observers.emit(Began(**named(line, envelope)))
        frame = self._serving.handle(line, envelope)
        if frame is not None:
            observers.emit(Encoded())
        failed = frame is not None and is_failure(frame)
        observers.emit(Ended(**named(line, envelope), replies=frame is not None, failed=failed))
        return frame

    def _take_ahead(self) -> Envelope | None:
        envelope, self._ahead = self._ahead, None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return envelope

    def _send_held(self, token: int) -> None:
        """Send the held replies. If the lead has been passed on, the new leader sends them instead."""
        with self._lock:
            line = self.line
            if not self._out or line is None or not self._role.holds(token):
                return
            held, self._out, self._out_bytes = self._out, [], 0
            charged, self._out_charged = self._out_charged, 0
        line.reply(join(held), len(held), charged)

    def _part(self, line: Served, token: int) -> bool:
        """Give a line a lead of its own. False if no thread is available for that: the line then stays."""
        self._send_held(token)
        self._forget(line)
        own = line.lead = Lead(self._serving, self._most_awake, line)
        try:
            own.start()
        except RuntimeError:
            with self._lock:
                line.lead = self
                self._lines[line.descriptor] = line
                if self._epoll is not None:
                    self._epoll.register(line.descriptor, select.EPOLLIN)
            return False
        return True

    def _forget(self, line: Served) -> None:
        with self._lock:
            if self._lines.pop(line.descriptor, None) is not None and self._epoll is not None:
                self._epoll.unregister(line.descriptor)

    def _failed(self, line: Served, token: int, error: Exception) -> bool:
        """End a line that has failed. False if this thread no longer leads, or if no line is left to lead."""
        serving = self._serving
        serving.state.handling = False
        serving.state.lead = None
        serving.state.note.handles = None
        with self._lock:
            leads = self._role.finish(token)
            charged = 0
            if leads:
                self._out, self._out_bytes = [], 0
                charged, self._out_charged = self._out_charged, 0
        if not leads:
            serving.detached.discard(threading.get_ident())
            serving.finished += 1
            line.fail(error)  # the new leader reads the line: it notices
            return False
        self._forget(line)
        if self._alone is None:
            # On another thread: the end of a line may have to wait, for example to find out what became of the peer.
            serving.pool.run_or_do(lambda: line.end(error, charged))
            return True
        with self._lock:
            self._role.end()
        serving.active.discard(self)
        line.end(error, charged)
        return False

    # Passing the lead on.

    def pass_on(self, token: int | None = None, turn: int | None = None) -> bool:
        """Pass the lead to another thread. False if the lead, or its leader, has moved on. Never waits.

        ``token``: the calling thread leads. ``turn``: the request that the leader has been running for too long.
        """
        serving = self._serving
        with self._lock:
            if token is not None and not self._role.holds(token):
                return False
            if turn is not None and self.waits:
                return False
            before = self._role.holder
            successor = self._role.pass_on(turn)
            if not successor:
                return False
            held, self._out, self._out_bytes = self._out, [], 0
            charged, self._out_charged = self._out_charged, 0
            line, runner = self.line, self._runner
            waits, self.waits = self.waits, False
            if not waits:
                serving.detached.add(runner)
        try:
            serving.pool.run(lambda: self._take_over(successor, line, held, charged))
        except BaseException:
            # No thread is available. The old leader keeps the lead, and the next tick tries again.
            with self._lock:
                self._role.undo(successor, before)
                self._out = held + self._out
                self._out_bytes = sum(frame.size for frame in self._out)
                self._out_charged += charged
                self.waits = waits
                serving.detached.discard(runner)
            raise
        return True

    def _take_over(self, token: int, line: Served | None, held: list[Frame], charged: int) -> None:
        if held and line is not None:
            line.reply(join(held), len(held), charged)
        self._lead(token, line)

    def begin_waiting(self, token: int) -> bool:
        """Keep the lead during a wait of the leader's request. Its thread must watch the lines meanwhile (`fileno`).

        False if the thread no longer leads, or must pass the lead on because another message of the line has been read.
        """
        if self._alone is not None:
            return False
        with self._lock:
            line = self.line
            if line is None or not self._role.holds(token):
                return False
            self.waits = True  # from here on only this thread can pass the lead on
        line.pace.spent(time.monotonic() - self.began)
        try:
            self._ahead = line.channel.next()
        except Exception as error:  # raised again in the thread that takes over
            self._problem = error
        if self._ahead is not None or self._problem is not None:
            return False
        if self._serving.observers:
            self._serving.observers.emit(Drained(peer=line.peer.name, line=line.descriptor))
        return True

    def resume(self, token: int) -> bool:
        """Note that the wait is over. False if the lead has been passed on meanwhile."""
        with self._lock:
            if not self._role.holds(token):
                return False
            self.waits = False
            self.began = time.monotonic()  # before `begin`, as in `_serve`
            self._role.begin()
            return True
