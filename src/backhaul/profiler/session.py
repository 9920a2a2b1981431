"""Session: a worker's part in a profile of the cluster. The functions here are what its holder calls by rpc.

    introduce ─► arm ─► (warm) ─► record ─► stop ─► fetch … ─► arm or disarm

All that they take and give back is plain data. A worker takes part in one profile at a time. If the holder of the
profile is lost, the worker ends its part by itself.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from backhaul import worker as workers
from backhaul.agent.observing import Event, LinkLost
from backhaul.errors import MisuseError
from backhaul.profiler.recorder import Recorder
from backhaul.profiler.torch_session import Probe, TorchSession
from backhaul.transport.stream import host_id
from backhaul.worker import Worker

CHUNK = 16 * 1024 * 1024
"""What is fetched in one call has at most this many bytes."""


class Session:
    """One worker's part. The calls that drive it come one after the other."""

    def __init__(self, worker: Worker, holder: str, id: str, order: Mapping[str, Any]) -> None:
        self.id = id
        self.holder = holder
        self.recorder = Recorder(order["max_events"])
        self.abandoned = False
        self._worker = worker
        self._order = order
        self._torch: TorchSession | None = None
        self._probe: Probe | None = None
        self._parcel = b""
        self._begin = 0
        self._forget = worker.agent.observers.add(self._observe)
        if order["torch"]:
            memory = order["options"].get("profile_memory", False)
            self._probe = Probe(worker.info.name, memory=memory)

    def _observe(self, event: Event) -> None:
        if isinstance(event, LinkLost) and event.served and event.peer == self.holder and not self.abandoned:
            self.abandoned = True
            self.recorder.on = False
            # Not here: an observer is called in the middle of things.
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

    def stop(self) -> int:
        """End the recording and pack it; returns its size in bytes."""
        self.recorder.on = False
        end = time.perf_counter_ns()
        torch_session, self._torch = self._torch, None
        trace, left_out, disturbed = "", 0, False
        operators: list[dict[str, Any]] = []
        if torch_session is not None:
            disturbed = not torch_session.stop()
            trace = torch_session.trace()
            operators, left_out = torch_session.operators(self._order["max_events"])
        self._parcel = msgspec.msgpack.encode(
            {
                "pid": os.getpid(),
                "begin": self._begin,
                "end": end,
                "clock": read_clock(),
                "threads": self.recorder.take(),
                "dropped": self.recorder.dropped,
                "operators_left_out": left_out,
                "disturbed": disturbed,
                "kineto": trace,
                "operators": operators,
                "probe": {"looks": [], "sizes": []} if self._probe is None else self._probe.take(),
            }
        )
        return len(self._parcel)

    def fetch(self, at: int) -> bytes:
        return self._parcel[at : at + CHUNK]

    def close(self) -> None:
        self._forget()
        self.recorder.on = False
        self._parcel = b""
        torch_session, self._torch = self._torch, None
        if self._probe is not None:
            self._probe.stop()
        if torch_session is not None:
            torch_session.stop()


_sessions: weakref.WeakKeyDictionary[Worker, Session] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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
                f"worker {worker.info.name!r} is being profiled already, by worker {other.holder!r}: a worker takes "
                "part in one profile at a time"
            )
        session = _sessions[worker] = Session(worker, holder, id, order)
    if other is not None:
        other.close()
    return session


def leave(worker: Worker, id: str) -> None:
    """End the worker's part in that profile, if it has one."""
    session = _sessions.get(worker)
    if session is not None and session.id == id:
        _remove(worker, session)


def _hidden(id: str) -> Session:
    """The current worker's part in that profile. The call that asks for it is not recorded."""
    worker = workers.current()
    session = _sessions.get(worker)
    if session is None or session.id != id:
        raise MisuseError(f"worker {worker.info.name!r} has no part in this profile any more")
    session.recorder.hide()
    return session


# What the holder of a profile calls.


def introduce() -> dict[str, Any]:
    """Which process the current worker lives in."""
    return {"host": host_id(), "pid": os.getpid()}


def read_clock() -> list[int]:
    """The time here: in nanoseconds of the clock that events have, and in those of Unix time."""
    return [time.perf_counter_ns(), time.time_ns()]


def arm(holder: str, id: str, order: dict[str, Any]) -> None:
    """Take part in a profile. Nothing is recorded yet."""
    take_part(workers.current(), holder, id, order)


def warm(id: str) -> None:
    _hidden(id).warm()


def record(id: str) -> None:
    _hidden(id).record()


def stop(id: str) -> int:
    return _hidden(id).stop()


def fetch(id: str, at: int) -> bytes:
    return _hidden(id).fetch(at)


def disarm(id: str) -> None:
    leave(workers.current(), id)
