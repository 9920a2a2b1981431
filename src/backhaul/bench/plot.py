"""The plot: speed relative to torch, and the times themselves beside the bare limits. PNG and SVG.

It is drawn from the plain data of `table.as_json`, so that an older run can be drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_GET_IT = "no plot: it needs matplotlib; pip install 'backhaul[bench]'"
FORMATS = (".png", ".svg")

_INK, _FAINT = "#1f2933", "#d5dae0"
_FASTER, _SLOWER, _OTHER = "#2f6db5", "#c2543d", "#8a94a0"
_FLOOR, _COPIES, _TLS = "#e0a526", "#2a8c6a", "#7a4fa3"
_DOTS = {
    "torch": ("torch RPC", _OTHER, "o", 30),
    "backhaul": ("Backhaul", _FASTER, "o", 30),
    "backhaul-tls": ("Backhaul, TLS", _TLS, "o", 30),
    "ping-pong": ("limit: bare socket", _INK, "|", 70),
    "memcpy": ("limit: two warm copies", _COPIES, "|", 70),
    "ssl": ("limit: bare ssl", _FLOOR, "|", 70),
}
_ROW_INCHES = 0.29
_LEAST, _MOST = 0.5, 100.0  # ratios beyond are cut off and labelled, else idle workers would dwarf all others
_STYLE: Any = {
    "font.size": 9.5,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "backhaul",  # else each file would differ from the last
}


def is_available() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def paths(target: Path) -> list[Path]:
    """The files: in a directory, or, if the target names a file, that name with each suffix."""
    stem = target.with_suffix("") if target.suffix in FORMATS else target / "bench"
    return [stem.with_name(stem.name + ending) for ending in FORMATS]


def draw(data: dict[str, Any], target: Path) -> list[Path]:
    """Write the plot in each format; returns the files. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in data["rows"] if _can_be_drawn(row)]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 1.5 + _ROW_INCHES * len(rows)), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
        _ratios(left, rows)
        _times(right, rows)
        left.set_yticks(range(len(rows)), [row["work"] for row in rows])
        left.set_ylim(len(rows) - 0.4, -0.6)
        for panel in (left, right):
            _clean(panel)
        files = paths(target)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _can_be_drawn(row: dict[str, Any]) -> bool:
    """Whether there is a time, a ratio, or a note about torch."""
    if row["unit"] == "share":
        return False
    return row["unit"] == "seconds" or f"torch/{row['ours']}" in row["ratios"] or "torch" in row["notes"]


def _ratios(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Bars from 1: to the right Backhaul is faster, to the left torch is."""
    panel.set_xscale("log")
    panel.set_xlim(_LEAST, _MOST)
    panel.axvline(1.0, color=_INK, linewidth=0.8)
    for place, row in enumerate(rows):
        ratio = row["ratios"].get(f"torch/{row['ours']}")
        if ratio is None:
            note = row["notes"].get("torch")
            panel.text(1.06, place, f"torch {note}" if note else "", va="center", color=_OTHER, style="italic")
            continue
        median = ratio["median"]
        panel.barh(place, median - 1, left=1.0, height=0.62, color=_FASTER if median >= 1 else _SLOWER)
        panel.plot((ratio["low"], ratio["high"]), (place, place), color=_INK, linewidth=1.0)
        right = max(median, ratio["high"], 1.0)
        if row["floor"] and row["floor"]["against"] == "torch":
            least = row["floor"]["at_least"]
            panel.plot((least, least), (place - 0.42, place + 0.42), color=_FLOOR, linewidth=2.2)
            right = max(right, least)
        number = f"{median:,.0f}x" if median >= 10 else f"{median:.1f}x"
        if right > _MOST * 0.8:
            panel.text(_MOST * 0.92, place, number, va="center", ha="right", color="white")
        else:
            panel.annotate(number, (right, place), xytext=(5, 0), textcoords="offset points", va="center")
    panel.plot([], [], color=_FLOOR, linewidth=2.2, label="floor")
    panel.plot([], [], color=_INK, linewidth=1.0, label="quartiles")
    panel.set_xticks((0.5, 1, 2, 5, 10, 20, 50, 100), ("½", "1", "2", "5", "10", "20", "50", "100"))
    panel.minorticks_off()
    panel.set_title("times as fast as torch RPC", loc="left", fontsize=10.5, fontweight="bold", pad=40)
    _legend(panel)


def _times(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Dots for the systems and ticks for the limits."""
    panel.set_xscale("log")
    for system, (label, colour, marker, size) in _DOTS.items():
        places = [place for place, row in enumerate(rows) if row["unit"] == "seconds" and system in row["systems"]]
        medians = [rows[place]["systems"][system]["median"] for place in places]
        if places:
            panel.scatter(medians, places, s=size, c=colour, marker=marker, linewidths=2.0, label=label, zorder=3)
    for place, row in enumerate(rows):
        ends = [row["systems"][system]["median"] for system in (row["ours"], "torch") if system in row["systems"]]
        if row["unit"] == "seconds" and len(ends) == 2:
            panel.plot(ends, (place, place), color=_FAINT, linewidth=2.0, zorder=2)
    low, high = panel.get_xlim()
    ticks = {1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "100 µs", 1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1.0: "1 s"}
    panel.set_xticks(list(ticks), list(ticks.values()))
    panel.set_xlim(low, high)
    panel.minorticks_off()
    panel.set_title("time per call, step or start", loc="left", fontsize=10.5, fontweight="bold", pad=40)
    _legend(panel)


def _legend(panel: Axes) -> None:
    panel.legend(
        loc="lower left",
        bbox_to_anchor=(-0.015, 1.0),
        ncols=3,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
        fontsize=8.5,
    )


def _clean(panel: Axes) -> None:
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(length=0)
    panel.grid(axis="x", color=_FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
