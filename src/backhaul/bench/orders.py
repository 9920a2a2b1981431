"""Orders: what the driver and the processes of a system say to each other.

Orders bring their workload along rather than name it: its functions travel as references to their modules. So a
process imports the models of a workload when it gets the first order for one, and an idle worker does without
them; and a test can have a workload of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from backhaul.bench.workloads import Workload


class Greeting(NamedTuple):
    """A process has joined the others, and a client has made its first call. ``at`` is on the monotonic clock."""

    at: float
    import_seconds: float  # that torch took


class Order(NamedTuple):
    """Run a workload this many times. A process that gets None instead of an order ends.

    ``start``, on the monotonic clock, is when clients that have to begin together begin.
    """

    workload: Workload
    repetitions: int
    start: float = 0.0


class Prepare(NamedTuple):
    """Import what a workload needs, so that the first order for it can be obeyed at once. Clients and servers do."""

    workload: Workload


class Try(NamedTuple):
    """Say what is wrong with how the system does a workload."""

    workload: Workload


class Meet(NamedTuple):
    """Call everybody else once."""


class Done(NamedTuple):
    """The answer to an order that asks for nothing."""


class Verdict(NamedTuple):
    """What a trial found wrong, if anything."""

    flaw: str | None


class Failure(NamedTuple):
    """What a process sends instead of an answer when something was raised in it."""

    kind: str  # of exception
    traceback: str
