"""Curves: the cost of one more item, by how many there are already. Measured here; `growth` judges and shows.

All but the plan is measured between processes over unix sockets. Each size is measured in several rounds, so that a
slow phase of the machine does not look like growth.
"""

from __future__ import annotations

import contextvars
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from backhaul import autograd, rpc
from backhaul.autograd.functions import ROOT, send, start
from backhaul.autograd.schedule import Schedule, Source
from backhaul.bench.pair import ENVIRONMENT, SERVER, Pair, apart, pair
from backhaul.cluster import Cluster, LocalWorker, cluster

Unit = Literal["seconds", "bytes"]

_WARM_UP_SECONDS = 0.3
_WIDTH, _BATCH = 64, 16
_STEPS = 40  # timed at one number of contexts, in each round
_HANDFUL = 500  # references that are made, fetched and dropped on top of the existing ones
_LEAST_TO_WEIGH = 1000  # references or contexts: the memory of fewer is lost in the allocator's rounding
_BRANCH = 50  # nodes between one source of a plan and the next


@dataclass(frozen=True)
class Curve:
    """The cost of one ``what``, by the number of ``axis``: one number for each round."""

    group: str
    axis: str
    what: str
    unit: Unit = "seconds"
    rounds: dict[int, list[float]] = field(default_factory=dict)

    def add(self, size: int, cost: float) -> None:
        self.rounds.setdefault(size, []).append(cost)

    @property
    def medians(self) -> dict[int, float]:
        return {size: statistics.median(self.rounds[size]) for size in sorted(self.rounds)}


@dataclass(frozen=True)
class Sizes:
    """How far each curve goes, and how often it is measured."""

    peers: Sequence[int] = (2, 4, 8, 16)
    contexts: Sequence[int] = (1, 10, 100, 1000)
    references: Sequence[int] = (1, 100, 1_000, 10_000, 100_000)
    messages: Sequence[int] = (2, 20, 200, 2_000, 10_000)
    passes: Sequence[int] = (1, 10, 100, 500)
    nodes: Sequence[int] = (100, 1_000, 10_000, 50_000)
    rounds: int = 5
    call_seconds: float = 1.0  # of calling, for each number of peers and round


FULL = Sizes()
QUICK = dataclasses.replace(FULL, references=(1, 100, 1_000, 10_000), rounds=3, call_seconds=0.5)
SMOKE = Sizes((2, 3), (1, 4), (1, 30), (2, 8), (1, 3), (100, 1000), rounds=1, call_seconds=0.1)


def measure(sizes: Sizes, groups: Iterable[str], say: Callable[[str], None] = lambda text: None) -> list[Curve]:
    """The curves of these groups."""
    curves: list[Curve] = []
    wanted = [name for name in GROUPS if name in set(groups)]
    if "peers" in wanted:
        say("peers")
        curves += _peers(sizes)
    others = [name for name in wanted if name != "peers"]
    if others:
        with pair() as two:
            for name in others:
                say(name)
                curves += GROUPS[name](two, sizes)
    return curves


# Calls, by how many processes make them.


def nothing() -> None: ...


def call_in_turn(others: Sequence[str], begin: float, seconds: float) -> int:
    """How many calls to ``others``, one after the other, finish within ``seconds`` after ``begin``."""
    turn = 0
    while time.monotonic() < begin:
        rpc.rpc_sync(others[turn % len(others)], nothing)
        turn += 1
    first, end = turn, begin + seconds
    while time.monotonic() < end:
        rpc.rpc_sync(others[turn % len(others)], nothing)
        turn += 1
    return turn - first


