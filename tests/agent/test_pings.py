"""Pings go to a silent peer that owes an answer, and no more often than necessary."""

from __future__ import annotations

import threading
import time

import pytest

from backhaul import rpc
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.wire.messages import Ping

PATIENCE = 0.4
_over = threading.Event()


def wait_until_over() -> bool:
    return _over.wait(10)


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "sockets"])
def test_a_long_call_is_pinged_now_and_then(sockets: bool) -> None:
    _over.clear()
    options = RpcOptions(unresponsive_after=PATIENCE)
    with InProcessCluster(2, sockets=sockets, options=options) as workers, workers[0].as_current():
        rpc.rpc_sync("worker1", int)
        handlers = workers[1].agent._handlers
        answer = handlers[Ping]
        pings: list[float] = []
        enough = threading.Event()

        def counted(line: object, envelope: object) -> object:
            pings.append(time.monotonic())
            if len(pings) == 3:
                enough.set()
            return answer(line, envelope)  # type: ignore[arg-type]

        handlers[Ping] = counted  # type: ignore[assignment]
        future = rpc.rpc_async("worker1", wait_until_over)
        waits = threading.Thread(target=future.wait)
        waits.start()
        assert enough.wait(10), "a silent peer is asked whether it is there"
        _over.set()
        waits.join(10)
        assert future.wait()
    # One ping for each quarter of the patience in which nothing came. A peer that has just answered is not pinged
    # again.
    assert pings[2] - pings[0] > PATIENCE / 10


def test_a_look_after_a_long_stop_loses_no_peer() -> None:
    """The silence proves nothing: this process, or the whole machine, may have been stopped since the ping."""
    with InProcessCluster(2, sockets=True) as workers:
        line = workers[0].agent._route("worker1", time.monotonic() + 10)
        state = line._state
        line.check_alive()
        assert state._pinged is not None
        state._pinged -= 1000
        state._looked -= 1000
        line.check_alive()
        line.check_alive()  # for example of another thread
        assert line.lost is None
        state._pinged -= 1000
        line.check_alive()
        assert isinstance(line.lost, rpc.WorkerUnresponsiveError)
