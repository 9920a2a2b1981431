"""Stages: stamps on the seams of the running code, from which `explain` tells afterwards where the time went.

The core knows nothing of this. A *seam* is a function that is looked up by its name whenever it is called: an attribute
of a class or of a module. `install` puts a wrapper there, in this process, that notes when each call of it
began and ended; before the first connection is made, since a connection keeps what it has looked up. The clock is
the same in all processes of a host.

A seam that is not there any more makes `install` raise `SeamGone`: then this table has to follow the code.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["work", "read", "write", "sleep", "wake"]
"""What a seam means for the way of a call: whether it waits, and for whom.

- ``read`` ends when bytes have come, which a ``write`` of the other process sent;
- ``sleep`` ends when another thread of the process has gone through a ``wake``.
"""


class Seam(NamedTuple):
    owner: str  # "module", or "module:Class"
    name: str
    stage: str  # what people read
    kind: Kind = "work"


SEAMS = (
    Seam("backhaul.agent.agent:Agent", "call", "the agent"),
    Seam("backhaul.agent.execution:Execution", "run", "the agent"),
    Seam("backhaul.autograd.engine:Engine", "backward", "the engine around it"),
    Seam("backhaul.autograd.engine:Engine", "run", "the engine around it"),
    Seam("backhaul.wire.values:Codec", "pack", "pack the values"),
    Seam("backhaul.wire.values:Codec", "pack_call", "pack the values"),
    Seam("backhaul.wire.values:Codec", "unpack", "unpack the values"),
    Seam("backhaul.agent.execution", "encode", "encode the frame"),
    Seam("backhaul.agent.agent", "encode", "encode the frame"),
    Seam("backhaul.autograd.engine", "encode", "encode the frame"),
    Seam("backhaul.transport.stream:StreamChannel", "write", "write", "write"),
    Seam("backhaul.transport.stream:StreamChannel", "flush", "write", "write"),
    Seam("backhaul.transport.stream:StreamChannel", "wait", "wait for room"),
    Seam("backhaul.transport.segments:Lending", "place", "copy into shared memory"),
    Seam("backhaul.transport.stream:StreamChannel", "read", "read", "read"),
    Seam("backhaul.wire.decoder:Decoder", "next", "decode the frame"),
    Seam("backhaul.agent.execution:Execution", "invoke", "the function itself"),
    Seam("backhaul.autograd.recording:Recorder", "asking", "record what is sent"),
    Seam("backhaul.autograd.recording:Recorder", "answering", "record what is sent"),
    Seam("backhaul.autograd.recording:Recorder", "received", "record what has come"),
    Seam("backhaul.autograd.share:Share", "arrive", "plan"),
    Seam("backhaul.autograd.engine", "_run_backward", "torch's engine"),
    Seam("backhaul.autograd.run:Run", "emit", "give gradients away"),
    Seam("backhaul.autograd.gradients", "store", "keep the gradients"),
    Seam("backhaul.autograd.passes:Running", "_sleep", "wait for the pass", "sleep"),
    Seam("backhaul.autograd.passes:Running", "report", "report", "wake"),
)

_CAPACITY = 1 << 17  # stamps of a thread

Stamped = dict[str, torch.Tensor]
"""Name of a thread -> its stamps, a row each: the place in `SEAMS`, and the nanoseconds of begin and end."""


class SeamGone(Exception):
    """The code has changed, and a seam is not where it was."""


class _Log:
    """The stamps of one thread. Made in full beforehand: nothing is allocated while it is written to."""

    __slots__ = ("at", "numbers", "thread")

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.thread = this_thread()
        self.numbers = array("q", bytes(3 * 8 * capacity))
        self.at = 0


class _ThreadState(threading.local):
    log: _Log | None = None


_state = _ThreadState()
_logs: list[_Log] = []


def this_thread() -> str:
    """What `take` calls the calling thread."""
    return f"{threading.current_thread().name}-{threading.get_ident()}"


def install() -> None:
    """Put stamps on all seams, in this process. Raises `SeamGone`."""
    for number, seam in enumerate(SEAMS):
        module, _, inner = seam.owner.partition(":")
        try:
            owner = importlib.import_module(module)
            if inner:
                owner = getattr(owner, inner)
            function = getattr(owner, seam.name)
        except (ImportError, AttributeError) as error:
            raise SeamGone(
                f"{seam.owner} has no {seam.name!r} any more ({error}): bench/stages.py names it as a stage of a call, "
                "and has to follow"
            ) from error
        setattr(owner, seam.name, _stamped(function, number))


def take() -> Stamped:
    """The stamps of all threads since the last time. Call it while nothing is measured."""
    found: Stamped = {}
    for log in _logs:
        if log.at >= len(log.numbers):
            raise RuntimeError(f"more than {_CAPACITY} stamps of one thread: fewer repetitions will do")
        if log.at:
            found[log.thread] = torch.tensor(log.numbers[: log.at], dtype=torch.int64).reshape(-1, 3)
            log.at = 0
    return found


def cost() -> tuple[float, float]:
    """What a stamp adds, in nanoseconds: to the time of its own stage, and to that of what it is in."""
    rounds, calls = 15, 2000
    inside: list[float] = []
    outside: list[float] = []
    clock = time.perf_counter_ns
    stamped = _stamped(_nothing, 0)
    before = _state.log
    log = _state.log = _Log(calls)
    try:
        for _ in range(rounds):
            log.at = 0
            begin = clock()
            for _ in range(calls):
                _nothing()
            bare = clock()
            for _ in range(calls):
                stamped()
            end = clock()
            noted = [log.numbers[at + 2] - log.numbers[at + 1] for at in range(0, log.at, 3)]
            own = statistics.median(noted) - (bare - begin) / calls
            inside.append(max(0.0, own))
            outside.append(max(0.0, (end - bare - (bare - begin)) / calls - own))
    finally:
        _state.log = before
    return statistics.median(inside), statistics.median(outside)


def _nothing() -> None: ...


def _stamped(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    clock = time.perf_counter_ns
    state = _state

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        try:
            return function(*args, **kwargs)
        finally:
            end = clock()
            log = state.log or _new_log()
            at = log.at
            numbers = log.numbers
            if at < len(numbers):
                numbers[at] = number
                numbers[at + 1] = begin
                numbers[at + 2] = end
                log.at = at + 3

    return call


def _new_log() -> _Log:
    log = _state.log = _Log()
    _logs.append(log)
    return log
