"""Door: greets everyone who connects, and admits the peers.

Theory of operation
-------------------
Anyone can connect, and most visitors that are not peers send nothing useful, or send it slowly. So no visitor gets its
own thread, more than a few seconds, or a large buffer. A visitor is a greeting that proceeds in steps (`Visitor.step`),
and one thread makes the steps of all visitors. The first visitor starts this thread. The thread ends after a while
without visitors, so an idle worker has none.

The number of visitors is bounded. When the door is full, the oldest visitor that is not yet trusted must go. A peer's
greeting takes only milliseconds, so the oldest visitor is not a peer.

Refused visitors are logged with the reason. Each reason is logged once in a while, followed by a count of the
repetitions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Channel, ChannelClosed, Listener, Visitor, Want
from backhaul.transport.sockets import no_descriptors

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""The longest time, in seconds, that a greeting may take."""

MOST = 512
"""How many greetings may be under way at once, if the process has enough descriptors."""

_ACCEPT_AT_ONCE = 64
_LINGER = 5.0
_SUMMARY_SECONDS = 10.0
_MAX_REASONS = 32
_SHOWN_REASONS = 5
_LONGEST_REASON = 300
_NO_DESCRIPTORS_PAUSE = 0.01
# Numbers, and text in quotes, even if the closing quote has been cut off.
_CHOSEN = re.compile(r"""b?'(?:[^'\\]|\\.)*(?:'|$)|b?"(?:[^"\\]|\\.)*(?:"|$)|\d+""")
_EVENTS: dict[Want, int] = {"read": select.EPOLLIN, "write": select.EPOLLOUT}


class Refusals:
    """Decides what to log about refused visitors. Pure: no lock, no clock.

    A reason is logged when it first occurs. `summary` says how often it has occurred since, and resets the counts.
    Numbers and text in quotes are ignored when reasons are compared, because the visitor chooses them. Otherwise a
    flood of garbage would hide why a peer was refused.
    """

    def __init__(self) -> None:
        self._more: Counter[str] = Counter()
        self._known: set[str] = set()
        self._others = 0

    def is_news(self, reason: str) -> bool:
        """Whether to log this reason now. If not, it counts towards the summary."""
        reason = _CHOSEN.sub("…", reason[:_LONGEST_REASON])
        if reason in self._known:
            self._more[reason] += 1
        elif len(self._known) < _MAX_REASONS:
            self._known.add(reason)
            return True
        else:
            self._others += 1
        return False

    def summary(self) -> str | None:
        """The log line about the reasons that were only counted; None if there are none. Resets the counts."""
        shown = self._more.most_common(_SHOWN_REASONS)
        total = self._more.total() + self._others
        rest = total - sum(count for _, count in shown)
        lines = [f"{count} times: {reason}" for reason, count in shown]
        if rest:
            lines.append(f"{rest} times for other reasons")
        self._more.clear()
        self._known.clear()
        self._others = 0
        return f"{total} more connections were not let in; " + "; ".join(lines) if total else None


class _Guest(NamedTuple):
    """A visitor, with the fields that are still needed after its socket is closed."""

    visitor: Visitor
    descriptor: int
    deadline: float


