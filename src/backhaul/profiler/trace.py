"""Trace: one file in Chrome's format with the recordings of all workers, for Perfetto and chrome://tracing.

Each worker is a process of the file, even if several share one process of the machine. The numbers of processes and
threads are made up, and their names say what they are. The spans of a thread nest. A call may not nest, because
another thread received its outcome or its thread did something else in the meantime. Such a call is drawn in its own
lane, and so is a call that continued after its request was handled.

An arrow is a pair of events, ``s`` and ``f``, with a unique id. Kineto's ids start over in every
process, so its arrows get new ones. Chrome's viewer binds an arrow to the innermost slice that is open at its time,
Perfetto to the slice that began last on its thread. An arrow that starts or ends at the beginning of a slice means the
same to both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from backhaul.profiler.gathered import Gathered, Owners, Recording
from backhaul.profiler.replay import CALL, GRADIENTS, LATE, OPENS, REPLY, RESULT, RUN, SERVE, STEP, Span, Told

Row = dict[str, Any]

CALLS_LANE, LATE_LANE, STEPS_LANE = "calls", "calls without a thread", "steps"
KINETO = "kineto"
_STRIDE = 1000
_DEVICES = 100


class _Names:
    """Numbers for the processes and threads of the file."""

    def __init__(self, gathered: Gathered, told: Mapping[str, Told]) -> None:
        self.pids = {recording.worker: (number + 1) * _STRIDE for number, recording in enumerate(gathered.recordings)}
        self._tids: dict[tuple[int, Any], int] = {}
        self._count = itertools.count(1)
        self._named: dict[int, str] = {
            thread.native: thread.name for recording in gathered.recordings for thread in recording.threads
        }
        self._rows: list[Row] = []
        for number, recording in enumerate(gathered.recordings):
            text = f"{recording.worker} (rank {recording.rank}, pid {recording.pid})"
            self._process(self.pids[recording.worker], text, number * _STRIDE)

    def _process(self, pid: int, name: str, order: int) -> None:
        self._rows.append(_meta("process_name", pid, 0, name=name))
        self._rows.append(_meta("process_sort_index", pid, 0, sort_index=order))

    def thread(self, worker: str, native: int, *, python: bool = False) -> tuple[int, int]:
        """``python``: the row for its Python functions, which do not nest with Backhaul's spans."""
        name = f"{self._named.get(native, 'thread')} ({native}{', Python' if python else ''})"
        return self._number(self.pids[worker], (native, python), name, 1000)

    def lane(self, worker: str, what: str, number: int) -> tuple[int, int]:
        return self._number(self.pids[worker], (what, number), f"{what} {number + 1}" if number else what, 0)

    def device(self, worker: str, device: int, stream: Any) -> tuple[int, int]:
        pid = self.pids[worker] + _DEVICES + device
        if (pid, None) not in self._tids:
            self._tids[pid, None] = 0
            name = f"{worker} device {device}" if device >= 0 else f"{worker} profiler"
            self._process(pid, name, self.pids[worker] - _STRIDE + 2 + device)
        return self._number(pid, stream, f"stream {stream}", 0)

    def _number(self, pid: int, key: Any, name: str, order: int) -> tuple[int, int]:
        tid = self._tids.get((pid, key))
        if tid is None:
            # Unique in the whole file, because some readers treat equal thread numbers as one thread.
            tid = self._tids[pid, key] = next(self._count)
            self._rows.append(_meta("thread_name", pid, tid, name=name))
            self._rows.append(_meta("thread_sort_index", pid, tid, sort_index=order + tid))
        return pid, tid

    def rows(self) -> list[Row]:
        return self._rows


def _meta(what: str, pid: int, tid: int, **args: Any) -> Row:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


