"""Systems: two live processes each, frozen except while they are measured.

The driver sends a client the name of a workload and gets its samples back. A system that
is not being measured is stopped (SIGSTOP), all alike, because torch's workers poll without rest
and would take the machine from the others. `compare` says why they are not started afresh instead.

The processes cannot outlive the driver: leaving a system ends them by their own ids, and the
kernel kills them, frozen or not, when the driver is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import NamedTuple

import torch
from ports import CLIENT, PORTS, SERVER
from workloads import WORKLOADS, Samples, Workload

_START_SECONDS = 60.0
_RUN_SECONDS = 60.0
_TRIAL_SECONDS = 6.0  # a trial takes milliseconds, the first in a process perhaps a second
_STOP_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1


class SystemFailed(Exception):
    """A process of a system raised, died, or did not answer in time."""


class TookTooLong(SystemFailed):
    """A process did not answer in time: something hangs in it."""


class Order(NamedTuple):
    """Run a workload so many times; 0 is for its trial. A process that gets None instead ends."""

    workload: str
    repetitions: int


class Verdict(NamedTuple):
    """What a trial found wrong, if anything."""

    flaw: str | None


class Failure(NamedTuple):
    """What a process sends instead of an answer when something was raised in it."""

    traceback: str


class System:
    """A context manager: the processes run inside its block. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._processes: dict[str, BaseProcess] = {}
        self._lines: dict[str, Connection] = {}

    def __enter__(self) -> System:
        """Start both processes and wait until they have met. They are frozen then."""
        self._directory = tempfile.TemporaryDirectory(prefix="backhaul-bench-")
        # `torch.set_num_threads` does not reach every thread: those that serve would start helpers for a matmul.
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        try:
            for role in (SERVER, CLIENT):
                here, there = context.Pipe()
                process = context.Process(
                    target=_live,
                    args=(self.name, role, self._directory.name, there, os.getpid()),
                    name=f"{self.name} {role}",
                    daemon=True,
                )
                process.start()
                there.close()
                self._processes[role] = process
                self._lines[role] = here
            deadline = time.monotonic() + _START_SECONDS
            for role in (SERVER, CLIENT):
                self._answer(role, deadline)
            self._freeze()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """End both processes. Raises `SystemFailed` if they do not part in peace."""
        try:
            if kind is None:
                self._part()
        finally:
            self._end()

    def measure(self, order: Order) -> Samples:
        """What the client measured. Raises `SystemFailed`."""
        samples = self._obey(order, _RUN_SECONDS)
        if not isinstance(samples, Samples):
            raise SystemFailed(f"{self.name}: {order.workload} gave {samples!r}")
        return samples

    def try_out(self, workload: str) -> str | None:
        """What is wrong with how the system does a workload; None if nothing is.

        A hang is an answer too; the system is then started afresh. Raises `SystemFailed` for anything else.
        """
        try:
            verdict = self._obey(Order(workload, 0), _TRIAL_SECONDS)
        except TookTooLong:
            self._end()
            self.__enter__()
            return "hangs"
        if not isinstance(verdict, Verdict):
            raise SystemFailed(f"{self.name}: the trial of {workload} gave {verdict!r}")
        return verdict.flaw

    def _obey(self, order: Order, seconds: float) -> object:
        self._thaw()
        try:
            try:
                self._lines[CLIENT].send(order)
            except OSError as error:
                raise SystemFailed(f"{self.name}: the client is gone: {error}") from error
            return self._answer(CLIENT, time.monotonic() + seconds)
        finally:
            self._freeze()

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
        self._thaw()
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
        self._signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            # An unreaped process keeps its id, so this can hit no other.
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


def _live(system: str, role: str, directory: str, line: Connection, driver: int) -> None:
    """The life of a process: join its peer, do what it is ordered, part."""
    _die_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, which ends us
    torch.set_num_threads(1)
    try:
        with PORTS[system](role, directory) as port:
            line.send("ready")
            while (order := line.recv()) is not None:
                workload = WORKLOADS[order.workload]
                line.send(workload.run(port, order.repetitions) if order.repetitions else _try_out(workload, port))
    except Exception:
        line.send(Failure(traceback.format_exc()))
        raise


def _try_out(workload: Workload, port: object) -> Verdict:
    try:
        return Verdict(workload.trial(port) if workload.trial else None)
    except Exception as error:
        traceback.print_exc()
        return Verdict(f"raises {type(error).__name__}")


def _die_with(driver: int) -> None:
    """Have the kernel kill this process when its parent, the driver, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # it died before we asked
        os._exit(1)
