"""The resources of a worker at rest, and whether it returns to them after a fault. Runs in the workers' processes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterable

from backhaul import rpc
from backhaul.worker import current
from crew import Crew

_BELL = "anon_inode:[eventfd]"  # the bell of a waiting thread, kept for the next one
_SPARE_BELLS = 8

_found: dict[str, int] = {}


def counts() -> dict[str, int]:
    """References, contexts, threads, descriptors and shared memory of this worker."""
    worker = current()
    references = worker.references.counts()
    autograd = worker.autograd.counts()
    memory = worker.agent.transport_memory()
    return {
        **{key: references[key] for key in ("values", "used", "pinned", "holders", "creations")},
        **autograd,
        "threads": sum(thread.name.startswith("backhaul") for thread in threading.enumerate()),
        "descriptors": sum(name != _BELL for name in open_files()),
        "bells": sum(name == _BELL for name in open_files()),
        **{f"memory {key}": value for key, value in memory.items()},
    }


def note() -> dict[str, int]:
    """Note the worker's current resources as its state at rest."""
    gc.collect()
    _found.clear()
    _found.update(counts())
    return dict(_found)


def await_back(seconds: float) -> dict[str, int]:
    """Return when the worker has no more than at rest.

    Workers keep some threads, up to ``num_worker_threads``, and some bells of threads that have waited.
    """
    spare = current().options.num_worker_threads
    allowed = {
        **_found,
        "threads": max(_found["threads"], spare + 4),
        "bells": _found["bells"] + _SPARE_BELLS,
    }
    start = time.monotonic()
    while True:
        gc.collect()
        more = {key: (value, allowed.get(key)) for key, value in counts().items() if value > allowed.get(key, 0)}
        if not more:
            return counts()
        assert time.monotonic() - start < seconds, f"after {seconds} s more than at the start: {more}; {open_files()}"
        threading.Event().wait(0.02)


def open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            pass
    return sorted(found)


# The test's side.


def note_all(crew: Crew) -> None:
    """Let every worker call every other, so that all connections exist, and note the resources of each."""
    names = [f"worker{rank}" for rank in range(len(crew))]
    for hand in crew:
        hand.run(_greet, names)
    for hand in crew:
        hand.run(note)


def _greet(names: list[str]) -> None:
    for name in names:
        rpc.rpc_sync(name, os.getpid, timeout=30)


def await_all_back(crew: Crew, ranks: Iterable[int] | None = None, seconds: float = 10.0) -> None:
    for rank in range(len(crew)) if ranks is None else ranks:
        crew[rank].run(await_back, seconds)
