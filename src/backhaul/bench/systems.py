"""Systems: live processes, frozen except while they are measured.

The driver sends a client the name of a workload and gets its samples back. A system that
is not being measured is stopped (SIGSTOP), all alike, because torch's workers poll without rest
and would take the machine from the others; so is a second client while only the first has work.
`compare` says why they are not started afresh instead.

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
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from backhaul.bench.life import live
from backhaul.bench.orders import Failure, Greeting, Meet, Order, Prepare, Verdict
from backhaul.bench.ports import CLIENT, KEY_FILE, SERVER
from backhaul.bench.workloads import Samples, Workload
from backhaul.security.keys import make_key_file

_START_SECONDS = 60.0
_RUN_SECONDS = 60.0
_TRIAL_SECONDS = 6.0  # a trial takes milliseconds, the first in a process perhaps a second
_STOP_SECONDS = 15.0
_TOGETHER_SECONDS = 0.15  # from an order to the moment when several clients begin: they warm up until then
_SETTLE_SECONDS = 0.2  # after which a worker that has nothing to do is idle


class SystemFailed(Exception):
    """A process of a system raised, died, or did not answer in time."""


class TookTooLong(SystemFailed):
    """A process did not answer in time: something hangs in it."""


class StartUp(NamedTuple):
    """Seconds from before the first process was started to the client's first reply; and torch's import among them."""

    seconds: float
    import_seconds: float


class Rest(NamedTuple):
    """What idle workers took: CPU-seconds of all, and bytes of memory that no other process shares, of each."""

    cpu_seconds: float
    bytes: list[int]


class System:
    """A context manager: the processes, one for each of the ``roles``, run inside its block. Not thread-safe."""

    def __init__(self, name: str, roles: Sequence[str] = (SERVER, CLIENT)) -> None:
        self.name = name
        self._roles = tuple(roles)
        self._processes: dict[str, BaseProcess] = {}
        self._lines: dict[str, Connection] = {}

    def __enter__(self) -> System:
        """Start the processes and wait until they have met. They are frozen then."""
        self._directory = tempfile.TemporaryDirectory(prefix="backhaul-bench-")
        make_key_file(os.path.join(self._directory.name, KEY_FILE))
        # `torch.set_num_threads` does not reach every thread: those that serve would start helpers for a matmul.
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
            greetings = {role: self._answer(role, start + _START_SECONDS) for role in self._roles}
            self._freeze()
        except BaseException:
            self._end()
            raise
        greeting = greetings[CLIENT]
        if not isinstance(greeting, Greeting):
            raise SystemFailed(f"{self.name}: the client began with {greeting!r}")
        self.start_up = StartUp(greeting.at - start, greeting.import_seconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """End the processes. Raises `SystemFailed` if they do not part in peace."""
        try:
            if kind is None:
                self._part()
        finally:
            self._end()

    def measure(self, workload: Workload, repetitions: int) -> list[Samples]:
        """What each client of the workload measured. Raises `SystemFailed`."""
        self._thaw((SERVER, *workload.clients))
        try:
            self._obey(Prepare(), workload.clients, _RUN_SECONDS)
            order = Order(workload.name, repetitions, time.monotonic() + _TOGETHER_SECONDS)
            answers = self._obey(order, workload.clients, _RUN_SECONDS)
        finally:
            self._freeze()
        samples = [answer for answer in answers if isinstance(answer, Samples)]
        if len(samples) != len(workload.clients):
            raise SystemFailed(f"{self.name}: {workload.name} gave {answers!r}")
        return samples

    def try_out(self, workload: str) -> str | None:
        """What is wrong with how the system does a workload; None if nothing is.

        A hang is an answer too; the system is then started afresh. Raises `SystemFailed` for anything else.
        """
        self._thaw((SERVER, CLIENT))
        try:
            (verdict,) = self._obey(Order(workload, 0), (CLIENT,), _TRIAL_SECONDS)
        except TookTooLong:
            self._end()
            self.__enter__()
            return "hangs"
        finally:
            self._freeze()
        if not isinstance(verdict, Verdict):
            raise SystemFailed(f"{self.name}: the trial of {workload} gave {verdict!r}")
        return verdict.flaw

    def meet(self) -> None:
        """Have everybody call everybody else. Raises `SystemFailed`."""
        self._thaw(self._roles)
        try:
            for role in self._roles:
                self._obey(Meet(), (role,), _RUN_SECONDS)
        finally:
            self._freeze()

    def rest(self, seconds: float) -> Rest:
        """What the processes take while they have nothing to do for so long."""
        pids = [process.pid for process in self._processes.values() if process.pid is not None]
        self._thaw(self._roles)
        try:
            time.sleep(_SETTLE_SECONDS)
            before = sum(map(_cpu_seconds, pids))
            time.sleep(seconds)
            return Rest(sum(map(_cpu_seconds, pids)) - before, list(map(_own_bytes, pids)))
        finally:
            self._freeze()

    def _obey(self, order: Order | Prepare | Meet, roles: Sequence[str], seconds: float) -> list[object]:
        deadline = time.monotonic() + seconds
        for role in roles:
            try:
                self._lines[role].send(order)
            except OSError as error:
                raise SystemFailed(f"{self.name}: the {role} is gone: {error}") from error
        return [self._answer(role, deadline) for role in roles]

    def _answer(self, role: str, deadline: float) -> object:
        line = self._lines[role]
        sentinels = [process.sentinel for process in self._processes.values()]
        ready = wait([line, *sentinels], max(0.0, deadline - time.monotonic()))
        if line in ready:
            try:
                answer = line.recv()
            except EOFError:
                answer = None
            if isinstance(answer, Failure):
                raise SystemFailed(f"{self.name}: the {role} raised\n{answer.traceback}")
            if answer is not None:
                return answer
        if ready:
            raise SystemFailed(f"{self.name}: a process ended early ({self._exit_codes()})")
        raise TookTooLong(f"{self.name}: the {role} did not answer in time")

    def _part(self) -> None:
        self._thaw(self._roles)
        for line in self._lines.values():
            line.send(None)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode != 0 for process in self._processes.values()):
            raise SystemFailed(f"{self.name}: the processes did not shut down well ({self._exit_codes()})")

    def _end(self) -> None:
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
            # An unreaped process keeps its id, so this can hit no other.
            if role in roles and process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


def _cpu_seconds(pid: int) -> float:
    """What the process has used so far, in user and kernel mode.

    Read from its CPU clock, as clock_getcpuclockid(3) would name it: /proc counts in hundredths of a second, and
    there an idle worker has often used none.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _own_bytes(pid: int) -> int:
    """Memory that would come free if the process ended: what no other one shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
