"""Orders: the messages between the driver and the processes of a system.

Orders contain their workload rather than its name: its functions travel as references to their modules. So a
process imports the models of a workload at its first order, and an idle worker needs none of
them. A test can also define its own workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from backhaul.bench.workloads import Workload


class Greeting(NamedTuple):
    """A process has joined the others, and a client has made its first call. ``at`` is on the monotonic clock."""

    at: float
    import_seconds: float  # for torch


class Order(NamedTuple):
    """Run a workload this many times. A process that gets None instead of an order ends.

    ``start``, on the monotonic clock, is when clients begin that must begin together.
    """

    workload: Workload
    repetitions: int
    start: float = 0.0


class Prepare(NamedTuple):
    """Import what a workload needs, so that its first order can be obeyed at once. For clients and servers."""

    workload: Workload


class Try(NamedTuple):
    """Report what is wrong with how the system does a workload."""

    workload: Workload


class Meet(NamedTuple):
    """Call every other worker once."""


class Done(NamedTuple):
    """The answer to an order that asks for nothing."""


class Verdict(NamedTuple):
    """The result of a trial: what is wrong, if anything."""

    flaw: str | None


class Failure(NamedTuple):
    """Sent instead of an answer when the process raised an exception."""

    kind: str  # the exception's type
    traceback: str
