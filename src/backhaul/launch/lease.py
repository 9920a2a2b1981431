"""A lease: how long the steward of a host goes on without word of the launcher, and when the launcher is sure of that.

A host that the network has cut off cannot be told to stop. So its steward holds a lease, which it asks to renew again
and again. A grant counts from the time of its *question*, which is before the launcher's answer. So if the launcher has
last answered at time t, the lease ends before t + seconds, whatever the network delays or repeats. Then the steward
kills its workers. The launcher waits until then, and a moment more, and knows that they are gone.

Pure: times are given, in seconds of a clock that goes on while the machine sleeps (`clock`).
"""

from __future__ import annotations

import time

_ASK_TIMES = 6
_MARGIN = 2.0  # seconds that killing takes, and that clocks may differ by

# Of a clock that goes on while the machine sleeps, where the system has one.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    return time.clock_gettime(_CLOCK)


class Lease:
    """The steward's side."""

    def __init__(self, seconds: float, now: float) -> None:
        self.ends = now + seconds
        self.next_question = now
        self._seconds = seconds
        self._asked: dict[int, float] = {}
        self._number = 0

    def ask(self, now: float) -> int | None:
        """The number of a question that is due now; the launcher repeats it in its answer."""
        if now < self.next_question:
            return None
        self._number += 1
        self._asked[self._number] = now
        self.next_question = now + self._seconds / _ASK_TIMES
        return self._number

    def granted(self, number: int) -> None:
        """The launcher has answered a question."""
        asked = self._asked.get(number)
        if asked is None:
            return
        self._asked = {each: at for each, at in self._asked.items() if each > number}
        self.ends = max(self.ends, asked + self._seconds)

    def is_over(self, now: float) -> bool:
        return now >= self.ends


class Grants:
    """The launcher's side."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._answered = now
        self.warned = False

    def answered(self, now: float) -> None:
        self._answered = now
        self.warned = False

    def silence(self, now: float) -> float:
        """Seconds since the host has last been heard."""
        return now - self._answered

    @property
    def doubtful_at(self) -> float:
        """When to say that the host does not answer."""
        return self._answered + self._seconds / 2

    @property
    def over_at(self) -> float:
        """When the workers of the host are gone for certain."""
        return self._answered + self._seconds + _MARGIN
