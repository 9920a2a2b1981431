"""Table: the figures of a run as text for people and as plain data for programs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from backhaul.bench.compare import Result
from backhaul.bench.floors import CEILINGS, floor_of, standing
from backhaul.bench.ports import BACKHAUL, BACKHAUL_TLS, MEMCPY, PING_PONG, SSL, TCP, TORCH
from backhaul.bench.rows import RATIOS, Row, Spread
from backhaul.bench.workloads import Figure

_PLAIN_WIDTH = 250  # wide enough for every row on one line
_MIB = 1 << 20
_COLUMNS = {
    BACKHAUL: (BACKHAUL, TORCH, PING_PONG, MEMCPY),
    BACKHAUL_TLS: (BACKHAUL_TLS, BACKHAUL, TORCH, SSL, TCP),
}
"""For rows about the key: the columns. One table for each."""


def write(result: Result, file: TextIO) -> None:
    """Print the tables, ruled on a terminal and plainly aligned elsewhere, and the stalls."""
    terminal = file.isatty()
    console = Console(file=file, width=None if terminal else _PLAIN_WIDTH, highlight=False)
    where = "; on one processor" if result.pinned else ""
    console.print(
        f"rounds: {result.rounds}{where}; load before: {result.load:.2f}; "
        "medians (quartiles); less is better except for /s",
    )
    for ours in _COLUMNS:
        if any(row.figure.ours == ours for row in result.rows):
            console.print(_table(result, ours, terminal))
    for stall in result.stalls:
        console.print(f"stalled: {stall.system}, {stall.work}: {stall.seconds:.1f} s for one repetition")
    for fault in result.faults:
        if not any(row.notes.get(fault.system) == fault.brief for row in result.rows):  # else its row says it
            console.print(f"failed: {fault.system}, {fault.work}: {fault.brief}")
    for system, reason in result.left_out.items():
        console.print(f"left out: {system}: {reason}")
    if below := [row.figure.name for row in result.rows if _misses(row, result)]:
        console.print(f"missed: {', '.join(below)}")


def _table(result: Result, ours: str, terminal: bool) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    (first, *headings, last), rows = _cells(result, ours)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=not terminal)
    table.add_column(last, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _cells(result: Result, ours: str) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of the table about a system."""
    systems = [system for system in _COLUMNS[ours] if system in result.systems]
    ratios = [pair for pair in RATIOS[ours] if set(pair) <= set(systems)]
    rows = []
    for row in result.rows:
        if row.figure.ours == ours:
            times = (row.notes.get(system) or text(row.spread(system), row.figure) for system in systems)
            shares = (ratio_text(row.ratio(*pair)) for pair in ratios)
            rows.append([row.figure.name, *times, *shares, _standing_text(row, result)])
    return ["work", *systems, *("/".join(pair) for pair in ratios), "met"], rows


def as_markdown(result: Result) -> str:
    """The tables for a page of the documentation, with a sentence about the machine before them."""
    machine = host(result.load)
    where = "; all processes on one processor" if result.pinned else ""
    lines = [
        f"{machine['cpus']} processors, Python {machine['python']}, torch {machine['torch']}; rounds: {result.rounds}; "
        f"load before: {result.load:.2f}{where}. Medians, quartiles in brackets; less is better except for /s."
    ]
    for ours in _COLUMNS:
        headings, rows = _cells(result, ours)
        if rows:
            lines += ["", _marked(headings), _marked(["---", *["---:"] * (len(headings) - 2), "---"])]
            lines += map(_marked, rows)
    return "\n".join(lines) + "\n"


def _marked(cells: list[str]) -> str:
    return f"| {' | '.join('' if cell == '-' else cell for cell in cells)} |"


def as_json(result: Result) -> dict[str, Any]:
    """The table as plain data. Rates are seconds per call, and less is better throughout."""
    return {
        "host": host(result.load),
        "systems": list(result.systems),
        "left_out": dict(result.left_out),
        "pinned": result.pinned,
        "rows": [_row_as_json(row, result) for row in result.rows],
        "stalls": [stall._asdict() for stall in result.stalls],
        "faults": [fault._asdict() for fault in result.faults],
    }


def _version() -> str:
    try:
        return version("backhaul")
    except PackageNotFoundError:  # not installed, only on the path
        return "unknown"


def host(load: float) -> dict[str, Any]:
    """The machine of a run, so that its figures can be judged."""
    return {
        "cpus": os.cpu_count(),
        "load_before": load,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backhaul": _version(),
    }


def _row_as_json(row: Row, result: Result) -> dict[str, Any]:
    ratios = {"/".join(pair): row.ratio(*pair) for pair in RATIOS[row.figure.ours]}
    floor = floor_of(row.figure, result.pinned)
    ceiling = CEILINGS.get(row.figure.name)
    stands = standing(row, result.pinned)
    return {
        "work": row.figure.name,
        "unit": row.figure.unit,
        "ours": row.figure.ours,
        "systems": {
            system: {**spread._asdict(), "rounds": list(rounds)}
            for system, rounds in row.rounds.items()
            if (spread := row.spread(system)) is not None
        },
        "notes": dict(row.notes),
        "ratios": {name: ratio._asdict() for name, ratio in ratios.items() if ratio is not None},
        "floor": {"at_least": floor.at_least, "aim": floor.aim, "against": floor.against} if floor else None,
        "ceiling": {"at_most": ceiling[0], "aim": ceiling[1]} if ceiling else None,
        "met": stands.met if stands else None,
        "steady": row.figure.steady,
    }


def text(spread: Spread | None, figure: Figure) -> str:
    if spread is None:
        return "-"
    if figure.as_rate:
        return f"{1 / spread.median:,.0f}/s ({1 / spread.high:,.0f}..{1 / spread.low:,.0f})"
    scale, unit = _scale(spread.median, figure)
    median, low, high = (_digits(number * scale) for number in spread)
    return f"{median} {unit} ({low}..{high})"


def _scale(number: float, figure: Figure) -> tuple[float, str]:
    if figure.unit == "share":
        return 100, "%"
    if figure.unit == "wake-ups":
        return 1, "times"
    if figure.unit == "bytes":
        return 1 / _MIB, "MiB"
    if figure.unit == "CPU seconds" or number >= 1:
        return (1, "s") if number >= 0.1 else (1e3, "ms")
    return (1e3, "ms") if number >= 1e-3 else (1e6, "us")


def _standing_text(row: Row, result: Result) -> str:
    stands = standing(row, result.pinned)
    return stands.text if stands else ""


def _misses(row: Row, result: Result) -> bool:
    stands = standing(row, result.pinned)
    return stands is not None and stands.met == "nothing"


def ratio_text(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    median, low, high = map(_digits, spread)
    return f"{median}x ({low}..{high})"


def _digits(number: float) -> str:
    """About three digits: 0.42, 4.21, 42.1, 421."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"
