"""Interpreter: shortens the interpreter's thread switch interval while a worker serves.

A thread that computes in Python releases the interpreter every 5 ms. A request that comes meanwhile must wait for this
twice: once to be read and once to be answered. So while requests come in, a worker asks for a shorter interval. That
costs nothing as long as no other thread wants the interpreter. `backhaul bench` shows what a computing thread loses
beside calls, in the row "computing while called". On a noisy machine that row cannot tell 1 % from nothing.

The interval belongs to the interpreter, so all workers of a process share this object. A value that the user has set
meanwhile, or that is already shorter, is left alone.
"""

from __future__ import annotations

import sys
import threading

SHORT = 0.0005


class SwitchInterval:
    """Keeps the interval short while at least one user is in a hurry. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: float | None = None

    def hurry(self) -> None:
        """Ask for the short interval. Call `rest` once afterwards."""
        with self._lock:
            self._users += 1
            if self._users == 1 and sys.getswitchinterval() > SHORT:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SHORT)

    def rest(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before is not None:
                if abs(sys.getswitchinterval() - SHORT) < SHORT / 10:  # it is rounded to microseconds
                    sys.setswitchinterval(self._before)
                self._before = None


# One for the process, because all workers share the interpreter and its interval.
switch_interval = SwitchInterval()
