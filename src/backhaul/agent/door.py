"""Door: greets those who connect, and lets the peers among them in.

Theory of operation
-------------------
Everybody may knock, and most who are not peers say nothing useful, or say it slowly. So nobody gets a thread of its
own, nor more than a few seconds, nor a large buffer: a visitor is a greeting that goes on in steps (`Visitor.step`),
and one thread makes the steps of all. It is started by the first visitor and ends when there has been none for
a while, so an idle worker has none.

There is room for a bounded number of them. When it is full, the one goes that has been there longest without anybody
vouching for it: a peer's greeting takes milliseconds, so it is not that one.

Who is not let in is written down with the reason; each reason once in a while, and then how many more there were.
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
"""Seconds that a greeting may take at most."""

MOST = 512
"""So many greetings may be under way at once, if the process may have enough descriptors."""

_ACCEPT_AT_ONCE = 64
_LINGER = 5.0
_SUMMARY_SECONDS = 10.0
_MAX_REASONS = 32
_SHOWN_REASONS = 5
_LONGEST_REASON = 300
_NO_DESCRIPTORS_PAUSE = 0.01
# What is in quotes, also if it has been cut off, and numbers.
_CHOSEN = re.compile(r"""b?'(?:[^'\\]|\\.)*(?:'|$)|b?"(?:[^"\\]|\\.)*(?:"|$)|\d+""")
_EVENTS: dict[Want, int] = {"read": select.EPOLLIN, "write": select.EPOLLOUT}


class Refusals:
    """What to write down about those who were not let in. Pure.

    A reason is written down when it first comes up; `summary` tells how often it has come up since, and forgets.
    Whoever knocks chooses some of the words in them, those in quotes and the numbers: these do not make it another one,
    or a flood of garbage would hide why a peer was not let in.
    """

    def __init__(self) -> None:
        self._more: Counter[str] = Counter()
        self._known: set[str] = set()
        self._others = 0

    def is_news(self, reason: str) -> bool:
        """Whether this is to be written down now. If not, it counts for the summary."""
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
        """What to write down about the rest, if there is something."""
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
    """A visitor, with what has to be known when its socket is closed already."""

    visitor: Visitor
    descriptor: int
    deadline: float


class Door:
    """See the module's docstring. `visit` is for one thread, and does not wait; the others are thread-safe."""

    def __init__(
        self,
        name: str,
        judge: Callable[[Hello], Welcome],
        let_in: Callable[[Channel, Hello], None],
        *,
        patience: float = PATIENCE,
        most: int | None = None,
    ) -> None:
        """``judge`` decides about who says hello; ``let_in`` gets those that are welcome. Neither may wait or raise."""
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
        # The thread's own; in the order of their deadlines:
        self._guests: dict[int, _Guest] = {}
        self._refusals = Refusals()
        self._looks = Refusals()  # those who went again without a word
        self._summary_at = 0.0
        self._crowded_said = 0.0  # when to say that again; of the thread that calls `visit`
        self._epoll: select.epoll | None = None

    def visit(self, listener: Listener) -> None:
        """Somebody is at the listener. Called by who watches it."""
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
            # Who watches the listener will be told again at once, and can do nothing about it before others have gone.
            time.sleep(_NO_DESCRIPTORS_PAUSE)

    def _say_crowded(self) -> None:
        now = time.monotonic()
        if now >= self._crowded_said:
            self._crowded_said = now + _SUMMARY_SECONDS
            _log.error("somebody connects and cannot be let in: %s", no_descriptors())

    def close(self) -> None:
        """Turn away who is there, and everybody from now on."""
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
        """Holds ``_lock``."""
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
        """Wait once, and go on with the greetings that can. False if this thread is to end, and has cleaned up."""
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
        """Let the next visitor start another thread, unless one has just come to this one. The last thing it does."""
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
        except Exception as error:  # of whatever kind: without this thread nobody could connect any more
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
        """Let the oldest go that nobody vouches for, until there are at most so many left."""
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
        # Who connects and goes again looked whether somebody listens, as this worker's peers do too.
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
    """How many visitors there may be: at most a quarter of the descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft // 4))
