"""Processor time: the CPU seconds of calls, for client and server together, awake and asleep.

Calls one after the other keep both sides awake; calls with pauses in between let both sleep. The difference is the
cost of staying awake.
"""

from __future__ import annotations

import time

from backhaul.bench.ports import SERVER, RpcPort

PAUSE_SECONDS = 0.01
_BUSY_CALLS = 300
_APART_CALLS = 20


def back_to_back(port: RpcPort) -> float:
    """CPU seconds of both processes for one no-op in a row of no-ops."""
    return _per_call(port, _BUSY_CALLS, 0.0)


def apart(port: RpcPort) -> float:
    """The same for one no-op every 10 ms."""
    return _per_call(port, _APART_CALLS, PAUSE_SECONDS)


def _per_call(port: RpcPort, calls: int, pause: float) -> float:
    for _ in range(5):
        port.noop()
    before = _used(port)
    for _ in range(calls):
        port.noop()
        if pause:
            time.sleep(pause)
    return (_used(port) - before) / calls


def _used(port: RpcPort) -> float:
    there: float = port.rpc.rpc_sync(SERVER, time.process_time)
    return time.process_time() + there
