"""A lease: how long a steward runs without an answer from the launcher, and when the launcher can be sure of its end.

A launcher cannot tell a host to stop once the network has cut the host off. So the host's steward holds a lease, and
keeps asking to renew it. A grant counts from the time of its *question*, which is before the launcher's answer. So if
the launcher last answered at time t, the lease ends before t + seconds, whatever the network delays or repeats. Then
the steward kills its workers. The launcher waits until then, plus a margin, and knows that they are gone.

Pure: the caller passes times, in seconds of a clock that runs on while the machine sleeps (`clock`).
"""

from __future__ import annotations

import time

_ASK_TIMES = 6
_MARGIN = 2.0  # seconds for the killing, and for differences between clocks

# A clock that runs on while the machine sleeps, if the system has one.
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
        """The number of a question that is due now, or None; the launcher repeats the number in its answer."""
        if now < self.next_question:
            return None
        self._number += 1
        self._asked[self._number] = now
        self.next_question = now + self._seconds / _ASK_TIMES
        return self._number

    def granted(self, number: int) -> None:
        """Note that the launcher has answered a question."""
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
        """Seconds since the launcher last heard from the host."""
        return now - self._answered

    @property
    def doubtful_at(self) -> float:
        """When to report that the host does not answer."""
        return self._answered + self._seconds / 2

    @property
    def over_at(self) -> float:
        """When the workers of the host are certainly gone."""
        return self._answered + self._seconds + _MARGIN
