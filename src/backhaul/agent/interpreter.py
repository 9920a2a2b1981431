"""Interpreter: shortens the interpreter's thread switch interval while a worker serves.

A thread that computes in Python releases the interpreter every 5 ms. A request that comes meanwhile must wait for this
twice: once to be read and once to be answered. So while requests come in, a worker asks for a shorter interval. That
costs nothing as long as no other thread wants the interpreter. `backhaul bench` shows what a computing thread loses
beside calls, in the row "computing while called". On a noisy machine that row cannot tell 1 % from nothing.

Each thread that waits for the interpreter wakes up once in every interval, to ask for it. If the thread that has the
interpreter has no processor, this is wasted. So the interval grows with the number of threads in the process: all
waiting threads together ask no more often than a few would. Without this rule, the shutdown of 64 workers on two cores
takes twice the processor time.

The interval belongs to the interpreter, so all workers of a process share this object. A value that the user has set
meanwhile, or that is already shorter, is left alone.
"""

from __future__ import annotations

import sys
import threading

SHORT = 0.0005
FEW = 8
"""With more threads than this in the process, the interval grows in proportion to their number."""

_ROUNDING = 2e-6  # the interpreter counts in microseconds


class SwitchInterval:
    """Keeps the interval short while at least one user is in a hurry. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0  # the interval when the first user came
        self._ours = 0.0  # the interval that this object has set since then

    def hurry(self) -> None:
        """Ask for the short interval. Call `adapt` now and then, and `rest` once afterwards."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = self._ours = sys.getswitchinterval()
            self._set(self._wanted())

    def adapt(self) -> None:
        """Follow the number of threads. For users that are in a hurry."""
        with self._lock:
            if self._users:
                self._set(self._wanted())

    def rest(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set(self._before)

    def _wanted(self) -> float:
        return min(self._before, SHORT * max(1.0, threading.active_count() / FEW))

    def _set(self, seconds: float) -> None:
        """Set the interval, unless the user has set it meanwhile. The caller holds ``_lock``."""
        if seconds != self._ours and abs(sys.getswitchinterval() - self._ours) < _ROUNDING:
            sys.setswitchinterval(seconds)
            self._ours = seconds


# One for the process, because all workers share the interpreter and its interval.
switch_interval = SwitchInterval()
