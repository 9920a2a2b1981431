"""Stages: stamped events in a worker, and what the time before each stamp was spent on.

`install` subscribes to the events of this process's worker (`agent.observing`) and notes the kind, time and
thread of each. The clock is the same in all processes of a host. An event ends a **stage**: the table below names what
the thread did since its last event. A stage is named after its main part. "Pack the values" includes finding
the line to the peer, "encode the frame" includes making the message, and "write" includes the locks around it and the
copy of large tensors into shared memory.
"""

from __future__ import annotations

import statistics
import time

import torch

from backhaul import worker
from backhaul.agent.observing import (
    Asked,
    Began,
    Came,
    Encoded,
    Ended,
    Event,
    GateOpens,
    GateWaits,
    HandedOut,
    Invoked,
    Observers,
    Packed,
    PassBegan,
    PassEnded,
    Planned,
    Queued,
    Read,
    RecvReached,
    RecvRecorded,
    Resumes,
    Returned,
    RunBegan,
    RunEnded,
    SendRecorded,
    Sent,
    Settled,
    Starts,
    Stops,
    Stored,
    TorchBegan,
    TorchEnded,
    Waits,
)

IN_BETWEEN = "in between"

STAGES: dict[type[Event], str] = {
    Asked: IN_BETWEEN,
    Packed: "pack the values",
    SendRecorded: "record what is sent",
    Encoded: "encode the frame",
    Sent: "write",
    Waits: "the agent",
    Read: "read",
    Came: "decode the frame",
    HandedOut: "the agent",
    Resumes: "the agent",
    RecvRecorded: "record what has come",
    Settled: "unpack the values",
    Began: "decode the frame",
    Invoked: "unpack the values",
    Returned: "the function itself",
    Ended: "the agent",
    Queued: "the agent",
    Starts: "the agent",
    Stops: "the agent",
    PassBegan: "begin the pass",
    Planned: "plan",
    RunBegan: "prepare the run",
    TorchBegan: "prepare the run",
    RecvReached: "torch's engine",
    TorchEnded: "torch's engine",
    Stored: "keep the gradients",
    RunEnded: "end the run",
    GateWaits: "torch's engine",
    GateOpens: "wait at a gate",
    PassEnded: "end the pass",
}
"""Kind of an event -> the stage that it ends."""

OTHER_MESSAGES = "other messages"
"""What a thread handles besides its own work because it arrived together, such as the end of the last context."""

KINDS = tuple(STAGES)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_TRIALS = 20_000

Cost = tuple[float, float]

Stamped = torch.Tensor
"""A row for each event, in order for each thread: its index in `KINDS`, its nanoseconds, and its thread."""


def stage_between(before: type[Event] | None, kind: type[Event]) -> str:
    """The stage between two events of a thread."""
    return OTHER_MESSAGES if before is Began and kind is Ended else STAGES[kind]


class Stamps:
    """Records the events of an observer. Thread-safe.

    Only numbers are kept: an event may refer to a reply, and so to tensors, which must not be kept alive.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []

    def observe(self, event: Event) -> None:
        number = _NUMBERS.get(type(event))
        if number is not None:
            self._rows.append((number, event.at, event.thread))

    def take(self) -> Stamped:
        """The events since the last call."""
        rows, self._rows = self._rows, []
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


_stamps = Stamps()


def install() -> None:
    """Stamp the events of this process's worker, until its end."""
    worker.current().agent.observers.add(_stamps.observe)


def take() -> Stamped:
    """The stamps of this process since the last call. Call it while nothing is measured."""
    return _stamps.take()


def cost() -> Cost:
    """The cost of a stamped event, in nanoseconds: up to its time, and after it."""
    clock = time.perf_counter_ns
    stamps, observers = Stamps(), Observers()
    observers.add(stamps.observe)
    begins: list[int] = []
    ends: list[int] = []
    for _ in range(_TRIALS):
        begin = clock()
        if observers:
            observers.emit(Sent(peer="a worker", line=0, size=0, replies=True))
        ends.append(clock())
        begins.append(begin)
    ats = stamps.take()[:, 1].tolist()
    # Reading the clock itself takes time, which is not part of the event's cost.
    looking = statistics.median(-(clock() - clock()) for _ in range(_TRIALS))
    before = statistics.median(at - begin for at, begin in zip(ats, begins, strict=True)) - looking
    after = statistics.median(end - at for at, end in zip(ats, ends, strict=True))
    return max(0.0, before), after
