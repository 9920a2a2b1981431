"""Spread: run work on several workers at once, and report all failures in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.ids import WorkerInfo

Work = tuple[Callable[..., Any], Sequence[Any]]
"""A function and its arguments."""


def spread(what: str, work: Mapping[WorkerInfo, Work], timeout: float = -1.0) -> dict[WorkerInfo, Any]:
    """Run each function on its worker, all at the same time, and return their values when all have finished.

    This worker's own part runs on the calling thread. ``what`` names the work in errors. ``timeout`` is as in
    `backhaul.rpc.rpc_sync`. Raises `PartialError`, with every error, if any worker fails.
    """
    here = rpc.get_worker_info()
    futures: dict[WorkerInfo, rpc.Future[Any]] = {}
    values: dict[WorkerInfo, Any] = {}
    errors: dict[WorkerInfo, BaseException] = {}
    if len(work) == 1 and here not in work:
        ((worker, (function, args)),) = work.items()
        try:
            return {worker: rpc.rpc_sync(worker, function, args, timeout=timeout)}
        except Exception as error:
            raise PartialError(what, [], {worker.name: error}) from error
    for worker, (function, args) in work.items():
        if worker == here:
            continue
        try:
            futures[worker] = rpc.rpc_async(worker, function, args, timeout=timeout)
        except Exception as error:
            errors[worker] = error
    if here in work:
        function, args = work[here]
        try:
            values[here] = function(*args)
        except Exception as error:
            errors[here] = error
    while futures:
        worker, future = futures.popitem()
        try:
            values[worker] = future.wait()
        except Exception as error:
            errors[worker] = error
        del future
    if errors:
        first = next(iter(errors.values()))
        done = [worker.name for worker in work if worker in values]
        values.clear()  # a stored error keeps this frame alive, and must not keep the values alive with it
        raise PartialError(what, done, {worker.name: errors[worker] for worker in work if worker in errors}) from first
    return {worker: values[worker] for worker in work}
