"""A busy callee: a thread of the server runs Python code, and so holds the GIL, while calls come in.

The GIL changes hands at most every few milliseconds, so a call waits that long before the server even looks
at it. Calls that get the GIL sooner slow that thread down, so its speed is measured as well.

The calls come with pauses in between. Without pauses, a server that polls for the next call hardly releases the
GIL, and answers as if no other thread needed it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from backhaul.bench.ports import SERVER, RpcPort

_PAUSE_SECONDS = 0.01
_WARM_UP_CALLS = 5
_ALONE_SECONDS = 0.15  # of undisturbed computing, before the calls and again after them
_CALLED_SECONDS = 0.3
_PIECE = range(500)  # some ten microseconds of work


class Progress(NamedTuple):
    """How many pieces of work were done, and the time on the server's clock."""

    at: float
    pieces: int


class _Computing(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="bench computing", daemon=True)
        self.pieces = 0
        self.go_on = True

    def run(self) -> None:
        while self.go_on:
            for _ in _PIECE:
                pass
            self.pieces += 1


_computing: _Computing | None = None


def begin() -> None:
    """Start computing. Runs on the server."""
    global _computing
    end()
    _computing = _Computing()
    _computing.start()


def end() -> None:
    """Stop computing. Runs on the server."""
    global _computing
    if _computing is not None:
        _computing.go_on = False
        _computing.join()
        _computing = None


def progress() -> Progress:
    """The progress so far. Runs on the server."""
    return Progress(time.perf_counter(), _computing.pieces if _computing is not None else 0)


@contextmanager
def busy_server(port: RpcPort) -> Iterator[None]:
    """The server computes inside the block."""
    port.rpc.rpc_sync(SERVER, begin)
    try:
        yield
    finally:
        port.rpc.rpc_sync(SERVER, end)


def call_times(port: RpcPort, count: int) -> list[float]:
    """How long each of ``count`` no-op calls to a busy server takes."""
    with busy_server(port):
        for _ in range(_WARM_UP_CALLS):
            _call(port)
        return [_call(port) for _ in range(count)]


def slowdown(port: RpcPort) -> float:
    """How many times longer a busy server takes for its own work while it receives no-op calls."""
    with busy_server(port):
        _call(port)
        marks = [_mark(port)]
        time.sleep(_ALONE_SECONDS)
        marks.append(_mark(port))
        end = time.perf_counter() + _CALLED_SECONDS
        while time.perf_counter() < end:
            _call(port)
        marks.append(_mark(port))
        time.sleep(_ALONE_SECONDS)
        marks.append(_mark(port))
    before, called, after = (_speed(*pair) for pair in pairwise(marks))
    return (before + after) / 2 / called


def _call(port: RpcPort) -> float:
    start = time.perf_counter()
    port.noop()
    seconds = time.perf_counter() - start
    time.sleep(_PAUSE_SECONDS)
    return seconds


def _mark(port: RpcPort) -> Progress:
    mark: Progress = port.rpc.rpc_sync(SERVER, progress)
    return mark


def _speed(start: Progress, stop: Progress) -> float:
    return (stop.pieces - start.pieces) / (stop.at - start.at)
