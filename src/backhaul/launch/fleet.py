"""Drives the course of a launch over several hosts: connections, clocks, signals and output. The I/O of `course`."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import FrameType

from backhaul.errors import ProtocolError
from backhaul.launch import protocol
from backhaul.launch.course import Action, Connect, Course, Disconnect, Say, Send
from backhaul.launch.guardian import Guardian
from backhaul.launch.job import Outcome, handled_signals
from backhaul.launch.lease import clock
from backhaul.launch.outlet import Outlet
from backhaul.launch.placement import Host
from backhaul.launch.prefix import ERR, prefixed_output
from backhaul.launch.ssh import explain, first_line, steward_argv
from backhaul.launch.supervisor import Command, Process, Supervisor
from backhaul.launch.terms import Terms
from backhaul.transport.hosts import address_towards

_HANG_UP_SECONDS = 3.0  # within which a connection must end after the last message
_WRITE_SECONDS = 0.2


@dataclass(frozen=True)
class Way:
    """How to reach the hosts."""

    ssh: str
    python: str
    inherited: dict[str, str]
    """The environment of ssh."""


@dataclass
class _Connection:
    """One connection with the steward of a host."""

    number: int
    host: Host
    process: Process | None = None
    reader: protocol.StewardReader = field(default_factory=protocol.StewardReader)
    wrong: str = ""
    """An error in its bytes, if it sent some that no steward sends."""
    hung_up: bool = False
    kill_at: float | None = None


class Fleet:
    """Runs a launch over hosts to its end. Main thread only, since it handles signals."""

    def __init__(self, terms: Terms, way: Way, *, colour: bool) -> None:
        self._terms = terms
        self._way = way
        self._course = Course(terms, address_towards)
        self._connections: list[_Connection] = []
        self._current: dict[int, _Connection] = {}
        self._leaving: list[Process] = []
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._passed: SimpleQueue[int] = SimpleQueue()
        self._until = math.inf  # when to stop waiting for the reader of the output
        self._guardian = Guardian()
        self._supervisor = Supervisor(self._on_bytes, self._guardian)
        self._outlet = Outlet(self._supervisor.wake)
        self._err = self._outlet.writer(sys.stderr.buffer)
        self._output = prefixed_output(self._outlet.writer(sys.stdout.buffer), self._err, colour=colour)

    def run(self) -> Outcome:
        """Run the launch and return its outcome. Raises `BrokenPipeError` if the reader of the output is gone."""
        try:
            with handled_signals(self._on_signal, self._on_passed), self._not_suspended():
                self._act(self._course.begin(clock()))
                while not self._course.done or self._supervisor.active:
                    self._step()
                unread = not self._flush()
        finally:
            self._supervisor.close()
            self._guardian.close()
        return replace(self._course.outcome, unread=unread)

    def _step(self) -> None:
        self._leaving += self._supervisor.poll(max(0.0, self._next_time() - clock()))
        for process in [process for process in self._leaving if process.over.is_set()]:
            self._leaving.remove(process)
            self._on_over(self._connections[process.index])
        while not self._signals.empty():
            self._act(self._course.stop(self._signals.get(), clock()))
        while not self._passed.empty():
            self._act(self._course.pass_on(self._passed.get()))
        for host, size in self._outlet.written():
            self._act([Send(host, protocol.Credit(size))])
        if self._outlet.error is not None:
            raise self._outlet.error
        self._act(self._course.tick(clock()))
        for connection in self._connections:
            if connection.kill_at is not None and clock() >= connection.kill_at and connection.process is not None:
                connection.kill_at = None
                self._supervisor.stop(signal.SIGKILL, only=connection.process)

    def _next_time(self) -> float:
        kills = [each.kill_at for each in self._connections if each.kill_at is not None]
        return min([self._course.next_time(), *kills, clock() + 3600.0])

    def _on_signal(self, signum: int) -> None:
        self._until = clock() + self._terms.grace if self._until == math.inf else 0.0
        self._signals.put(signum)
        self._supervisor.wake()

    def _on_passed(self, signum: int) -> None:
        self._passed.put(signum)
        self._supervisor.wake()

    @contextmanager
    def _not_suspended(self) -> Iterator[None]:
        """Refuse Ctrl-Z with a message: the hosts would conclude that a suspended launcher is dead."""

        def refuse(signum: int, frame: FrameType | None) -> None:
            self._say("the launcher ignores Ctrl-Z: its hosts would consider it dead and end the workers")

        previous = signal.getsignal(signal.SIGTSTP)
        if previous is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, refuse)
        try:
            yield
        finally:
            if previous is signal.SIG_DFL:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    # Actions of the course.

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(host):
                    self._connect(host)
                case Disconnect(host):
                    self._disconnect(host)
                case Send(host, message):
                    self._send(host, message)
                case Say(text):
                    self._say(text)

    def _connect(self, number: int) -> None:
        host = self._terms.hosts[number]
        argv = steward_argv(host, self._way.ssh, self._way.python, self._terms.host_timeout)
        connection = _Connection(number, host)
        self._connections.append(connection)
        self._current[number] = connection
        try:
            connection.process = self._supervisor.start(
                Command(host.name, argv, self._way.inherited, fed=True), len(self._connections) - 1
            )
        except OSError as error:
            del self._current[number]
            why = f"host {host.name}: {argv[0]} cannot run: {error.strerror}"
            self._act(self._course.disconnected(number, why, clock()))
            return
        if connection.process.feed is not None:
            connection.process.feed.send(first_line(self._terms.environment))

    def _disconnect(self, number: int) -> None:
        connection = self._current.pop(number, None)
        if connection is None or connection.process is None:
            return
        connection.hung_up = True
        connection.kill_at = clock() + _HANG_UP_SECONDS
        if connection.process.feed is not None:
            connection.process.feed.close()

    def _send(self, number: int, message: protocol.Message) -> None:
        connection = self._current.get(number)
        if connection is not None and connection.process is not None and connection.process.feed is not None:
            connection.process.feed.send(protocol.frame(message))

    def _say(self, text: str) -> None:
        self._err(f"backhaul: {text}\n".encode(errors="backslashreplace"))

    # Input from the hosts.

    def _on_bytes(self, name: str, index: int, stream: int, data: bytes) -> None:
        """The sink of the supervisor; ``index`` is that of a connection."""
        connection = self._connections[index]
        if stream == ERR:
            # Before the steward speaks, this is output of ssh. It is reported only if the connection fails.
            if connection.reader.greeted:
                self._output(f"host {name}", index, ERR, data)
            return
        try:
            messages = connection.reader.feed(data)
        except ProtocolError as error:
            connection.wrong = str(error)
            if connection.process is not None:
                self._supervisor.stop(signal.SIGKILL, only=connection.process)
            return
        for message in messages:
            if connection.hung_up:
                return
            if isinstance(message, protocol.Output):
                self._print(connection, message)
            else:
                self._act(self._course.received(connection.number, message, clock()))

    def _print(self, connection: _Connection, output: protocol.Output) -> None:
        self._output(self._terms.seats[output.rank].name, output.rank, output.stream, output.data)
        if output.data:
            self._outlet.mark(connection.number, len(output.data))

    def _on_over(self, connection: _Connection) -> None:
        """Handle a connection that has ended, after all its bytes were read."""
        connection.kill_at = None
        process = connection.process
        if connection.hung_up or process is None:
            return
        self._current.pop(connection.number, None)
        if connection.wrong:
            why = f"host {connection.host.name}: its bytes are not those of a steward: {connection.wrong}"
        elif connection.reader.greeted:
            why = _broken(connection.host, process)
        else:
            noise = connection.reader.noise.decode(errors="backslashreplace")
            code = process.returncode or 0
            why = explain(connection.host, self._way.ssh, self._way.python, code, process.stderr_tail, noise)
        self._act(self._course.disconnected(connection.number, why, clock()))

    def _flush(self) -> bool:
        """Write the remaining output. False if a signal has come and the reader did not read in time."""
        while not self._outlet.finish(_WRITE_SECONDS):
            if clock() >= self._until:
                return False
        if self._outlet.error is not None:
            raise self._outlet.error
        return True


def _broken(host: Host, process: Process) -> str:
    said = process.stderr_tail.splitlines()
    last = f": {said[-1]}" if said else f": it {process.ending}"
    return f"the connection with host {host.name} has ended{last}"
