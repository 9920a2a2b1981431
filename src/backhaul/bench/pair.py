"""A pair: two worker processes of one host, and a thread of the client's own to measure on.

The driver of a cluster is no good place for that: it looks at every call for what a notebook may have to
ship. Nor is a thread that serves a call: it gives its connection away before it waits. So the driver only orders, and
what is measured runs on a thread that belongs to nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from backhaul.cluster import LocalWorker, cluster

CLIENT, SERVER = "client", "server"

# `torch.set_num_threads` does not reach every thread: those that serve would start helpers for a matmul.
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
        """What the function returns there, on a thread of its own."""
        return run_apart(self._client, function, *args)

    def on_server(self, function: Callable[..., T], *args: Any) -> T:
        return run_apart(self._server, function, *args)


@contextmanager
def pair() -> Iterator[Pair]:
    """Two workers, as long as the block lasts."""
    with cluster(2, names=(CLIENT, SERVER), env=ENVIRONMENT) as workers:
        yield Pair(*workers)


@contextmanager
def two_pairs() -> Iterator[tuple[Pair, Pair]]:
    """Two that have nothing to do with each other, to be compared in turns. Who has no turn sleeps."""
    names = (CLIENT, SERVER, f"other {CLIENT}", f"other {SERVER}")
    with cluster(4, names=names, env=ENVIRONMENT) as workers:
        yield Pair(*workers[:2]), Pair(*workers[2:])


def run_apart(worker: LocalWorker, function: Callable[..., T], *args: Any) -> T:
    value: T = worker.rpc_sync(apart, (function, *args), timeout=_SECONDS)
    return value


def apart(function: Callable[..., T], *args: Any) -> T:
    """Run it on a new thread, and wait for that."""
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
