"""Farewell: when a fixed group may end. Every worker has asked for it, and no work is left.

Theory of operation
-------------------
The living member of the lowest rank leads. Everybody else asks it `AwaitEnd`, a request that it
answers at the very end; so a leader that dies is noticed, and the next one takes over.

The leader asks every member `AwaitReady`, which is answered once that member has asked for
the shutdown; so a member that dies first is noticed too. Then it takes tallies: how many
calls each member has sent to each other one and how many it has finished for each. When two tallies
in a row are the same, every member is idle, and what one sent the other finished, there was a
moment between the two at which nothing ran and nothing was under way, and so nothing can start
any more. (One tally is not enough: its parts are taken at different times.)

There are two **stages**: first all work ends; then all give up their references, and that is over, too.

The leader leaves last: it answers once all the living have asked `AwaitEnd`, and stays until they
have hung up, so that none of them takes its going for a death.

A member that cannot be reached is waited for until it answers or is known to be dead (`fates`). Whoever waits says for
whom, in the log. It is a warning, every ten seconds, if a member cannot be reached, or if all have asked for the end
and work still goes on. That others have not asked for it yet is no warning: a server that has nothing else to do
waits here for hours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.logs import link_logger
from backhaul.errors import AuthenticationError, ProtocolError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import AwaitEnd, AwaitReady, Tally

_log = logging.getLogger(__name__)

WORK, LAST = 0, 1
STAGES = 2

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
_DEPARTURE_SECONDS = 2.0
_REMIND_SECONDS = 10.0
_WHAT = "graceful shutdown"

_UNREACHABLE = (WorkerLostError, RpcTimeoutError, AuthenticationError)
"""What the attempt to ask a member can raise, whether it lives or not: a greeting can time out or be refused."""

PeerCounts = dict[int, int]
"""Rank of a peer -> number of calls."""

Counts = tuple[bool, PeerCounts, PeerCounts]
"""What a member tells: idle; calls sent to each peer; calls finished for each peer."""


class Verdicts(Protocol):
    """See `fates.Fates`."""

    def await_verdict(self, peer: WorkerInfo, deadline: float, what: str) -> bool: ...


class Asker(Protocol):
    """The part of the agent that this protocol needs."""

    me: WorkerInfo

    def members(self) -> list[WorkerInfo]: ...
    def ask_later(self, to: WorkerInfo, make: Callable[[int], Any], what: str, deadline: float) -> Future[Any]: ...
    @property
    def fates(self) -> Verdicts: ...
    def is_replaced(self, info: WorkerInfo) -> bool: ...
    def peers_connected(self) -> bool: ...
    def counts(self) -> Counts: ...
    def answer(self, id: int, value: Any) -> Frame: ...


def balanced(tallies: dict[int, Counts]) -> bool:
    """All are idle, and what one sent to another that one has finished."""
    for rank, (idle, sent, _) in tallies.items():
        if not idle:
            return False
        for peer, count in sent.items():
            if peer in tallies and tallies[peer][2].get(rank, 0) != count:
                return False
    return True


class _Promise:
    """Answers requests once something has happened, or at once if it has."""

    def __init__(self, answer: Callable[[int, Any], Frame]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._kept = False
        self._value: Any = None
        self._waiting: list[tuple[Line, int]] = []

    def asked_by(self) -> set[int]:
        """The ranks whose requests wait."""
        with self._lock:
            return {line.peer.id for line, _ in self._waiting}

    def handle(self, line: Line, envelope: Envelope) -> Frame | None:
        id = envelope.message.id
        with self._lock:
            if not self._kept:
                self._waiting.append((line, id))
                return None
        return self._answer(id, self._value)

    def keep(self, value: Any) -> None:
        with self._lock:
            self._kept, self._value = True, value
            waiting, self._waiting = self._waiting, []
        for line, id in waiting:
            line.reply(self._answer(id, value))


class Farewell:
    """One worker's part in the end of its group."""

    def __init__(self, agent: Asker, closed: threading.Event) -> None:
        self._agent = agent
        self._closed = closed
        # The members whose answer this worker, if it leads, waits for, by rank; some may have come.
        self._awaited: dict[int, tuple[WorkerInfo, Future[Any] | None]] = {}
        self._ready = [_Promise(agent.answer) for _ in range(STAGES)]
        self._end = [_Promise(agent.answer) for _ in range(STAGES)]

    def handlers(self) -> Iterable[tuple[type[Any], Callable[[Line, Envelope], Frame | None]]]:
        return (
            (AwaitReady, lambda line, envelope: self._promise(self._ready, envelope).handle(line, envelope)),
            (AwaitEnd, lambda line, envelope: self._promise(self._end, envelope).handle(line, envelope)),
            (Tally, self._on_tally),
        )

    def run(self, stage: int, deadline: float) -> list[str]:
        """Wait for the end of a stage; return the names of the members that died first.

        Raises `RpcTimeoutError` if it does not come before the deadline.
        """
        agent = self._agent
        self._ready[stage].keep(None)
        lost: dict[int, str] = {}
        for leader in agent.members():
            if leader == agent.me:
                break
            try:
                with self._reminding(lambda leader=leader: [leader.name], logging.INFO):  # type: ignore[misc]
                    ask = lambda id: AwaitEnd(id, stage)  # noqa: E731
                    dead: list[str] = self._ask(leader, ask, "the end of the group", deadline)
            except WorkerLostError:
                lost[leader.id] = leader.name
            else:
                return sorted({*dead, *lost.values()})
        self._lead(stage, lost, deadline)
        names = sorted(lost.values())
        self._end[stage].keep(names)
        if stage == LAST:
            self._wait_for_departures()
        return names

    def _lead(self, stage: int, lost: dict[int, str], deadline: float) -> None:
        """Return when all work of the living is over; add the dead to ``lost``."""
        before: dict[int, Counts] = {}
        pause = _FIRST_PAUSE
        busy: list[str] = []
        with self._reminding(self._names_of_awaited, logging.INFO):
            self._ask_all(lambda id: AwaitReady(id, stage), "its readiness to shut down", lost, deadline)
        with self._reminding(lambda: busy, logging.WARNING):
            while True:
                try:
                    tallies = self._ask_all(Tally, "its tally", lost, deadline)
                except RpcTimeoutError as error:  # the deadline has passed in the middle of a round
                    raise (self._still_busy(busy) if busy else error) from error
                tallies[self._agent.me.id] = self._agent.counts()
                everybody = self._end[stage].asked_by() >= tallies.keys() - {self._agent.me.id}
                if everybody and tallies == before and balanced(tallies):
                    return
                before = tallies
                busy = self._names_of_busy(tallies)
                if time.monotonic() + pause > deadline:
                    raise self._still_busy(busy)
                self._closed.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    @staticmethod
    def _still_busy(names: list[str]) -> RpcTimeoutError:
        return RpcTimeoutError(f"{_WHAT}: work was still going on at the deadline, on {', '.join(map(repr, names))}")

    def _names_of_awaited(self) -> list[str]:
        """The members whose answer this worker waits for."""
        awaited = list(self._awaited.values())
        return [info.name for info, future in awaited if future is None or not future.done()]

    def _names_of_busy(self, tallies: dict[int, Counts]) -> list[str]:
        """The members that work, or to which calls are under way; all if that cannot be told."""
        names = {info.id: info.name for info in self._agent.members()}
        busy = {rank for rank, (idle, _, _) in tallies.items() if not idle}
        for rank, (_, sent, _) in tallies.items():
            busy |= {to for to, count in sent.items() if to in tallies and tallies[to][2].get(rank, 0) != count}
        return [names.get(rank, f"rank {rank}") for rank in sorted(busy or tallies)]

    @contextmanager
    def _reminding(self, names: Callable[[], list[str]], level: int) -> Iterator[None]:
        """Inside, say every ten seconds whom this worker waits for."""
        over = threading.Event()

        def remind() -> None:
            waited = 0.0
            while not over.wait(_REMIND_SECONDS) and not self._closed.is_set():
                waited += _REMIND_SECONDS
                _log.log(level, "%s has waited %.0f s for %s", _WHAT, waited, ", ".join(map(repr, names())))

        thread = threading.Thread(target=remind, name="backhaul-farewell", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _wait_for_departures(self) -> None:
        deadline = time.monotonic() + _DEPARTURE_SECONDS
        pause = _FIRST_PAUSE
        while self._agent.peers_connected() and time.monotonic() < deadline:
            self._closed.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _ask_all(self, make: Callable[[int], Any], what: str, lost: dict[int, str], deadline: float) -> dict[int, Any]:
        """The answers of the living members other than this one, by rank."""
        agent = self._agent
        others = [info for info in agent.members() if info != agent.me and info.id not in lost]
        answers: dict[int, Any] = {}
        futures: list[tuple[WorkerInfo, Future[Any] | None]] = []
        for info in others:
            try:
                futures.append((info, agent.ask_later(info, make, what, deadline)))
            except _UNREACHABLE:
                futures.append((info, None))  # it is asked again below
        self._awaited = {info.id: (info, future) for info, future in futures}
        for info, future in futures:
            try:
                answers[info.id] = self._answer_of(info, future, make, what, deadline)
            except WorkerLostError:
                lost[info.id] = info.name
            self._awaited.pop(info.id, None)
        return answers

    def _ask(self, info: WorkerInfo, make: Callable[[int], Any], what: str, deadline: float) -> Any:
        return self._answer_of(info, None, make, what, deadline)

    def _answer_of(
        self, info: WorkerInfo, future: Future[Any] | None, make: Callable[[int], Any], what: str, deadline: float
    ) -> Any:
        """The answer of a member, asked again as long as only the connection is lost. Raises `WorkerLostError`.

        A worker that takes a living member for dead would wait for others that wait for it.
        """
        while True:
            try:
                if future is None:
                    future = self._agent.ask_later(info, make, what, deadline)
                return future.wait()
            except _UNREACHABLE as error:
                if time.monotonic() >= deadline:
                    raise RpcTimeoutError(
                        f"{_WHAT}: worker {info.name!r} had not told {what} at the deadline: {error}"
                    ) from error
                link_logger(info.name).debug("= it is asked again for %s: %s", what, error)
            future = None
            if not self._agent.fates.await_verdict(info, deadline, _WHAT) and not self._agent.is_replaced(info):
                raise WorkerLostError(f"worker {info.name!r} has ended", info.name)

    @staticmethod
    def _promise(promises: list[_Promise], envelope: Envelope) -> _Promise:
        stage: int = envelope.message.stage
        if not 0 <= stage < STAGES:
            raise ProtocolError(f"stage {stage} of a shutdown, which has {STAGES}")
        return promises[stage]

    def _on_tally(self, line: Line, envelope: Envelope) -> Frame:
        return self._agent.answer(envelope.message.id, self._agent.counts())
