"""Session: a worker's part in a profile of the cluster. The holder calls the functions here by rpc.

    introduce ─► arm ─► (warm) ─► record ─► stop ─► packed … ─► fetch … ─► record or disarm

All their arguments and results are plain data. A worker takes part in one profile at a time. If the holder of the
profile is lost, the worker ends its part by itself.

Packing a large recording takes minutes, so it runs on its own thread. The holder keeps asking whether it is
done, which tells a worker that packs from one that hangs.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backhaul import worker as workers
from backhaul.agent.observing import Event, LinkLost
from backhaul.errors import MisuseError
from backhaul.profiler import parcel
from backhaul.profiler.recorder import Recorder
from backhaul.profiler.torch_session import Probe, TorchSession
from backhaul.transport.stream import host_id
from backhaul.worker import Worker


class Session:
    """One worker's part. Its calls must come one after the other."""

    def __init__(self, worker: Worker, holder: str, id: str, order: Mapping[str, Any]) -> None:
        self.id = id
        self.holder = holder
        self.recorder = Recorder(order["max_events"])
        self.abandoned = False
        self._worker = worker
        self._order = order
        self._torch: TorchSession | None = None
        self._probe: Probe | None = None
        self._packing: _Packing | None = None
        self._begin = 0
        self._forget = worker.agent.observers.add(self._observe)
        if order["torch"]:
            memory = order["options"].get("profile_memory", False)
            self._probe = Probe(worker.info.name, memory=memory)

    def _observe(self, event: Event) -> None:
        if isinstance(event, LinkLost) and event.served and event.peer == self.holder and not self.abandoned:
            self.abandoned = True
            self.recorder.on = False
            # Not on this thread: an observer runs in the middle of other work.
            name = f"backhaul-{self._worker.info.name}-profile-end"
            threading.Thread(target=_remove, args=(self._worker, self), name=name, daemon=True).start()
        self.recorder.observe(event)

    def warm(self) -> None:
        if self._order["torch"]:
            self._torch = TorchSession(self._order["options"])
            self._torch.warm()

    def record(self) -> None:
        if self._order["torch"]:
            self._torch = self._torch or TorchSession(self._order["options"])
            self._torch.record()
        self.recorder.dropped = 0
        self._begin = time.perf_counter_ns()
        self.recorder.on = True

    def stop(self) -> None:
        """End the recording, and begin to pack it."""
        self.recorder.on = False
        end = time.perf_counter_ns()
        torch_session, self._torch = self._torch, None
        name = f"backhaul-{self._worker.info.name}-profile-packing"
        self._packing = _Packing(name, lambda: self._pack(torch_session, end))

    def _pack(self, torch_session: TorchSession | None, end: int) -> list[bytes]:
        trace, left_out, disturbed = b"", 0, False
        operators: Iterable[dict[str, Any]] = ()
        if torch_session is not None:
            disturbed = not torch_session.stop()
            trace = torch_session.trace()
            operators, left_out = torch_session.operators(self._order["max_events"])
        threads = self.recorder.take()
        head = {
            "pid": os.getpid(),
            "begin": self._begin,
            "end": end,
            "clock": read_clock(),
            "dropped": self.recorder.dropped,
            "operators_left_out": left_out,
            "disturbed": disturbed,
            "probe": {"looks": [], "sizes": []} if self._probe is None else self._probe.take(),
        }
        return parcel.pack(head, threads, operators, trace)

    def packed(self, seconds: float | None) -> int | None:
        """The number of blocks of the recording; None if it is not packed within ``seconds``. Raises packing errors."""
        packing = self._packing
        if packing is None:
            raise MisuseError(f"worker {self._worker.info.name!r} has not stopped its part in this profile")
        blocks = packing.wait(seconds)
        return None if blocks is None else len(blocks)

    def fetch(self, number: int) -> bytes:
        """A block. The session forgets it."""
        blocks = None if self._packing is None else self._packing.wait(0)
        if blocks is None:
            raise MisuseError(f"worker {self._worker.info.name!r} has not packed its part in this profile")
        block, blocks[number] = blocks[number], b""
        return block

    def close(self) -> None:
        self._forget()
        self.recorder.on = False
        torch_session, self._torch = self._torch, None
        packing, self._packing = self._packing, None
        if self._probe is not None:
            self._probe.stop()
        if torch_session is not None:
            torch_session.stop()
        if packing is not None:
            packing.join()


class _Packing:
    """A thread that packs a recording."""

    def __init__(self, name: str, pack: Callable[[], list[bytes]]) -> None:
        self._pack = pack
        self._blocks: list[bytes] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with parcel.collector_paused():
                self._blocks = self._pack()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float | None) -> list[bytes] | None:
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self._blocks

    def join(self) -> None:
        self._thread.join()


# The session of each worker. It hangs here and not off the Worker, which is below this layer and does not know it.
_sessions: weakref.WeakKeyDictionary[Worker, Session] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # around these


def _remove(worker: Worker, session: Session) -> None:
    with _lock:
        found = _sessions.get(worker) is session
        if found:
            del _sessions[worker]
    if found:
        session.close()


def take_part(worker: Worker, holder: str, id: str, order: dict[str, Any]) -> Session:
    """Make a worker ready to record. Raises `MisuseError` if it takes part in another profile."""
    with _lock:
        other = _sessions.get(worker)
        if other is not None and not other.abandoned:
            raise MisuseError(
                f"worker {worker.info.name!r} is already being profiled by worker {other.holder!r}: a worker takes "
                "part in one profile at a time"
            )
        session = _sessions[worker] = Session(worker, holder, id, order)
    if other is not None:
        other.close()
    return session


def leave(worker: Worker, id: str) -> None:
    """End the worker's part in the profile, if it has one."""
    session = _sessions.get(worker)
    if session is not None and session.id == id:
        _remove(worker, session)


def _hidden(id: str) -> Session:
    """The current worker's part in the profile. The call that asks for it is not recorded."""
    worker = workers.current()
    session = _sessions.get(worker)
    if session is None or session.id != id:
        raise MisuseError(f"worker {worker.info.name!r} no longer takes part in this profile")
    session.recorder.hide()
    return session


# Functions for the holder of a profile.


def introduce() -> dict[str, Any]:
    """The process in which the current worker lives."""
    return {"host": host_id(), "pid": os.getpid()}


def read_clock() -> list[int]:
    """The time here, in nanoseconds: on the clock of events, and as Unix time."""
    return [time.perf_counter_ns(), time.time_ns()]


def arm(holder: str, id: str, order: dict[str, Any]) -> None:
    """Take part in a profile. Recording does not begin yet."""
    take_part(workers.current(), holder, id, order)


def warm(id: str) -> None:
    _hidden(id).warm()


def record(id: str) -> None:
    _hidden(id).record()


def stop(id: str) -> None:
    _hidden(id).stop()


def packed(id: str, seconds: float) -> int | None:
    return _hidden(id).packed(seconds)


def fetch(id: str, number: int) -> bytes:
    return _hidden(id).fetch(number)


def disarm(id: str) -> None:
    leave(workers.current(), id)
