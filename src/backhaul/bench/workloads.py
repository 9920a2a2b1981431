"""Workloads: the work that is measured in rounds, and the figures of the table that come from it.

Every figure except the plan's share is in seconds per call, so less is better and a quotient of two is a
speed-up. For gradients a call is a step: forward and backward in a new context.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch

from backhaul.bench import busy, gradients, processor_time, training
from backhaul.bench.gradients import Forward
from backhaul.bench.orders import Order
from backhaul.bench.ports import (
    BACKHAUL,
    BACKHAUL_TLS,
    CLIENT,
    MEMCPY,
    PING_PONG,
    SECOND,
    SERVER,
    SERVERS,
    SSL,
    TCP,
    TORCH,
    Port,
    RpcPort,
)

BURST = 5000
DEPTH = 8
RING = (*SERVERS[:3], CLIENT)
TRAINERS = (CLIENT, *SERVERS[1:3])  # workers that also serve other work: separate ones would be idle then
WINDOW_SECONDS = 0.25  # during which several clients count their calls
_WARM_UP_SECONDS = 0.1
_KIB = 1024
_RPC = (BACKHAUL, TORCH)
_CALLS = (*_RPC, PING_PONG)
_TLS = (BACKHAUL_TLS, *_RPC, SSL, TCP)


class Samples(NamedTuple):
    """Seconds per call (or the share) of each repetition; and the longest repetition as a whole, including the warm-up.

    Medians and a warm-up would hide a call that occasionally hangs for seconds; ``longest`` does not.
    """

    seconds: list[float]
    longest: float


@dataclass(frozen=True)
class Figure:
    """A row of the table: a number computed from one round's samples."""

    name: str
    of: Callable[[list[float]], float] = statistics.median
    unit: Literal["seconds", "share", "bytes", "CPU seconds", "wake-ups"] = "seconds"
    as_rate: bool = False  # shown as calls per second; samples never are rates
    steady: bool = True  # enough to compare with another run
    ours: str = BACKHAUL  # the system that the figure is about, compared with the others


@dataclass(frozen=True)
class Workload:
    """``run(port, order)`` warms up and measures, on each of the ``clients`` at once.

    ``trial(port)`` runs once before that on each client, and says what is wrong with a system's results, if
    anything. ``prepare(port)`` runs before the trial on clients and servers, and does slow first-time work.

    All of it is sent to other processes, so functions must be module-level.
    """

    name: str
    run: Callable[[Any, Order], Samples]
    repetitions: int  # in one round
    figures: tuple[Figure, ...]
    systems: tuple[str, ...] = _CALLS  # the systems that can do it
    trial: Callable[[Any], str | None] | None = None
    prepare: Callable[[Any], None] | None = None
    clients: tuple[str, ...] = (CLIENT,)
    servers: tuple[str, ...] = (SERVER,)
    every: int = 1  # measured once in this many rounds, for slow work that varies little

    @property
    def roles(self) -> tuple[str, ...]:
        """The workers with a part in it; all others are frozen during it."""
        return tuple(dict.fromkeys((*self.servers, *self.clients)))

    @property
    def is_wide(self) -> bool:
        """Whether it needs more workers than one server and its clients."""
        return not set(self.roles) <= {SERVER, CLIENT, SECOND}


def noop(port: Port, order: Order) -> Samples:
    return _time(port.noop, order)


def echo(size: int, port: Port, order: Order) -> Samples:
    tensor = _tensor(size)
    if not torch.equal(port.echo(tensor), tensor):
        raise ValueError(f"the echo of {size} bytes differs from what was sent")
    return _time(lambda: port.echo(tensor), order)


