"""Reads a trace in Chrome's format like a viewer: processes, threads, slices, and the slices that arrows connect."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROUNDING = 0.002
"""The tolerance for times in the file, in microseconds."""


@dataclass(frozen=True, eq=False)
class Slice:
    process: str
    thread: str
    name: str
    kind: str
    begin: float
    end: float
    args: dict[str, Any]

    def holds(self, other: Slice, slack: float = ROUNDING) -> bool:
        return self.begin - slack <= other.begin and other.end <= self.end + slack


class Arrow(NamedTuple):
    id: int
    name: str
    kind: str
    source: Slice
    target: Slice
    left: float
    arrived: float


class Reading:
    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self.data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        self.rows: list[dict[str, Any]] = self.data["traceEvents"]
        self.about: dict[str, Any] = self.data["backhaul"]
        self.pids = {row["pid"]: row["args"]["name"] for row in self._named("process_name")}
        self.tids = {(row["pid"], row["tid"]): row["args"]["name"] for row in self._named("thread_name")}
        self._slices: dict[tuple[int, int], list[Slice]] = {}
        for row in self.rows:
            if row["ph"] == "X":
                key = row["pid"], row["tid"]
                begin, end = row["ts"], row["ts"] + row["dur"]
                names = self.pids[row["pid"]].split(" ")[0], self.tids[key]
                slice = Slice(*names, row["name"], row["cat"], begin, end, row.get("args", {}))
                self._slices.setdefault(key, []).append(slice)

    def _named(self, what: str) -> Iterator[dict[str, Any]]:
        return (row for row in self.rows if row["ph"] == "M" and row["name"] == what)

    @property
    def processes(self) -> list[str]:
        return [name.split(" ")[0] for name in self.pids.values()]

    def slices(self, kind: str | None = None, process: str | None = None, name: str | None = None) -> list[Slice]:
        return [
            slice
            for row in self._slices.values()
            for slice in row
            if (kind is None or slice.kind == kind)
            and (process is None or slice.process == process)
            and (name is None or slice.name == name)
        ]

    def threads(self) -> dict[tuple[int, int], list[Slice]]:
        return self._slices

    def at(self, row: dict[str, Any]) -> Slice:
        """The innermost slice that is open at an event of an arrow, on its thread."""
        time = row["ts"]
        open_then = [
            slice for slice in self._slices[row["pid"], row["tid"]] if slice.begin <= time < slice.end + ROUNDING
        ]
        assert open_then, f"no slice is open at {row}"
        return max(open_then, key=lambda slice: (slice.begin, -slice.end))

    def arrows(self, kind: str = "backhaul.flow") -> list[Arrow]:
        """All arrows of a kind. Each has one beginning, one end and a unique id."""
        ends: dict[int, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            if row["ph"] in "stf":
                assert row["ph"] not in ends.setdefault(row["id"], {}), f"two arrows have the id {row['id']}"
                ends[row["id"]][row["ph"]] = row
        found = []
        for id, pair in ends.items():
            assert set(pair) == {"s", "f"}, f"half of an arrow: {pair}"
            start, end = pair["s"], pair["f"]
            assert end["bp"] == "e"
            assert (start["cat"], start["name"]) == (end["cat"], end["name"])
            if start["cat"] == kind:
                found.append(
                    Arrow(id, start["name"], kind, self.at(start), self.at(end), start["ts"], end["ts"]),
                )
        return found

    def assert_nested(self) -> None:
        """Check that on every thread a slice ends before the slice in which it begins."""
        for slices in self._slices.values():
            stack: list[Slice] = []
            for slice in sorted(slices, key=lambda slice: (slice.begin, -slice.end)):
                while stack and stack[-1].end <= slice.begin + ROUNDING:
                    stack.pop()
                assert not stack or slice.end <= stack[-1].end + ROUNDING, f"{slice} ends after {stack[-1]}"
                stack.append(slice)
