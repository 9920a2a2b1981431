"""All or nothing: the first worker that fails for good stops the others, and so does a signal to the launcher.

A worker that fails is restarted while restarts are left, once its process group is gone. With ``rejoin`` the
others continue even when none are left.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from backhaul.launch.console import Console
from backhaul.launch.session import RESTARTS_VARIABLE
from backhaul.launch.supervisor import GRACE, Command, Process

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""For the workers' programs. Slurm sends one some time before the end of a job, for example."""


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit ``code``, and its cause if the code is not zero."""

    code: int
    why: str = ""
    """Which worker or host failed, and how. If ``stopped``, all others were stopped because of it."""
    signum: int | None = None
    stopped: bool = True
    unread: bool = False
    """Output was dropped because its reader did not read it in time."""

    @property
    def report(self) -> str:
        """The message for the user."""
        if self.signum is not None:
            return f"stopped by {signal.Signals(self.signum).name}"
        return f"{self.why}; the other workers were stopped" if self.why and self.stopped else self.why


class Cause:
    """The first event, a worker's failure or a signal. Later ones are its consequences."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None

    def claim(self, outcome: Outcome) -> bool:
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True


OnEnd = Callable[[Process, bool], None]
"""Called with a process that has ended, and whether it is restarted."""

OnSignal = Callable[[int], None]
"""Called with a signal, in its handler."""


def run_job(
    console: Console,
    commands: Sequence[Command],
    grace: float = GRACE,
    restarts: int = 0,
    on_end: OnEnd = lambda process, again: None,
    rejoin: bool = False,
    on_missing: Callable[[Process], None] = lambda process: None,
) -> Outcome:
    """Run ``commands`` until all have ended and their output is printed. Main thread only, since it handles signals.

    Workers that fail are restarted, ``restarts`` times in total. With ``rejoin``, the others continue without a worker
    that is not restarted, and ``on_missing`` is called with it. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on once;
    a second signal kills the workers at once. SIGUSR1 and SIGUSR2 are passed on and stop nothing. Raises
    `BrokenPipeError` if the reader of the output is gone.
    """
    supervisor = console.supervisor
    cause = Cause()
    missing = Cause()  # why the others continue without a worker

    def stop(signum: int) -> None:
        if cause.claim(Outcome(128 + signum, signum=signum)):
            console.hurry(grace)  # first: the poll in which the grace time ends must find it over here, too
            supervisor.stop(signum, grace)
        else:
            console.hurry(0.0)
            supervisor.stop(signal.SIGKILL, grace=0.0)

    times = [0] * len(commands)
    leaving: list[Process] = []  # restarted when they are over
    with handled_signals(stop, supervisor.pass_on):
        for index, command in enumerate(commands):
            supervisor.start(command, index)
        while supervisor.active or leaving:
            for process in supervisor.poll():
                again = bool(process.returncode) and sum(times) < restarts and cause.outcome is None
                on_end(process, again)
                if again:
                    times[process.index] += 1
                    leaving.append(process)
                elif process.returncode:
                    failure = Outcome(
                        exit_code(process.returncode),
                        f"{process.name} {process.ending}",
                        stopped=len(commands) > 1 and not rejoin,
                    )
                    if rejoin and cause.outcome is None:
                        missing.claim(failure)
                        on_missing(process)
                    elif cause.claim(failure):
                        supervisor.stop(grace=grace)
            for process in [process for process in leaving if process.over.is_set()]:
                leaving.remove(process)
                if cause.outcome is None:
                    restarted = {RESTARTS_VARIABLE: str(times[process.index])}
                    command = commands[process.index]
                    supervisor.start(replace(command, env={**command.env, **restarted}), process.index)
            if cause.outcome is not None:
                leaving.clear()
            console.look_after()
        unread = not console.finish()
    return replace(cause.outcome or missing.outcome or Outcome(0), unread=unread)


def exit_code(returncode: int) -> int:
    """The code as a shell reports it: a death by signal N is 128 + N."""
    return returncode if returncode >= 0 else 128 - returncode


@contextmanager
def handled_signals(stop: OnSignal, pass_on: OnSignal) -> Iterator[None]:
    """Call ``stop`` for signals that end the job in the block, and ``pass_on`` for those that are for the workers'
    programs, unless they are ignored. Main thread only."""

    def handle(signum: int, frame: FrameType | None) -> None:
        (stop if signum in _STOP_SIGNALS else pass_on)(signum)

    previous = {}
    for signum in (*_STOP_SIGNALS, *_PASSED_SIGNALS):
        # A signal that is ignored from the start means nohup or a shell's background job. It stays ignored.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, handle)
    # An ignored SIGCHLD is inherited and would hide our children's exit codes.
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
