"""Orders: what the driver and the processes of a system say to each other."""

from __future__ import annotations

from typing import NamedTuple


class Greeting(NamedTuple):
    """A process has joined the others, and a client has made its first call. ``at`` is on the monotonic clock."""

    at: float
    import_seconds: float  # that torch took


class Order(NamedTuple):
    """Run a workload so many times; 0 is for its trial. A process that gets None instead ends.

    ``start``, on the monotonic clock, is when those who have to begin together begin.
    """

    workload: str
    repetitions: int
    start: float = 0.0


class Prepare(NamedTuple):
    """Import what orders need, so that the first one can be obeyed at once."""


class Meet(NamedTuple):
    """Call everybody else once."""


class Verdict(NamedTuple):
    """What a trial found wrong, if anything."""

    flaw: str | None


class Failure(NamedTuple):
    """What a process sends instead of an answer when something was raised in it."""

    traceback: str
