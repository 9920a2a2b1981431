"""The worker processes of a cluster, seen from the driver; and `serve`, which each of them runs.

The driver is an ordinary member of the group, with rank 0. The workers are processes
that get the driver's ``__main__``, join the group, and serve until the driver shuts down.
Code typed into a notebook follows with each call (`launch.interactive`).
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FunctionType, ModuleType
from typing import IO, TYPE_CHECKING, Any

from backhaul.cluster.handles import WorkerHandle, Workers
from backhaul.errors import MisuseError, RpcTimeoutError, WorkerLostError
from backhaul.launch import interactive
from backhaul.launch.main_module import describe, load
from backhaul.launch.members import JOIN, Members, Start
from backhaul.launch.prefix import Write, prefixed_output
from backhaul.launch.session import Session
from backhaul.launch.supervisor import GRACE, Process, Sink, drop
from backhaul.options import RpcOptions

if TYPE_CHECKING:
    from backhaul.ids import WorkerInfo
    from backhaul.worker import Worker


_SERVE = "backhaul.cluster.processes:serve"
_LOOK_SECONDS = 0.2
_RESTART_SECONDS = 60.0


class LocalWorker(WorkerHandle):
    """A worker process of a cluster on this machine, as the driver sees it."""

    def __init__(self, driver: Worker, process: Process) -> None:
        super().__init__(driver, driver.get_worker_info(process.name))
        self._process = process

    def __repr__(self) -> str:
        return f"<{self.name}: {f'pid {self.pid}' if self.alive else self._process.ending}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs."""
        return self._process.returncode is None


class Cluster(Workers[LocalWorker]):
    """The workers of a cluster, by rank. Made by `cluster`; a context manager."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        options: RpcOptions,
        timeout: float,
        env: Mapping[str, str],
        output: bool,
    ) -> None:
        # Imported here because these import torch, which takes seconds.
        from backhaul.rendezvous import Place
        from backhaul.worker import become_worker, current, current_or_none

        existing = current_or_none()
        if existing is not None:
            raise MisuseError(
                f"this process is already worker {existing.info.name!r} of a group; close that cluster, or call "
                "rpc.shutdown(), before cluster()"
            )
        self._restarting = threading.Lock()
        main = sys.modules["__main__"]
        world_size = len(names) + 1
        session = Session()
        options = dataclasses.replace(
            options, init_method=session.init_method, secret=options.secret or bytes.fromhex(session.secret)
        )
        self._starts = starts = [
            Start(describe(main), sys.argv, each, rank, world_size, options) for rank, each in enumerate(names, 1)
        ]
        self._env = env
        self._members = Members(session, _output() if output else drop)
        try:
            loaded = self._members.start(_SERVE, starts, env, timeout)
            with self._members.blamed(), _environment("BACKHAUL_RUNTIME_DIR", session.directory):
                become_worker(Place(name, 0, world_size), options, self._members.require_all)
        except BaseException:
            self._members.stop(grace=0.0)
            raise
        self._members.serving()
        self._driver = current()
        super().__init__([LocalWorker(self._driver, process) for process in self._members.processes])
        self._shipper = interactive.Shipper(self._define, vars(main), _at_home(main, loaded))
        self._driver.before_call.append(self._before_call)
        atexit.register(self.close)

    def __enter__(self) -> Cluster:
        return self

    def restart(self, name: str, timeout: float = _RESTART_SECONDS) -> LocalWorker:
        """Start another process in the place of worker ``name``, with its name and rank; returns the new worker.

        If the old process still runs, it is ended first. Its values are gone: references to them raise
        `WorkerLostError`. Calls go to the new process, which has the functions of this script or notebook, as others
        do. Returns when the new worker is ready for calls. Raises `WorkerLostError` with its last output if it does not
        start, and `RpcTimeoutError` if that takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        worker = self._of_name(name)
        with self._restarting:
            start = dataclasses.replace(self._starts[worker.info.id - 1], definitions=self._shipper.sent())
            process = self._members.restart(_SERVE, start, self._env, timeout)
            self._await_joined(worker.info, process, deadline)
            worker._process = process
            self._shipper.repeat(lambda definitions: worker.rpc_sync(interactive.apply, (definitions,)))
        return worker

    def _await_joined(self, info: WorkerInfo, process: Process, deadline: float) -> None:
        agent = self._driver.agent

        def joined() -> bool:
            return agent.membership.find(info).addresses.pid == process.pid

        with agent.presence.changed:
            while not joined():
                if process.returncode is not None:
                    process.over.wait(GRACE)
                    raise self._members.lost_at_start(process, "while it joined the group again")
                if time.monotonic() > deadline:
                    raise RpcTimeoutError(f"worker {info.name!r} did not rejoin the group in time")
                agent.presence.changed.wait(_LOOK_SECONDS)

    def close(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the group and end the workers. May be called again.

        If ``graceful``, wait for calls that still run, at most ``timeout`` seconds unless that
        is 0. Raises `RpcTimeoutError` at the timeout; the workers are gone in any case.
        """
        # A process forked from the driver has this object, but not the workers.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if not self._driver.closed:
                self._driver.before_call.remove(self._before_call)
                self._shut_down(self._driver, graceful, timeout)
            if graceful:
                self._members.wait()
        finally:
            self._members.stop()

    def _before_call(self, target: WorkerInfo, func: Any, args: Any, kwargs: Any) -> None:
        """Send the workers the definitions that a call refers to. A hook of the driver's `Worker`."""
        if target != self._driver.info:
            self._shipper(func, args, kwargs)


def serve(fd: int) -> None:
    """Run a worker of a cluster until the cluster ends. `Members` starts it; ``fd`` is its end of the pipe."""
    with Connection(fd) as pipe:
        os.set_inheritable(fd, False)
        start: Start = pipe.recv()
        sys.argv[:] = start.argv
        names = set(vars(load(start.main)))
        interactive.apply(list(start.definitions))  # before others can call this worker
        from backhaul import rpc

        pipe.send(names)
        if pipe.recv() != JOIN:
            return
    rpc.init_rpc(start.name, rank=start.rank, world_size=start.world_size, rpc_backend_options=start.options)
    try:
        rpc.shutdown()
    except WorkerLostError:
        pass  # the driver knows, or the driver is the lost worker


def _at_home(main: ModuleType, loaded: set[str]) -> Callable[[str, Any], bool]:
    """Whether the workers have a name of ``main`` from running its file, with an unchanged value."""
    path = getattr(main, "__file__", None)

    def at_home(name: str, value: Any) -> bool:
        if name not in loaded:
            return False
        inner = inspect.unwrap(value) if interactive.is_defined_here(value) else None
        return not isinstance(inner, FunctionType) or inner.__code__.co_filename == path

    return at_home


def _output() -> Sink:
    return prefixed_output(_writer("stdout"), _writer("stderr"))


def _writer(name: str) -> Write:
    """Writes to the current ``sys.stdout`` or ``sys.stderr``; a notebook's takes only text."""

    def write(data: bytes) -> None:
        stream: IO[str] = getattr(sys, name)
        try:
            stream.write(data.decode(errors="backslashreplace"))
            stream.flush()
        except (ValueError, OSError):
            pass  # the driver's own stream is closed or cannot show the bytes, and there is nowhere to report that

    return write


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
