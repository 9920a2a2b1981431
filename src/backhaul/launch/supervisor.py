"""Starts processes, carries their output, notices when they end, and stops them.

One thread drives a supervisor by calling `Supervisor.poll` in a loop; everything
happens on that thread. Other threads may only call `stop`, `pass_on`, `start_soon` and `wake`, signal handlers only
`stop`, `pass_on` and `wake`.

The life of a process::

    running ──(its leader exits)──> leaving ──(output at its end, or a second)──> over

Each process leads a session, and so a group, of its own. A signal to the group reaches the
process's children too, and a terminal's Ctrl-C reaches none of them directly. While a process is
*leaving*, its leader stays a zombie, so that the group's number cannot be reused
before the rest of the group is killed. Then the leader is reaped.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType

from backhaul.launch.feed import Feed
from backhaul.launch.guardian import Guardian
from backhaul.launch.prefix import ERR, OUT
from backhaul.transport.processes import name_of

GRACE = 5.0
"""Seconds between asking a process to end and killing it."""

_LINGER = 1.0  # seconds that children of an ended process have to end and finish their output
_CHUNK = 1 << 16
_TAIL = 4096

Sink = Callable[[str, int, int, bytes], None]
"""Receives a process's name, index, stream (1 or 2) and output; empty output marks the end."""


@dataclass(frozen=True)
class Command:
    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    pass_fds: Sequence[int] = ()
    cwd: str | None = None
    fed: bool = False
    """Whether the process's standard input is a `Feed`; otherwise it is empty."""


@dataclass(eq=False)
class Process:
    """A started command. ``sentinel`` becomes readable when the process ends, until the supervisor is closed."""

    name: str
    index: int
    pid: int
    sentinel: int
    popen: subprocess.Popen[bytes]
    identity: str = ""
    """The process's name as in `transport.processes`, on its machine and on others."""
    feed: Feed | None = None
    over: threading.Event = field(default_factory=threading.Event)
    returncode: int | None = None
    _tail: bytearray = field(default_factory=bytearray)
    _open: set[int] = field(default_factory=set)
    _leaving_until: float = 0.0

    @property
    def stderr_tail(self) -> str:
        """The last lines of the process's standard error."""
        return self._tail.decode(errors="backslashreplace").strip("\n")

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        return "is running" if self.returncode is None else ending(self.returncode)


