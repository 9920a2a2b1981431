"""The work of workers while faults happen, and what must hold afterwards. Runs in the workers' processes.

Each call has an identity. Its callee notes that it ran, and its caller notes each time its future resolves. This
reveals a call that ran twice, and a future that resolved twice or never.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from awaiting import await_events
from backhaul import rpc
from backhaul.rpc import RRef
from backhaul.worker import current

PATIENCE = 30.0

# Callee's side.

ran: Counter[str] = Counter()
_ran = threading.Condition()
"""Notified whenever a call has run."""
_gates: dict[str, threading.Event] = {}
_entered: dict[str, threading.Event] = {}


def who() -> str:
    return rpc.get_worker_info().name


def note_run(id: str) -> None:
    with _ran:
        ran[id] += 1
        _ran.notify_all()


def once(id: str, x: torch.Tensor) -> torch.Tensor:
    note_run(id)
    return x + 1


def gate(name: str) -> threading.Event:
    return _gates.setdefault(name, threading.Event())


def entered(name: str) -> threading.Event:
    return _entered.setdefault(name, threading.Event())


def block(name: str, seconds: float = 120.0) -> str:
    """Run until the test opens the gate of that name."""
    note_run(name)
    entered(name).set()
    gate(name).wait(seconds)
    return name


def block_via(to: str, name: str) -> str:
    return rpc.rpc_sync(to, block, args=(name,), timeout=0)  # type: ignore[no-any-return]


def await_entered(name: str) -> None:
    assert entered(name).wait(PATIENCE), f"{name} was not called"


def open_gate(name: str) -> None:
    gate(name).set()


def runs() -> dict[str, int]:
    return dict(ran)


# Caller's side.


class Outcome(NamedTuple):
    at: float
    """The time, on the clock that all processes share."""
    value: Any
    error: str
    """The type and text of the error; empty if there was none."""
    worker: str
    """The worker that the error names as lost."""

    @property
    def kind(self) -> str:
        return self.error.partition(":")[0]


def outcome_of(function: Callable[[], Any]) -> Outcome:
    try:
        value = function()
    except (rpc.BackhaulError, OSError) as error:
        return Outcome(time.time(), None, f"{type(error).__name__}: {error}", getattr(error, "worker", ""))
    return Outcome(time.time(), value, "", "")


def call(to: str, function: Any, *args: Any, timeout: float = -1.0) -> Outcome:
    return outcome_of(lambda: rpc.rpc_sync(to, function, args=args, timeout=timeout))


def call_within(seconds: float, to: str, function: Any, *args: Any) -> Outcome:
    return call(to, function, *args, timeout=seconds)


def time_call(to: str, seconds: float) -> float:
    """The seconds that a small call takes."""
    start = time.monotonic()
    rpc.rpc_sync(to, who, timeout=seconds)
    return time.monotonic() - start


def serve_echoes(address: str) -> int:
    """Serve a bare TCP connection that sends each byte back. Returns its port."""
    listener = socket.create_server((address, 0))

    def serve() -> None:
        with listener:
            sock, _ = listener.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := sock.recv(1):
                sock.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def time_echoes(address: str, port: int, seconds: float) -> list[float]:
    """The seconds that each echo of a byte takes, one after the other, over bare TCP with the system's settings."""
    took: list[float] = []
    with socket.create_connection((address, port), 60.0) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            begun = time.monotonic()
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            took.append(time.monotonic() - begun)
    return took


def call_until_good(to: str, seconds: float) -> float:
    """Call until one call works. Returns the seconds until then."""
    start = time.monotonic()
    while True:
        found = call(to, who, timeout=5.0)
        if not found.error:
            return time.monotonic() - start
        assert time.monotonic() - start < seconds, f"no call works after {seconds} s: {found.error}"
        threading.Event().wait(0.05)


class Book(NamedTuple):
    """The outcomes of the calls that a worker made."""

    made: int
    good: list[str]
    failed: dict[str, str]
    """By identity: the type and text of the error."""
    unresolved: list[str]
    resolved_twice: list[str]
    wrong: list[str]


class Calls:
    """Calls some workers all the time."""

    def __init__(self, workers: list[str], size: int, pause: float, timeout: float) -> None:
        self._workers, self._size, self._pause, self._timeout = workers, size, pause, timeout
        self._resolved: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self._wrong: list[str] = []
        self._made: list[str] = []
        self._all_resolved = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="calls")
        self._thread.start()

    def _run(self) -> None:
        me = f"{who()}:{os.getpid()}"
        for number, to in zip(itertools.count(), itertools.cycle(self._workers), strict=False):
            if self._over.wait(self._pause):
                return
            self._call(f"{me}:{number}", to, torch.full((self._size,), float(number)))

    def _call(self, id: str, to: str, x: torch.Tensor) -> None:
        self._made.append(id)
        try:
            future = rpc.rpc_async(to, once, args=(id, x), timeout=self._timeout)
        except rpc.BackhaulError as error:
            self._note(id, error)
            return
        future.add_done_callback(lambda done: self._done(id, x, done))

    def _done(self, id: str, x: torch.Tensor, done: Any) -> None:
        try:
            good = torch.equal(done.value(), x + 1)
        except rpc.BackhaulError as error:
            self._note(id, error)
        else:
            if not good:
                self._wrong.append(id)
            self._note(id, None)

    def _note(self, id: str, error: BaseException | None) -> None:
        with self._all_resolved:
            self._resolved[id] += 1
            if error is not None:
                self._failed[id] = f"{type(error).__name__}: {error}"
            self._all_resolved.notify_all()

    def stop(self, seconds: float) -> Book:
        """Make no more calls, and wait until all of them have resolved."""
        self._over.set()
        self._thread.join(PATIENCE)
        with self._all_resolved:
            self._all_resolved.wait_for(lambda: len(self._resolved) == len(self._made), seconds)
        return Book(
            len(self._made),
            [id for id in self._made if self._resolved[id] and id not in self._failed],
            self._failed,
            [id for id in self._made if not self._resolved[id]],
            [id for id, count in self._resolved.items() if count > 1],
            self._wrong,
        )


