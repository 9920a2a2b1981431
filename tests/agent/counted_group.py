"""A group in one process whose work is counted: calls of Python functions, messages, questions to the store.

Unlike seconds, counts hardly depend on the machine and its load: only the amount of polling does.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from backhaul.agent import interpreter, watch
from backhaul.errors import WorkerLostError
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.transport.memory import MemoryChannel, Network
from backhaul.wire.messages import KIND_OF, Ping
from backhaul.worker import Worker

OPTIONS = RpcOptions(rpc_timeout=1500, connect_timeout=300, probe_timeout=300, unresponsive_after=None, busy_poll=0)

_INTERVAL = 0.2
_OF_WORKER = re.compile(r"backhaul-(worker\d+)")
_KIND = 3  # where a frame has its kind: see wire.frames
_PING = bytes([KIND_OF[Ping]])
_STORE = ("check", "get", "compare_set", "add", "multi_get", "set", "wait")


class CountedStore:
    """A store in memory that counts its requests."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name in _STORE:
            self.asked[name] += 1
        return getattr(self._store, name)


class CountedNetwork(Network):
    """Counts messages, including those that end a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0
        self.visits = 0
        self.pings = 0
        self._pinged = threading.Condition()

    def post(self, to: MemoryChannel, data: bytes) -> None:
        self.messages += 1
        if data[_KIND : _KIND + 1] == _PING:
            with self._pinged:
                self.pings += 1
                self._pinged.notify_all()
        super().post(to, data)

    def await_pings(self, count: int, seconds: float) -> None:
        """Wait until ``count`` pings have been sent."""
        with self._pinged:
            assert self._pinged.wait_for(lambda: self.pings >= count, seconds), self.pings

    def listener(self, address: str | None) -> Any:
        self.visits += 1
        return super().listener(address)


class CountedGroup(InProcessCluster):
    """A group of ``n`` workers whose work is counted."""

    network: CountedNetwork

    def __init__(self, size: int, options: RpcOptions | Sequence[RpcOptions] = OPTIONS) -> None:
        need = 64 * size + 1024
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < need:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), hard))
        super().__init__(size, options=options)

    def shut_down(self) -> None:
        """Shut all workers down at once, as a program does. Workers that were lost before cause no error."""

        def part(worker: Worker) -> None:
            with contextlib.suppress(WorkerLostError):
                worker.shutdown()

        self.on_each(part)

    def on_each(self, act: Callable[[Worker], object]) -> None:
        """Do something on a thread for each worker, all at once."""
        threads = [
            threading.Thread(target=act, args=(worker,), name=f"backhaul-{worker.info.name}-user") for worker in self
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def forget(self, worker: Worker) -> None:
        """Remove a worker that has ended."""
        self._workers.remove(worker)

    def _join(self, size: int) -> Any:
        self.network = CountedNetwork()
        self._store = self.store = CountedStore()  # type: ignore[assignment]
        return super()._join(size)


@contextmanager
def patience(size: int) -> Iterator[None]:
    """A block in which workers poll less often, so that the threads of ``size`` workers can share one interpreter.

    Each worker ticks some hundred times a second while something is due, and each thread that waits for the interpreter
    asks for it every half millisecond. A thousand workers in one process would do nothing else. Neither cost depends on
    the size of the group.
    """
    slower = max(1.0, size / 10)
    found = [(watch, "_TICK", watch._TICK * slower), (watch, "_SLOW_TICK", watch._SLOW_TICK * slower)]
    found.append((interpreter, "SHORT", _INTERVAL))
    before = [(module, name, getattr(module, name)) for module, name, _ in found]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL)
    for module, name, value in found:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        sys.setswitchinterval(interval)


class Work:
    """Calls of Python functions, by worker. Threads that belong to no worker do not count."""

    def __init__(self) -> None:
        self.of: dict[str, Counter[Any]] = {}

    def calls(self) -> dict[str, int]:
        """The number of calls, by worker."""
        return {name: functions.total() for name, functions in list(self.of.items())}


@contextmanager
def counting() -> Iterator[Work]:
    """Count the calls of those worker threads that are started inside the block.

    A worker's threads are named ``backhaul-<worker>…``.
    """
    work = Work()

    def begin(frame: Any, event: str, argument: Any) -> None:
        found = _OF_WORKER.match(threading.current_thread().name)
        if found is None:
            sys.setprofile(None)
            return
        functions = work.of.setdefault(found[1], Counter())

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                functions[frame.f_code] += 1

        sys.setprofile(note)

    threading.setprofile(begin)
    try:
        yield work
    finally:
        threading.setprofile(None)
