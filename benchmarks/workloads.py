"""Workloads: what is measured, and which figures of the table come from it.

Every figure but the plan's share is in seconds per call, so less is better and a quotient of two is a
factor of speed. For gradients a call is a step: forward and backward in a context of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import gradients
import torch
from gradients import Forward
from ports import Port, RpcPort

BURST = 5000
DEPTH = 8
_WARM_UP_SECONDS = 0.1
_KIB = 1024
_RPC = ("backhaul", "torch")


class Samples(NamedTuple):
    """Seconds per call (or the share) of each repetition; and the longest of them as a whole, the warm-up's included.

    Medians and a warm-up would hide a call that hangs for seconds once in a while; ``longest`` does not.
    """

    seconds: list[float]
    longest: float


@dataclass(frozen=True)
class Figure:
    """A row of the table: a number made of one round's samples."""

    name: str
    of: Callable[[list[float]], float] = statistics.median
    unit: Literal["seconds", "calls per second", "share"] = "seconds"  # as it is shown: samples are never rates


@dataclass(frozen=True)
class Workload:
    """``run(port, repetitions)`` warms up and measures.

    ``trial(port)``, once before all that, says what is wrong with a system's results, if anything.
    """

    name: str
    run: Callable[[Any, int], Samples]
    repetitions: int  # in one round
    figures: tuple[Figure, ...]
    systems: tuple[str, ...] = ("backhaul", "torch", "ping-pong")  # that can do it
    trial: Callable[[Any], str | None] | None = None


def _noop(port: Port, repetitions: int) -> Samples:
    return _time(port.noop, repetitions)


def _echo(size: int, port: Port, repetitions: int) -> Samples:
    tensor = torch.rand(size // torch.float32.itemsize)
    if not torch.equal(port.echo(tensor), tensor):
        raise ValueError(f"the echo of {size} bytes differs from what was sent")
    return _time(lambda: port.echo(tensor), repetitions)


def _burst(port: Port, repetitions: int) -> Samples:
    return _time(lambda: port.burst(BURST), repetitions, warm_up=lambda: port.burst(BURST // 50), calls=BURST)


def _nest(port: Port, repetitions: int) -> Samples:
    if port.nest(DEPTH) != DEPTH:
        raise ValueError("a nested call returned another depth")
    return _time(lambda: port.nest(DEPTH), repetitions)


def _step(forward: Forward, port: RpcPort, repetitions: int) -> Samples:
    return _time(lambda: gradients.step(forward, port), repetitions)


def _plan_share(port: RpcPort, repetitions: int) -> Samples:
    shares: list[float] = []
    timed = _time(lambda: shares.append(gradients.plan_share(port)), repetitions)
    return Samples(shares[-repetitions:], timed.longest)


def _time(
    act: Callable[[], object], repetitions: int, *, warm_up: Callable[[], object] | None = None, calls: int = 1
) -> Samples:
    """Time ``act``, which makes so many calls, after ``warm_up`` or itself has run for a while."""
    clock = time.perf_counter
    warm_up = warm_up or act
    longest = 0.0
    # By time rather than by number: a process that has just been thawed is slow for a while,
    # and a fixed number of calls lasts longest on the slowest system.
    end = clock() + _WARM_UP_SECONDS
    while (start := clock()) < end:
        warm_up()
        longest = max(longest, clock() - start)
    samples = []
    for _ in range(repetitions):
        start = clock()
        act()
        samples.append(clock() - start)
    return Samples([seconds / calls for seconds in samples], max(longest, *samples))


def _p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


def _echo_of(label: str, size: int, repetitions: int) -> Workload:
    name = f"echo {label}"
    return Workload(name, partial(_echo, size), repetitions, (Figure(name),))


def _gradient_of(name: str, repetitions: int) -> Workload:
    forward = gradients.FORWARDS[name]
    return Workload(
        name, partial(_step, forward), repetitions, (Figure(name),), _RPC, trial=partial(gradients.flaw, forward)
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("no-op", _noop, 1000, (Figure("no-op p50"), Figure("no-op p99", _p99))),
        _echo_of("1 KiB", _KIB, 300),
        _echo_of("64 KiB", 64 * _KIB, 200),
        _echo_of("1 MiB", _KIB**2, 50),
        _echo_of("16 MiB", 16 * _KIB**2, 8),
        Workload("in flight", _burst, 1, (Figure(f"{BURST:,} in flight", unit="calls per second"),)),
        Workload("nested", _nest, 40, (Figure(f"nested x {DEPTH}"),), _RPC),
        _gradient_of("chain of 1", 60),
        _gradient_of("chain of 4", 20),
        _gradient_of("chain of 16", 8),
        _gradient_of("fan-out of 2", 40),
        _gradient_of("fan-out of 8", 15),
        _gradient_of("fan-out of 32", 5),
        _gradient_of("fan-out of 8, 1 unused", 15),
        _gradient_of("U-shape", 50),
        _gradient_of("1,500 nodes, no calls", 5),
        Workload("plan", _plan_share, 5, (Figure("share of its plan", unit="share"),), ("backhaul",)),
    )
}
