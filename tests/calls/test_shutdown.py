"""How workers of one process shut down: together, late, or without one that is dead."""

from __future__ import annotations

import threading
import time

import pytest
from callees import call_gate, open_gate, wait_for_gate, who

from backhaul import rpc
from backhaul.testing import InProcessCluster


def shut_down_all(workers: InProcessCluster, **options: float) -> list[BaseException]:
    """Shut all workers down in parallel, as processes would. Returns what they raised."""
    errors: list[BaseException] = []

    def shut_down(worker: object) -> None:
        try:
            worker.shutdown(**options)  # type: ignore[attr-defined]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shut_down, args=(worker,)) for worker in workers if not worker.closed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def test_graceful_shutdown_waits_for_nested_work(trio: InProcessCluster, gate: str) -> None:
    done: list[bool] = []
    trio[0].rpc_async("worker1", call_gate, args=("worker2", gate)).add_done_callback(lambda f: done.append(f.value()))
    threading.Timer(0.3, open_gate, (gate,)).start()
    assert shut_down_all(trio) == []
    assert done == [True]


def test_graceful_shutdown_waits_for_work_that_a_callback_starts(trio: InProcessCluster, gate: str) -> None:
    done: list[str] = []
    first = trio[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    first.add_done_callback(lambda _: done.append(trio[0].rpc_sync("worker2", who)))
    threading.Timer(0.2, open_gate, (gate,)).start()
    assert shut_down_all(trio) == []
    assert done == ["worker2"]


def test_graceful_shutdown_waits_for_all_to_ask(pair: InProcessCluster) -> None:
    over = threading.Event()
    thread = threading.Thread(target=lambda: (pair[0].shutdown(), over.set()))
    thread.start()
    assert not over.wait(0.2)
    assert pair[1].rpc_sync("worker0", who) == "worker0"
    pair[1].shutdown()
    thread.join(10)
    assert over.is_set()


def test_graceful_shutdown_ends_at_its_timeout(pair: InProcessCluster, gate: str) -> None:
    stuck = pair[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    start = time.monotonic()
    errors = shut_down_all(pair, timeout=0.5)
    assert time.monotonic() - start < 3
    assert errors
    assert all(isinstance(error, rpc.RpcTimeoutError | rpc.WorkerLostError) for error in errors)
    open_gate(gate)
    with pytest.raises(rpc.BackhaulError):
        stuck.wait()


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_graceful_shutdown_with_a_dead_peer_names_it(trio: InProcessCluster, dead: int) -> None:
    trio[dead].shutdown(graceful=False)
    errors = shut_down_all(trio, timeout=20)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, rpc.WorkerLostError)
        assert f"worker{dead}" in str(error)
    assert all(worker.closed for worker in trio)


def test_a_worker_that_was_shut_down_says_so(pair: InProcessCluster) -> None:
    pair[0].shutdown(graceful=False)
    with pytest.raises(rpc.NotInitializedError, match="shut down"):
        pair[0].rpc_sync("worker1", who)
    with pytest.raises(rpc.NotInitializedError, match="shut down"):
        pair[0].shutdown()
