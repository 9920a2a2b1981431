"""All or nothing: the first worker that fails stops the others, and so does a signal to us."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


def run_job(supervisor: Supervisor, commands: Sequence[Command], grace: float = GRACE) -> Outcome:
    """Run ``commands`` to their end. Main thread only, since it handles signals.

    SIGINT, SIGTERM and SIGHUP are passed on once; a second one kills at once.
    """
    cause = _Cause()
    with _signals_stop(supervisor, cause, grace):
        for command in commands:
            supervisor.start(command)
        while supervisor.active:
            for process in supervisor.poll():
                if process.returncode and cause.claim(Outcome(exit_code(process.returncode), process)):
                    supervisor.stop(grace=grace)
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
