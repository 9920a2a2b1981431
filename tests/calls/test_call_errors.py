"""Calls that fail: exceptions of the function, timeouts, peers that vanish."""

from __future__ import annotations

import threading
import time
import traceback

import pytest
from callees import call_gate, open_gate, raise_value_error, wait_for_gate, who

from backhaul import rpc
from backhaul.rpc import RpcOptions
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Call, Result


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Custom(Exception):
    pass


def raise_custom() -> None:
    raise Custom("mine")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def leave_process() -> None:
    raise SystemExit(3)


def raise_at(to: str) -> None:
    rpc.rpc_sync(to, raise_value_error, args=("two hops away",))


def test_remote_exception_has_its_type_worker_and_traceback(pair: InProcessCluster) -> None:
    with pytest.raises(ValueError, match="bad luck") as caught:
        pair[0].rpc_sync("worker1", raise_value_error, args=("bad luck",))
    cause = caught.value.__cause__
    assert isinstance(cause, BaseException)
    assert cause.worker == "worker1"  # type: ignore[attr-defined]
    text = "".join(traceback.format_exception(caught.value))
    assert "Traceback on worker 'worker1'" in text
    assert "in raise_value_error" in text
    with pytest.raises(Custom, match="mine"):
        pair[0].rpc_sync("worker1", raise_custom)


def test_exception_whose_type_cannot_travel_is_a_remote_error(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.RemoteError, match="1 and 2") as caught:
        pair[0].rpc_sync("worker1", raise_unpicklable)
    assert caught.value.worker == "worker1"
    assert caught.value.type_name.endswith("Unpicklable")
    assert "raise_unpicklable" in caught.value.remote_traceback


def test_a_remote_exit_is_an_error_here(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.RemoteError, match="SystemExit"):
        pair[0].rpc_sync("worker1", leave_process)
    assert pair[0].rpc_sync("worker1", who) == "worker1"


def test_traceback_survives_two_hops(trio: InProcessCluster) -> None:
    with pytest.raises(ValueError, match="two hops away") as caught:
        trio[0].rpc_sync("worker1", raise_at, args=("worker2",))
    text = "".join(traceback.format_exception(caught.value))
    for piece in ("on worker 'worker1'", "on worker 'worker2'", "in raise_at", "in raise_value_error"):
        assert piece in text


# Timeouts.


def test_timeout_of_a_call_and_its_late_reply(pair: InProcessCluster, gate: str) -> None:
    for call in (pair[0].rpc_sync, lambda *a, **k: pair[0].rpc_async(*a, **k).wait()):
        start = time.monotonic()
        with pytest.raises(rpc.RpcTimeoutError, match="RPC ran for more than set timeout") as caught:
            call("worker1", wait_for_gate, args=(gate,), timeout=0.1)
        assert 0.09 < time.monotonic() - start < 5
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, RuntimeError)
    open_gate(gate)
    assert pair[0].rpc_sync("worker1", who) == "worker1"


def test_timeout_of_a_future_nobody_waits_for(pair: InProcessCluster, gate: str) -> None:
    failed = threading.Event()
    future = pair[0].rpc_async("worker1", wait_for_gate, args=(gate,), timeout=0.05)
    future.add_done_callback(lambda _: failed.set())
    assert failed.wait(10)
    with pytest.raises(rpc.RpcTimeoutError):
        future.value()
    open_gate(gate)


def test_default_timeout_and_no_timeout(gate: str) -> None:
    with InProcessCluster(2, options=RpcOptions(rpc_timeout=0.1)) as workers:
        with pytest.raises(rpc.RpcTimeoutError):
            workers[0].rpc_sync("worker1", wait_for_gate, args=(gate,))
        future = workers[0].rpc_async("worker1", wait_for_gate, args=(gate,), timeout=0)
        threading.Timer(0.3, open_gate, (gate,)).start()
        assert future.wait()


def test_a_lost_reply_times_out_and_others_are_not_harmed() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as workers:
        assert workers[0].rpc_sync("worker1", who) == "worker1"
        faults.next("drop", Result)
        with pytest.raises(rpc.RpcTimeoutError):
            workers[0].rpc_sync("worker1", who, timeout=0.2)
        assert workers[0].rpc_sync("worker1", who) == "worker1"


# Peers that vanish.


def test_a_cut_connection_fails_its_callers_and_is_made_again(gate: str) -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as workers:
        waiting = workers[0].rpc_async("worker1", wait_for_gate, args=(gate,))
        faults.next("cut", Call)
        with pytest.raises(rpc.WorkerLostError, match="worker1") as caught:
            workers[0].rpc_sync("worker1", who)
        assert caught.value.worker == "worker1"
        with pytest.raises(rpc.WorkerLostError):
            waiting.wait()
        open_gate(gate)
        assert workers[0].rpc_sync("worker1", who) == "worker1"


def test_a_worker_that_shuts_down_fails_its_callers(trio: InProcessCluster, gate: str) -> None:
    direct = trio[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    indirect = trio[0].rpc_async("worker2", call_gate, args=("worker1", gate))
    trio[2].rpc_sync("worker1", who)
    trio[1].shutdown(graceful=False)
    for future in (direct, indirect):
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            future.wait()
    open_gate(gate)
    with pytest.raises(rpc.WorkerLostError, match="worker1"):
        trio[0].rpc_sync("worker1", who)
    assert trio[0].rpc_sync("worker2", who) == "worker2"
