"""Entrants: the systems of a run, each started afresh after a failure.

A system that raises, dies or hangs must not end a run of minutes: its row says so, and everything else
continues. Work for one server and its clients, and work for several servers, runs in different processes, so that
measurements between two workers do not depend on others that they may have met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, TypeVar

from backhaul.bench.ports import CLIENT, MEMCPY, SECOND, SERVER, SERVERS
from backhaul.bench.systems import Limits, System, SystemFailed
from backhaul.bench.workloads import Samples, Workload

T = TypeVar("T")

NOT_THERE = "does not start"


class Fault(NamedTuple):
    """A system's failure. ``brief`` is for its row, ``text`` has the traceback, if there is one."""

    system: str
    work: str
    brief: str
    text: str


class Entrant:
    """A context manager: a system runs inside its block. No method raises `SystemFailed`; each fault is reported."""

    def __init__(self, name: str, workloads: Sequence[Workload], tell: Callable[[Fault], None], limits: Limits) -> None:
        self.name = name
        self._workloads = tuple(workloads)
        self.roles = _roles(name, workloads)
        self._tell = tell
        self._limits = limits
        self._system: System | None = None

    def __enter__(self) -> Entrant:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        system, self._system = self._system, None
        if system is not None:
            try:
                system.__exit__(kind, error, trace)
            except SystemFailed as failure:
                self._fail("the end", failure)

    def does(self, workload: Workload) -> bool:
        """Whether these processes do this workload."""
        return workload in self._workloads

    def try_out(self, workload: Workload) -> Fault | None:
        """The fault in how the system does a workload; None if there is none."""
        flaw = self._attempt(workload, lambda system: system.try_out(workload))
        if not isinstance(flaw, str):
            return flaw
        fault = Fault(self.name, workload.name, flaw, f"{self.name}: {workload.name}: {flaw}")
        self._tell(fault)
        return fault

    def measure(self, workload: Workload, repetitions: int) -> list[Samples] | Fault:
        """The measurements of each client of the workload."""
        return self._attempt(workload, lambda system: system.measure(workload, repetitions))

    def _attempt(self, workload: Workload, act: Callable[[System], T]) -> T | Fault:
        system = self._system
        if system is None:
            return Fault(self.name, workload.name, NOT_THERE, NOT_THERE)
        try:
            return act(system)
        except SystemFailed as failure:
            fault = self._fail(workload.name, failure)
        system.kill()
        self._start()
        return fault

    def _start(self) -> None:
        system = System(self.name, self.roles, self._limits)
        try:
            self._system = system.__enter__()
        except SystemFailed as failure:
            self._system = None
            self._fail("the start", failure)

    def _fail(self, work: str, failure: SystemFailed) -> Fault:
        fault = Fault(self.name, work, failure.brief, str(failure))
        self._tell(fault)
        return fault


def entrants_of(
    names: Sequence[str], workloads: Sequence[Workload], tell: Callable[[Fault], None], limits: Limits
) -> list[Entrant]:
    """The entrants that the workloads need, not started yet."""
    found = []
    for wide in (False, True):
        for name in names:
            own = [workload for workload in workloads if name in workload.systems and workload.is_wide is wide]
            if own:
                found.append(Entrant(name, own, tell, limits))
    return found


def _roles(system: str, workloads: Sequence[Workload]) -> tuple[str, ...]:
    """All roles in any of the workloads, in a fixed order."""
    if system == MEMCPY:
        return (CLIENT,)
    needed = {role for workload in workloads for role in workload.roles}
    return tuple(role for role in (SERVER, CLIENT, SECOND, *SERVERS[1:]) if role in needed)
