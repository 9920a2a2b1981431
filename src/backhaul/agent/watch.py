"""Watch: the one thread of a worker that looks after what no other thread attends to.

It sleeps in ``epoll`` and costs nothing while the worker is idle. It

- lets visitors in at the listeners' doors (the greeting itself runs on the pool),
- notices peers that hang up while nobody reads from them,
- reads the replies to futures that nobody waits for,
- fails futures whose deadline has passed, and pings peers that owe an answer and are silent,
- ticks every few milliseconds while requests run, so that long ones give away their lead. It ticks more slowly while
  nothing seems to be stuck: it takes the interpreter from those who work.

It never blocks on a peer and runs no user code.

An outbound is registered one-shot: after each event it must be armed again. Armed with
``EPOLLIN`` it is *watched*: replies are wanted and nobody else reads them. For a plain future that
is decided at a tick, since most callers wait for it themselves a moment later; for one with callbacks,
or awaited, at once.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul.agent.outbound import Outbound
    from backhaul.transport.base import Listener

_log = logging.getLogger(__name__)

_TICK = 0.002
_SLOW_TICK = 0.008
_QUIET_TICKS = 25
_HANG_UP = select.EPOLLRDHUP | select.EPOLLONESHOT
_REPLIES = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Watch:
    """See the module's docstring. `add`, `remove`, `look_after` and `wake` are thread-safe."""

    def __init__(self, name: str, patience: float | None, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._check_every = math.inf if patience is None else patience / 4
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._listeners: dict[int, tuple[Listener, Callable[[Listener], None]]] = {}
        self._outbounds: dict[int, Outbound] = {}
        self._soon: set[Outbound] = set()  # have futures; to be watched at the next tick if nobody reads
        self._watched: set[Outbound] = set()
        self._holding: set[Outbound] = set()
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
            self._outbounds.clear()
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

    def add_listener(self, listener: Listener, visit: Callable[[Listener], None]) -> None:
        self._listeners[listener.fileno()] = (listener, visit)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def remove_listener(self, listener: Listener) -> None:
        if self._listeners.pop(listener.fileno(), None) is not None:
            self._epoll.unregister(listener.fileno())

    def add(self, outbound: Outbound) -> None:
        """Notice when this peer hangs up."""
        with self._lock:
            if not self._closing:
                self._outbounds[outbound.fileno()] = outbound
                self._epoll.register(outbound.fileno(), _HANG_UP)

    def remove(self, outbound: Outbound) -> None:
        """Forget an outbound; its descriptor is about to be closed."""
        with self._lock:
            self._soon.discard(outbound)
            self._watched.discard(outbound)
            if self._outbounds.get(outbound.fileno()) is outbound:
                del self._outbounds[outbound.fileno()]
                self._epoll.unregister(outbound.fileno())

    def look_after(self, outbound: Outbound, deadline: float) -> None:
        """This outbound has a future that may find no reader, and is due at ``deadline``."""
        if outbound not in self._watched and outbound not in self._soon:
            self._soon.add(outbound)
        if deadline < self._deadline:
            self._deadline = deadline
            self.wake()
        elif self.asleep:
            self.wake()

    def remind(self, outbound: Outbound) -> None:
        """This outbound has something to send: have it do so at the next tick, without waiting."""
        self._holding.add(outbound)
        if self.asleep:
            self.wake()

    def attend(self, outbound: Outbound) -> None:
        """Read this outbound's replies from now on, without waiting for a tick."""
        with self._lock:
            if outbound in self._watched:
                return
            self._arm(outbound, _REPLIES)
        if self._check_at == math.inf and self._check_every != math.inf:
            self._check_at = time.monotonic() + self._check_every
            self.wake()

    def _settle(self, outbound: Outbound) -> None:
        """Arm an outbound after an event, for replies if there are any to come.

        A caller opens its slot first and looks whether the outbound is attended to then. Here it is
        the other way round: so one of the two notices the other.
        """
        with self._lock:
            self._arm(outbound, _REPLIES if outbound.outstanding else _HANG_UP)
            if outbound.outstanding and outbound not in self._watched:
                self._arm(outbound, _REPLIES)

    def _arm(self, outbound: Outbound, events: int) -> None:
        """Holds ``_lock``."""
        if self._outbounds.get(outbound.fileno()) is not outbound:
            return
        self._epoll.modify(outbound.fileno(), events)
        self._soon.discard(outbound)
        if events == _REPLIES:
            self._watched.add(outbound)
        else:
            self._watched.discard(outbound)

    def _run(self) -> None:
        self._enter()
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
        for outbound in list(self._holding):
            self._holding.discard(outbound)
            if not outbound.send_held():
                self._holding.add(outbound)
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
        outbound = self._outbounds.get(descriptor)
        if outbound is None:
            return
        drained = outbound.drain()
        # Look at it again at the next tick: somebody else reads it; or more replies follow, which nobody is in a hurry
        # for, and each of which would take the interpreter from those who work.
        with self._lock:
            self._soon.add(outbound)
            self._watched.discard(outbound)
        # Now, so that one of the two notices the other: who hangs a callback on a future looks at _watched after that.
        if drained and (outbound.is_urgent() or not outbound.outstanding):
            self._settle(outbound)
        else:
            self.asleep = False

    def _attend(self) -> bool:
        """Watch the outbounds that have futures and no reader. False if there was nothing to do."""
        if not self._soon:
            return False
        self.hurry()
        for outbound in list(self._soon):
            if not outbound.outstanding or not outbound.being_read():
                self._settle(outbound)
                if outbound.lost is not None:
                    self._soon.discard(outbound)
                elif self._check_at == math.inf:
                    self._check_at = time.monotonic() + self._check_every
        return True

    def _expire(self, now: float) -> None:
        self._deadline = math.inf
        outbounds = list(self._outbounds.values())
        for outbound in outbounds:
            outbound.expire(now)
        # Calls made meanwhile have lowered _deadline themselves.
        self._deadline = min([self._deadline, *(outbound.next_deadline() for outbound in outbounds)])

    def _check_peers(self, now: float) -> None:
        self._check_at = math.inf
        for outbound in list(self._watched):
            if outbound.outstanding:
                outbound.check_alive()
                self._check_at = now + self._check_every