class _Writer:
    def __init__(self, gathered: Gathered, told: Mapping[str, Told]) -> None:
        self.names = _Names(gathered, told)
        self.slices: list[Row] = []
        self.arrows: list[Row] = []
        self._origin = gathered.begin
        self._ids = itertools.count(1)

    def time(self, at: float) -> float:
        """Microseconds since the window began."""
        return round((at - self._origin) / 1000, 3)

    def slice(self, where: tuple[int, int], name: str, kind: str, begin: int, end: int, args: Row) -> None:
        row = {"ph": "X", "cat": f"backhaul.{kind}", "name": name, "pid": where[0], "tid": where[1]}
        duration = round(max(end - begin, 1) / 1000, 3)
        self.slices.append({**row, "ts": self.time(begin), "dur": duration, "args": args})

    def arrow(self, name: str, source: tuple[tuple[int, int], int], target: tuple[tuple[int, int], int]) -> None:
        (pid, tid), at = source
        common = {"cat": "backhaul.flow", "name": name, "id": next(self._ids)}
        self.arrows.append({"ph": "s", **common, "pid": pid, "tid": tid, "ts": self.time(at)})
        (pid, tid), at = target
        self.arrows.append({"ph": "f", "bp": "e", **common, "pid": pid, "tid": tid, "ts": self.time(at)})

    def new_id(self) -> int:
        return next(self._ids)


def chrome_trace(gathered: Gathered, told: Mapping[str, Told]) -> dict[str, Any]:
    """The whole file, as data for `json`."""
    writer = _Writer(gathered, told)
    places: dict[int, tuple[int, int]] = {}
    calls = [span for each in told.values() for span in calls_of(each)]
    late = [span for each in told.values() for span in late_of(each)]
    kineto = list(_kineto(writer, gathered))
    theirs = _kineto_spans(kineto)
    for worker, each in told.items():
        mine = [span for span in calls if span.worker == worker]
        around = [
            Span(worker, thread, KINETO, "", gathered.begin + begin, gathered.begin + end, {})
            for thread in {span.thread for span in mine}
            for begin, end in theirs.get(writer.names.thread(worker, thread), ())
        ]
        nested, apart = nest([*each.spans, *mine, *around])
        for span in nested:
            places[id(span)] = writer.names.thread(worker, span.thread)
        for what, spans in ((CALLS_LANE, apart), (LATE_LANE, [span for span in late if span.worker == worker])):
            for number, span in lanes(spans):
                places[id(span)] = writer.names.lane(worker, what, number)
        for span in sorted([*nested, *apart], key=lambda span: (span.begin, -span.end)):
            _write(writer, span, places[id(span)])
    for span in late:
        _write(writer, span, places[id(span)])
    for name, begin, end in gathered.steps:
        where = writer.names.lane(gathered.home, STEPS_LANE, 0)
        writer.slice(where, name, STEP, begin, end, {})
    everything = [span for each in told.values() for span in each.spans]
    _draw_calls(writer, calls, late, everything, places)
    _draw_gradients(writer, everything, places)
    counters = [row for recording in gathered.recordings for row in _sizes(writer, recording)]
    slices = [*writer.slices, *(row for row in kineto if row["ph"] == "X")]
    slices.sort(key=lambda row: (row["ts"], -row["dur"]))
    # After all slices: an arrow belongs to the slice that is open at its time, which may have begun at that moment.
    others = [*writer.arrows, *_whole(row for row in kineto if row["ph"] != "X")]
    others.sort(key=lambda row: row["ts"])
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": gathered.begin + gathered.recordings[0].unix,
        "backhaul": metadata(gathered),
        "traceEvents": [*writer.names.rows(), *slices, *others, *counters],
    }


def metadata(gathered: Gathered) -> dict[str, Any]:
    """The file's description of itself. Times are in nanoseconds."""
    return {
        "profiled_by": gathered.home,
        "seconds": (gathered.end - gathered.begin) / 1e9,
        "lost": gathered.lost,
        "workers": {
            recording.worker: {
                "rank": recording.rank,
                "host": recording.host,
                "pid": recording.pid,
                "clock_offset_ns": recording.alignment.offset,
                "clock_error_ns": recording.alignment.error,
                "clock_method": recording.alignment.method,
                "measured_offset_ns": recording.alignment.measured_offset,
                "measured_error_ns": recording.alignment.measured_error,
                "round_trips": recording.alignment.rounds,
                "events_dropped": recording.dropped,
            }
            for recording in gathered.recordings
        },
    }


# Spans.


