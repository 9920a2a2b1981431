"""Rows: profiled events as plain data that can be sent, and how to insert them into another profile.

The times of a callee's events count from the start of the execution. On one host all processes share a clock, so the
start is known exactly. If it lies outside the call, the clocks differ, and the execution is placed
in the middle of the call.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.autograd import profiler_util
from torch.autograd.profiler import record_function

from backhaul.ids import WorkerInfo

REMOTE = "#remote_op: "
"""Separates the name of a call from that of an event of its callee."""

MOST_ROWS = 50_000
"""For one report. Rows with the latest start are dropped."""

_LABEL = re.compile(r" \[call (\d+)\]$")
_THREADS_OF_A_WORKER = 100_000
_FunctionEvent: Any = profiler_util.FunctionEvent


class Row(NamedTuple):
    """An event. Times are in microseconds, from the start of the execution."""

    name: str
    node: int
    thread: int
    start: float
    end: float
    is_async: bool
    scope: int
    forward_thread: int
    sequence: int
    shapes: list[Any]
    stack: list[str]
    cpu_memory: int
    device_memory: int
    flops: int
    kernels: list[tuple[str, int, float]]


class Report(NamedTuple):
    """The recording of an execution."""

    began: int
    """In nanoseconds, on the clock of the callee's host."""
    length: float
    """In microseconds."""
    nodes: dict[int, str]
    """The names of the rows' workers, by rank."""
    rows: list[tuple[Any, ...]]


class Span:
    """A call of a profiled thread: its time, and the report of its callee once available.

    Its number is 0 if no known profile could ask for it.
    """

    def __init__(self, number: int, mode: str, function: str, caller: WorkerInfo, callee: WorkerInfo) -> None:
        self.number = number
        self.is_async = mode != "sync"
        self.caller = caller
        self.key = f"rpc_{mode}#{function}({caller.name} -> {callee.name})"
        self.began = 0
        self.elapsed: float | None = None
        self.report: Report | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block that the profiler of this thread records as the call, or as its beginning."""
        with record_function(f"{self.key} [call {self.number}]" if self.number else self.key):
            self.began = time.perf_counter_ns()  # after entering: the first block of a process takes long
            yield

    def finish(self, report: Any = None) -> None:
        if report is not None:
            self.report = Report(*report)
        self.elapsed = (time.perf_counter_ns() - self.began) / 1000

    def offset(self) -> float:
        """The time from the start of the call to the start of the execution, in microseconds."""
        if self.report is None or self.elapsed is None:
            return 0.0
        found = (self.report.began - self.began) / 1000
        if found >= 0 and found + self.report.length <= self.elapsed:
            return found
        return max(0.0, (self.elapsed - self.report.length) / 2)


class PassSpan(Span):
    """A backward pass that a profiled thread started, with the runs that other threads of this worker made for it.

    A thread's profiler does not record them.
    """

    PASS = "torch::distributed::autograd::backward"
    RUN = "torch::distributed::autograd::SendRpcBackward"

    def __init__(self, me: WorkerInfo) -> None:
        super().__init__(0, "sync", "backward", me, me)
        self.runs: list[tuple[int, int, int]] = []
        """The thread, and the begin and the end on the clock of `Span.began`."""


def span_of(name: str, spans: Mapping[int, Span]) -> Span | None:
    """The span to which a label belongs."""
    found = _LABEL.search(name)
    return None if found is None else spans.get(int(found[1]))


def report_of(events: list[Any], spans: Mapping[int, Span], me: WorkerInfo, began: int) -> Report:
    """A report on events of this worker."""
    graft(events, spans)
    nodes = {me.id: me.name}
    for span in spans.values():
        if span.report is not None:
            nodes.update(span.report.nodes)
    rows = [tuple(_row(event, me)) for event in events[:MOST_ROWS]]
    return Report(began, (time.perf_counter_ns() - began) / 1000, nodes, rows)


def _row(event: Any, me: WorkerInfo) -> Row:
    return Row(
        event.name,
        event.node_id if event.is_remote else me.id,
        # Threads of different workers may have equal numbers, and torch sorts events into trees by thread.
        event.thread if event.is_remote else event.thread + (me.id + 1) * _THREADS_OF_A_WORKER,
        event.time_range.start,
        event.time_range.end,
        bool(event.is_async),
        event.scope,
        event.fwd_thread or 0,
        event.sequence_nr,
        event.input_shapes or [],
        list(event.stack or ()),
        event.cpu_memory_usage,
        event.device_memory_usage,
        event.flops or 0,
        [tuple(kernel) for kernel in event.kernels],
    )


def graft(events: list[Any], spans: Mapping[int, Span]) -> None:
    """Give the events of calls their names and times, and insert the events of their callees."""
    _insert_runs(events, spans)
    found = [(event, span) for event in events if (span := span_of(event.name, spans)) is not None]
    if not found:
        return
    last = max(event.time_range.end for event in events)
    for event in events:
        if event.node_id == -1:
            event.node_id = found[0][1].caller.id
    for event, span in found:
        event.name = event.trace_name = span.key
        start = event.time_range.start
        if span.is_async:
            event.is_async = True
            event.time_range.end = last if span.elapsed is None else start + span.elapsed
        events.extend(_remote_events(span, start + span.offset()))
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def _insert_runs(events: list[Any], spans: Mapping[int, Span]) -> None:
    """Insert the runs of other threads into the passes that they belong to."""
    passes = sorted((span for span in spans.values() if isinstance(span, PassSpan)), key=lambda span: span.began)
    if not any(each.runs for each in passes):
        return
    blocks = [event for event in events if event.name == PassSpan.PASS]
    blocks.sort(key=lambda block: block.time_range.start)
    for block, each in zip(blocks, passes, strict=False):  # the profiler may have been off for a pass
        threads = {thread: number for number, (thread, _, _) in enumerate(each.runs, 1)}
        for number, (thread, began, ended) in enumerate(each.runs):
            event: Any = _FunctionEvent(
                id=number,
                name=PassSpan.RUN,
                trace_name=PassSpan.RUN,
                thread=block.thread + _THREADS_OF_A_WORKER * threads[thread],
                start_us=block.time_range.start + (began - each.began) / 1000,
                end_us=block.time_range.start + (ended - each.began) / 1000,
                fwd_thread=0,
                scope=block.scope,
                node_id=block.node_id,
                is_legacy=True,
            )
            event.overload_name = ""
            events.append(event)
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def remote_rows(span: Span) -> Iterable[Row]:
    """The rows of a finished call."""
    return () if span.report is None or span.elapsed is None else (Row(*row) for row in span.report.rows)


def _remote_events(span: Span, began: float) -> Iterable[Any]:
    for number, row in enumerate(remote_rows(span)):
        name = span.key + REMOTE + row.name
        event: Any = _FunctionEvent(
            id=number,
            name=name,
            trace_name=name,
            thread=row.thread,
            start_us=began + row.start,
            end_us=began + row.end,
            fwd_thread=row.forward_thread,
            input_shapes=row.shapes,
            stack=row.stack,
            scope=row.scope,
            use_device="cuda" if row.kernels else None,
            cpu_memory_usage=row.cpu_memory,
            device_memory_usage=row.device_memory,
            is_async=row.is_async,
            is_remote=True,
            sequence_nr=row.sequence,
            node_id=row.node,
            is_legacy=True,
            flops=row.flops,
        )
        for kernel in row.kernels:
            event.append_kernel(*kernel)
        event.overload_name = ""
        yield event
