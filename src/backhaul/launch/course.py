"""The course of a launch over several hosts: decides what to do from what the stewards report. A pure state machine.

Theory of operation
-------------------
The launch as a whole::

    gathering ──> listening ──> reaching ──> running ──> stopping ──> done
        │             │            │            └──(all workers are over)──^
        └─────────────┴────────────┴──(a host cannot be used)──────────────^

*gathering*: every host must answer and have what the workers need. *listening*: the first host takes the port on
which the group will meet. *reaching*: every host tries to connect to that port. Only then are workers started, so that
a wrong name or a firewall causes an error that names the host, not a group that never meets.

A host::

    connecting ──> setting up ──> ready ──> up ──(its connection ends)──> cut off ──(its lease ends)──> away
        ^                                   └──(no answer until its lease ends)──────────────────────────^  │
        └──────────────────────────────────────────(rejoin: after a pause)──────────────────────────────────┘

Workers of a host that is *cut off* may still run. When the host's lease ends, they have been killed (`lease`), and the
workers of the other hosts are told. Without ``rejoin`` the launcher does not wait for that: the loss of a host ends the
launch.

A worker::

    waiting ──> running ──(ended)──> leaving ──(its process group is gone)──> over
       ^                                └──────────(it is restarted)─┐
       └─────────────────────────────────────────────────────────────┘

Each method returns the actions to take. Times are in seconds, all of the same clock.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from backhaul.launch import protocol
from backhaul.launch.job import Cause, Outcome, exit_code
from backhaul.launch.lease import Grants
from backhaul.launch.placement import Host, Seat
from backhaul.launch.session import LOOPBACK, RESTARTS_VARIABLE
from backhaul.launch.terms import Terms

HOST_FAILED = 255
"""The exit code if a host is unusable or lost; ssh uses the same."""

_REACH_SECONDS = 5.0
_STOP_SLACK = 5.0  # seconds beyond the grace time within which a host must confirm that its workers are gone
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0


@dataclass(frozen=True)
class Connect:
    host: int


@dataclass(frozen=True)
class Disconnect:
    host: int


@dataclass(frozen=True)
class Send:
    host: int
    message: protocol.Message


@dataclass(frozen=True)
class Say:
    text: str


Action = Connect | Disconnect | Send | Say


@dataclass
class _Worker:
    seat: Seat
    state: Literal["waiting", "running", "leaving", "over"] = "waiting"
    process: str = ""
    times: int = 0
    again: bool = False


@dataclass
class _Berth:
    """The state of one host."""

    number: int
    host: Host
    workers: list[_Worker]
    state: Literal["connecting", "setting up", "ready", "up", "cut off", "away", "closed"] = "connecting"
    deadline: float = math.inf
    address: str = ""
    own_address: str = ""
    failure: str = ""
    grants: Grants | None = None
    tries: int = 0

    @property
    def connected(self) -> bool:
        return self.state in ("connecting", "setting up", "ready", "up")


@dataclass
class Course:
    """See the module's docstring. ``towards`` gives the address of the launcher's machine that faces another host."""

    terms: Terms
    towards: Callable[[str], str | None]
    phase: Literal["gathering", "listening", "reaching", "running", "stopping", "done"] = "gathering"
    _cause: Cause = field(default_factory=Cause)
    _address: str = ""
    _port: int = 0
    _stop_by: float = math.inf
    _berths: list[_Berth] = field(default_factory=list)
    _workers: list[_Worker] = field(default_factory=list)
    _failures: dict[int, Outcome] = field(default_factory=dict)  # by rank, in order of time; a restart removes one

    def __post_init__(self) -> None:
        self._workers = [_Worker(seat) for seat in self.terms.seats]
        for number, host in enumerate(self.terms.hosts):
            workers = [worker for worker in self._workers if worker.seat.host == number]
            self._berths.append(_Berth(number, host, workers))

    # Queries.

    @property
    def done(self) -> bool:
        return self.phase == "done"

    @property
    def outcome(self) -> Outcome:
        """How the launch has ended."""
        if self._cause.outcome is not None:
            return self._cause.outcome
        return next(iter(self._failures.values()), Outcome(0))

    def next_time(self) -> float:
        """When `tick` must be called next."""
        times = [self._stop_by]
        for berth in self._berths:
            times.append(berth.deadline)
            if berth.grants is not None and berth.state in ("up", "cut off"):
                times.append(berth.grants.over_at)
                if berth.state == "up" and self.phase == "running" and not berth.grants.warned:
                    times.append(berth.grants.doubtful_at)
        return min(times)

    # Events.

    def begin(self, now: float) -> list[Action]:
        return [self._connect(berth, now) for berth in self._berths]

    def received(self, number: int, message: protocol.Message, now: float) -> list[Action]:
        """Handle a message from the steward of a host."""
        berth = self._berths[number]
        match message:
            case protocol.Ask(question):
                return self._asked(berth, question, now)
            case protocol.Hello():
                return self._greeted(berth, message, now)
            case protocol.Ready():
                berth.state, berth.deadline = "ready", math.inf
                return self._advance(now)
            case protocol.Refused(reason):
                return self._unusable(berth, f"host {berth.host.name}: {reason}", now)
            case protocol.Listening(port, error):
                return self._listening(berth, port, error, now)
            case protocol.Reached(own_address, error):
                return self._reached(berth, own_address, error, now)
            case protocol.Started(rank, _, process):
                self._workers[rank].process = process
                return []
            case protocol.Ended(rank, returncode, ending):
                how = f"{ending} on host {berth.host.name}"
                return self._ended(self._workers[rank], returncode, how, now)
            case protocol.Over(rank):
                return self._over(self._workers[rank])
        return self._unusable(berth, f"host {berth.host.name} said what only a launcher says: {message!r}", now)

    def disconnected(self, number: int, why: str, now: float) -> list[Action]:
        """Handle a connection that ended by itself."""
        berth = self._berths[number]
        if berth.state != "up":
            berth.state = "away"
            return self._unusable(berth, why, now)
        if self.phase == "stopping":
            berth.state = "closed"
            return self._give_up(berth) + self._finish_if_over()
        if self.terms.rejoin:
            berth.state = "cut off"
            return [Say(f"{why}\nits workers count as lost once their lease is over")]
        berth.state = "closed"
        return self._give_up(berth) + self._fail(Outcome(HOST_FAILED, why, stopped=self._others(berth)), now)

    def stop(self, signum: int, now: float) -> list[Action]:
        """Handle a signal to the launcher."""
        if self._cause.claim(Outcome(128 + signum, signum=signum)):
            return self._stop(signum, now)
        self._stop_by = min(self._stop_by, now + _STOP_SLACK)
        return self._to_all(protocol.Stop(signal.SIGKILL, 0.0))

    def pass_on(self, signum: int) -> list[Action]:
        """Handle a signal to the launcher that is for the workers' programs. Workers that do not run yet miss it."""
        return self._to_all(protocol.Signal(signum))

    def tick(self, now: float) -> list[Action]:
        """Handle the passing of time."""
        if self.phase == "stopping" and now >= self._stop_by:
            return self._finish()
        actions: list[Action] = []
        for berth in self._berths:
            if not self.done:
                actions += self._look_at(berth, now)
        return actions

    # Before the workers.

    def _connect(self, berth: _Berth, now: float) -> Action:
        berth.state = "connecting"
        berth.deadline = now + self.terms.connect_timeout
        return Connect(berth.number)

    def _greeted(self, berth: _Berth, hello: protocol.Hello, now: float) -> list[Action]:
        ours = self.terms.version
        if (hello.protocol, hello.version) != (protocol.VERSION, ours):
            reason = f"it has Backhaul {hello.version}, but the launcher has {ours}: install the same version on both"
            return self._unusable(berth, f"host {berth.host.name}: {reason}", now)
        berth.state = "setting up"
        berth.address = berth.host.address or hello.address
        berth.grants = Grants(self.terms.host_timeout, now)
        setup = protocol.Setup(
            berth.host.name,
            dict(self.terms.environment),
            berth.host.workdir or self.terms.workdir,
            self.terms.script,
            self.terms.host_timeout,
        )
        return [Send(berth.number, setup)]

    def _asked(self, berth: _Berth, question: int, now: float) -> list[Action]:
        actions: list[Action] = []
        if berth.grants is not None:
            if berth.grants.warned:
                actions.append(Say(f"host {berth.host.name} answers again"))
            berth.grants.answered(now)
            actions.append(Send(berth.number, protocol.Grant(question)))
        return actions

    def _advance(self, now: float) -> list[Action]:
        """Move to the next phase if all hosts are ready for it or have failed."""
        if self.phase == "running":  # a host is back
            return self._reach([berth for berth in self._berths if berth.state == "ready"], now)
        first = self._berths[0]
        if self.phase == "listening" and first.state == "closed":
            return self._fail(Outcome(HOST_FAILED, first.failure, stopped=False), now)
        wanted = {"gathering": "ready", "reaching": "up"}.get(self.phase)
        if wanted is None or any(berth.state not in (wanted, "closed") for berth in self._berths):
            return []
        failures = [berth.failure for berth in self._berths if berth.state == "closed"]
        if failures:
            return self._fail(Outcome(HOST_FAILED, "\n".join(failures), stopped=False), now)
        if self.phase == "gathering":
            return self._meet(now)
        self.phase = "running"
        return [action for berth in self._berths for action in self._start_waiting(berth)]

    def _meet(self, now: float) -> list[Action]:
        """Choose the address at which the group meets."""
        first = self._berths[0]
        address = self.terms.master_addr or first.address or self._local_address()
        if address is None:
            why = (
                f"no address of host {first.host.name} is known that the others can reach: give it with --master-addr, "
                "or as address= in a hostfile"
            )
            return self._fail(Outcome(HOST_FAILED, why, stopped=False), now)
        self.phase = "listening"
        self._address = address
        first.deadline = now + self._reach_seconds
        return [Send(0, protocol.Listen(address, self.terms.master_port))]

    @property
    def _reach_seconds(self) -> float:
        """How long a host may take to say that it listens, or that it has reached the first host."""
        return _REACH_SECONDS + self.terms.host_timeout

    def _local_address(self) -> str | None:
        """The address of the launcher's machine, which is the first host, that faces the other hosts."""
        if all(berth.host.is_local for berth in self._berths):
            return LOOPBACK
        others = [berth.address for berth in self._berths if berth.address]
        return self.towards(others[0]) if others else None

    def _listening(self, berth: _Berth, port: int, error: str, now: float) -> list[Action]:
        if error:
            why = (
                f"host {berth.host.name} cannot listen on {self._address} port {port}, where the group would meet: "
                f"{error}. Give an address of that host with --master-addr, and a free port with --master-port"
            )
            return self._fail(Outcome(HOST_FAILED, why, stopped=False), now)
        self._port = port
        self.phase = "reaching"
        return self._reach(self._berths, now)

    def _reach(self, berths: Sequence[_Berth], now: float) -> list[Action]:
        for berth in berths:
            berth.deadline = now + self._reach_seconds
        # While the group runs, its own store has the port, or had it: only the route matters, not the answer.
        return [Send(berth.number, protocol.Reach(self._address, self._port, _REACH_SECONDS)) for berth in berths]

    def _reached(self, berth: _Berth, own_address: str, error: str, now: float) -> list[Action]:
        if error and self.phase == "reaching":
            first = self._berths[0].host.name
            why = (
                f"host {berth.host.name} cannot reach {self._address} port {self._port}, where the group would meet on "
                f"host {first}: {error}. Name the address of {first} that the others reach with --master-addr, and a "
                "port that a firewall lets through with --master-port"
            )
            return self._unusable(berth, why, now)
        berth.state = "up"
        berth.deadline = math.inf
        berth.tries = 0
        berth.own_address = self.terms.listen_on or berth.host.address or own_address
        if self.phase == "running":
            back: list[Action] = [Say(f"host {berth.host.name} is back")]
            return back + self._start_waiting(berth)
        return self._advance(now)

    def _unusable(self, berth: _Berth, why: str, now: float) -> list[Action]:
        """Give up a host that cannot be used: for good, or, if the launch is already running, until a later attempt."""
        actions: list[Action] = [Disconnect(berth.number)] if berth.connected else []
        if self.phase == "running":
            if berth.failure != why:
                actions.append(Say(f"{why}\ntrying host {berth.host.name} again"))
            berth.failure = why
            return actions + self._try_later(berth, now)
        berth.state, berth.deadline, berth.failure = "closed", math.inf, why
        return actions + (self._finish_if_over() if self.phase == "stopping" else self._advance(now))

    # Workers.

    def _start_waiting(self, berth: _Berth) -> list[Action]:
        return [self._start(worker) for worker in berth.workers if worker.state == "waiting"]

    def _start(self, worker: _Worker) -> Action:
        seat = worker.seat
        berth = self._berths[seat.host]
        environment = self.terms.worker_environment(seat, self._address, str(self._port), berth.own_address)
        if worker.times:
            environment[RESTARTS_VARIABLE] = str(worker.times)
        worker.state, worker.again = "running", False
        self._failures.pop(seat.rank, None)
        return Send(berth.number, protocol.Start(seat.rank, seat.name, list(self.terms.argv), environment))

    def _ended(self, worker: _Worker, returncode: int, how: str, now: float) -> list[Action]:
        name = worker.seat.name
        used = sum(each.times for each in self._workers)
        worker.state = "leaving"
        worker.again = bool(returncode) and used < self.terms.restarts and self.phase == "running"
        actions: list[Action] = []
        if worker.process:
            actions += self._to_all(protocol.News(worker.process, how, worker.again))
            worker.process = ""
        if not returncode:
            return actions
        stopped = len(self._workers) > 1 and not self.terms.rejoin
        failure = self._failures[worker.seat.rank] = Outcome(exit_code(returncode), f"{name} {how}", stopped=stopped)
        if worker.again:
            worker.times += 1
            left = self.terms.restarts - used - 1
            return [*actions, Say(f"{name} {how}; it is restarted, and {left} restarts are left")]
        if self.terms.rejoin and self.phase == "running":
            return [*actions, Say(f"{name} {how}; the other workers go on")]
        return actions + self._fail(failure, now)

    def _over(self, worker: _Worker) -> list[Action]:
        """Handle the end of a worker's process group."""
        if worker.again and self.phase == "running":
            return [self._start(worker)]
        worker.state = "over"
        return self._finish_if_over()

    # Hosts that do not answer.

    def _look_at(self, berth: _Berth, now: float) -> list[Action]:
        grants = berth.grants
        if berth.state == "away" and now >= berth.deadline:
            return [self._connect(berth, now)]
        if berth.connected and now >= berth.deadline:
            if berth.state == "ready":  # it was told to listen, or to reach the first host
                limit = f"{self._reach_seconds:g} s"
            else:
                limit = f"{self.terms.connect_timeout:g} s (--connect-timeout)"
            return self._unusable(berth, f"host {berth.host.name} has not answered within {limit}", now)
        if grants is None or berth.state not in ("up", "cut off"):
            return []
        silence = f"has not answered for {grants.silence(now):.0f} s"
        if now >= grants.over_at:
            return self._lost(berth, silence, now)
        if berth.state == "up" and self.phase == "running" and now >= grants.doubtful_at and not grants.warned:
            grants.warned = True
            limit = f"it counts as lost after {self.terms.host_timeout:g} s (--host-timeout)"
            return [Say(f"host {berth.host.name} {silence}; {limit}")]
        return []

    def _lost(self, berth: _Berth, silence: str, now: float) -> list[Action]:
        """Handle a lost host: its lease is over, so its workers have ended."""
        actions: list[Action] = [Disconnect(berth.number)] if berth.connected else []
        name = berth.host.name
        if self.phase != "running" or not self.terms.rejoin:
            berth.state = "closed"
            failure = Outcome(HOST_FAILED, f"host {name} {silence}", stopped=self._others(berth))
            return actions + self._give_up(berth) + self._fail(failure, now) + self._finish_if_over()
        berth.state = "cut off"  # so that its workers get no news of each other
        berth.failure = ""
        for worker in berth.workers:
            if worker.state in ("running", "leaving"):
                if worker.state == "running":
                    actions += self._ended(worker, HOST_FAILED, f"was lost with host {name}, which {silence}", now)
                worker.state = "waiting" if worker.again else "over"
        if any(worker.state == "waiting" for worker in berth.workers):
            actions += self._try_later(berth, now)
        else:
            berth.state = "closed"
        return actions + self._finish_if_over()

    def _try_later(self, berth: _Berth, now: float) -> list[Action]:
        berth.state = "away"
        berth.deadline = now + min(_FIRST_PAUSE * 2.0 ** min(berth.tries, 10), _LONGEST_PAUSE)
        berth.tries += 1
        return []

    # The end.

    def _fail(self, outcome: Outcome, now: float) -> list[Action]:
        return self._stop(signal.SIGTERM, now) if self._cause.claim(outcome) else []

    def _stop(self, signum: int, now: float) -> list[Action]:
        if self.phase not in ("running", "stopping"):
            return self._finish()
        self.phase = "stopping"
        self._stop_by = now + self.terms.grace + _STOP_SLACK
        actions = self._to_all(protocol.Stop(signum, self.terms.grace))
        for berth in self._berths:
            if berth.state != "up":
                if berth.connected:
                    actions.append(Disconnect(berth.number))
                berth.state, berth.deadline = "closed", math.inf
                actions += self._give_up(berth)
        for worker in self._workers:
            if worker.state == "waiting":
                worker.state = "over"
        return actions + self._finish_if_over()

    def _give_up(self, berth: _Berth) -> list[Action]:
        """Stop waiting for the workers of an unreachable host. Its steward ends them."""
        for worker in berth.workers:
            worker.state = "over"
        return []

    def _finish_if_over(self) -> list[Action]:
        """End the launch when all workers are over, except those that wait for a host that is away."""
        if self.phase not in ("running", "stopping"):
            return []
        if any(worker.state in ("running", "leaving") for berth in self._berths for worker in berth.workers):
            return []
        if any(worker.state == "waiting" for berth in self._berths if berth.state == "up" for worker in berth.workers):
            return []
        return self._finish()

    def _finish(self) -> list[Action]:
        self.phase = "done"
        self._stop_by = math.inf
        actions: list[Action] = [Disconnect(berth.number) for berth in self._berths if berth.connected]
        for berth in self._berths:
            berth.state, berth.deadline = "closed", math.inf
        return actions

    def _to_all(self, message: protocol.Message) -> list[Action]:
        return [Send(berth.number, message) for berth in self._berths if berth.state == "up"]

    def _others(self, berth: _Berth) -> bool:
        return any(other is not berth and other.workers for other in self._berths)
