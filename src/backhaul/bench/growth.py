"""``backhaul bench --growth``: whether the cost of one more item stays the same as their number grows.

A curve is **flat** if the cost at its largest size is within 1.5 times its base, and **grows** if not. The base is the
median of the costs in the lower half of its sizes. That can be too lenient: one-time costs of a pass or a batch
weigh heavily on one message of two. So the table also shows the factor to the lowest cost of all other sizes, which can
be too strict, since that is the luckiest one. A curve that is flat by the first and not by the second is **unclear**:
look at it, or measure again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from backhaul.bench import curves, plot
from backhaul.bench.curves import Curve, Sizes
from backhaul.bench.table import host
from backhaul.errors import BackhaulError

FLAT_WITHIN = 1.5

_PLAIN_WIDTH = 160
_KIB = 1024


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    for path in (options.json, options.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)  # fail now, not after minutes of measuring
    load = os.getloadavg()[0]
    try:
        found = curves.measure(options.sizes, options.only or curves.GROUPS, _say)
        if options.check:
            found = again(found, options.sizes)
    except BackhaulError as error:
        print(error, file=sys.stderr)
        return 1
    write(found, load, sys.stdout)
    data = as_json(found, load)
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.plot is not None:
        print(*draw(data, options.plot) if plot.is_available() else [plot.HOW_TO_GET_IT])
    return 1 if options.check and not all(map(is_flat, found)) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backhaul bench --growth",
        description="Measure what a call, a context, a reference, a message or a node costs as their number grows. "
        "Takes up to eight minutes. The exit code is 0 if everything could be measured.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="sizes", action="store_const", const=curves.QUICK, help="takes under two minutes")
    size.add_argument(
        "--smoke",
        dest="sizes",
        action="store_const",
        const=curves.SMOKE,
        help="takes seconds; its figures mean nothing",
    )
    parser.add_argument("--only", action="append", choices=list(curves.GROUPS), help="only these; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures to PATH")
    parser.add_argument(
        "--plot", type=Path, metavar="PATH", help="also plot them, as PNG and SVG: into a directory, or to this name"
    )
    parser.add_argument(
        "--check", action="store_true", help="measure growing curves again; exit code 1 if they still grow"
    )
    parser.set_defaults(sizes=curves.FULL)
    return parser


def base(curve: Curve) -> float:
    """The cost to which the largest size is compared."""
    costs = list(curve.medians.values())
    return statistics.median(costs[: max(1, len(costs) // 2)])


def factor(curve: Curve) -> float:
    """The cost at the largest size, relative to the base."""
    return list(curve.medians.values())[-1] / base(curve)


def factor_to_lowest(curve: Curve) -> float:
    """The cost at the largest size, relative to the lowest cost of all other sizes."""
    *others, largest = curve.medians.values()
    return largest / min(others or [largest])


def is_flat(curve: Curve) -> bool:
    return factor(curve) <= FLAT_WITHIN


def verdict(curve: Curve) -> str:
    if not is_flat(curve):
        return "GROWS"
    return "flat" if factor_to_lowest(curve) <= FLAT_WITHIN else "unclear"


def again(found: Sequence[Curve], sizes: Sizes) -> list[Curve]:
    """Measure the groups of growing curves again; returns the better version of each curve."""
    groups = {name for name in curves.GROUPS for curve in found if curve.group == name and not is_flat(curve)}
    second = {(curve.axis, curve.what): curve for curve in curves.measure(sizes, groups, _say)}
    return [min(curve, second.get((curve.axis, curve.what), curve), key=factor) for curve in found]


def write(found: Sequence[Curve], load: float, file: TextIO) -> None:
    """Print a table for each quantity that grows."""
    terminal = file.isatty()
    console = Console(file=file, width=None if terminal else _PLAIN_WIDTH, highlight=False)
    console.print(
        f"cost of one, in the median of its rounds; flat: at the largest size at most {FLAT_WITHIN:g} times "
        f"the median of the lower half of sizes; load before: {load:.2f}"
    )
    for axis in dict.fromkeys(curve.axis for curve in found):
        rows = [curve for curve in found if curve.axis == axis]
        sizes = sorted({size for curve in rows for size in curve.rounds})
        table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
        table.add_column(axis, no_wrap=True, min_width=44)
        for size in sizes:
            table.add_column(f"{size:,}", justify="right", no_wrap=True, min_width=10)
        table.add_column("factor", justify="right", no_wrap=True)
        table.add_column("to lowest", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for curve in rows:
            costs = [_text(curve.medians.get(size), curve) for size in sizes]
            table.add_row(curve.what, *costs, *_verdict(curve))
        console.print()
        console.print(table)


def _verdict(curve: Curve) -> tuple[str, str, str]:
    if len(curve.rounds) < 2:
        return "", "", ""
    return f"{factor(curve):.2f}x", f"{factor_to_lowest(curve):.2f}x", verdict(curve)


def _text(cost: float | None, curve: Curve) -> str:
    if cost is None:
        return ""
    if curve.unit == "bytes":
        return f"{cost / _KIB:.2f} KiB"
    scale, unit = (1e3, "ms") if cost >= 1e-3 else (1e6, "us") if cost >= 1e-6 else (1e9, "ns")
    number = cost * scale
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"


def as_json(found: Sequence[Curve], load: float) -> dict[str, Any]:
    """The curves as plain data: seconds or bytes for one."""
    return {
        "host": host(load),
        "flat_within": FLAT_WITHIN,
        "curves": [
            {
                "axis": curve.axis,
                "what": curve.what,
                "unit": curve.unit,
                "points": [
                    {"size": size, "median": median, "rounds": curve.rounds[size]}
                    for size, median in curve.medians.items()
                ],
                "base": base(curve),
                "factor": factor(curve),
                "factor_to_lowest": factor_to_lowest(curve),
                "verdict": verdict(curve),
                "flat": is_flat(curve),
            }
            for curve in found
        ],
    }


def paths(target: Path) -> list[Path]:
    """The files of the plot: in a directory, or, if the target names a file, that name with each suffix."""
    stem = target.with_suffix("") if target.suffix in plot.FORMATS else target / "growth"
    return [stem.with_suffix(ending) for ending in plot.FORMATS]


_INK, _FAINT, _LINE, _LIMIT = "#1f2933", "#d5dae0", "#2f6db5", "#c2543d"
_COLUMNS = 4


def draw(data: dict[str, Any], target: Path) -> list[Path]:
    """Draw one small panel for each curve, from `as_json`; returns the files. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [curve for curve in data["curves"] if len(curve["points"]) > 1]
    rows = -(-len(found) // _COLUMNS)
    style: Any = {"font.size": 8.5, "text.color": _INK, "axes.edgecolor": _FAINT, "svg.hashsalt": "backhaul"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.1 * _COLUMNS, 2.3 * rows), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, _COLUMNS, squeeze=False).flat
        for panel, curve in zip(panels, found, strict=False):
            _panel(panel, curve, data["flat_within"])
        for panel in list(panels)[len(found) :]:
            panel.set_visible(False)
        files = paths(target)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _panel(panel: Any, curve: dict[str, Any], flat_within: float) -> None:
    scale, unit = (1 / _KIB, "KiB") if curve["unit"] == "bytes" else (1e6, "µs")
    sizes = [point["size"] for point in curve["points"]]
    costs = [point["median"] * scale for point in curve["points"]]
    limit = flat_within * curve["base"] * scale
    for size, point in zip(sizes, curve["points"], strict=True):
        panel.plot([size] * len(point["rounds"]), [cost * scale for cost in point["rounds"]], ".", color=_FAINT)
    panel.plot(sizes, costs, "o-", color=_LINE if curve["flat"] else _LIMIT, markersize=4, linewidth=1.5)
    panel.axhline(limit, color=_LIMIT, linewidth=0.8, linestyle=(0, (4, 3)))
    panel.set_xscale("log")
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.minorticks_off()
    panel.set_ylim(0, 1.15 * max(limit, *costs))
    panel.set_title(f"{curve['what']}, {unit}", loc="left", fontsize=8.5, fontweight="bold")
    panel.set_xlabel(f"{curve['axis']} · {curve['factor']:.2f}x")
    panel.tick_params(length=0, colors=_INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.grid(axis="y", color=_FAINT, linewidth=0.5)
    panel.set_axisbelow(True)


def _say(text: str) -> None:
    """Report progress to a user who watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
