"""Kineto's records from two processes go into one file: new numbers for processes, threads and arrows."""

from __future__ import annotations

from typing import Any

from backhaul.profiler.clocks import HOME, Alignment
from backhaul.profiler.gathered import Gathered, Recording
from backhaul.profiler.replay import replay
from backhaul.profiler.trace import chrome_trace

BASE = 10**18
"""The zero of Kineto's times, in nanoseconds of Unix time."""


def kineto(pid: int) -> dict[str, Any]:
    def row(ph: str, ts: float, tid: int = 50, pid: int = pid, **more: Any) -> dict[str, Any]:
        return {"ph": ph, "ts": ts, "pid": pid, "tid": tid, "name": "x", **more}

    return {
        "baseTimeNanoseconds": BASE,
        "traceEvents": [
            row("M", 0, args={"name": "python"}),
            row("X", 5.0, cat="cpu_op", dur=2.0),
            row("X", 8.0, tid=7, pid=0, cat="kernel", dur=1.0),
            row("s", 5.0, cat="ac2g", id=1),
            row("f", 8.0, tid=7, pid=0, cat="ac2g", id=1, bp="e"),
            row("f", 6.0, cat="ac2g", id=2, bp="e"),  # Kineto has not recorded its beginning
            row("X", 0.0, pid="Spans", cat="Trace", dur=9.0),  # type: ignore[arg-type]
        ],
    }


def recording(worker: str, pid: int, alignment: Alignment) -> Recording:
    # Its clock shows 0 at the base of its Unix time.
    unix = BASE + alignment.offset
    return Recording(worker, 0, "host", pid, alignment, 0, 10_000, [], 0, False, [], [], kineto(pid), unix)


def test_two_traces_in_one_file() -> None:
    ahead = Alignment(500, 3, 500, 3, 20, "round trips")
    recordings = [recording("a", 123, HOME), recording("b", 123, ahead)]
    recordings[1].host = "another"
    gathered = Gathered("a", 50, 0, 10_000, recordings, [], [], [])
    trace = chrome_trace(gathered, {each.worker: replay([], each.worker, 0, 10_000) for each in recordings})
    rows = trace["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert sorted(names.values()) == ["a (rank 0, pid 123)", "a device 0", "b (rank 0, pid 123)", "b device 0"]
    operators = {names[row["pid"]]: row["ts"] for row in rows if row.get("cat") == "cpu_op"}
    assert operators == {"a (rank 0, pid 123)": 5.0, "b (rank 0, pid 123)": 4.5}
    arrows = [row for row in rows if row["ph"] in "sf"]
    assert len(arrows) == 4
    pairs = {(row["id"], row["ph"]): names[row["pid"]] for row in arrows}
    assert len({id for id, _ in pairs}) == 2
    for id in {id for id, _ in pairs}:
        assert pairs[id, "f"] == f"{pairs[id, 's'][0]} device 0"
    about = trace["backhaul"]["workers"]["b"]
    assert (about["clock_offset_ns"], about["clock_error_ns"], about["round_trips"]) == (500, 3, 20)
