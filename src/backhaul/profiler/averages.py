"""Averages: the operators of all workers, summed by name and worker, and printed in torch's layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from backhaul.errors import OptionError
from backhaul.profiler.gathered import Operator

_WIDEST_NAME = 55

_SUMS = (
    "cpu_time_total",
    "self_cpu_time_total",
    "device_time_total",
    "self_device_time_total",
    "cpu_memory_usage",
    "device_memory_usage",
    "flops",
)
_SORTABLE = (*_SUMS, "cpu_time", "device_time", "count", "key", "worker")


class Average(msgspec.Struct):
    """All calls of one operator on one worker. Times are in microseconds, sizes in bytes."""

    key: str
    worker: str
    input_shapes: str = ""
    stack: list[str] = []
    count: int = 0
    cpu_time_total: float = 0.0
    self_cpu_time_total: float = 0.0
    device_time_total: float = 0.0
    self_device_time_total: float = 0.0
    cpu_memory_usage: int = 0
    device_memory_usage: int = 0
    flops: int = 0

    @property
    def cpu_time(self) -> float:
        """The average time of one call."""
        return self.cpu_time_total / self.count

    @property
    def device_time(self) -> float:
        return self.device_time_total / self.count


class Averages(list[Average]):
    """What `profile.key_averages` returns. Prints as `table` does."""

    def table(self, sort_by: str | None = "self_cpu_time_total", row_limit: int = 100) -> str:
        """The rows as text, sorted by ``sort_by``, largest first; at most ``row_limit`` rows, or all if that is -1."""
        rows = list(self)
        if sort_by is not None:
            if sort_by not in _SORTABLE:
                raise OptionError(f"sort_by {sort_by!r} must be None or one of {', '.join(_SORTABLE)}")
            rows.sort(key=lambda row: getattr(row, sort_by), reverse=sort_by not in ("key", "worker"))
        return _table(rows if row_limit < 0 else rows[:row_limit], self)

    def __str__(self) -> str:
        return self.table()


def average(
    operators: Iterable[Operator], *, group_by_input_shape: bool = False, group_by_stack_n: int = 0
) -> Averages:
    """One row for each operator name and worker; if asked to, also for each shape or stack."""
    found: dict[tuple[str, str, str, tuple[str, ...]], Average] = {}
    for operator in operators:
        shapes = operator.input_shapes if group_by_input_shape else ""
        stack = tuple(operator.stack[:group_by_stack_n])
        key = (operator.name, operator.worker, shapes, stack)
        row = found.get(key)
        if row is None:
            row = found[key] = Average(operator.name, operator.worker, shapes, list(stack))
        row.count += 1
        for name in _SUMS:
            setattr(row, name, getattr(row, name) + getattr(operator, name))
    return Averages(found.values())


def _table(rows: Sequence[Average], everything: Iterable[Average]) -> str:
    everything = list(everything)
    whole = sum(row.self_cpu_time_total for row in everything)
    on_device = sum(row.self_device_time_total for row in everything)
    headers = ["Name", "Worker", "Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg"]
    if on_device:
        headers += ["Self device", "Device total", "Device time avg"]
    memory = any(row.cpu_memory_usage or row.device_memory_usage for row in everything)
    if memory:
        headers += ["CPU Mem", "Device Mem"]
    headers.append("# of Calls")
    shapes = any(row.input_shapes for row in everything)
    if shapes:
        headers.append("Input Shapes")
    cells = []
    for row in rows:
        line = [
            row.key if len(row.key) <= _WIDEST_NAME else f"{row.key[: _WIDEST_NAME - 1]}…",
            row.worker,
            _percent(row.self_cpu_time_total, whole),
            microseconds(row.self_cpu_time_total),
            _percent(row.cpu_time_total, whole),
            microseconds(row.cpu_time_total),
            microseconds(row.cpu_time),
        ]
        if on_device:
            line += [
                microseconds(row.self_device_time_total),
                microseconds(row.device_time_total),
                microseconds(row.device_time),
            ]
        if memory:
            line += [f"{row.cpu_memory_usage} b", f"{row.device_memory_usage} b"]
        line.append(str(row.count))
        if shapes:
            line.append(row.input_shapes)
        cells.append(line)
    text = columns(headers, cells)
    return f"{text}\nSelf CPU time total: {microseconds(whole)}"


def columns(headers: Sequence[str], cells: Sequence[Sequence[str]], left: int = 2) -> str:
    """A plain table. The first ``left`` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([rule, line(headers), rule, *map(line, cells), rule])


def microseconds(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3f}s"
    return f"{value / 1e3:.3f}ms" if value >= 1e3 else f"{value:.3f}us"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "-"
