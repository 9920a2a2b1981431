"""All or nothing: the first worker that fails for good stops the others, and so does a signal to us.

A worker that fails is started again as long as restarts are left, once its process group is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from backhaul.launch.supervisor import GRACE, Command, Process, Supervisor

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit ``code``, and what it comes from if it is not zero."""

    code: int
    failed: Process | None = None
    signum: int | None = None


class _Cause:
    """What came first: a worker's failure or a signal. Later ones follow from it."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None

    def claim(self, outcome: Outcome) -> bool:
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True


RESTARTS_VARIABLE = "BACKHAUL_RESTARTS"
"""Tells a worker how often it has been restarted, if it has."""

OnEnd = Callable[[Process, bool], None]
"""Told of a process that has ended, and whether it is started again."""


def run_job(
    supervisor: Supervisor,
    commands: Sequence[Command],
    grace: float = GRACE,
    restarts: int = 0,
    on_end: OnEnd = lambda process, again: None,
) -> Outcome:
    """Run ``commands`` to their end. Main thread only, since it handles signals.

    Workers that fail are started again, ``restarts`` times altogether. SIGINT, SIGTERM and SIGHUP are passed on once; a
    second one kills at once.
    """
    cause = _Cause()
    times = [0] * len(commands)
    leaving: list[Process] = []  # to be started again when they are over
    with _signals_stop(supervisor, cause, grace):
        for index, command in enumerate(commands):
            supervisor.start(command, index)
        while supervisor.active or leaving:
            for process in supervisor.poll():
                again = bool(process.returncode) and sum(times) < restarts and cause.outcome is None
                on_end(process, again)
                if again:
                    times[process.index] += 1
                    leaving.append(process)
                elif process.returncode and cause.claim(Outcome(exit_code(process.returncode), process)):
                    supervisor.stop(grace=grace)
            for process in [process for process in leaving if process.over.is_set()]:
                leaving.remove(process)
                if cause.outcome is None:
                    restarted = {RESTARTS_VARIABLE: str(times[process.index])}
                    command = commands[process.index]
                    supervisor.start(replace(command, env={**command.env, **restarted}), process.index)
            if cause.outcome is not None:
                leaving.clear()
    return cause.outcome or Outcome(0)


def exit_code(returncode: int) -> int:
    """As a shell has it: a death by signal N is 128 + N."""
    return returncode if returncode >= 0 else 128 - returncode


@contextmanager
def _signals_stop(supervisor: Supervisor, cause: _Cause, grace: float) -> Iterator[None]:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        if cause.claim(Outcome(128 + signum, signum=signum)):
            supervisor.stop(signum, grace)
        else:
            supervisor.stop(signal.SIGKILL, grace=0.0)

    previous = {}
    for signum in _STOP_SIGNALS:
        # Ignored from the start means nohup, or a shell's background job: it stays ignored.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, on_signal)
    # An ignored SIGCHLD is inherited, and would hide our children's exit codes.
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
