"""Watch: the one thread of a worker that looks after what no other thread attends to.

It sleeps in ``epoll`` and costs nothing while the worker is idle. It

- takes visitors from the listeners and gives them to the door,
- notices peers that hang up while nobody reads from them,
- reads the replies to futures that no thread waits for,
- fails futures whose deadline has passed, and pings peers that owe an answer and are silent,
- ticks every few milliseconds while requests run, so that long ones give away their lead. It ticks more slowly while
  nothing seems to be stuck: it takes the interpreter from those who work.

It never blocks on a peer and runs no user code.

A line is registered one-shot: after each event it must be armed again. A line that is armed with ``EPOLLIN`` is
*watched*: replies are wanted, and no other thread reads them. For a plain future that is decided at a tick, since
most callers wait for it themselves a moment later; for one with callbacks, or one that is awaited, at once.
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
    from backhaul.agent.calling import Calling
    from backhaul.agent.line import Line


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
        self._lines: dict[int, Calling] = {}
        self.unread: set[Calling] = set()
        """Lines with futures that perhaps no thread waits for; some may have none left. For waiting threads to read."""
        self._soon: set[Calling] = set()  # of those, to be watched at the next tick if no thread reads them
        self._strays: set[Calling] = set()  # have no futures, and something may come all the same
        self._kept: Counter[Calling] = Counter()  # are read whenever something comes; by how many want that
        self._watched: set[Calling] = set()
        self._holding: set[Line] = set()
        self._lock = threading.Lock()
        self._deadline = math.inf  # when to look at deadlines next
        self._check_at = math.inf
        self.trim: Callable[[], float] = lambda: math.inf
        """Called when all is quiet, to free what is idle; says in how many seconds it wants to be called again."""
        self._trim_at = math.inf
        self._closing = False
        # A finalizer may wake it, at any point of a thread that is doing so already.
        self._bell_lock = threading.RLock()
        self._silent = False  # the bell's number may be somebody else's
        self._pace = _TICK
        self._hurries = False  # this thread's: the interpreter changes hands more often
        self.ticks: list[Callable[[], bool]] = []
        """Called at every tick; True keeps the ticks coming."""
        self.asleep = False
        """True: nothing ticks. Whoever starts a request must then `wake` the watch."""
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
        """In a forked child, where this thread does not exist: close the descriptors."""
        self._silent = True
        self._epoll.close()
        os.close(self._bell)

    def hurry(self) -> None:
        """Something may be stuck: the next tick is to come soon. For ticks to call."""
        self._pace = _TICK

    def wake(self) -> None:
        self.asleep = False
        self._pace = _TICK
        with self._bell_lock:
            if not self._silent:
                os.eventfd_write(self._bell, 1)

    def add_listener(self, listener: L, visit: Callable[[L], None]) -> None:
        """Have ``visit`` called with something that has a descriptor whenever that is readable."""
        self._listeners[listener.fileno()] = (listener, visit)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def remove_listener(self, listener: _Readable) -> None:
        if self._listeners.pop(listener.fileno(), None) is not None:
            self._epoll.unregister(listener.fileno())

    def add(self, line: Calling) -> None:
        """Notice when this peer hangs up."""
        with self._lock:
            if not self._closing:
                self._lines[line.fileno()] = line
                self._epoll.register(line.fileno(), _HANG_UP)

    def remove(self, line: Calling) -> None:
        """Forget an line; its descriptor is about to be closed."""
        with self._lock:
            for lines in (self._soon, self._watched, self._strays, self.unread):
                lines.discard(line)
            if self._lines.get(line.fileno()) is line:
                del self._lines[line.fileno()]
                self._epoll.unregister(line.fileno())

    def look_after(self, line: Calling, deadline: float) -> None:
        """This line has a future that may find no reader, and is due at ``deadline``."""
        self.unread.add(line)
        if line not in self._watched and line not in self._soon:
            self._soon.add(line)
        if deadline < self._deadline:
            self._deadline = deadline
            self.wake()
        elif self.asleep:
            self.wake()

    def take_over(self) -> None:
        """A thread that has read for others stops: look after what is left."""
        for line in list(self.unread):
            if not line.futures:
                self.forget_read(line)
            elif line not in self._watched and line not in self._soon:
                self._soon.add(line)
                if self.asleep:
                    self.wake()

    def forget_read(self, line: Calling) -> None:
        """A line had no futures: it is not unread any more, unless a future has been opened since that look."""
        self.unread.discard(line)
        if line.futures:
            self.unread.add(line)

    def read_once(self, line: Calling) -> None:
        """Something may come on this line that no thread waits for any more: read it when it does."""
        self._strays.add(line)
        self._soon.add(line)
        if self.asleep:
            self.wake()

    def keep_reading(self, line: Calling) -> None:
        """Read this line whenever something comes, unless another thread does. To be followed by `stop_reading`."""
        with self._lock:
            self._kept[line] += 1
            self._arm(line, _READABLE)

    def stop_reading(self, line: Calling) -> None:
        with self._lock:
            self._kept[line] -= 1
            if not self._kept[line]:
                del self._kept[line]

    def will_read(self, line: Calling) -> bool:
        """Whether this thread reads what comes on a line, now or after the next tick. For schedulers of tests."""
        return any(line in lines for lines in (self._watched, self._soon, self._strays, self._kept))

    def remind(self, line: Line) -> None:
        """This line has something to send: have it do so at the next tick, without waiting."""
        self._holding.add(line)
        if self.asleep:
            self.wake()

    def attend(self, line: Calling) -> None:
        """Read this line's replies from now on, without waiting for a tick."""
        with self._lock:
            if line in self._watched:
                return
            self._arm(line, _READABLE)
        if self._check_at == math.inf and self._check_every != math.inf:
            self._check_at = time.monotonic() + self._check_every
            self.wake()

    def _arm_after_event(self, line: Calling) -> None:
        """Arm a line after an event, for replies if there are any to come.

        A caller opens its slot first and looks whether the line is watched then. Here it is the other way round: so
        one of the two notices the other.
        """
        with self._lock:
            self._arm(line, _READABLE if line.futures or line in self._strays or line in self._kept else _HANG_UP)
            if line.futures and line not in self._watched:
                self._arm(line, _READABLE)

    def _arm(self, line: Calling, events: int) -> None:
        """Holds ``_lock``."""
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

    def _look_after_all(self) -> None:
        quiet = 0
        while not self._closing:
            active = self._tick()
            quiet = 0 if active else quiet + 1
            if quiet > _QUIET_TICKS:
                self.asleep = True
                # A request that began before `asleep` was set has not rung the bell.
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
                # Without this thread the worker would look alive and be deaf.
                _log.exception("the watch thread goes on after a failure")

    def _tick(self) -> bool:
        """False when all has been quiet."""
        try:
            return self._tick_all()
        except Exception:  # no new thread can be had, say
            _log.exception("the watch thread goes on after a failure")
            return True

    def _tick_all(self) -> bool:
        self._pace = min(2 * self._pace, _SLOW_TICK)
        active = self._attend()
        for line in list(self._holding):
            self._holding.discard(line)
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
        # If another thread reads the line, or more replies follow that nobody is in a hurry for, it is looked at again
        # at the next tick: each event would take the interpreter from the threads that work.
        with self._lock:
            self._soon.add(line)
            self._watched.discard(line)
            self._strays.discard(line)
        # After that, so that one of the two notices the other: a thread that hangs a callback on a future looks at
        # _watched later.
        if drained and (line.is_urgent() or not line.futures or line in self._kept):
            self._arm_after_event(line)
        else:
            self.asleep = False

    def _attend(self) -> bool:
        """Watch the lines that have futures and no reader. False if there was nothing to do."""
        if not self._soon:
            return False
        self.hurry()
        for line in list(self._soon):
            # In this order: a reader that stops looks at _soon after it has given up its role.
            self._soon.discard(line)
            if line.lost is not None or not line.being_read():
                self._arm_after_event(line)
            elif line in self._kept:
                self._soon.add(line)  # its reader does not give it back: look again at the next tick
            else:
                self._notice_hang_up(line)  # if there are futures, the reader calls take_over
            if self._check_at == math.inf:
                self._check_at = time.monotonic() + self._check_every
        return True

    def _notice_hang_up(self, line: Calling) -> None:
        """Arm a line that another thread reads, which may give it back to nobody."""
        with self._lock:
            if line not in self._watched and self._lines.get(line.fileno()) is line:
                self._epoll.modify(line.fileno(), _HANG_UP)

    def _expire(self, now: float) -> None:
        self._deadline = math.inf
        lines = list(self._lines.values())
        for line in lines:
            line.expire(now)
        # Calls made meanwhile have lowered _deadline themselves.
        self._deadline = min([self._deadline, *(line.next_deadline() for line in lines)])

    def _check_peers(self, now: float) -> None:
        self._check_at = math.inf
        # The lines that another thread reads, too: a thread that waits for many lines pings nobody.
        for line in self._watched | self.unread:
            if line.futures:
                line.check_alive()
                self._check_at = now + self._check_every