def ending(returncode: int) -> str:
    """How a process with that return code ended, in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "a signal"
    return f"was killed by {name} (signal {-returncode})"


class Supervisor:
    """Runs commands until they are over. A context manager: leaving it kills the remaining processes."""

    def __init__(self, sink: Sink, guardian: Guardian) -> None:
        self._sink = sink
        self._guardian = guardian
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        # SimpleQueue.put is reentrant: a signal handler may interrupt it and call it again.
        self._stops: SimpleQueue[tuple[int, float, Process | None]] = SimpleQueue()
        self._passed: SimpleQueue[int] = SimpleQueue()
        self._starts: SimpleQueue[tuple[Command, int, Future[Process]]] = SimpleQueue()
        self._kill_at: float | None = None
        self._held = False
        self._exited: list[Process] = []
        self._active: dict[int, Process] = {}
        self._sentinels: list[int] = []

    @property
    def active(self) -> bool:
        """Whether any process is not over yet."""
        return bool(self._active)

    def start(self, command: Command, index: int | None = None) -> Process:
        """Start ``command``. Call only before or between polls.

        ``index`` is that of the process whose place the new one takes, if any.
        """
        popen = subprocess.Popen(
            list(command.argv),
            env=dict(command.env),
            cwd=command.cwd,
            stdin=subprocess.PIPE if command.fed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=tuple(command.pass_fds),
        )
        self._guardian.watch(popen.pid)
        index = len(self._sentinels) if index is None else index
        process = Process(command.name, index, popen.pid, _sentinel(popen.pid), popen, name_of(popen.pid))
        if popen.stdin is not None:
            process.feed = self.feed(os.dup(popen.stdin.fileno()))
            popen.stdin.close()
        self._active[process.pid] = process
        self._sentinels.append(process.sentinel)
        self._selector.register(process.sentinel, selectors.EVENT_READ, partial(self._on_exit, process))
        for stream, pipe in ((OUT, popen.stdout), (ERR, popen.stderr)):
            if pipe is not None:
                process._open.add(stream)
                if not self._held:
                    self._selector.register(pipe, selectors.EVENT_READ, partial(self._on_output, process, stream))
        return process

    def attend(self, fd: int, callback: Callable[[], None]) -> None:
        """Make `poll` call ``callback`` when ``fd`` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def feed(self, fd: int) -> Feed:
        """A `Feed` that owns ``fd``; `poll` writes its bytes whenever there is room."""
        return Feed(fd, self._selector)

    def hold_output(self, held: bool) -> None:
        """Leave the output of all processes in their pipes, or resume reading it.

        While output is held, a process with unread output does not become over, so none of it is lost.
        """
        if held == self._held:
            return
        self._held = held
        for process in self._active.values():
            for stream in process._open:
                pipe = process.popen.stdout if stream == OUT else process.popen.stderr
                if pipe is None:
                    continue
                if held:
                    self._selector.unregister(pipe)
                else:
                    self._selector.register(pipe, selectors.EVENT_READ, partial(self._on_output, process, stream))
                    if process.returncode is not None:
                        process._leaving_until = time.monotonic() + _LINGER

    def drop_output(self) -> None:
        """Read the output of all processes from now on, and drop it."""
        self._sink = drop
        self.hold_output(False)

    def start_soon(self, command: Command, index: int) -> Future[Process]:
        """A future of the process that the next `poll` starts in the place of another. Safe from any thread."""
        future: Future[Process] = Future()
        self._starts.put((command, index, future))
        self.wake()
        return future

    def stop(self, signum: int = signal.SIGTERM, grace: float = GRACE, only: Process | None = None) -> None:
        """Send ``signum`` to every process, and SIGKILL to those still running after ``grace`` seconds.

        With ``only``, send it to that process alone, and no SIGKILL later. Safe from any thread and from a signal
        handler. Returns at once; `poll` sends the signals.
        """
        self._stops.put((signum, time.monotonic() + grace, only))
        self.wake()

    def pass_on(self, signum: int) -> None:
        """Send ``signum`` to every process, but not to its children. Safe from any thread and from a signal handler."""
        self._passed.put(signum)
        self.wake()

    def wake(self) -> None:
        """Make `poll` return. Safe from any thread and from a signal handler."""
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            pass  # full: `poll` wakes anyway

    def poll(self, seconds: float | None = None) -> list[Process]:
        """Wait at most ``seconds`` for an event; return the processes that ended, in their order."""
        for key, _ in self._selector.select(self._patience(seconds)):
            key.data()
        self._start_requested()
        self._send_passed()
        self._send_stops()
        self._act_on_time()
        exited, self._exited = self._exited, []
        return exited

    def close(self) -> None:
        """Kill the remaining processes, wait for them, and release everything. Their last output is dropped."""
        self.drop_output()  # the sink may be the part that failed
        if self.active:
            self.stop(signal.SIGKILL, grace=0.0)
        while self.active:
            self.poll()
        self._selector.close()
        for fd in (self._wake_read, self._wake_write, *self._sentinels):
            os.close(fd)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def _patience(self, seconds: float | None) -> float | None:
        times = [process._leaving_until for process in self._active.values() if self._is_leaving(process)]
        if self._kill_at is not None:
            times.append(self._kill_at)
        if seconds is not None:
            times.append(time.monotonic() + seconds)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _drain_wake(self) -> None:
        os.read(self._wake_read, _CHUNK)

    def _start_requested(self) -> None:
        while True:
            try:
                command, index, future = self._starts.get_nowait()
            except Empty:
                return
            try:
                future.set_result(self.start(command, index))
            except BaseException as error:
                future.set_exception(error)

    def _send_passed(self) -> None:
        while not self._passed.empty():
            signum = self._passed.get()
            for process in self._active.values():
                os.kill(process.pid, signum)  # a zombie at worst

    def _send_stops(self) -> None:
        while True:
            try:
                signum, kill_at, only = self._stops.get_nowait()
            except Empty:
                return
            if only is not None:
                if only.pid in self._active:
                    _signal_group(only, signum)
                continue
            for process in self._active.values():
                _signal_group(process, signum)
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _act_on_time(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for process in self._active.values():
                _signal_group(process, signal.SIGKILL)
        for process in list(self._active.values()):
            if self._is_leaving(process) and (not process._open or now >= process._leaving_until):
                self._finish(process)

    def _is_leaving(self, process: Process) -> bool:
        """Whether the process has ended and will be over in a moment."""
        return process.returncode is not None and not (self._held and process._open)

    def _on_output(self, process: Process, stream: int) -> None:
        pipe = process.popen.stdout if stream == OUT else process.popen.stderr
        if pipe is None or pipe.closed or self._held:  # changed since the selector looked
            return
        data = os.read(pipe.fileno(), _CHUNK)
        if not data:
            self._end_output(process, stream)
            return
        if stream == ERR:
            process._tail += data
            del process._tail[:-_TAIL]
        self._sink(process.name, process.index, stream, data)

    def _end_output(self, process: Process, stream: int) -> None:
        pipe = process.popen.stdout if stream == OUT else process.popen.stderr
        process._open.discard(stream)
        if pipe is not None:
            self._selector.unregister(pipe)
            pipe.close()
        self._sink(process.name, process.index, stream, b"")

    def _on_exit(self, process: Process) -> None:
        self._selector.unregister(process.sentinel)
        process.returncode = _peek_returncode(process.pid)
        # Processes that the leader left behind get a moment to clean up, then they are killed.
        _signal_group(process, signal.SIGTERM)
        process._leaving_until = time.monotonic() + _LINGER
        self._exited.append(process)

    def _finish(self, process: Process) -> None:
        _signal_group(process, signal.SIGKILL)
        for stream in list(process._open):
            self._end_output(process, stream)
        self._guardian.forget(process.pid)
        if process.feed is not None:
            process.feed.abandon()
        process.popen.wait()
        del self._active[process.pid]
        process.over.set()


def drop(name: str, index: int, stream: int, data: bytes) -> None:
    """The sink that drops all output."""


def _sentinel(pid: int) -> int:
    """A descriptor that becomes readable when child ``pid`` has exited; the child is not reaped.

    Made of a thread and a pipe, since some kernels in use lack pidfd_open.
    """
    read_end, write_end = os.pipe()

    def wait() -> None:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # another reaped it: it has exited all the same
        finally:
            os.close(write_end)

    threading.Thread(target=wait, name=f"backhaul-wait-{pid}", daemon=True).start()
    return read_end


def _peek_returncode(pid: int) -> int:
    """The exit code of a zombie; minus the signal's number if a signal killed it."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        result = None
    if result is None:
        return 255  # something else reaped it and got the code; never report that as success
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _signal_group(process: Process, signum: int) -> None:
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        pass
