"""Gathered: the recordings of all workers in one profile, with all times on the profiling worker's clock."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from backhaul.agent.observing import Event
from backhaul.profiler import parcel
from backhaul.profiler.clocks import Alignment
from backhaul.profiler.recorder import KINDS


class Moment(msgspec.Struct, gc=False):
    """An event of a thread. ``processor`` is the thread's processor time until then, in nanoseconds."""

    event: Event
    at: int
    processor: int
    call: int = 0
    """The number of the call that a wait is for."""


class Thread(msgspec.Struct):
    """A thread of a worker, and its events in order of time."""

    worker: str
    native: int
    name: str
    moments: list[Moment]
    serves: bool
    """Whether the thread belongs to Backhaul; outside calls it only waits."""


class Operator(msgspec.Struct):
    """A torch operator, or a block of `record_function`. Times are in nanoseconds, durations in microseconds."""

    worker: str
    name: str
    thread: int
    begin: int
    end: int
    device: str
    cpu_time_total: float
    self_cpu_time_total: float
    device_time_total: float
    self_device_time_total: float
    cpu_memory_usage: int
    device_memory_usage: int
    flops: int
    input_shapes: str
    stack: list[str]
    is_user_annotation: bool
    inner: bool
    """Whether another operator encloses it."""


class Recording(msgspec.Struct):
    """The recording of one worker."""

    worker: str
    rank: int
    host: str
    pid: int
    alignment: Alignment
    begin: int
    end: int
    threads: list[Thread]
    dropped: int
    disturbed: bool
    """Whether another torch profiler was started in the process, which ended ours."""
    looks: list[tuple[int, int]]
    """Samples of the probe of its process: when, and how long it waited for the GIL; 0 if the GIL was free."""
    sizes: list[tuple[int, int, int]]
    kineto: dict[str, Any] | None
    unix: int
    """Unix time minus the profiling worker's clock, in nanoseconds, according to this worker's clocks."""


class Gathered(msgspec.Struct):
    """All recordings. The window is the time in which every worker recorded."""

    home: str
    home_thread: int
    begin: int
    end: int
    recordings: list[Recording]
    operators: list[Operator]
    steps: list[tuple[str, int, int]]
    lost: list[str]


def unpack(
    worker: str, rank: int, host: str, alignment: Alignment, blocks: list[bytes]
) -> tuple[Recording, list[dict[str, Any]]]:
    """The recording of a worker, and its operators, not yet assigned to workers: others may share its process."""
    data = parcel.unpack(blocks)
    monotonic, unix = data["clock"]
    recording = Recording(
        worker=worker,
        rank=rank,
        host=host,
        pid=data["pid"],
        alignment=alignment,
        begin=alignment.to_home(data["begin"]),
        end=alignment.to_home(data["end"]),
        threads=[
            Thread(
                worker,
                each["native"],
                each["name"],
                [_moment(row, alignment) for row in each["rows"]],
                each["name"].startswith(f"backhaul-{worker}") or each["name"].startswith("backhaul-asyncio-"),
            )
            for each in data["threads"]
        ],
        dropped=data["dropped"] + data["operators_left_out"],
        disturbed=data["disturbed"],
        looks=[(alignment.to_home(at), waited) for at, waited in data["probe"]["looks"]],
        sizes=[(alignment.to_home(at), resident, devices) for at, resident, devices in data["probe"]["sizes"]],
        kineto=json.loads(data["kineto"]) if data["kineto"] else None,
        unix=unix - alignment.to_home(monotonic),
    )
    return recording, data["operators"]


def _moment(row: Sequence[Any], alignment: Alignment) -> Moment:
    name, at, processor, fields = row
    kind = KINDS[name]
    at = alignment.to_home(at)
    call = fields.pop("call", 0) if name in ("Waits", "Resumes") else 0
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Moment(kind(at=at, thread=0, **fields), at, processor, call)


class Owners:
    """Which worker of a process a thread worked for at a time, according to its events. Several may share a process."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self._moments: dict[int, list[tuple[int, str]]] = {}
        self._first = ""
        for recording in recordings:
            self._first = self._first or recording.worker
            for thread in recording.threads:
                self._moments.setdefault(thread.native, []).extend(
                    (moment.at, thread.worker) for moment in thread.moments
                )
        self._single = {}
        for native, moments in self._moments.items():
            owners = {worker for _, worker in moments}
            if len(owners) == 1:
                self._single[native] = owners.pop()
            else:
                moments.sort()

    def of(self, native: int, at: int) -> str:
        single = self._single.get(native)
        if single is not None:
            return single
        moments = self._moments.get(native)
        if not moments:
            return self._first
        place = bisect_right(moments, at, key=lambda moment: moment[0])
        return moments[max(0, place - 1)][1]


def operators_of(rows: Iterable[Mapping[str, Any]], recording: Recording, owners: Owners) -> list[Operator]:
    """The operators that a process's profiler recorded, each with its worker."""
    found = []
    for row in rows:
        begin, end = row["begin"] - recording.unix, row["end"] - recording.unix
        found.append(
            Operator(
                worker=owners.of(row["native"], begin),
                name=row["name"],
                thread=row["native"],
                begin=begin,
                end=end,
                device=row["device"],
                cpu_time_total=row["cpu"],
                self_cpu_time_total=row["self_cpu"],
                device_time_total=row["device_time"],
                self_device_time_total=row["self_device"],
                cpu_memory_usage=row["memory"],
                device_memory_usage=row["device_memory"],
                flops=row["flops"],
                input_shapes=row["shapes"],
                stack=row["stack"],
                is_user_annotation=row["annotation"],
                inner=row["inner"],
            )
        )
    return found
