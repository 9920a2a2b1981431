"""What a group of n workers costs each worker, and the leader: joining, liveness, losing a worker, shutting down.

The tests count operations, not seconds: calls of Python functions, messages, connections, requests to the store. They
look at the worker with the highest cost, which pings n others, leads the shutdown or loses n connections. Its cost may
grow as n log n.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from counted_group import OPTIONS, CountedGroup, Work, counting, patience

from backhaul.agent.calling import Calling
from backhaul.ids import WorkerInfo
from backhaul.worker import Worker

PATIENCE = 600.0
# The counts vary with what is polled, and small groups have costs that do not depend on their size.
SLACK = 1.5
WATCHFUL = 1
"""The rank of the worker that pings the others: not that of the leader, which would ping while all shut down."""


class Cost(NamedTuple):
    """The cost for the worker with the highest cost."""

    join: int
    watch: int
    """To find out once whether all others are alive."""
    loss: int
    end: int
    asked: float
    """The mean number of requests to the store until all have joined."""
    connections: int
    """The number after every worker has called one common worker."""


def cost_of(size: int) -> Cost:
    watchful = dataclasses.replace(OPTIONS, unresponsive_after=max(2.0, size / 25))
    with patience(size), counting() as work:
        group = CountedGroup(size, [watchful if rank == WATCHFUL else OPTIONS for rank in range(size)])
        join = dearest(work)
        asked = group.store.asked.total() / size
        assert group.network.visits == 0, "connections that no call has needed yet"

        victim = group[-1]
        group.on_each(lambda worker: worker.rpc_sync(victim.info.name, os.getpid))
        connections = group.network.visits
        watch = cost_of_pings(group, work)

        lose(group, victim)
        loss = dearest(work)

        group.shut_down()
        end = dearest(work)
    gc.collect()
    return Cost(join, watch, loss, end, asked, connections)


def dearest(work: Work) -> int:
    """The calls of the worker that made the most. Resets all counts."""
    calls = work.calls()
    for functions in work.of.values():
        functions.clear()
    return max(calls.values())


def cost_of_pings(group: CountedGroup, work: Work) -> int:
    """What it costs a worker that waits for calls to all others to ping each of them once, and to read the answers."""
    others = [worker for rank, worker in enumerate(group) if rank != WATCHFUL]
    _go.clear()
    futures = [group[WATCHFUL].rpc_async(worker.info.name, park) for worker in others]
    for _ in others:
        assert _parked.acquire(timeout=PATIENCE)
    dearest(work)
    rounds = 2
    # With the first ping of one more round, the others have been answered.
    group.network.await_pings(group.network.pings + rounds * len(others) + 1, PATIENCE)
    cost = dearest(work) // rounds
    _go.set()
    assert [future.wait() for future in futures] == [None] * len(others)
    dearest(work)
    return cost


def park() -> None:
    """A call that waits until all have been pinged."""
    _parked.release()
    assert _go.wait(PATIENCE)


_parked = threading.Semaphore(0)
_go = threading.Event()


def lose(group: CountedGroup, victim: Worker) -> None:
    """End a worker without a goodbye. Returns when all others know that it is over."""
    others = [worker for worker in group if worker is not victim]
    known = threading.Semaphore(0)

    def over(peer: WorkerInfo, reason: str) -> None:
        known.release()

    for worker in others:
        worker.agent.fates.on_over.append(over)
    victim.agent.transport.close()
    for line in [*victim.agent.calling(), *victim.agent.serving.lines]:
        line.channel.shutdown()
    for _ in others:
        assert known.acquire(timeout=PATIENCE)
    victim.shutdown(graceful=False)
    group.forget(victim)


def growth(costs: Mapping[int, float]) -> float:
    """How much more the largest size costs than the smallest, beyond n log n."""
    (small, less), *_, (large, more) = sorted(costs.items())
    return (more / less) / (large * math.log(large) / (small * math.log(small)))


def table(costs: dict[int, Cost]) -> str:
    """The table as in docs/performance.md."""
    rows = []
    for size, cost in costs.items():
        phases = " | ".join(f"{each:,} | {each / size:,.0f}" for each in (cost.join, cost.watch, cost.loss, cost.end))
        rows.append(f"| {size:,} | {phases} | {cost.asked:,.0f} |")
    return "\n".join(rows)


def check(sizes: list[int]) -> None:
    costs = {size: cost_of(size) for size in sizes}
    print(table(costs))
    for size, cost in costs.items():
        assert cost.connections == size, "one for each call, the victim's to itself among them"
    for name in ("join", "watch", "loss", "end", "asked"):
        each = {size: float(getattr(cost, name)) for size, cost in costs.items()}
        assert growth(each) < SLACK, f"{name}: {each}"


def test_the_cost_of_a_worker_grows_no_faster_than_n_log_n() -> None:
    check([8, 32])


def parting(size: int) -> Counter[Any]:
    """For each function, the most calls by any worker while a fully connected group shuts down.

    Each worker also has a reference to a value of each other worker.
    """
    with patience(size), counting() as work:
        group = CountedGroup(size)
        names = [worker.info.name for worker in group]
        held: list[Any] = []

        def refer(worker: Worker) -> None:
            references = [worker.remote(name, int) for name in names if name != worker.info.name]
            assert [reference.to_here() for reference in references] == [0] * (size - 1)
            held.append(references)

        group.on_each(refer)
        assert len(held) == size
        assert group.network.visits == size * (size - 1)
        dearest(work)
        group.shut_down()
        most: Counter[Any] = Counter()
        for functions in work.of.values():
            most |= functions
    gc.collect()
    return most


def test_no_function_is_called_more_than_n_log_n_times_in_a_shutdown() -> None:
    """A function that is called n times for each of n peers hides among cheaper ones, so each function counts alone."""
    small, large = 4, 40
    less, more = parting(small), parting(large)
    # A worker may call a function some times for each peer; what it polls varies most in a small group.
    costs = {code: {small: max(less[code], small), large: more[code]} for code in more if more[code] > 8 * large}
    assert Calling.lose.__code__ in more
    assert not {code.co_qualname: cost for code, cost in costs.items() if growth(cost) > 2 * SLACK}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_workers() -> None:
    check([10, 30, 100, 300, 1000])
