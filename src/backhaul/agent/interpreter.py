"""While a worker serves, the interpreter changes hands more often.

A thread that computes in Python gives the interpreter away every 5 ms. A request that comes meanwhile has to wait for
that, once to be read and once more to be answered. So while requests come in, a worker asks for a shorter interval. It
costs nothing as long as no other thread wants the interpreter. What a computing thread next to calls loses is in
`backhaul bench`, row "computing while called"; on a noisy machine that row cannot tell 1 % from nothing.

The interval belongs to the interpreter, so all workers of a process share what is here. A value that the user has set
meanwhile, or that is shorter already, stays.
"""

from __future__ import annotations

import sys
import threading

SHORT = 0.0005


class SwitchInterval:
    """Counts those who are in a hurry. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: float | None = None

    def hurry(self) -> None:
        """To be followed by one `rest`."""
        with self._lock:
            self._users += 1
            if self._users == 1 and sys.getswitchinterval() > SHORT:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SHORT)

    def rest(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before is not None:
                if abs(sys.getswitchinterval() - SHORT) < SHORT / 10:  # it is stored in microseconds
                    sys.setswitchinterval(self._before)
                self._before = None


# There is one interpreter, and one interval, for all workers of the process.
switch_interval = SwitchInterval()