def calls_of(told: Told) -> list[Span]:
    """A span for each request with an outcome, from its issue to the outcome."""
    found = []
    for request in told.requests:
        outcome = told.settled.get(request.call)
        if outcome is None or outcome.at < request.begin:
            continue
        details: Row = {
            "peer": request.peer,
            "call": request.call,
            "failed": outcome.failed,
            "is_call": request.is_call,
            "since": max(outcome.since, request.begin) + 1,
        }
        if request.size is not None:
            details["bytes"] = request.size
        if outcome.thread != request.thread:
            details["settled_on"] = outcome.thread
        name = f"{request.what} → {request.peer}"
        found.append(Span(told.worker, request.thread, CALL, name, request.begin, outcome.at, details))
    return found


def late_of(told: Told) -> list[Span]:
    """A span for each call that continued without a thread, from the end of its function's first part."""
    found = []
    for span in told.spans:
        end = told.late.get((span.details.get("peer", ""), span.details.get("call", 0)))
        if span.kind == SERVE and span.details.get("call") and end is not None and end > span.begin:
            name = span.details.get("what", span.name)
            found.append(Span(told.worker, span.thread, LATE, name, span.begin, end, dict(span.details)))
    return found


def nest(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """The spans that nest on their threads, and the calls that do not. Kineto's spans only take up room."""
    nested: list[Span] = []
    apart: list[Span] = []
    threads: dict[int, list[Span]] = {}
    for span in spans:
        if span.kind == CALL and "settled_on" in span.details:
            apart.append(span)
        else:
            threads.setdefault(span.thread, []).append(span)
    for row in threads.values():
        row.sort(key=lambda span: (span.begin, -span.end))
        stack: list[Span] = []
        out: set[int] = set()
        for span in row:
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            while stack and span.end > stack[-1].end and stack[-1].kind == CALL:
                out.add(id(stack.pop()))
            if stack and span.end > stack[-1].end:
                if span.kind == CALL:
                    out.add(id(span))
                    continue
                if KINETO not in (span.kind, stack[-1].kind):
                    span.end = stack[-1].end
            stack.append(span)
        nested += [span for span in row if id(span) not in out and span.kind != KINETO]
        apart += [span for span in row if id(span) in out]
    return nested, apart


def lanes(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the first free lane."""
    free: list[int] = []
    for span in sorted(spans, key=lambda span: span.begin):
        number = next((number for number, until in enumerate(free) if until <= span.begin), len(free))
        free[number : number + 1] = [span.end]
        yield number, span


def _write(writer: _Writer, span: Span, where: tuple[int, int]) -> None:
    details = {key: value for key, value in span.details.items() if key not in ("since", "encoded", "sent")}
    writer.slice(where, span.name, span.kind, span.begin, span.end, details)
    if span.kind == CALL:
        writer.slice(where, "result", RESULT, span.details["since"], span.end, details)


# Arrows.


def _draw_calls(
    writer: _Writer, calls: list[Span], late: list[Span], spans: list[Span], places: Mapping[int, tuple[int, int]]
) -> None:
    """Draw arrows from each call to its execution, and back from its reply to its result."""
    served: dict[tuple[str, str, int, str], Span] = {}
    for span in [*spans, *late]:
        if span.details.get("call") and span.kind in (SERVE, REPLY, LATE):
            served[span.kind, span.details["peer"], span.details["call"], span.worker] = span
    for call in calls:
        key = call.worker, call.details["call"], call.details["peer"]
        execution = served.get((SERVE, *key))
        if execution is None:
            continue
        here = places[id(call)]
        writer.arrow("call", (here, call.begin), (places[id(execution)], execution.begin))
        since = call.details["since"]
        if (ended := served.get((LATE, *key))) is not None:
            writer.arrow("reply", (places[id(ended)], ended.end - 1), (here, since))
        elif (reply := served.get((REPLY, *key))) is not None:
            writer.arrow("reply", (places[id(reply)], reply.begin), (here, since))


def _draw_gradients(writer: _Writer, spans: list[Span], places: Mapping[int, tuple[int, int]]) -> None:
    """Draw arrows from each gradient message to the runs it starts and the gates it opens; else to its arrival."""
    runs: dict[tuple[str, int, int], Span] = {}
    gates: dict[tuple[str, int, int], Span] = {}
    arrivals: dict[tuple[str, int, int], Span] = {}
    for span in spans:
        backward: int = span.details.get("backward", 0)
        if span.kind == RUN:
            runs.update(((span.worker, backward, source), span) for source in span.details["sources"])
        elif span.kind == OPENS:
            gates[span.worker, backward, span.details["source"]] = span
        elif span.kind == SERVE and "came" in span.details:
            arrivals.update(((span.worker, backward, source), span) for source in span.details["sources"])
    for sent in spans:
        if sent.kind != GRADIENTS:
            continue
        source = places[id(sent)], sent.begin
        targets: dict[int, tuple[Span, int]] = {}
        for number in sent.details["sources"]:
            key = sent.details["peer"], sent.details["backward"], number
            if (gate := gates.get(key)) is not None:
                targets[id(gate)] = gate, gate.begin
            elif (run := runs.get(key)) is not None:
                targets[id(run)] = run, run.begin
            elif (arrival := arrivals.get(key)) is not None:
                targets[id(arrival)] = arrival, arrival.begin
        for target, at in targets.values():
            writer.arrow("gradients", source, (places[id(target)], at))


# Kineto's rows.

_DROPPED_PROCESSES = ("Spans", "Traces", "")


def _kineto(writer: _Writer, gathered: Gathered) -> Iterator[Row]:
    for recording in gathered.recordings:
        if recording.kineto is None:
            continue
        together = [each for each in gathered.recordings if (each.host, each.pid) == (recording.host, recording.pid)]
        owners = Owners(sorted(together, key=lambda each: each.worker != recording.worker))
        base = recording.kineto.get("baseTimeNanoseconds", 0) - recording.unix
        ids: dict[tuple[Any, Any], int] = {}
        for row in recording.kineto["traceEvents"]:
            if row.get("ph") == "M" or row.get("pid") in _DROPPED_PROCESSES or "ts" not in row:
                continue
            yield _renumbered(writer, recording, owners, base, ids, row)


def _whole(rows: Iterable[Row]) -> list[Row]:
    """The rows without halves of arrows: Kineto writes the end of some whose beginning it has not recorded."""
    found = list(rows)
    begun = {row["id"] for row in found if row["ph"] == "s"}
    ended = {row["id"] for row in found if row["ph"] == "f"}
    return [row for row in found if row["ph"] not in "stf" or row["id"] in begun & ended]


def _kineto_spans(rows: Iterable[Row]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Thread of the file -> beginning and end of Kineto's slices, in nanoseconds since the window began."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in rows:
        if row["ph"] == "X":
            begin, duration = round(row["ts"] * 1000), round(row.get("dur", 0) * 1000)
            found.setdefault((row["pid"], row["tid"]), []).append((begin, begin + duration))
    return found


def _renumbered(
    writer: _Writer, recording: Recording, owners: Owners, base: int, ids: dict[tuple[Any, Any], int], row: Row
) -> Row:
    at = base + row["ts"] * 1000
    if row["pid"] == recording.pid:
        python = row.get("cat") == "python_function"
        pid, tid = writer.names.thread(owners.of(row["tid"], round(at)), row["tid"], python=python)
    else:
        device = row["pid"] if isinstance(row["pid"], int) else 0
        pid, tid = writer.names.device(recording.worker, device, row["tid"])
    changed = {**row, "pid": pid, "tid": tid, "ts": writer.time(at)}
    if "id" in row:
        key = row.get("cat"), row["id"]
        if key not in ids:
            ids[key] = writer.new_id()
        changed["id"] = ids[key]
    return changed


def _sizes(writer: _Writer, recording: Recording) -> Iterator[Row]:
    for at, resident, devices in recording.sizes:
        yield {
            "ph": "C",
            "name": "memory",
            "pid": writer.names.pids[recording.worker],
            "tid": 0,
            "ts": writer.time(at),
            "args": {"resident bytes": resident, **({"device bytes": devices} if devices else {})},
        }