_calls: list[Calls] = []


def start_calls(workers: list[str], size: int = 8, pause: float = 0.002, timeout: float = 20.0) -> None:
    _calls.append(Calls(workers, size, pause, timeout))


def stop_calls(seconds: float = 30.0) -> list[Book]:
    books = [calls.stop(seconds) for calls in _calls]
    _calls.clear()
    return books


def assert_sound(books: list[Book], callees: list[dict[str, int]]) -> int:
    """Check that every future resolved once, each call ran at most once, and good calls ran. Returns their number."""
    counts: Counter[str] = Counter()
    for each in callees:
        counts.update(each)
    for book in books:
        assert not book.unresolved, f"{len(book.unresolved)} calls never resolved: {book.unresolved[:3]}"
        assert not book.resolved_twice, book.resolved_twice[:3]
        assert not book.wrong, f"wrong values: {book.wrong[:3]}"
        strange = [text for text in book.failed.values() if not text.startswith(_EXPECTED)]
        assert not strange, strange[:3]
    twice = [id for id, count in counts.items() if count > 1]
    assert not twice, f"ran more than once: {twice[:3]}"
    return sum(book.made for book in books)


_EXPECTED = ("WorkerLostError", "WorkerSuspectedError", "WorkerUnresponsiveError", "RpcTimeoutError")


# References.

_held: list[RRef[Any]] = []


class Token:
    """A value that only references keep alive."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number


def hold(owner: str, count: int) -> None:
    """Get references to new values of that worker, and keep them."""
    new = [rpc.remote(owner, Token, args=(number,)) for number in range(count)]
    for rref in new:
        rref.rpc_sync(timeout=PATIENCE).get()
    _held.extend(new)


def read_all() -> list[Any]:
    """The numbers of all references that are kept here, or their errors."""
    found: list[Any] = []
    for rref in _held:
        answer = outcome_of(lambda rref=rref: rref.rpc_sync(timeout=PATIENCE).get())  # type: ignore[misc]
        found.append(answer.error or answer.value)
    return found


def let_go() -> None:
    _held.clear()


def values() -> int:
    return current().references.counts()["values"]


def await_values(count: int, seconds: float) -> float:
    start = time.monotonic()
    came = await_events(current(), lambda: values() == count, seconds)
    assert came, f"after {seconds} s: {values()} values, not {count}"
    return time.monotonic() - start


# Large tensors.


def total(x: torch.Tensor) -> float:
    return float(x.sum())


def send_large(to: str, elements: int, timeout: float = 0) -> Outcome:
    """Send a tensor of ones; the callee counts them."""
    found = call(to, total, torch.ones(elements), timeout=timeout)
    assert found.error or found.value == elements, found
    return found


def await_runs(id: str, count: int, seconds: float = PATIENCE) -> None:
    with _ran:
        assert _ran.wait_for(lambda: ran[id] == count, seconds), f"{id} ran {ran[id]} times, not {count}"


_large: list[Future[Outcome]] = []


def start_large(to: str, elements: int) -> None:
    """`send_large`, on a new thread."""
    future: Future[Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(send_large(to, elements))
        except BaseException as error:
            future.set_exception(error)

    _large.append(future)
    threading.Thread(target=run, name="large").start()


def large_done() -> bool:
    return _large[-1].done()


def large_outcome() -> Outcome:
    return _large[-1].result(80.0)


# The end.


def shut_down(graceful: bool = True, timeout: float = 0) -> str:
    """Shut down. Returns how it ended."""
    try:
        rpc.shutdown(graceful=graceful, timeout=timeout)
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


# Limits.


def try_large(to: str, elements: int) -> str:
    """Send a tensor. Returns "sent", or the type and text of the error."""
    try:
        found = rpc.rpc_sync(to, total, args=(torch.ones(elements),), timeout=60)
    except (rpc.BackhaulError, MemoryError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    assert found == elements, found
    return "sent"


def try_text(to: str, size: int) -> str:
    """Send a text. Returns "sent", or the type and text of the error."""
    try:
        assert rpc.rpc_sync(to, len, args=("x" * size,), timeout=60) == size
    except (rpc.BackhaulError, MemoryError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "sent"


def call_many(to: str, function: Any, count: int, seconds: float) -> list[str]:
    """Make calls at the same time, with a number each. Returns what is wrong with each."""
    futures: list[Any] = []
    for number in range(count):
        try:
            futures.append(rpc.rpc_async(to, function, args=(str(number),), timeout=seconds))
        except (rpc.BackhaulError, RuntimeError) as error:
            futures.append(error)
    found = []
    for future in futures:
        try:
            if isinstance(future, BaseException):
                raise future
            future.wait()
            found.append("")
        except (rpc.BackhaulError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def p99(to: str, count: int) -> float:
    """The 99th percentile of ``count`` small calls, in seconds."""
    took = []
    for _ in range(count):
        start = time.perf_counter()
        rpc.rpc_sync(to, who)
        took.append(time.perf_counter() - start)
    return sorted(took)[int(0.99 * count)]


def ask_without_reading(to: str, function: Any, size: int, count: int) -> None:
    """Ask for large answers, and do not wait for them."""
    _futures.extend(rpc.rpc_async(to, function, args=(size,)) for _ in range(count))


_futures: list[Any] = []
