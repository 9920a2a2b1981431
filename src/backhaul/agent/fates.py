"""Fates: decides whether unreachable peers are present, suspected or over, and tells the layers above. Drives `fate`.

A thread that notices that a connection has ended, or cannot be made, asks for an examination. A pool thread then pings
the peer, over a new connection if necessary. A peer that answers is present. A peer that does not answer is over if the
launcher, the engine or the machine says so; otherwise it is suspected. While it is suspected, a timer repeats the
examination until the peer answers, is known to be over, or has been suspected for ``lost_after`` seconds.

The layers above rely on this order: what a peer held is given up (`on_over`) only after everything that the peer sent
has been read, and before the first message of its successor is read.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from backhaul.agent.logs import link_logger
from backhaul.agent.observing import Over, Present, Suspected
from backhaul.errors import BackhaulError, NotInitializedError, RpcTimeoutError, WorkerLostError, WorkerSuspectedError
from backhaul.ids import GUEST, WorkerInfo

if TYPE_CHECKING:
    from backhaul.agent.link import Link
    from backhaul.agent.member import Member
    from backhaul.agent.observing import Observers
    from backhaul.agent.pool import Pool
    from backhaul.options import RpcOptions

_log = logging.getLogger(__name__)

_PATIENT_AFTER = 5
_PATIENT_FACTOR = 2.5
_REMIND_SECONDS = 10.0
_GIVE_UP_SECONDS = 30.0
_SILENT = "it does not answer"


class Examiner(Protocol):
    """The part of the agent that examinations need."""

    me: WorkerInfo
    closed: threading.Event
    options: RpcOptions
    observers: Observers
    pool: Pool

    def link(self, peer: WorkerInfo) -> Link: ...
    def is_reachable(self, info: WorkerInfo, seconds: float) -> bool: ...
    def how_ended(self, info: WorkerInfo) -> str | None: ...
    def cut_off(self, rank: int) -> None: ...


class Fates:
    """See the module's docstring. Thread-safe."""

    def __init__(self, agent: Examiner) -> None:
        self.on_over: list[Callable[[WorkerInfo, str], None]] = []
        """Called with a peer and how it ended, once for each incarnation, on a thread that may wait."""
        self.on_present: list[Callable[[WorkerInfo], None]] = []
        """Called with a peer that answered after a connection with it had ended, on a thread that may wait."""
        self.on_suspected: list[Callable[[WorkerInfo, WorkerLostError], None]] = []
        """Called with a peer that cannot be reached, and the error that calls to it raise from now on."""
        self.on_back: list[Callable[[WorkerInfo], None]] = []
        """Called with a suspected peer that has answered."""
        self._agent = agent
        self._lost_after = math.inf if agent.options.lost_after is None else agent.options.lost_after
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._examining: set[WorkerInfo] = set()
        self._again: set[WorkerInfo] = set()  # examine once more: something happened meanwhile
        self._ending: dict[WorkerInfo, threading.Thread] = {}  # the thread that tells the layers above of an end
        self._due: dict[WorkerInfo, float] = {}
        self._timer: threading.Thread | None = None

    # What happens.

    def examine(self, peer: WorkerInfo) -> None:
        """Examine a peer on another thread. Returns at once."""
        if peer == self._agent.me or peer.id == GUEST or self._agent.closed.is_set():
            return
        with self._changed:
            self._due.pop(peer, None)
            if peer in self._examining:
                self._again.add(peer)
                return
            self._examining.add(peer)
        try:
            self._agent.pool.run(lambda: self._examine(peer))
        except BaseException as error:  # no thread is available
            with self._changed:
                self._examining.discard(peer)
                self._schedule(peer, time.monotonic() + 0.1)
            _log.warning("worker %r will be examined later: %s", peer.name, error)

    def greeted(self, link: Link, member: Member, *, reached: bool) -> None:
        """Note that a peer has greeted this worker, or has answered a greeting (``reached``).

        Returns when any earlier incarnation of the peer has been given up.
        """
        incarnation = member.incarnation
        with self._changed:
            continues = link.fate.continues(incarnation)
        if not continues and not self.end(link.peer, f"{member} has taken its place"):
            self._await_end(link.peer)
        with self._changed:
            if link.fate.over or not link.fate.continues(incarnation):
                link.renew(incarnation)
            link.fate.incarnation = incarnation
            if link.fate.suspected and not reached:
                self._schedule(link.peer, time.monotonic())
        if reached:
            self._answered(link)

    def end(self, peer: WorkerInfo, reason: str, *, certain: bool = True, incarnation: str = "") -> bool:
        """Note that an incarnation of a peer is over: the named one, or by default the one that is known here.

        Returns True when the layers above have been told. False if it was over already, or if the named incarnation is
        not the one that is known here.
        """
        link = self._agent.link(peer)
        with self._changed:
            fate = link.fate
            if incarnation and fate.incarnation not in ("", incarnation):
                return False
            if not fate.end(reason, certain=certain):
                return False
            self._due.pop(peer, None)
            self._ending[peer] = threading.current_thread()
            self._changed.notify_all()
        link_logger(peer.name).debug("= it is over: %s", reason)
        if not certain:
            _log.warning("worker %r counts as dead: %s; what it held is freed (option lost_after)", peer.name, reason)
        try:
            self._agent.cut_off(peer.id)
            for callback in list(self.on_over):
                callback(peer, reason)
        finally:
            with self._changed:
                del self._ending[peer]
                self._changed.notify_all()
        if self._agent.observers:
            self._agent.observers.emit(Over(peer=peer.name, reason=reason, certain=certain))
        return True

    def _await_end(self, peer: WorkerInfo) -> None:
        """Wait until the layers above have been told of an end that another thread has noticed."""

        def told() -> bool:
            return self._ending.get(peer) in (None, threading.current_thread()) or self._agent.closed.is_set()

        with self._changed:
            if not self._changed.wait_for(told, _GIVE_UP_SECONDS):
                _log.warning("giving up what worker %r held takes more than %g s", peer.name, _GIVE_UP_SECONDS)

    def end_later(self, peer: WorkerInfo, reason: str, incarnation: str) -> None:
        """`end`, on another thread. Returns at once."""

        def end() -> None:
            self.end(peer, reason, incarnation=incarnation)

        self._agent.pool.run(end)

    # What is known.

    @property
    def busy(self) -> bool:
        """Whether a peer is being examined, or the layers above are being told of an end. For tests."""
        with self._changed:
            return bool(self._examining or self._ending)

    def refusal(self, link: Link) -> WorkerLostError | None:
        """The error for calls to a suspected peer, to which no connection is tried; None if it is not suspected."""
        fate = link.fate
        if not fate.suspected:
            return None
        seconds = time.monotonic() - fate.since
        return WorkerSuspectedError(
            f"worker {link.peer.name!r} has not been reached for {seconds:.1f} s: {fate.reason}. It is not known to be "
            "dead, so references to it are kept and work again when it answers; until then calls fail at once",
            link.peer.name,
        )

    def require(self, peer: WorkerInfo) -> None:
        """Raise `WorkerLostError` if a peer is known to be over, else have it examined. Does not wait."""
        fate = self._agent.link(peer).fate
        if fate.over:
            raise WorkerLostError(f"worker {peer.name!r} is lost: {fate.reason}", peer.name)
        self.examine(peer)

    def await_verdict(self, peer: WorkerInfo, deadline: float, what: str) -> bool:
        """Wait for the fate of an unreachable peer. True if the peer answers, False if it is known to be over.

        Logs every ten seconds which peer it waits for. Raises `RpcTimeoutError` at the deadline, naming the peer, and
        `NotInitializedError` if this worker is shut down.
        """
        link = self._agent.link(peer)
        self.examine(peer)
        remind = time.monotonic() + _REMIND_SECONDS
        with self._changed:
            while True:
                if link.fate.over:
                    return False
                if peer not in self._examining and not link.fate.suspected:
                    return True
                now = time.monotonic()
                if now >= deadline:
                    raise RpcTimeoutError(
                        f"{what} waited for worker {peer.name!r}, which could not be reached at the deadline: "
                        f"{link.fate.reason or _SILENT}"
                    )
                if self._agent.closed.is_set():
                    raise NotInitializedError(f"worker {self._agent.me.name!r} has been shut down; call init_rpc again")
                if now >= remind:
                    remind = now + _REMIND_SECONDS
                    _log.warning("%s waits for worker %r: %s", what, peer.name, link.fate.reason or _SILENT)
                self._changed.wait(min(deadline, remind, now + 1.0) - now)

    def close(self) -> None:
        """End the timer. The agent must be closed."""
        with self._changed:
            self._due.clear()
            self._changed.notify_all()
            timer = self._timer
        if timer is not None and timer is not threading.current_thread():
            timer.join()

    # Examinations.

    def _examine(self, peer: WorkerInfo) -> None:
        try:
            self._find_out(peer)
        finally:
            with self._changed:
                self._examining.discard(peer)
                again = peer in self._again
                self._again.discard(peer)
                self._changed.notify_all()
        if again:
            self.examine(peer)

    def _find_out(self, peer: WorkerInfo) -> None:
        agent = self._agent
        link = agent.link(peer)
        if link.fate.over:
            return
        if self._has_left(link):
            return
        seconds = agent.options.probe_timeout
        if link.fate.tries >= _PATIENT_AFTER:  # a slow network needs more time for a greeting
            seconds = min(seconds * _PATIENT_FACTOR, agent.options.connect_timeout)
        try:
            agent.is_reachable(peer, seconds)
        except BackhaulError as error:
            # The peer's goodbye may have come during the attempt.
            if not agent.closed.is_set() and not self._has_left(link):
                self._doubt(link, error)
            return
        self._answered(link)
        for callback in list(self.on_present):
            callback(peer)

    def _has_left(self, link: Link) -> bool:
        """Whether the peer has said goodbye. It is over when its last line has ended."""
        if link.left and not link.up:  # otherwise the end of its last line starts another examination
            self.end(link.peer, "it has left the group")
        return link.left

    def _answered(self, link: Link) -> None:
        with self._changed:
            was_suspected = link.fate.answered()
            self._changed.notify_all()
        if was_suspected:
            _log.warning("worker %r answers again", link.peer.name)
            if self._agent.observers:
                self._agent.observers.emit(Present(peer=link.peer.name))
            for callback in list(self.on_back):
                callback(link.peer)

    def _doubt(self, link: Link, error: BackhaulError) -> None:
        peer = link.peer
        how = self._agent.how_ended(peer)
        if how is not None:
            self.end(peer, how)
            return
        now = time.monotonic()
        with self._changed:
            news = link.fate.doubt(now, str(error))
            given_up = link.fate.is_given_up(now, self._lost_after)
            if not given_up and not link.fate.over:
                self._schedule(peer, link.fate.next_try(now, self._lost_after))
            self._changed.notify_all()
        if given_up:
            self.end(peer, f"it has not answered for {self._lost_after:g} s", certain=False)
        elif news:
            _log.warning(
                "worker %r cannot be reached: %s. Calls to it fail until it answers; references to it are kept",
                peer.name,
                error,
            )
            if self._agent.observers:
                self._agent.observers.emit(Suspected(peer=peer.name, reason=str(error)))
            refusal = self.refusal(link)
            if refusal is not None:
                for callback in list(self.on_suspected):
                    callback(peer, refusal)

    def _schedule(self, peer: WorkerInfo, at: float) -> None:
        """Examine a peer at a given time. The caller holds ``_changed``."""
        self._due[peer] = at
        if self._timer is None:
            self._timer = threading.Thread(target=self._wait_for_due, name="backhaul-fates", daemon=True)
            self._timer.start()
        else:
            self._changed.notify_all()

    def _wait_for_due(self) -> None:
        while True:
            with self._changed:
                if not self._due or self._agent.closed.is_set():
                    self._timer = None
                    return
                now = time.monotonic()
                due = [peer for peer, at in self._due.items() if at <= now]
                for peer in due:
                    del self._due[peer]
                if not due:
                    self._changed.wait(min(self._due.values()) - now)
            for peer in due:
                self.examine(peer)
