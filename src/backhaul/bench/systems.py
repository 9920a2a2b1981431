"""Systems: live processes, frozen except while they are measured.

The driver sends a client a workload and gets its samples back. A system that
is not being measured is stopped (SIGSTOP). All systems are treated alike, because torch's workers poll all the time
and would take the machine from the others. A system's processes without a part in the
workload are stopped too. `compare` explains why they are not started afresh instead.

After a failure a system cannot continue: its owner ends it and starts another (`entrants`).

The processes cannot outlive the driver: leaving a system ends them by their own ids, and the
kernel kills them, frozen or not, when the driver is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import NamedTuple, TypeVar

from backhaul.bench.life import live
from backhaul.bench.orders import Done, Failure, Greeting, Meet, Order, Prepare, Try, Verdict
from backhaul.bench.ports import CLIENT, KEY_FILE, SERVER
from backhaul.bench.rest import Rest, watch
from backhaul.bench.workloads import Samples, Workload
from backhaul.security.keys import make_key_file

T = TypeVar("T")

_END_SECONDS = 1.0  # from the closing of a process's line until its exit code is known
_TOGETHER_SECONDS = 0.15  # from an order until several clients begin; they warm up until then


class Limits(NamedTuple):
    """Seconds after which a process that has not answered counts as hung.

    A trial takes milliseconds, but the first one in a process includes imports and other first-time costs. The time
    to import torch shows how long those take on this machine.
    """

    start: float = 120.0
    prepare: float = 120.0
    trial: float = 5.0
    trial_imports: float = 2.0  # times the import time of torch, on top of the above
    run: float = 60.0
    stop: float = 15.0


class SystemFailed(Exception):
    """A process of a system raised, died, or did not answer in time. ``brief`` says so in a word or two."""

    def __init__(self, text: str, brief: str) -> None:
        super().__init__(text)
        self.brief = brief


class StartUp(NamedTuple):
    """Seconds from before the start of the first process to the client's first reply; torch's import among them."""

    seconds: float
    import_seconds: float


class System:
    """A context manager: the processes, one for each of the ``roles``, run inside its block. Not thread-safe."""

    def __init__(self, name: str, roles: Sequence[str] = (SERVER, CLIENT), limits: Limits | None = None) -> None:
        self.name = name
        self._limits = limits or Limits()
        self._roles = tuple(roles)
        self._processes: dict[str, BaseProcess] = {}
        self._lines: dict[str, Connection] = {}

    def __enter__(self) -> System:
        """Start the processes and wait until they have met. They are frozen when this returns."""
        self._directory = tempfile.TemporaryDirectory(prefix="backhaul-bench-")
        make_key_file(os.path.join(self._directory.name, KEY_FILE))
        # `torch.set_num_threads` does not reach every thread: serving threads would start helpers for a matmul.
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        start = time.monotonic()
        try:
            for role in self._roles:
                here, there = context.Pipe()
                process = context.Process(
                    target=live,
                    args=(self.name, role, self._roles, self._directory.name, there, os.getpid()),
                    name=f"{self.name} {role}",
                    daemon=True,
                )
                process.start()
                there.close()
                self._processes[role] = process
                self._lines[role] = here
            greetings = {role: self._answer(role, start + self._limits.start, Greeting) for role in self._roles}
            self._freeze()
        except BaseException:
            self.kill()
            raise
        self.start_up = StartUp(greetings[CLIENT].at - start, greetings[CLIENT].import_seconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """End the processes. Raises `SystemFailed` if they do not shut down cleanly."""
        try:
            if kind is None:
                self._part()
        finally:
            self.kill()

    def measure(self, workload: Workload, repetitions: int) -> list[Samples]:
        """The measurements of each client of the workload. Raises `SystemFailed`."""
        self._prepare(workload)
        try:
            order = Order(workload, repetitions, time.monotonic() + _TOGETHER_SECONDS)
            return self._obey(order, workload.clients, self._limits.run, Samples)
        finally:
            self._freeze()

    def try_out(self, workload: Workload) -> str | None:
        """What is wrong with how the system does a workload; None if nothing is. Raises `SystemFailed`.

        Clients that work together are tried one after the other.
        """
        self._prepare(workload)
        limit = self._limits.trial + self._limits.trial_imports * self.start_up.import_seconds
        try:
            for client in workload.clients:
                (verdict,) = self._obey(Try(workload), (client,), limit, Verdict)
                if verdict.flaw is not None:
                    return verdict.flaw
            return None
        finally:
            self._freeze()

    def _prepare(self, workload: Workload) -> None:
        """Thaw the processes with a part in the workload, and make them import what they need for it."""
        roles = [role for role in workload.roles if role in self._roles]  # a bare copy has no server
        self._thaw(roles)
        try:
            self._obey(Prepare(workload), roles, self._limits.prepare, Done)
        except BaseException:
            self._freeze()
            raise

    def meet(self) -> None:
        """Make every process call every other. Raises `SystemFailed`."""
        self._thaw(self._roles)
        try:
            for role in self._roles:
                self._obey(Meet(), (role,), self._limits.run, Done)
        finally:
            self._freeze()

    def rest(self, seconds: float) -> Rest:
        """What the processes use while they are idle for ``seconds``."""
        pids = [process.pid for process in self._processes.values() if process.pid is not None]
        self._thaw(self._roles)
        try:
            return watch(pids, seconds)
        finally:
            self._freeze()

    def _obey(
        self, order: Order | Prepare | Try | Meet, roles: Sequence[str], seconds: float, answer: type[T]
    ) -> list[T]:
        deadline = time.monotonic() + seconds
        for role in roles:
            try:
                self._lines[role].send(order)
            except OSError as error:
                raise SystemFailed(f"{self.name}: the {role} is gone: {error}", "dies") from error
        return [self._answer(role, deadline, answer) for role in roles]

    def _answer(self, role: str, deadline: float, kind: type[T]) -> T:
        line = self._lines[role]
        sentinels = [process.sentinel for process in self._processes.values()]
        ready = wait([line, *sentinels], max(0.0, deadline - time.monotonic()))
        if line in ready:
            try:
                answer = line.recv()
            except (EOFError, OSError):
                answer = None
                self._processes[role].join(_END_SECONDS)
            if isinstance(answer, Failure):
                raise SystemFailed(f"{self.name}: the {role} raised\n{answer.traceback}", f"raises {answer.kind}")
            if isinstance(answer, kind):
                return answer
            if answer is not None:
                raise SystemFailed(f"{self.name}: the {role} answered {answer!r}", "answers wrongly")
        if ready:
            raise SystemFailed(f"{self.name}: a process ended early ({self._exit_codes()})", "dies")
        raise SystemFailed(f"{self.name}: the {role} did not answer in time", "hangs")

    def _part(self) -> None:
        self._thaw(self._roles)
        for role, line in self._lines.items():
            try:
                line.send(None)
            except OSError as error:
                raise SystemFailed(f"{self.name}: the {role} is gone: {error}", "dies") from error
        deadline = time.monotonic() + self._limits.stop
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode != 0 for process in self._processes.values()):
            text = f"{self.name}: the processes did not shut down well ({self._exit_codes()})"
            raise SystemFailed(text, "does not shut down well")

    def kill(self) -> None:
        """End the processes at once, in whatever state they are."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        for line in self._lines.values():
            line.close()
        self._directory.cleanup()

    def _exit_codes(self) -> str:
        codes = {role: process.exitcode for role, process in self._processes.items()}
        return ", ".join(
            f"{role}: {'running' if code is None else f'exit code {code}'}" for role, code in codes.items()
        )

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP, self._roles)

    def _thaw(self, roles: Sequence[str]) -> None:
        self._signal(signal.SIGCONT, roles)

    def _signal(self, number: signal.Signals, roles: Sequence[str]) -> None:
        for role, process in self._processes.items():
            # An unreaped process keeps its id, so the signal cannot reach another one.
            if role in roles and process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)
