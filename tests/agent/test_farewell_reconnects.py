"""A graceful shutdown in which a connection breaks: a living worker is not treated as dead."""

from __future__ import annotations

import threading

import pytest

from backhaul import rpc
from backhaul.testing import InProcessCluster

PATIENCE = 20.0


def cut(workers: InProcessCluster, one: int, other: int) -> None:
    """End the connection on which worker ``one`` asks worker ``other``."""
    for line in list(workers[other].agent.serving.lines):
        if line.peer.id == one:
            line.shutdown()


@pytest.mark.parametrize("pair", [(1, 0), (0, 1), (2, 0), (2, 1)], ids=str)
def test_a_connection_breaks_during_a_graceful_shutdown(pair: tuple[int, int]) -> None:
    with InProcessCluster(3, sockets=True) as workers:
        for worker in workers:
            with worker.as_current():
                for name in ("worker0", "worker1", "worker2"):
                    rpc.rpc_sync(name, int)
        asked = threading.Event()
        leader = workers[0].agent.farewell
        handle = leader._end[0].handle

        def noticed(line: object, envelope: object) -> object:
            asked.set()
            return handle(line, envelope)  # type: ignore[arg-type]

        leader._end[0].handle = noticed  # type: ignore[method-assign,assignment]
        errors: list[BaseException] = []

        def leave(rank: int) -> None:
            try:
                workers[rank].shutdown(timeout=PATIENCE)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=leave, args=(rank,)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        assert asked.wait(PATIENCE)
        cut(workers, *pair)
        last = threading.Thread(target=leave, args=(0,))
        last.start()
        for thread in (*threads, last):
            thread.join(2 * PATIENCE)
        assert not errors
        assert all(worker.closed for worker in workers)
