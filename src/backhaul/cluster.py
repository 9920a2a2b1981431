"""``cluster(n)``: worker processes on this machine, driven from one script or notebook.

The driver is an ordinary member of the group, of rank 0; the workers are ordinary
processes that join it and serve until the driver shuts down. How they start, told
over one pipe for each worker::

    driver                              worker
      Start: main, argv, options  ──>     runs the driver's script up to cluster()
      <── the names it has then
      "join", when all have them  ──>
      init_rpc                            init_rpc
                                          shutdown: serves until the driver does the same

A worker that fails on the way ends; its descriptor becomes readable here, and the
others are stopped. The `Guardian` kills the workers if the driver is killed.

Importing this module does not import torch, since ``import backhaul`` imports it.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from types import FunctionType, TracebackType
from typing import IO, TYPE_CHECKING, Any, overload

from backhaul.errors import MisuseError, OptionError, RpcTimeoutError, WorkerLostError
from backhaul.launch import interactive
from backhaul.launch.guardian import Guardian
from backhaul.launch.main_module import MainModule, describe, load, stop_if_loading
from backhaul.launch.prefix import PrefixedOutput, Write, wants_colour
from backhaul.launch.session import Session
from backhaul.launch.supervisor import Command, Process, Sink, Supervisor, drop

if TYPE_CHECKING:
    from backhaul.agent.future import Future
    from backhaul.ids import WorkerInfo
    from backhaul.options import RpcOptions
    from backhaul.worker import Worker

_log = logging.getLogger(__name__)

START_SECONDS = 60.0

_JOIN = "join"


def cluster(
    n: int,
    *,
    name: str = "driver",
    names: Sequence[str] | None = None,
    options: RpcOptions | None = None,
    timeout: float = START_SECONDS,
    env: Mapping[str, str] | None = None,
    output: bool = True,
) -> Cluster:
    """Start ``n`` worker processes on this machine; this process becomes the driver, of rank 0.

    Use it as ``with backhaul.cluster(2) as workers:``, or call `Cluster.close` at the end, as in a
    notebook. Workers are called ``worker1``, ``worker2``, …, or as ``names`` says; ``env`` is added to
    their environment; what they print comes out here, with their names in front,
    unless ``output`` is False. Functions and classes of the script or notebook
    are callable on them.

    Raises `WorkerLostError` with the worker's last output if one does not start, `RpcTimeoutError` if
    one takes longer than ``timeout`` seconds, `MisuseError` if this process is a worker already.
    """
    stop_if_loading()
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"cluster() needs a number of workers of at least 1, not {n!r}")
    names = [f"worker{rank}" for rank in range(1, n + 1)] if names is None else list(names)
    if len(names) != n or len({name, *names}) != n + 1:
        raise OptionError(f"cluster({n}) needs {n} names that differ from each other and from {name!r}; got {names}")
    return Cluster(name, names, options, timeout, dict(env or {}), output)


class LocalWorker:
    """A worker process of a cluster, as the driver sees it."""

    def __init__(self, driver: Worker, process: Process, info: WorkerInfo) -> None:
        self._driver = driver
        self._process = process
        self.info = info

    def __repr__(self) -> str:
        state = self._process.ending if self._process.returncode is not None else f"pid {self.pid}"
        return f"<{self.name}: {state}>"

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.returncode is None

    def rpc_sync(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = -1.0,
    ) -> Any:
        """`backhaul.rpc.rpc_sync` to this worker."""
        return self._driver.rpc_sync(self.info, func, args, kwargs, timeout)

    def rpc_async(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = -1.0,
    ) -> Future[Any]:
        """`backhaul.rpc.rpc_async` to this worker."""
        return self._driver.rpc_async(self.info, func, args, kwargs, timeout)


@dataclasses.dataclass(frozen=True)
class _Start:
    """The first message to a worker: what it needs to become one."""

    main: MainModule
    argv: list[str]
    name: str
    rank: int
    world_size: int
    options: RpcOptions


class Cluster(Sequence[LocalWorker]):
    """The workers of a cluster, in the order of their ranks. Made by `cluster`."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        options: RpcOptions | None,
        timeout: float,
        env: Mapping[str, str],
        output: bool,
    ) -> None:
        # Here and not above, since it takes torch seconds to import.
        from backhaul import rpc
        from backhaul.worker import current, current_or_none

        existing = current_or_none()
        if existing is not None:
            raise MisuseError(
                f"this process is already worker {existing.info.name!r} of a group: one cluster at a time, so close the "
                "other one, or call rpc.shutdown(), first"
            )
        self._owner = os.getpid()
        self._closed = False
        self._workers: list[LocalWorker] = []
        self._processes = _Processes(_sink(output))
        try:
            options = self._processes.options(options)
            main = sys.modules["__main__"]
            starts = [
                _Start(describe(main), sys.argv, each, rank, len(names) + 1, options)
                for rank, each in enumerate(names, 1)
            ]
            loaded = self._processes.start(starts, env, timeout)
            with self._processes.blamed(), _environment(BACKHAUL_RUNTIME_DIR=self._processes.session.directory):
                rpc.init_rpc(name, rank=0, world_size=len(names) + 1, rpc_backend_options=options)
            self._driver = current()
        except BaseException:
            self._processes.stop(grace=0.0)
            raise
        self._workers = [
            LocalWorker(self._driver, process, self._driver.get_worker_info(process.name))
            for process in self._processes.all
        ]
        self._shipper = interactive.Shipper(self._define, vars(main), _at_home(main, loaded))
        self._driver.before_call.append(self._before_call)
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<Cluster {'closed ' if self._closed else ''}{self._workers}>"

    def __len__(self) -> int:
        return len(self._workers)

    @overload
    def __getitem__(self, index: int) -> LocalWorker: ...
    @overload
    def __getitem__(self, index: slice) -> list[LocalWorker]: ...
    def __getitem__(self, index: int | slice) -> LocalWorker | list[LocalWorker]:
        return self._workers[index]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=kind is None)

    def close(self, graceful: bool = True, timeout: float = 0) -> None:
        """End the workers and leave the group; nothing if that was done already.

        ``graceful`` waits, at most ``timeout`` seconds if that is not 0, for the work that is still
        going on. Raises `RpcTimeoutError` at the timeout; the workers are gone in any case.
        """
        # A child that was forked from the driver has the object, but neither worker nor workers.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._shut_down(graceful, timeout)
        finally:
            self._processes.stop()

    def _shut_down(self, graceful: bool, timeout: float) -> None:
        from backhaul import rpc
        from backhaul.worker import current_or_none

        if self._driver.closed or current_or_none() is not self._driver:
            return  # the user has called rpc.shutdown()
        try:
            rpc.shutdown(graceful, timeout)
        except WorkerLostError:
            pass  # it was logged when it was lost, and whoever called it was told
        if graceful:
            self._processes.wait()

    def _before_call(self, target: WorkerInfo, func: Any, args: Any = (), kwargs: Any = None) -> None:
        """Let the workers have what the call refers to. A hook of the driver's `Worker`."""
        if target != self._driver.info:
            self._shipper(func, args, kwargs)

    def _define(self, definitions: list[interactive.Definition]) -> None:
        """Make the definitions on every worker. One that is lost needs none: its next call will tell."""
        futures = []
        for worker in self._workers:
            try:
                futures.append(worker.rpc_async(interactive.apply, (definitions,)))
            except WorkerLostError:
                continue
        for future in futures:
            try:
                future.wait()
            except WorkerLostError:
                continue