def _peers(sizes: Sizes) -> list[Curve]:
    """One group of the largest number of processes; those without a turn sleep."""
    axis = "peers", "processes"
    to_one, to_one_cpu = Curve(*axis, "call, all to one server"), Curve(*axis, "call, all to one server: CPU time")
    to_all, to_all_cpu = Curve(*axis, "call, each to each"), Curve(*axis, "call, each to each: CPU time")
    with cluster(max(sizes.peers), env=ENVIRONMENT) as workers:
        for _ in range(sizes.rounds):
            for size in sizes.peers:
                taking = workers[:size]
                names = [worker.name for worker in taking]
                server, *clients = taking
                targets = {client: [server.name] for client in clients}
                _call(workers, targets, taking, size, sizes.call_seconds, to_one, to_one_cpu)
                targets = {
                    each: [*names[place + 1 :], *names[:place]] for place, each in enumerate(taking)
                }  # each starts with a different peer
                _call(workers, targets, taking, size, sizes.call_seconds, to_all, to_all_cpu)
    return [to_one, to_one_cpu, to_all, to_all_cpu]


def _call(
    workers: Cluster,
    targets: dict[LocalWorker, list[str]],
    taking: Sequence[LocalWorker],
    size: int,
    seconds: float,
    wall: Curve,
    cpu: Curve,
) -> None:
    # More processes need longer to start calling.
    begin = time.monotonic() + _WARM_UP_SECONDS + 0.05 * size
    counts = [worker.rpc_async(apart, (call_in_turn, others, begin, seconds)) for worker, others in targets.items()]
    time.sleep(max(0.0, begin - time.monotonic()))
    before = sum(map(_cpu_seconds, taking))
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    used = sum(map(_cpu_seconds, taking)) - before
    calls = sum(count.wait() for count in counts)
    wall.add(size, seconds / calls)
    cpu.add(size, used / calls)


def _cpu_seconds(worker: LocalWorker) -> float:
    """The CPU time that its process has used so far: its CPU clock, named as in clock_getcpuclockid(3)."""
    return time.clock_gettime((~worker.pid << 3) | 2)


# Contexts.

with torch.random.fork_rng():
    torch.manual_seed(1)
    _LAYER = nn.Linear(_WIDTH, _WIDTH)
    _INPUT = torch.rand(_BATCH, _WIDTH, requires_grad=True)

_open: list[tuple[contextvars.Context, Any, Tensor]] = []


def layer(value: Tensor) -> Tensor:
    output: Tensor = _LAYER(value)
    return output


def step() -> None:
    """Forward and backward over one hop, in a new context."""
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(SERVER, layer, args=(_INPUT,)).sum()])


def have_contexts(count: int) -> None:
    """Open or leave contexts, each with one call recorded on both ends, until there are ``count``."""
    while len(_open) < count:
        space, manager = contextvars.Context(), autograd.context()
        space.run(manager.__enter__)
        _open.append((space, manager, space.run(rpc.rpc_sync, SERVER, layer, args=(_INPUT,))))
    while len(_open) > count:
        space, manager, _ = _open.pop()
        space.run(manager.__exit__)
    rpc.rpc_sync(SERVER, nothing)  # by then the server has read all one-way messages


def time_steps(count: int) -> float:
    return _median_of(step, count)


def _contexts(two: Pair, sizes: Sizes) -> list[Curve]:
    axis = "contexts", "contexts alive"
    steps, memory = Curve(*axis, "step in one more"), Curve(*axis, "one more: memory, both ends", "bytes")
    two.on_client(time_steps, _STEPS)
    before = _own_bytes(two)
    for turn in range(sizes.rounds):
        for size in sizes.contexts:
            two.on_client(have_contexts, size)
            if turn == 0 and size >= _LEAST_TO_WEIGH:
                memory.add(size, (_own_bytes(two) - before) / size)
            steps.add(size, two.on_client(time_steps, _STEPS))
    two.on_client(have_contexts, 0)
    return [steps, *([memory] if memory.rounds else [])]


# References.


@dataclass
class Value:
    """The referent of the references. It can be fetched, and the process counts its instances."""

    number: int

    def __post_init__(self) -> None:
        _values[0] += 1

    def __del__(self) -> None:
        _values[0] -= 1


_values = [0]
_held: list[rpc.RRef[Value]] = []


def have_references(count: int) -> None:
    """Make or drop references to values of the server until there are ``count``.

    Returns when the server has made or freed the values.
    """
    del _held[count:]
    _held.extend(rpc.remote(SERVER, Value, args=(number,)) for number in range(count - len(_held)))
    rpc.rpc_sync(SERVER, await_values, args=(count,))


