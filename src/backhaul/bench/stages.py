"""Stages: what happens in a worker, stamped, and what the time before each stamp was spent on.

`install` subscribes to the events of this process's worker (`agent.observing`) and notes of each its kind, its time and
its thread. The clock is the same in all processes of a host. An event ends a **stage**: what the thread has done since
its last event has the name that stands here. A stage is named after its main part. "Pack the values" includes finding
the line to the peer, "encode the frame" making the message, and "write" the locks around it and the copy of large
tensors into shared memory.
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
"""What a thread handles that has come together with what it is about: the end of the last context, say."""

KINDS = tuple(STAGES)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_TRIALS = 20_000

Cost = tuple[float, float]

Stamped = torch.Tensor
"""A row for each event, in order for each thread: its place in `KINDS`, its nanoseconds, and its thread."""


def stage_between(before: type[Event] | None, kind: type[Event]) -> str:
    """The stage between two events of a thread."""
    return OTHER_MESSAGES if before is Began and kind is Ended else STAGES[kind]


class Stamps:
    """What an observer has seen, written down. Thread-safe.

    Only numbers are kept: an event may refer to a reply, and so to tensors that are to be freed.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []

    def observe(self, event: Event) -> None:
        number = _NUMBERS.get(type(event))
        if number is not None:
            self._rows.append((number, event.at, event.thread))

    def take(self) -> Stamped:
        """What has been seen since the last time."""
        rows, self._rows = self._rows, []
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


_stamps = Stamps()


def install() -> None:
    """Stamp what happens in the worker of this process, until its end."""
    worker.current().agent.observers.add(_stamps.observe)


def take() -> Stamped:
    """The stamps of this process since the last time. Call it while nothing is measured."""
    return _stamps.take()


def cost() -> Cost:
    """What an event that is stamped takes, in nanoseconds: up to its time, and from there on."""
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
    # Between a look at the clock and the next one the clock itself takes its time, which is not the event's.
    looking = statistics.median(-(clock() - clock()) for _ in range(_TRIALS))
    before = statistics.median(at - begin for at, begin in zip(ats, begins, strict=True)) - looking
    after = statistics.median(end - at for at, end in zip(ats, ends, strict=True))
    return max(0.0, before), after