@cache
def _tensor(size: int) -> torch.Tensor:
    return torch.rand(size // torch.float32.itemsize)


def _burst(port: Port, order: Order) -> Samples:
    return _time(lambda: port.burst(BURST), order, warm_up=lambda: port.burst(BURST // 50), calls=BURST)


def _noop_together(port: Port, order: Order) -> Samples:
    return _together(port.noop, order)


def _train_together(port: RpcPort, order: Order) -> Samples:
    return _together(lambda: training.step(port), order)


def _together(act: Callable[[], object], order: Order) -> Samples:
    """Calls one after the other, while other clients do the same; returns seconds per call of this client."""
    clock = time.monotonic
    longest = 0.0
    while (now := clock()) < order.start:
        act()
        longest = max(longest, clock() - now)
    calls = 0
    while calls == 0 or now < order.start + WINDOW_SECONDS:
        before = now
        act()
        now = clock()
        longest = max(longest, now - before)
        calls += 1
    return Samples([(now - order.start) / calls], longest)


def _nest(port: Port, order: Order) -> Samples:
    if port.nest(DEPTH) != DEPTH:
        raise ValueError("a nested call returned another depth")
    return _time(lambda: port.nest(DEPTH), order)


def _circle(port: Port, order: Order) -> Samples:
    return _time(lambda: port.circle(RING, DEPTH), order)


def _circle_flaw(port: Port) -> str | None:
    expected = [RING[index % len(RING)] for index in range(DEPTH)]
    return None if port.circle(RING, DEPTH) == expected else "another way around"


def _noop_while_busy(port: RpcPort, order: Order) -> Samples:
    times = busy.call_times(port, order.repetitions)
    return Samples(times, max(times))


def _slowdown(port: RpcPort, order: Order) -> Samples:
    return Samples([busy.slowdown(port) for _ in range(order.repetitions)], longest=0.0)


def _refer(port: Port, order: Order) -> Samples:
    return _time(port.refer, order)


def _step(forward: Forward, port: RpcPort, order: Order) -> Samples:
    return _time(lambda: gradients.step(forward, port), order)


def _train(port: RpcPort, order: Order) -> Samples:
    return _time(lambda: training.step(port), order)


def _processor_time(measure: Callable[[RpcPort], float], port: RpcPort, order: Order) -> Samples:
    return Samples([measure(port) for _ in range(order.repetitions)], longest=0.0)


def _plan_share(port: RpcPort, order: Order) -> Samples:
    shares: list[float] = []
    timed = _time(lambda: shares.append(gradients.plan_share(port)), order)
    return Samples(shares[-order.repetitions :], timed.longest)


def _time(
    act: Callable[[], object], order: Order, *, warm_up: Callable[[], object] | None = None, calls: int = 1
) -> Samples:
    """Time ``act``, which makes ``calls`` calls, after ``warm_up`` or itself has run for a while."""
    clock = time.perf_counter
    warm_up = warm_up or act
    longest = 0.0
    # By time rather than by number: a process is slow for a while after a thaw,
    # and a fixed number of calls takes longest on the slowest system.
    end = clock() + _WARM_UP_SECONDS
    while (start := clock()) < end:
        warm_up()
        longest = max(longest, clock() - start)
    samples = []
    for _ in range(order.repetitions):
        start = clock()
        act()
        samples.append(clock() - start)
    return Samples([seconds / calls for seconds in samples], max(longest, *samples))


def _p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


def _joint(samples: list[float]) -> float:
    """Seconds per call of all clients together, whose rates add up."""
    return 1 / sum(1 / seconds for seconds in samples)


def _echo_of(label: str, size: int, repetitions: int, every: int = 1) -> Workload:
    name = f"echo {label}"
    return Workload(name, partial(echo, size), repetitions, (Figure(name),), (*_CALLS, MEMCPY), every=every)


def _tls_of(plain: Workload, repetitions: int, every: int = 1) -> Workload:
    """The same work for the systems that do it over TCP with TLS, and for those that they are compared with."""
    figures = (Figure(f"TLS {plain.figures[0].name}", ours=BACKHAUL_TLS),)
    return Workload(f"TLS {plain.name}", plain.run, repetitions, figures, _TLS, every=every)


def _gradient_of(name: str, repetitions: int, every: int = 1, *, servers: int = 1) -> Workload:
    forward = gradients.FORWARDS[name]
    return Workload(
        name,
        partial(_step, forward),
        repetitions,
        (Figure(name),),
        _RPC,
        trial=partial(gradients.flaw, forward, SERVERS[:servers]),
        servers=SERVERS[:servers],
        every=every,
    )


_NOOP = Workload("no-op", noop, 1000, (Figure("no-op p50"), Figure("no-op p99", _p99, steady=False)))

WORKLOADS = {
    workload.name: workload
    for workload in (
        _NOOP,
        _echo_of("1 KiB", _KIB, 300),
        _echo_of("64 KiB", 64 * _KIB, 200),
        _echo_of("1 MiB", _KIB**2, 50),
        _echo_of("16 MiB", 16 * _KIB**2, 8),
        _echo_of("64 MiB", 64 * _KIB**2, 4),
        _echo_of("256 MiB", 256 * _KIB**2, 2, every=4),
        Workload("in flight", _burst, 1, (Figure(f"{BURST:,} in flight", as_rate=True),)),
        Workload(
            "two clients",
            _noop_together,
            1,
            (Figure("two clients", _joint, as_rate=True),),
            clients=(CLIENT, SECOND),
        ),
        Workload("nested", _nest, 40, (Figure(f"nested x {DEPTH}"),), _RPC),
        Workload("remote + to_here", _refer, 150, (Figure("remote + to_here"),), _RPC),
        _gradient_of("chain of 1", 60),
        _gradient_of("chain of 4", 20),
        _gradient_of("chain of 16", 8),
        _gradient_of("fan-out of 2", 40),
        _gradient_of("fan-out of 8", 15),
        _gradient_of("fan-out of 32", 5),
        _gradient_of("fan-out of 8, 1 unused", 15),
        _gradient_of("U-shape", 50),
        Workload(
            "parameter server",
            _train,
            20,
            (Figure("parameter server"),),
            _RPC,
            trial=training.flaw,
            prepare=training.prepare,
        ),
        _gradient_of("transformer in two", 2, every=2),
        _gradient_of("1,500 nodes, no calls", 5),
        _gradient_of("chain of 4 over 2", 20, servers=2),
        _gradient_of("chain of 4 over 3", 20, servers=3),
        _gradient_of("chain of 16 over 2", 8, servers=2),
        _gradient_of("chain of 16 over 3", 8, servers=3),
        _gradient_of("fan-out of 8 over 2", 15, servers=2),
        _gradient_of("fan-out of 8 over 4", 15, servers=4),
        _gradient_of("pipeline of 3", 8, servers=3),
        Workload("ring of 4", _circle, 40, (Figure(f"ring of 4 x {DEPTH}"),), _RPC, _circle_flaw, servers=RING[:3]),
        Workload(
            "3 trainers",
            _train_together,
            1,
            (Figure("parameter server, 3 trainers", _joint, as_rate=True),),
            _RPC,
            trial=training.flaw,
            prepare=training.prepare,
            clients=TRAINERS,
        ),
        Workload(
            "CPU time",
            partial(_processor_time, processor_time.back_to_back),
            1,
            (Figure("no-op, CPU of both"),),
            _RPC,
        ),
        Workload(
            "CPU time, calls apart",
            partial(_processor_time, processor_time.apart),
            1,
            (Figure("no-op every 10 ms, CPU of both"),),
            _RPC,
            every=2,
        ),
        Workload(
            "busy callee",
            _noop_while_busy,
            50,
            (Figure("no-op, busy callee p50"), Figure("no-op, busy callee p99", _p99, steady=False)),
            _RPC,
            every=2,
        ),
        Workload(
            "computing callee",
            _slowdown,
            1,
            (Figure("computing while called", unit="share", steady=False),),
            _RPC,
            every=2,
        ),
        Workload("plan", _plan_share, 5, (Figure("share of its plan", unit="share"),), (BACKHAUL,)),
        _tls_of(_NOOP, 500),
        _tls_of(_echo_of("1 MiB", _KIB**2, 0), 30, every=2),
        _tls_of(_echo_of("64 MiB", 64 * _KIB**2, 0), 3, every=2),
    )
}
