"""The worker processes of a cluster, from the driver's side: start, watch, stop.

How a worker starts, with the messages on its pipe::

    driver                              worker
      Start: main, argv, options  ──>     runs the driver's script up to cluster()
      <── the names it has then
      JOIN, when all are that far ──>     joins the group, and serves

A worker that fails on the way exits, and its sentinel reports that; the others are stopped. Later, a worker may be
restarted: another process takes its place in the same way, while the others continue.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from backhaul.errors import RpcTimeoutError, WorkerLostError
from backhaul.launch.guardian import Guardian
from backhaul.launch.interactive import Definition
from backhaul.launch.main_module import MainModule
from backhaul.launch.session import Session
from backhaul.launch.supervisor import GRACE, Command, Process, Sink, Supervisor
from backhaul.news import promise, tell
from backhaul.options import RpcOptions

_log = logging.getLogger(__name__)

JOIN = "join"
_END_SECONDS = 30.0
"""How long workers that have left their group may take to end by themselves."""

beginning: list[str] = []
"""Statements that every worker process begins with. Of the launching process, which has no worker."""


@dataclass(frozen=True)
class Start:
    """The first message to a worker: everything that the process needs to become one."""

    main: MainModule
    argv: list[str]
    name: str
    rank: int
    world_size: int
    options: RpcOptions
    definitions: Sequence[Definition] = ()
    """The definitions that the driver has sent to the other workers before."""


class Members:
    """Worker processes, with a thread that carries their output and notices when they end.

    Always call `stop`: it also releases what was made before the first process.
    """

    def __init__(self, session: Session, sink: Sink) -> None:
        self.processes: list[Process] = []
        self._session = session
        try:
            self._guardian = Guardian(session.directory)
        except BaseException:
            session.close()
            raise
        self._supervisor = Supervisor(sink, self._guardian)
        self._thread = threading.Thread(target=self._run, name="backhaul-cluster", daemon=True)
        self._ended: list[Process] = []
        self._expected = True
        self._stopping = False
        self._dismissed: set[int] = set()  # processes that end because others replace them
        promise(session.directory)

    def start(self, entry: str, starts: Sequence[Start], env: Mapping[str, str], timeout: float) -> set[str]:
        """Start the workers and let them join; returns the names that all of them have in their ``__main__``.

        ``entry`` is the ``module:function`` that a worker calls with its end of the pipe. Raises
        `WorkerLostError` if a worker ends, and `RpcTimeoutError` if one is not up in time.
        """
        deadline = time.monotonic() + timeout
        pipes: list[Connection] = []

        def begin(command: Command) -> Process:
            process = self._supervisor.start(command)
            self.processes.append(process)
            return process

        try:
            try:
                for start in starts:
                    pipes.append(self._start_one(entry, start, env, begin)[1])
            finally:
                self._thread.start()
            with self.blamed():
                for pipe, start in zip(pipes, starts, strict=True):
                    pipe.send(start)
                sentinels = [process.sentinel for process in self.processes]
                loaded = [
                    self._await_names(pipe, start.name, sentinels, deadline)
                    for pipe, start in zip(pipes, starts, strict=True)
                ]
                for pipe in pipes:
                    pipe.send(JOIN)
        finally:
            for pipe in pipes:
                pipe.close()
        return set.intersection(*loaded)

    def restart(self, entry: str, start: Start, env: Mapping[str, str], timeout: float) -> Process:
        """End worker ``start.name`` if it runs, and start another process in its place; returns the new process.

        The new process has been told to join the group when this returns. Raises as `start` does.
        """
        deadline = time.monotonic() + timeout
        place = next(place for place, process in enumerate(self.processes) if process.name == start.name)
        old = self.processes[place]
        self._dismissed.add(old.pid)
        self._supervisor.stop(only=old)
        if not old.over.wait(GRACE):
            self._supervisor.stop(signal.SIGKILL, only=old)
            old.over.wait()
        process, pipe = self._start_one(
            entry, start, env, lambda command: self._supervisor.start_soon(command, old.index).result()
        )
        self.processes[place] = process
        try:
            pipe.send(start)
            self._await_names(pipe, start.name, [process.sentinel], deadline)
            pipe.send(JOIN)
        except (OSError, EOFError) as error:
            process.over.wait(GRACE)
            raise self.lost_at_start(process, "while it was restarted") from error
        except BaseException:
            self._supervisor.stop(signal.SIGKILL, only=process)
            raise
        finally:
            pipe.close()
        return process

    def lost_at_start(self, process: Process, when: str) -> WorkerLostError:
        """The error for a process that ended too early."""
        return WorkerLostError(
            f"worker {process.name!r} {process.ending} {when}. Its last output:\n{process.stderr_tail or '(none)'}",
            process.name,
        )

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """If the block fails because a worker ended, raise an error with that worker's last output."""
        try:
            yield
        except Exception as error:
            # A pipe's end may be visible a moment before the end of the process that closed it.
            process = self._first_ended(patience=1.0 if isinstance(error, OSError | EOFError) else 0.0)
            if process is None:
                raise
            raise self.lost_at_start(process, "while the cluster was starting") from error

    def require_all(self) -> None:
        """Raise inside `blamed` if a worker has ended."""
        if self._ended:
            raise EOFError("a worker ended")

    def serving(self) -> None:
        """From now on, log a warning when a worker ends by itself."""
        self._expected = False

    def wait(self) -> None:
        """Wait for the processes to end by themselves, which may take seconds on a busy machine."""
        self._expected = True
        deadline = time.monotonic() + _END_SECONDS
        for process in self.processes:
            process.over.wait(max(0.0, deadline - time.monotonic()))

    def stop(self, grace: float = GRACE) -> None:
        """End the remaining processes, wait for them, and clean up."""
        self._expected = True
        self._stopping = True
        if self._thread.ident is not None:
            self._supervisor.stop(grace=grace)
            self._thread.join()
        self._supervisor.close()
        self._guardian.close()
        self._session.close()

    def _start_one(
        self, entry: str, start: Start, env: Mapping[str, str], begin: Callable[[Command], Process]
    ) -> tuple[Process, Connection]:
        ours, theirs = Pipe()
        with theirs:
            # The search path comes first, and whole: -m would put the current directory, and a script
            # its own directory, before the standard library.
            path = [item for item in sys.path if isinstance(item, str)]
            module, _, function = entry.partition(":")
            start_path, serve = f"import sys; sys.path[:] = {path!r}", f"from {module} import {function}"
            boot = "; ".join([start_path, *beginning, serve, f"{function}({theirs.fileno()})"])
            command = Command(
                start.name,
                [sys.executable, "-u", "-c", boot, start.name],
                {**os.environ, **self._session.environment(start.rank, start.world_size), **env},
                pass_fds=[theirs.fileno()],
            )
            try:
                process = begin(command)
            except BaseException:
                ours.close()
                raise
        return process, ours

    def _await_names(self, pipe: Connection, name: str, sentinels: list[int], deadline: float) -> set[str]:
        ready = wait([pipe, *sentinels], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RpcTimeoutError(
                f"worker {name!r} did not start in time; if it is only slow, give cluster() a longer timeout"
            )
        if pipe not in ready:
            raise EOFError("a worker ended")
        names: set[str] = pipe.recv()
        return names

    def _first_ended(self, patience: float) -> Process | None:
        ended = wait([process.sentinel for process in self.processes], patience)
        for process in self.processes:
            if process.sentinel in ended:
                process.over.wait(GRACE)  # until its output is complete
        return self._ended[0] if self._ended else None

    def _run(self) -> None:
        while self._supervisor.active or not self._stopping:
            for process in self._supervisor.poll():
                self._ended.append(process)
                tell(self._session.directory, process.identity, process.ending)
                if not self._expected and process.returncode and process.pid not in self._dismissed:
                    _log.warning("worker %r %s", process.name, process.ending)
