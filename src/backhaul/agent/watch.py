"""Watch: one thread per worker that handles the events no other thread waits for.

It sleeps in ``epoll`` and costs nothing while the worker is idle. It

- accepts connections from the listeners and gives them to the door,
- notices peers that hang up while no thread reads from them,
- reads the replies to futures that no thread waits for,
- fails futures whose deadline has passed, and pings peers that owe an answer and are silent,
- ticks every few milliseconds while requests run, so that long requests pass on their lead. While nothing seems stuck
  it ticks more slowly, because each tick takes the interpreter from the working threads.

It never blocks on a peer and runs no user code.

A line is registered one-shot: after each event it must be armed again. A line that is armed with ``EPOLLIN`` is
*watched*: replies are due, and no other thread reads them. For a plain future the watch thread decides this at a tick,
since most callers wait for the future themselves a moment later. For a future that has callbacks or is awaited, the
line is watched at once.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from backhaul.agent.interpreter import switch_interval

if TYPE_CHECKING:
    from backhaul.agent.line import Line
    from backhaul.agent.reading import Reading


class _Readable(Protocol):
    def fileno(self) -> int: ...


L = TypeVar("L", bound=_Readable)

_log = logging.getLogger(__name__)

_TICK = 0.002
_SLOW_TICK = 0.008
_QUIET_TICKS = 25
_HANG_UP = select.EPOLLRDHUP | select.EPOLLONESHOT
_READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Watch:
    """See the module's docstring. `add`, `remove`, `look_after` and `wake` are thread-safe."""

    def __init__(self, name: str, patience: float | None, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._check_every = math.inf if patience is None else patience / 4
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._listeners: dict[int, tuple[Any, Callable[[Any], None]]] = {}
        self._lines: dict[int, Reading] = {}
        self.unread: set[Reading] = set()
        """Lines with futures that perhaps no thread waits for. Threads that wait for many lines read these, too. A line
        may stay here for a while after its last future."""
        self._soon: set[Reading] = set()  # lines to watch at the next tick if no thread reads them
        self._strays: set[Reading] = set()  # lines without futures on which a message may still come
        self._kept: Counter[Reading] = Counter()  # lines to read whenever data comes -> by how many callers
        self._watched: set[Reading] = set()
        self._holding: set[Line] = set()
        self._lock = threading.Lock()
        self._deadline = math.inf  # when to check the deadlines of futures next
        self._check_at = math.inf
        self.trim: Callable[[], float] = lambda: math.inf
        """Called when all is quiet, to free idle resources. Returns after how many seconds to call it again."""
        self._trim_at = math.inf
        self._closing = False
        # Reentrant: a finalizer may call wake() in a thread that is inside wake() already.
        self._bell_lock = threading.RLock()
        self._silent = False  # the bell is closed, and its descriptor may belong to another file
        self._pace = _TICK
        self._hurries = False  # used by the watch thread only: the interpreter switches threads more often
        self.ticks: list[Callable[[], bool]] = []
        """Called at every tick. A True result keeps the ticks coming."""
        self.asleep = False
        """True while nothing ticks. A thread that starts a request must then `wake` the watch."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            self._lines.clear()
        self._epoll.close()
        with self._bell_lock:
            self._silent = True
            os.close(self._bell)

    def abandon(self) -> None:
        """In a forked child, where the watch thread does not exist: close the descriptors."""
        self._silent = True
        self._epoll.close()
        os.close(self._bell)

    def hurry(self) -> None:
        """Make the next tick come soon, because something may be stuck. Called from ticks."""
        self._pace = _TICK

    def wake(self) -> None:
        self.asleep = False
        self._pace = _TICK
        with self._bell_lock:
            if not self._silent:
                os.eventfd_write(self._bell, 1)

    def add_listener(self, listener: L, visit: Callable[[L], None]) -> None:
        """Call ``visit(listener)`` on the watch thread whenever the listener's descriptor is readable."""
        self._listeners[listener.fileno()] = (listener, visit)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def remove_listener(self, listener: _Readable) -> None:
        if self._listeners.pop(listener.fileno(), None) is not None:
            self._epoll.unregister(listener.fileno())

    def add(self, line: Reading) -> None:
        """Notice when the peer of this line hangs up. Call `remove` before the line is closed."""
        with self._lock:
            if not self._closing:
                self._lines[line.fileno()] = line
                self._epoll.register(line.fileno(), _HANG_UP)

    def remove(self, line: Reading) -> None:
        """Forget a line whose descriptor is about to be closed."""
        with self._lock:
            for lines in (self._soon, self._watched, self._strays, self.unread):
                lines.discard(line)
            if self._lines.get(line.fileno()) is line:
                del self._lines[line.fileno()]
                self._epoll.unregister(line.fileno())

    def look_after(self, line: Reading, deadline: float) -> None:
        """Look after a line with a new future that may have no reader and is due at ``deadline``."""
        self.unread.add(line)
        if line not in self._watched and line not in self._soon:
            self._soon.add(line)
        if deadline < self._deadline:
            self._deadline = deadline
            self.wake()
        elif self.asleep:
            self.wake()

    def take_over(self) -> None:
        """Look after the remaining futures when a thread that has read for others stops reading."""
        for line in list(self.unread):
            if not line.futures:
                self.forget_read(line)
            elif line not in self._watched and line not in self._soon:
                self._soon.add(line)
                if self.asleep:
                    self.wake()

    def forget_read(self, line: Reading) -> None:
        """Take a line without futures off ``unread``, unless a future has been opened since the caller looked."""
        self.unread.discard(line)
        if line.futures:
            self.unread.add(line)

    def read_once(self, line: Reading) -> None:
        """Read this line once more when data comes, although no thread waits for it any more."""
        self._strays.add(line)
        self._soon.add(line)
        if self.asleep:
            self.wake()

    def keep_reading(self, line: Reading) -> None:
        """Read this line whenever data comes, unless another thread reads it. Ends with `stop_reading`."""
        with self._lock:
            self._kept[line] += 1
            self._arm(line, _READABLE)

    def stop_reading(self, line: Reading) -> None:
        with self._lock:
            self._kept[line] -= 1
            if not self._kept[line]:
                del self._kept[line]

    def will_read(self, line: Reading) -> bool:
        """Whether the watch thread reads this line, now or after the next tick. For test schedulers."""
        return any(line in lines for lines in (self._watched, self._soon, self._strays, self._kept))

    def remind(self, line: Line) -> None:
        """Have a line send its held frames at the next tick, without waiting."""
        self._holding.add(line)
        if self.asleep:
            self.wake()

    def attend(self, line: Reading) -> None:
        """Read this line's replies from now on, without waiting for the next tick."""
        with self._lock:
            if line in self._watched:
                return
            self._arm(line, _READABLE)
        if self._check_at == math.inf and self._check_every != math.inf:
            self._check_at = time.monotonic() + self._check_every
            self.wake()

    def _arm_after_event(self, line: Reading) -> None:
        """Arm a line after an event: for replies if any are due, otherwise only for a hang-up.

        A caller opens its slot first, and then checks whether the line is watched. This method marks the line first,
        and then checks for slots. So at least one of the two notices the other.
        """
        with self._lock:
            self._arm(line, _READABLE if line.futures or line in self._strays or line in self._kept else _HANG_UP)
            if line.futures and line not in self._watched:
                self._arm(line, _READABLE)

    def _arm(self, line: Reading, events: int) -> None:
        """The caller holds ``_lock``."""
        if self._lines.get(line.fileno()) is not line:
            return
        self._epoll.modify(line.fileno(), events)
        self._soon.discard(line)
        if events == _READABLE:
            self._watched.add(line)
        else:
            self._watched.discard(line)

    def _run(self) -> None:
        self._enter()
        self._hurry_interpreter(True)
        try:
            self._look_after_all()
        finally:
            self._hurry_interpreter(False)

    def _hurry_interpreter(self, hurries: bool) -> None:
        if hurries != self._hurries:
            self._hurries = hurries
            (switch_interval.hurry if hurries else switch_interval.rest)()
        elif hurries:
            switch_interval.adapt()

    def _look_after_all(self) -> None:
        quiet = 0
        while not self._closing:
            active = self._tick()
            quiet = 0 if active else quiet + 1
            if quiet > _QUIET_TICKS:
                self.asleep = True
                # Tick once more: a request that began before `asleep` was set has not rung the bell.
                if self._tick():
                    self.asleep = False
                    quiet = 0
                else:
                    self._trim_at = min(self._trim_at, time.monotonic() + self.trim())
            self._hurry_interpreter(not self.asleep)
            now = time.monotonic()
            timeout = min(self._deadline, self._check_at, self._trim_at) - now
            if not self.asleep:
                timeout = min(timeout, self._pace)
            events = self._epoll.poll(None if timeout == math.inf else max(0.0, timeout))
            try:
                self._act(events)
            except Exception:
                # Without this thread the worker would look alive but read nothing.
                _log.exception("the watch thread goes on after a failure")

    def _tick(self) -> bool:
        """Run all ticks. False if nothing was active."""
        try:
            return self._tick_all()
        except Exception:  # for example, no thread is available
            _log.exception("the watch thread goes on after a failure")
            return True

    def _tick_all(self) -> bool:
        self._pace = min(2 * self._pace, _SLOW_TICK)
        active = self._attend()
        for line in list(self._holding):
            self._holding.discard(line)
            if not line.retains:  # the held frames have left with another one
                continue
            if not line.send_held():
                self._holding.add(line)
            self.hurry()
            active = True
        for tick in self.ticks:
            active = tick() or active
        return active

    def _act(self, events: list[tuple[int, int]]) -> None:
        for descriptor, _ in events:
            self._handle(descriptor)
        now = time.monotonic()
        if now >= self._deadline:
            self._expire(now)
        if now >= self._check_at:
            self._check_peers(now)
        if now >= self._trim_at:
            self._trim_at = now + self.trim()

    def _handle(self, descriptor: int) -> None:
        if descriptor == self._bell:
            try:
                os.eventfd_read(self._bell)
            except BlockingIOError:
                pass
            return
        if descriptor in self._listeners:
            listener, visit = self._listeners[descriptor]
            visit(listener)
            return
        line = self._lines.get(descriptor)
        if line is None:
            return
        drained = line.drain()
        if line.lost is not None:
            # Armed again, it would show its hang-up over and over until the thread that loses it calls `remove`.
            return
        # If another thread reads the line, or only replies without callbacks are still due, the next tick looks at the
        # line again. Handling each event at once would take the interpreter from the working threads.
        with self._lock:
            self._soon.add(line)
            self._watched.discard(line)
            self._strays.discard(line)
        # Check is_urgent after the change of _watched. A thread that adds a callback to a future marks it urgent first,
        # and then looks at _watched. So at least one of the two notices the other.
        if drained and (line.is_urgent() or not line.futures or line in self._kept):
            self._arm_after_event(line)
        else:
            self.asleep = False

    def _attend(self) -> bool:
        """Watch the lines that have futures but no reader. False if there was nothing to do."""
        if not self._soon:
            return False
        self.hurry()
        for line in list(self._soon):
            # Discard before being_read(): a reader that stops gives up its role first, and then looks at _soon.
            self._soon.discard(line)
            if line.lost is not None or not line.being_read():
                self._arm_after_event(line)
            elif line in self._kept:
                self._soon.add(line)  # the reader will not call take_over: look again at the next tick
            else:
                self._notice_hang_up(line)  # if there are futures, the reader calls take_over
            if self._check_at == math.inf:
                self._check_at = time.monotonic() + self._check_every
        return True

    def _notice_hang_up(self, line: Reading) -> None:
        """Arm a line for a hang-up. Another thread reads the line now, and may stop without a successor."""
        with self._lock:
            if line not in self._watched and self._lines.get(line.fileno()) is line:
                self._epoll.modify(line.fileno(), _HANG_UP)

    def _expire(self, now: float) -> None:
        self._deadline = math.inf
        lines = list(self._lines.values())
        for line in lines:
            line.expire(now)
        # min: calls made meanwhile may have lowered _deadline themselves.
        self._deadline = min([self._deadline, *(line.next_deadline() for line in lines)])

    def _check_peers(self, now: float) -> None:
        self._check_at = math.inf
        # Include lines that other threads read: a thread that waits for many lines sends no pings.
        for line in self._watched | self.unread:
            if line.futures:
                line.check_alive()
                self._check_at = now + self._check_every