class Door:
    """See the module's docstring. Only one thread may call `visit`. All other methods are thread-safe."""

    def __init__(
        self,
        name: str,
        judge: Callable[[Hello], Welcome],
        let_in: Callable[[Channel, Hello], None],
        *,
        patience: float = PATIENCE,
        most: int | None = None,
    ) -> None:
        """``judge`` decides about each greeting. ``let_in`` gets the admitted peers. Neither may wait or raise."""
        self._name = name
        self._judge = judge
        self._let_in = let_in
        self._patience = patience
        self._most = _room() if most is None else most
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._arrived: deque[Visitor] = deque()
        self._thread: threading.Thread | None = None
        self._bell = -1
        self._crowded = False
        self._closed = False
        # Used only by the door's thread. The guests are in the order of their deadlines:
        self._guests: dict[int, _Guest] = {}
        self._refusals = Refusals()
        self._looks = Refusals()  # visitors that hung up without a greeting
        self._summary_at = 0.0
        self._crowded_said = 0.0  # when to log that again; used only by the thread that calls `visit`
        self._epoll: select.epoll | None = None

    def visit(self, listener: Listener) -> None:
        """Accept the visitors at a listener. The thread that watches the listener calls this.

        Does not wait for visitors. Sleeps briefly if the process is out of descriptors.
        """
        arrived: list[Visitor] = []
        crowded = False
        try:
            while len(arrived) < _ACCEPT_AT_ONCE and (visitor := listener.accept()) is not None:
                arrived.append(visitor)
        except OSError:
            crowded = True
        with self._lock:
            turned_away = arrived if self._closed else []
            if not self._closed and (arrived or (crowded and self._thread is not None)):
                self._arrived.extend(arrived)
                self._crowded = self._crowded or crowded
                turned_away = [self._arrived.popleft() for _ in range(len(self._arrived) - self._most)]
                self._wake()
        for visitor in turned_away:
            visitor.turn_away()
        if crowded:
            self._say_crowded()
            # The listener stays readable, so the watching thread would spin until other visitors have gone.
            time.sleep(_NO_DESCRIPTORS_PAUSE)

    def _say_crowded(self) -> None:
        now = time.monotonic()
        if now >= self._crowded_said:
            self._crowded_said = now + _SUMMARY_SECONDS
            _log.error("a connection cannot be accepted: %s", no_descriptors())

    def close(self) -> None:
        """Turn away all visitors, now and from now on. Waits for the door's thread to end."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                os.eventfd_write(self._bell, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: close the descriptors."""
        self._closed = True
        for visitor in [*self._arrived, *(guest.visitor for guest in self._guests.values())]:
            visitor.turn_away()
        if self._bell >= 0:
            os.close(self._bell)
        if self._epoll is not None:
            self._epoll.close()

    def _wake(self) -> None:
        """Wake the door's thread, or start it. The caller holds ``_lock``."""
        if self._thread is None:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        else:
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        with select.epoll() as epoll:
            self._epoll = epoll
            epoll.register(self._bell, select.EPOLLIN)
            while self._receive(epoll):
                pass

    def _receive(self, epoll: select.epoll) -> bool:
        """Wait once, and continue the greetings that are ready. False if this thread must end; it has cleaned up."""
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            crowded, self._crowded = self._crowded, False
            closed = self._closed
        if closed:
            for visitor in [*arrived, *(guest.visitor for guest in self._guests.values())]:
                visitor.turn_away()
            self._guests.clear()
            self._summarise()
            return not self._end()
        for visitor in arrived:
            self._begin(visitor, epoll)
        if crowded:
            self._make_room(len(self._guests) // 2)
        now = time.monotonic()
        if now >= self._summary_at:
            self._summarise()
        until = next((guest.deadline for guest in self._guests.values()), now + _LINGER)
        events = epoll.poll(max(0.0, min(until, self._summary_at) - now))
        for descriptor, _ in events:
            if descriptor == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif descriptor in self._guests:
                self._step(self._guests[descriptor], epoll)
        now = time.monotonic()
        while self._guests and (guest := next(iter(self._guests.values()))).deadline <= now:
            self._refuse(guest, TimeoutError(f"the greeting took longer than {self._patience:g} s"))
        if not events and not self._guests and now >= until:
            self._summarise()
            return not self._end()
        return True

    def _end(self) -> bool:
        """Retire this thread; it must end next. False if a visitor has just arrived, so that it must go on."""
        with self._lock:
            if self._arrived:
                return False
            self._thread = None
            os.close(self._bell)
            self._bell = -1
        return True

    def _begin(self, visitor: Visitor, epoll: select.epoll) -> None:
        if len(self._guests) >= self._most:
            self._make_room(self._most - 1)
        if len(self._guests) >= self._most:
            visitor.turn_away()
            return
        guest = _Guest(visitor, visitor.fileno(), time.monotonic() + self._patience)
        self._guests[guest.descriptor] = guest
        epoll.register(guest.descriptor, 0)
        self._step(guest, epoll)

    def _step(self, guest: _Guest, epoll: select.epoll) -> None:
        try:
            outcome = guest.visitor.step(self._judge)
        except Exception as error:  # any kind: without this thread no peer could connect any more
            self._refuse(guest, error)
            return
        if isinstance(outcome, str):
            epoll.modify(guest.descriptor, _EVENTS[outcome])
            return
        del self._guests[guest.descriptor]
        epoll.unregister(guest.descriptor)
        if outcome is not None:
            self._let_in(*outcome)

    def _make_room(self, most: int) -> None:
        """Refuse the oldest untrusted visitors until at most ``most`` visitors are left."""
        excess = len(self._guests) - most
        for guest in [guest for guest in self._guests.values() if not guest.visitor.trusted][: max(0, excess)]:
            self._refuse(guest, TimeoutError(f"there were more than {most} others, and it had not said who it is"))

    def _refuse(self, guest: _Guest, error: Exception) -> None:
        del self._guests[guest.descriptor]
        whence = guest.visitor.whence
        guest.visitor.turn_away()
        reason = str(error)
        if not isinstance(error, AuthenticationError | ProtocolError | ChannelClosed | TimeoutError):
            _log.error("a greeting failed here: %s", reason, exc_info=error)
            return
        # A visitor that hangs up without a greeting only checked whether a worker listens. Peers do that, too.
        looked = isinstance(error, ChannelClosed)
        if (self._looks if looked else self._refusals).is_news(reason):
            level = logging.INFO if looked else logging.WARNING
            _log.log(level, "a connection%s was not let in: %s", whence and f" from {whence}", reason)

    def _summarise(self) -> None:
        self._summary_at = time.monotonic() + _SUMMARY_SECONDS
        for level, refusals in ((logging.WARNING, self._refusals), (logging.INFO, self._looks)):
            summary = refusals.summary()
            if summary is not None:
                _log.log(level, "%s", summary)


def _room() -> int:
    """How many visitors to allow: `MOST`, but at most a quarter of the descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft // 4))
