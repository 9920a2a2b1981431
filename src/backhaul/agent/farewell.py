"""Farewell: decides when a fixed group may end: every worker has asked for the end, and no work is left.

Theory of operation
-------------------
The living member of the lowest rank leads. All other members send it `AwaitEnd`, a request that it answers at the very
end. So they notice if the leader dies, and the next member takes over.

The leader sends every member `AwaitReady`. A member answers once its own shutdown has been requested. So the leader
notices a member that dies before that. Then the leader takes tallies: how many calls each member has sent to each other
member, and how many it has finished for each. The leader stops when two tallies in a row are the same, every member is
idle, and every call that one member sent was finished by the other. Then there was a moment between the two tallies at
which nothing ran and nothing was under way, so nothing can start any more. (One tally is not enough: its parts are
taken at different times.)

There are two **stages**. In the first, all work ends. In the second, all members give up their references, and the
stage ends when the owners have been told.

The leader leaves last. It answers once all living members have sent `AwaitEnd`, and stays until they have hung up, so
that no member mistakes its departure for a death.

The group waits for an unreachable member until the member answers or is known to be dead (`fates`). Every ten seconds a
waiting worker logs which members it waits for. The log line is a warning if a member cannot be reached, or if all have
asked for the end and work still goes on. Otherwise its level is INFO: a server that has nothing else to do waits here
for hours.
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
"""Errors of an attempt to ask a member that may still live: its greeting can time out or be refused."""

PeerCounts = dict[int, int]
"""Rank of a peer -> number of calls."""

Counts = tuple[bool, PeerCounts, PeerCounts]
"""A member's tally: idle; calls sent to each peer; calls finished for each peer."""


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
    """Whether all members are idle, and each call that one member sent has been finished by the other."""
    for rank, (idle, sent, _) in tallies.items():
        if not idle:
            return False
        for peer, count in sent.items():
            if peer in tallies and tallies[peer][2].get(rank, 0) != count:
                return False
    return True


class _Promise:
    """Answers requests once something has happened, or at once if it has happened already. Thread-safe."""

    def __init__(self, answer: Callable[[int, Any], Frame]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._kept = False
        self._value: Any = None
        self._waiting: list[tuple[Line, int]] = []

    def asked_by(self) -> set[int]:
        """The ranks whose requests still wait for the answer."""
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
        # By rank, the members whose answers the leader waits for; some answers may have come.
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
        """Wait for the end of a stage. Returns the names of the members that died before it.

        Raises `RpcTimeoutError` if the stage does not end before the deadline.
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
        """Return when all work of the living members is over. Adds the dead members to ``lost``."""
        before: dict[int, Counts] = {}
        pause = _FIRST_PAUSE
        busy: list[str] = []
        with self._reminding(self._names_of_awaited, logging.INFO):
            self._ask_all(lambda id: AwaitReady(id, stage), "its readiness to shut down", lost, deadline)
        with self._reminding(lambda: busy, logging.WARNING):
            while True:
                try:
                    tallies = self._ask_all(Tally, "its tally", lost, deadline)
                except RpcTimeoutError as error:  # the deadline passed in the middle of a round
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
        """The members that work, or to which calls are under way; all members if the tallies do not say."""
        names = {info.id: info.name for info in self._agent.members()}
        busy = {rank for rank, (idle, _, _) in tallies.items() if not idle}
        for rank, (_, sent, _) in tallies.items():
            busy |= {to for to, count in sent.items() if to in tallies and tallies[to][2].get(rank, 0) != count}
        return [names.get(rank, f"rank {rank}") for rank in sorted(busy or tallies)]

    @contextmanager
    def _reminding(self, names: Callable[[], list[str]], level: int) -> Iterator[None]:
        """A context that logs every ten seconds which members this worker waits for."""
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
        """The answers of all other living members, by rank. Adds the dead members to ``lost``."""
        agent = self._agent
        others = [info for info in agent.members() if info != agent.me and info.id not in lost]
        answers: dict[int, Any] = {}
        futures: list[tuple[WorkerInfo, Future[Any] | None]] = []
        for info in others:
            try:
                futures.append((info, agent.ask_later(info, make, what, deadline)))
            except _UNREACHABLE:
                futures.append((info, None))  # asked again below
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
        """The answer of a member. Asks again as long as only the connection is lost.

        Otherwise a worker could conclude that a living member is dead, and wait for others that wait for it. Raises
        `WorkerLostError` if the member has ended, and `RpcTimeoutError` at the deadline.
        """
        while True:
            try:
                if future is None:
                    future = self._agent.ask_later(info, make, what, deadline)
                return future.wait()
            except _UNREACHABLE as error:
                if time.monotonic() >= deadline:
                    raise RpcTimeoutError(
                        f"{_WHAT}: worker {info.name!r} had not reported {what} by the deadline: {error}"
                    ) from error
                link_logger(info.name).debug("= asking again for %s: %s", what, error)
            future = None
            if not self._agent.fates.await_verdict(info, deadline, _WHAT) and not self._agent.is_replaced(info):
                raise WorkerLostError(f"worker {info.name!r} has ended", info.name)

    @staticmethod
    def _promise(promises: list[_Promise], envelope: Envelope) -> _Promise:
        stage: int = envelope.message.stage
        if not 0 <= stage < STAGES:
            raise ProtocolError(f"a message for stage {stage} of a shutdown, but a shutdown has only {STAGES} stages")
        return promises[stage]

    def _on_tally(self, line: Line, envelope: Envelope) -> Frame:
        return self._agent.answer(envelope.message.id, self._agent.counts())
