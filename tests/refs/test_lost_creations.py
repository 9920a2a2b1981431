"""A creation that is lost on the way: workers that wait for its value hear of it, also while its creator keeps it."""

from __future__ import annotations

import time

import pytest

from backhaul.errors import WorkerLostError
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster
from backhaul.transport.memory import MemoryChannel

SOON = 20.0  # less than the timeout of a call


class Value:
    def get(self) -> int:
        return 1


def use(rref: RRef[Value]) -> int:
    return rref.rpc_sync().get()


def test_users_hear_that_the_creation_was_lost() -> None:
    """Worker 0 asks worker 1 for a value, and gives the reference away before it knows that the request is lost."""
    with InProcessCluster(3, seed=1) as workers:
        first = workers[0]
        first.rpc_sync("worker1", int)  # there is a connection
        with workers.scheduler.hold():
            made = first.remote("worker1", Value)
            line = first.agent.link(workers[1].info).open
            assert line is not None
            assert isinstance(line.channel, MemoryChannel)
            assert line.channel.peer is not None
            used = first.rpc_async("worker2", use, args=(made,))
            workers.scheduler.drop(line.channel.peer)
            workers.scheduler.end(line.channel)
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"the request of worker .worker0. for it is lost"):
            used.wait()
        assert time.monotonic() - began < SOON
        with pytest.raises(WorkerLostError):
            made.to_here()