def await_values(count: int) -> None:
    deadline = time.monotonic() + 60.0
    while _values[0] != count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"there are {_values[0]} values, not {count}")
        time.sleep(0.0005)


def time_references(count: int) -> tuple[float, float, float]:
    """Seconds to make, to fetch and to drop one of ``count`` references, on top of the existing ones."""
    clock = time.perf_counter
    before = len(_held)
    start = clock()
    have_references(before + count)
    made = clock()
    # Some of all ages: the newest are still in the caches.
    chosen = _held[:: max(1, len(_held) // count)][:count]
    begin = clock()
    for rref in chosen:
        rref.to_here()
    fetched = clock()
    del chosen, rref
    again = clock()
    have_references(before)
    dropped = clock()
    return (made - start) / count, (fetched - begin) / count, (dropped - again) / count


def _references(two: Pair, sizes: Sizes) -> list[Curve]:
    axis = "references", "references alive"
    curves = [Curve(*axis, f"{what} one more") for what in ("make", "fetch", "drop")]
    memory = Curve(*axis, "one more: memory, both ends", "bytes")
    handful = min(_HANDFUL, 10 * max(sizes.references))
    two.on_client(time_references, handful)
    before = _own_bytes(two)
    for turn in range(sizes.rounds):
        for size in sizes.references:
            two.on_client(have_references, size)
            if turn == 0 and size >= _LEAST_TO_WEIGH:
                memory.add(size, (_own_bytes(two) - before) / size)
            for curve, cost in zip(curves, two.on_client(time_references, handful), strict=True):
                curve.add(size, cost)
        two.on_client(have_references, 0)
    return [*curves, *([memory] if memory.rounds else [])]


# Messages in one context, and passes.


def chain(calls: int) -> Tensor:
    """A chain: each call takes the result of the previous one."""
    value = _INPUT[0]
    for _ in range(calls):
        value = rpc.rpc_sync(SERVER, half, args=(value,))
    return value


def fan_out(calls: int) -> Tensor:
    """All calls take the same tensor."""
    return torch.stack([rpc.rpc_sync(SERVER, half, args=(_INPUT[0],)) for _ in range(calls)])


def residual(calls: int) -> Tensor:
    """A chain with a skip connection around each call: one component on the client, with a gate for each call."""
    value = _INPUT[0]
    for _ in range(calls):
        value = value + rpc.rpc_sync(SERVER, half, args=(value,)) / calls
    return value


def half(value: Tensor) -> Tensor:
    return value / 2


SHAPES: dict[str, Callable[[int], Tensor]] = {"chain": chain, "fan-out": fan_out, "residual": residual}


def time_messages(shape: str, messages: int) -> tuple[float, float]:
    """Seconds for each message of a pass, forward and backward. A call is two messages: request and reply."""
    clock = time.perf_counter
    calls = messages // 2
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(max(1, min(20, 100 // calls))):
        with autograd.context() as context:
            begin = clock()
            loss = SHAPES[shape](calls).sum()
            turned = clock()
            autograd.backward(context, [loss])
            end = clock()
        del loss
        forward.append((turned - begin) / messages)
        backward.append((end - turned) / messages)
    gc.collect()
    return statistics.median(forward), statistics.median(backward)


def time_passes(sizes: Sequence[int], steps: int) -> dict[int, float]:
    """Seconds for a call and a pass over it, in a context that has had this many passes already."""
    times: list[float] = []
    clock = time.perf_counter
    with autograd.context() as context:
        for _ in range(max(sizes) + steps):
            begin = clock()
            autograd.backward(context, [rpc.rpc_sync(SERVER, layer, args=(_INPUT,)).sum()])
            times.append(clock() - begin)
    return {size: statistics.median(times[size : size + steps]) for size in sizes}


def _messages(two: Pair, sizes: Sizes) -> list[Curve]:
    axis = "messages", "messages in one context"
    curves = {
        shape: (Curve(*axis, f"message forward, {shape}"), Curve(*axis, f"message backward, {shape}"))
        for shape in SHAPES
    }
    for shape in SHAPES:
        two.on_client(time_messages, shape, min(200, max(sizes.messages)))
    for _ in range(sizes.rounds):
        for shape, pair_of in curves.items():
            for size in sizes.messages:
                for curve, cost in zip(pair_of, two.on_client(time_messages, shape, size), strict=True):
                    curve.add(size, cost)
    return [curve for pair_of in curves.values() for curve in pair_of]


def _passes(two: Pair, sizes: Sizes) -> list[Curve]:
    curve = Curve("passes", "passes in one context before", "call and pass")
    for _ in range(sizes.rounds):
        for size, cost in two.on_client(time_passes, list(sizes.passes), 10).items():
            curve.add(size, cost)
    return [curve]


# The plan.


# Short branches on a trunk, so that a graph of many nodes is not equally deep. Torch 2.13 frees nodes that Python has
# touched by recursion, node by node, and 50,000 nodes in a row are too many for the stack of a thread.


def branch(length: int) -> Tensor:
    """A row of ``length`` nodes, the last one a leaf."""
    value = torch.rand(1, requires_grad=True)
    for _ in range(length - 1):
        value = -value
    return value


def one_source(nodes: int) -> dict[int, Source]:
    """One graph, and its roots."""
    value = branch(_BRANCH)
    for _ in range(nodes // _BRANCH - 1):
        value = value + branch(_BRANCH - 1)
    return {ROOT: Source(start([value]).grad_fn, ROOT)}


def sources_apart(nodes: int) -> dict[int, Source]:
    """Many short, unconnected branches, as at a server."""
    numbers = range(1, nodes // _BRANCH + 1)
    return {number: Source(send(number, [branch(_BRANCH - 1)]).grad_fn, number) for number in numbers}


def sources_of_one(nodes: int) -> dict[int, Source]:
    """One graph with many sources on it, as with skip connections around calls."""
    found: dict[int, Source] = {}
    value = branch(_BRANCH)
    for number in range(1, nodes // _BRANCH):
        value = value + branch(_BRANCH - 2)
        found[number] = Source(send(number, [value]).grad_fn, number)
    found[ROOT] = Source(start([value]).grad_fn, ROOT)
    return found


GRAPHS: dict[str, Callable[[int], dict[int, Source]]] = {
    "one source": one_source,
    "sources apart": sources_apart,
    "sources of one component": sources_of_one,
}


def time_plan(graph: str, nodes: int) -> float:
    """Seconds for each node: planning the components, and delivering the gradients of all sources one by one."""
    sources = GRAPHS[graph](nodes)
    latest_first = sorted(sources, key=lambda source: (source != ROOT, -source))
    gc.collect()
    times: list[float] = []
    for _ in range(max(3, min(50, 20_000 // nodes))):
        begin = time.perf_counter()
        schedule = Schedule(sources)
        schedule.take_part(sources)
        schedule.resolve()
        for source in latest_first:
            schedule.arrive([source], sources.__getitem__)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / nodes


def _nodes(two: Pair, sizes: Sizes) -> list[Curve]:
    curves = {graph: Curve("plan", "nodes of a graph", f"node of the plan, {graph}") for graph in GRAPHS}
    for _ in range(sizes.rounds):
        for graph, curve in curves.items():
            for size in sizes.nodes:
                curve.add(size, two.on_client(time_plan, graph, size))
    return list(curves.values())


GROUPS: dict[str, Callable[[Pair, Sizes], list[Curve]]] = {
    "peers": lambda two, sizes: _peers(sizes),
    "contexts": _contexts,
    "references": _references,
    "messages": _messages,
    "passes": _passes,
    "plan": _nodes,
}


def _median_of(act: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _own_bytes(two: Pair) -> int:
    return two.on_client(own_bytes) + two.on_server(own_bytes)


def own_bytes() -> int:
    """Memory of this process that it shares with no other."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
