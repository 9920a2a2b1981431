"""A pair: two worker processes on one host, and a separate thread of the client to measure on.

The driver of a cluster is not suited for that: it checks every call for definitions of a notebook that it must
ship. Nor is a thread that serves a call: it gives its connection away before it waits. So the driver only gives orders,
and the measured code runs on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from backhaul.cluster import LocalWorker, cluster
from backhaul.options import RpcOptions

CLIENT, SERVER = "client", "server"

# `torch.set_num_threads` does not reach every thread: serving threads would start helpers for a matmul.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_SECONDS = 600.0

T = TypeVar("T")


class Pair:
    """A client and a server. Made by `pair` and `two_pairs`."""

    def __init__(self, client: LocalWorker, server: LocalWorker) -> None:
        self._client = client
        self._server = server

    @property
    def server(self) -> str:
        """Its name."""
        return self._server.name

    def on_client(self, function: Callable[..., T], *args: Any) -> T:
        """The function's result on the client, on a new thread there."""
        return run_apart(self._client, function, *args)

    def on_server(self, function: Callable[..., T], *args: Any) -> T:
        return run_apart(self._server, function, *args)


@contextmanager
def pair() -> Iterator[Pair]:
    """Two workers, for the duration of the block."""
    with cluster(2, names=(CLIENT, SERVER), env=ENVIRONMENT) as workers:
        yield Pair(*workers)


@contextmanager
def two_pairs(options: RpcOptions | None = None) -> Iterator[tuple[Pair, Pair]]:
    """Two independent pairs, to compare in turns. The pair without a turn sleeps."""
    names = (CLIENT, SERVER, f"other {CLIENT}", f"other {SERVER}")
    with cluster(4, names=names, env=ENVIRONMENT, options=options) as workers:
        yield Pair(*workers[:2]), Pair(*workers[2:])


def run_apart(worker: LocalWorker, function: Callable[..., T], *args: Any) -> T:
    value: T = worker.rpc_sync(apart, (function, *args), timeout=_SECONDS)
    return value


def apart(function: Callable[..., T], *args: Any) -> T:
    """Run the function on a new thread, and wait for it."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="bench")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