class _Processes:
    """The workers' processes, with a thread that carries their output and notices their end."""

    def __init__(self, sink: Sink) -> None:
        self.all: list[Process] = []
        self.session = Session()
        self._guardian = Guardian(self.session.directory)
        self._supervisor = Supervisor(sink, self._guardian)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="backhaul-cluster", daemon=True)

    def options(self, given: RpcOptions | None) -> RpcOptions:
        """The options of this group: as ``given``, with where to meet and the secret."""
        from backhaul.options import RpcOptions

        given = RpcOptions() if given is None else given
        if given.init_method != RpcOptions().init_method:
            raise OptionError("cluster() decides where its workers meet: leave init_method out of the options")
        secret = given.secret or bytes.fromhex(self.session.secret)
        return dataclasses.replace(given, init_method=self.session.init_method, secret=secret)

    def start(self, starts: Sequence[_Start], env: Mapping[str, str], timeout: float) -> set[str]:
        """Start the workers and let them join; returns the names that they all have in their ``__main__``."""
        deadline = time.monotonic() + timeout
        pipes: list[tuple[Connection, Process]] = []
        try:
            try:
                for start in starts:
                    pipes.append(self._start_one(start, env))
            finally:
                self._thread.start()
            for (pipe, _), start in zip(pipes, starts, strict=True):
                with self._blaming_eof():
                    pipe.send(start)
            names = [self._await_loaded(pipe, process, deadline) for pipe, process in pipes]
            for pipe, _ in pipes:
                with self._blaming_eof():
                    pipe.send(_JOIN)
        finally:
            for pipe, _ in pipes:
                pipe.close()
        return set.intersection(*names)

    def _start_one(self, start: _Start, env: Mapping[str, str]) -> tuple[Connection, Process]:
        ours, theirs = Pipe()
        with theirs:
            # The search path first, and whole: with -m or a script of ours, the current
            # or our own directory would come before the standard library.
            path = [entry for entry in sys.path if isinstance(entry, str)]
            boot = f"import sys; sys.path[:] = {path!r}; from backhaul.cluster import serve; serve({theirs.fileno()})"
            environment = {**os.environ, **self.session.environment(start.rank, start.world_size), **env}
            argv = [sys.executable, "-u", "-c", boot, start.name]
            command = Command(start.name, argv, environment, pass_fds=[theirs.fileno()])
            try:
                process = self._supervisor.start(command)
            except BaseException:
                ours.close()
                raise
        self.all.append(process)
        return ours, process

    def _await_loaded(self, pipe: Connection, process: Process, deadline: float) -> set[str]:
        sentinels = [each.sentinel for each in self.all]
        ready = wait([pipe, *sentinels], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RpcTimeoutError(
                f"worker {process.name!r} was not up in time; its last output:\n{process.stderr_tail}\n"
                "If it is only slow, give cluster() a longer timeout"
            )
        with self._blaming_eof():
            if pipe not in ready:
                raise EOFError
            names: set[str] = pipe.recv()
        return names
