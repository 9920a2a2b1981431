"""The steward: one process on each host that starts and ends the workers there, for a launcher elsewhere.

The steward talks to the launcher over its standard input and output (`protocol`), usually an ssh connection.
Three events end all workers of the host at once:

- the end of the steward's input: the launcher or the connection is gone;
- the end of its lease (`lease`): the launcher has not answered for so long that it considers the workers lost;
- the steward's own death or suspension: its guardian then ends the workers.

One thread does all the work, in the loop of a `Supervisor`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from queue import Empty, SimpleQueue

from backhaul.directories import PrivateDirectory
from backhaul.errors import ProtocolError
from backhaul.launch import protocol
from backhaul.launch.feed import Feed
from backhaul.launch.guardian import Guardian
from backhaul.launch.lease import Lease, clock
from backhaul.launch.session import NOT_INHERITED, RUNTIME_DIR_VARIABLE
from backhaul.launch.supervisor import Command, Process, Supervisor
from backhaul.news import promise, tell
from backhaul.transport.hosts import address_towards

_READ = 1 << 16
_FIRST_LEASE = 60.0  # seconds within which the launcher must set up this steward
_AFTER_LEASE = 0.5  # seconds that this process has to act before its guardian does
_BACKLOG = 64


class Steward:
    """See the module's docstring. ``source`` and ``target`` are descriptors of the launcher's pipes."""

    def __init__(self, version: str, source: int, target: int, directory: PrivateDirectory) -> None:
        self._version = version
        self._source = source
        self._directory = directory.path
        self._guardian = Guardian(directory.path)
        self._supervisor = Supervisor(self._carry, self._guardian)
        self._feed: Feed = self._supervisor.feed(target)
        self._reader = protocol.Reader(protocol.ToSteward)
        self._greeted_at = clock()
        self._lease = Lease(_FIRST_LEASE, self._greeted_at)
        self._credit = protocol.WINDOW
        self._environment: dict[str, str] | None = None
        self._workdir = ""
        self._listener: socket.socket | None = None
        self._reached: SimpleQueue[protocol.Reached] = SimpleQueue()  # from the threads that connect
        self._leaving: list[Process] = []
        self._launcher_gone = False

    def run(self) -> None:
        """Serve the launcher until it is gone. All workers are gone when this returns."""
        self._supervisor.attend(self._source, self._on_input)
        self._feed.send(protocol.MARK)
        self._send(protocol.Hello(protocol.VERSION, self._version, _ssh_address()))
        try:
            while not self._launcher_gone:
                self._look_after_lease()
                for process in self._supervisor.poll(max(0.0, self._next_time() - clock())):
                    self._on_end(process)
                self._report_reached()
                self._report_over()
        finally:
            self._supervisor.close()
            self._guardian.close()
            self._feed.abandon()

    # The launcher.

    def _on_input(self) -> None:
        data = os.read(self._source, _READ)
        if not data:
            self._launcher_gone = True
            return
        for message in self._reader.feed(data):
            self._do(message)

    def _do(self, message: protocol.Message) -> None:
        match message:
            case protocol.Setup():
                self._set_up(message)
            case protocol.Listen(address, port):
                self._listen(address, port)
            case protocol.Reach(address, port, seconds):
                threading.Thread(target=self._reach, args=(address, port, seconds), daemon=True).start()
            case protocol.Start():
                self._start(message)
            case protocol.Stop(signum, grace):
                self._supervisor.stop(signum, grace)
            case protocol.Signal(signum):
                self._supervisor.pass_on(signum)
            case protocol.Grant(number):
                self._lease.granted(number)
                self._guardian.expect(self._lease.ends - clock() + _AFTER_LEASE)
            case protocol.Credit(size):
                self._credit += size
                self._supervisor.hold_output(self._credit <= 0)
            case protocol.News(process, ending, replaced):
                tell(self._directory, process, ending, replaced=replaced)
            case _:
                raise ProtocolError(f"the launcher sent {message!r}")

    def _send(self, message: protocol.Message) -> None:
        self._feed.send(protocol.frame(message))

    def _look_after_lease(self) -> None:
        now = clock()
        if self._lease.is_over(now):
            # Perhaps nobody reads this. If somebody does, the connection works and the launcher is suspended.
            print("backhaul: the launcher has not answered; the workers of this host are killed", file=sys.stderr)
            self._launcher_gone = True
            return
        number = self._lease.ask(now)
        if number is not None:
            self._send(protocol.Ask(number))
        self._launcher_gone |= self._feed.broken

    def _next_time(self) -> float:
        return min(self._lease.next_question, self._lease.ends)

    # Before the workers.

    def _set_up(self, setup: protocol.Setup) -> None:
        refusal = _refusal(setup)
        if refusal:
            self._send(protocol.Refused(refusal))
            return
        self._lease = Lease(setup.lease, self._greeted_at)  # counts from before the launcher's answer, like any grant
        self._guardian.expect(setup.lease + _AFTER_LEASE)
        promise(self._directory, of_all_hosts=True)
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        own = {RUNTIME_DIR_VARIABLE: self._directory}
        self._environment = {**inherited, **setup.environment, **own}
        self._workdir = setup.workdir
        self._send(protocol.Ready())

    def _listen(self, address: str, port: int) -> None:
        """Take the port on which the group will meet, to check that it is free and reachable."""
        try:
            family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except OSError as error:
            self._send(protocol.Listening(port, error.strerror or str(error)))
            return
        self._listener = sock
        self._send(protocol.Listening(sock.getsockname()[1]))

    def _reach(self, address: str, port: int, seconds: float) -> None:
        """Try to connect, on a thread of its own because connecting takes time."""
        error = ""
        try:
            socket.create_connection((address, port), seconds).close()
        except OSError as failure:
            error = failure.strerror or str(failure)
        self._reached.put(protocol.Reached(address_towards(address) or "", error))
        self._supervisor.wake()

    def _report_reached(self) -> None:
        while True:
            try:
                self._send(self._reached.get_nowait())
            except Empty:
                return

    # The workers.

    def _start(self, start: protocol.Start) -> None:
        if self._environment is None:
            raise ProtocolError("the launcher started a worker before it set up this host")
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        environment = {**self._environment, **start.environment}
        argv = [sys.executable, *start.argv]
        try:
            process = self._supervisor.start(Command(start.name, argv, environment, cwd=self._workdir), start.rank)
        except OSError as error:
            self._send(protocol.Ended(start.rank, 127, f"could not be started: {error}"))
            self._send(protocol.Over(start.rank))
            return
        self._send(protocol.Started(start.rank, process.pid, process.identity))

    def _carry(self, name: str, index: int, stream: int, data: bytes) -> None:
        """The sink of the supervisor; ``index`` is a rank."""
        for begin in range(0, len(data), protocol.CHUNK) or (0,):
            self._send(protocol.Output(index, stream, data[begin : begin + protocol.CHUNK]))
        self._credit -= len(data)
        if self._credit <= 0:
            self._supervisor.hold_output(True)

    def _on_end(self, process: Process) -> None:
        self._leaving.append(process)
        self._send(protocol.Ended(process.index, process.returncode or 0, process.ending))

    def _report_over(self) -> None:
        for process in [process for process in self._leaving if process.over.is_set()]:
            self._leaving.remove(process)
            self._send(protocol.Over(process.index))


def _refusal(setup: protocol.Setup) -> str:
    """Why workers cannot start here; empty if they can."""
    if not os.path.isdir(setup.workdir):
        return (
            f"it has no directory {setup.workdir}, in which the launcher runs: make it, or name another with --workdir"
        )
    if setup.script is not None and not os.path.exists(os.path.join(setup.workdir, setup.script)):
        return (
            f"it has no script {os.path.join(setup.workdir, setup.script)}: copy it there, or give the directory that "
            "has it with --workdir"
        )
    return ""


def _ssh_address() -> str:
    """This host's address on the ssh connection; empty without one."""
    parts = os.environ.get("SSH_CONNECTION", "").split()  # the client's address and port, then the server's
    return parts[2] if len(parts) == 4 else ""


def main(version: str) -> None:
    """Be the steward of this host. ``version`` is the version of Backhaul here.

    Standard input and output belong to the launcher, so no print may reach them.
    """
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    # The steward notices a broken connection when it writes; the signal would end it before its workers.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    directory = PrivateDirectory()
    try:
        Steward(version, source, target, directory).run()
    finally:
        directory.remove()
