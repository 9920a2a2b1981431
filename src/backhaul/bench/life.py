"""The life of a process of a system: import torch, join the others, do what the driver orders, part.

It imports torch itself, with an eye on the clock: how long a system takes to start is to be known with
and without that. So this module is the first that such a process imports, and needs no torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from backhaul.bench.orders import Failure, Greeting, Meet, Order, Prepare, Verdict

_PR_SET_PDEATHSIG = 1


def live(system: str, role: str, roles: Sequence[str], directory: str, line: Connection, driver: int) -> None:
    """All of it. What goes wrong is sent to the driver, and raised."""
    _die_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, which ends us
    try:
        begin = time.monotonic()
        import torch

        import_seconds = time.monotonic() - begin
        torch.set_num_threads(1)
        from backhaul.bench.ports import PORTS

        with PORTS[system](role, roles, directory) as port:
            line.send(Greeting(time.monotonic(), import_seconds))
            # A full collection looks at all that importing torch has made, and takes a tenth of a second, which would
            # hit one system or the other by chance. What is made from now on is collected as ever, in all of them.
            gc.collect()
            gc.freeze()
            while (order := line.recv()) is not None:
                line.send(_obey(port, order))
    except Exception:
        line.send(Failure(traceback.format_exc()))
        raise


def _obey(port: Any, order: Order | Prepare | Meet) -> object:
    if isinstance(order, Meet):
        port.meet()
        return order
    # Not before it is needed: the models in there are memory that an idle worker does without.
    from backhaul.bench.workloads import WORKLOADS

    if isinstance(order, Prepare):
        return order
    workload = WORKLOADS[order.workload]
    if order.repetitions:
        return workload.run(port, order)
    try:
        return Verdict(workload.trial(port) if workload.trial else None)
    except Exception as error:
        traceback.print_exc()
        return Verdict(f"raises {type(error).__name__}")


def _die_with(driver: int) -> None:
    """Have the kernel kill this process when its parent, the driver, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # it died before we asked
        os._exit(1)
