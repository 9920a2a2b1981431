"""Chrome traces written by Kineto: adds names, times and the callees' events to their calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backhaul.remote_profile.rows import REMOTE, Span, remote_rows, span_of

_log = logging.getLogger(__name__)

_PROCESSES = 1_000_000
"""Above the ids of real processes: each other worker is shown as the process with this number plus its rank."""


def extend(path: str, spans: Mapping[int, Span]) -> None:
    """Add the recordings of other workers for these calls to a trace."""
    file = Path(path)
    try:
        trace: dict[str, Any] = json.loads(file.read_text(errors="replace"))
        events: list[dict[str, Any]] = trace["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("the trace %s gets no events of other workers, because it cannot be read: %s", path, error)
        return
    nodes: dict[int, str] = {}
    added: list[dict[str, Any]] = []
    for event in events:
        span = span_of(str(event.get("name", "")), spans)
        if span is not None:
            event["name"] = span.key
            # Kineto also shows a block on the timeline of its device, but the callee's events must appear once.
            if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
                added += _of_call(event, span)
                nodes.update({} if span.report is None else span.report.nodes)
    for rank, name in sorted(nodes.items()):
        added.append({"name": "process_name", "ph": "M", "pid": _PROCESSES + rank, "tid": 0, "args": {"name": name}})
    if added:
        trace["traceEvents"] = events + added
    file.write_text(json.dumps(trace))


def _of_call(event: Mapping[str, Any], span: Span) -> Iterator[dict[str, Any]]:
    start = float(event["ts"])
    if span.is_async and span.elapsed is not None:
        # The call overlaps with its thread's next activity, so it is not drawn as a block among those.
        same = {"name": span.key, "cat": "rpc", "id": span.number, "pid": event["pid"], "tid": event["tid"]}
        yield {**same, "ph": "b", "ts": start}
        yield {**same, "ph": "e", "ts": start + span.elapsed}
    start += span.offset()
    for row in remote_rows(span):
        arguments: dict[str, Any] = {"node_id": row.node}
        if row.shapes:
            arguments["Input Dims"] = row.shapes
        yield {
            "name": span.key + REMOTE + row.name,
            "ph": "X",
            "cat": "remote_op",
            "pid": _PROCESSES + row.node,
            "tid": row.thread,
            "ts": start + row.start,
            "dur": row.end - row.start,
            "args": arguments,
        }
