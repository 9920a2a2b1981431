"""The life of a process of a system: import torch, join the others, obey the driver's orders, leave.

The process imports torch itself and measures that, because the start-up time of a system is reported with
and without it. So this module is the first that such a process imports, and needs no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from backhaul.bench.orders import Done, Failure, Greeting, Meet, Order, Prepare, Try, Verdict

_PR_SET_PDEATHSIG = 1


def live(system: str, role: str, roles: Sequence[str], directory: str, line: Connection, driver: int) -> None:
    """The whole life. Errors are sent to the driver, and also raised if the process cannot obey further orders."""
    die_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends us
    try:
        begin = time.monotonic()
        import torch

        import_seconds = time.monotonic() - begin
        torch.set_num_threads(1)
        from backhaul.bench.hosts import PORTS

        with PORTS[system](role, roles, directory) as port:
            line.send(Greeting(time.monotonic(), import_seconds))
            while (order := line.recv()) is not None:
                line.send(_answer(port, order))
    except Exception as error:
        line.send(_failure(error))
        raise


def _answer(port: Any, order: Order | Prepare | Try | Meet) -> object:
    """The result of an order. The process continues after a failure: the driver starts the system afresh."""
    try:
        return _obey(port, order)
    except Exception as error:
        return _failure(error)


def _obey(port: Any, order: Order | Prepare | Try | Meet) -> object:
    match order:
        case Meet():
            port.meet()
        case Prepare(workload):
            if workload.prepare is not None:
                workload.prepare(port)
        case Try(workload):
            return Verdict(workload.trial(port) if workload.trial is not None else None)
        case Order(workload):
            return workload.run(port, order)
    return Done()


def _failure(error: Exception) -> Failure:
    return Failure(type(error).__name__, "".join(traceback.format_exception(error)))


def die_with(driver: int) -> None:
    """Make the kernel kill this process when its parent, the driver, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # the driver died before the call
        os._exit(1)
