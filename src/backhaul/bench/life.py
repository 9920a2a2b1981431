"""The life of a process of a system: import torch, join the others, do what the driver orders, part.

It imports torch itself, with an eye on the clock: how long a system takes to start is to be known with
and without that. So this module is the first that such a process imports, and needs no torch.
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
    """All of it. What goes wrong is sent to the driver; if nothing can be obeyed after it, it is raised too."""
    die_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, which ends us
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
    """What came of an order. The process goes on if that is a failure: the driver starts the system afresh."""
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
    """Have the kernel kill this process when its parent, the driver, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # it died before we asked
        os._exit(1)
