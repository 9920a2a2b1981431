"""The plot is drawn from plain data, whatever is missing in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from backhaul.bench import plot, table
from backhaul.bench.compare import SYSTEMS, Result
from backhaul.bench.footprint import idle_figure
from backhaul.bench.rows import Row
from backhaul.bench.workloads import Figure

ROWS = [
    Row(Figure("no-op p50"), {"torch": [4e-4], "backhaul": [4e-5], "ping-pong": [3e-5]}),
    Row(
        Figure("echo 64 MiB"),
        {"torch": [0.1, 0.3], "backhaul": [0.05, 0.1], "ping-pong": [0.03, 0.04], "memcpy": [0.02, 0.02]},
    ),
    Row(Figure("fan-out of 8, 1 unused"), {"backhaul": [4e-3]}, {"torch": "hangs"}),
    Row(Figure("1,500 nodes, no calls"), {"torch": [0.9], "backhaul": [1.0]}),
    Row(Figure("share of its plan", unit="share"), {"backhaul": [0.06]}),
    Row(idle_figure(10.0), {"torch": [19.8], "backhaul": [0.002]}),
    Row(Figure("memory of an idle worker", unit="bytes"), {"torch": [4e7], "backhaul": [4e6]}),
    Row(
        Figure("TLS echo 64 MiB", ours="backhaul-tls"),
        {"torch": [0.1], "backhaul": [0.02], "backhaul-tls": [0.2], "ssl": [0.15], "tcp": [0.08]},
    ),
]


def data(rows: list[Row]) -> dict[str, Any]:
    return table.as_json(Result(list(SYSTEMS), rows, [], 0.0, {}))


def test_a_directory_or_a_name() -> None:
    assert plot.paths(Path("out")) == [Path("out/bench.png"), Path("out/bench.svg")]
    assert plot.paths(Path("out/v1.2.png")) == [Path("out/v1.2.png"), Path("out/v1.2.svg")]


def test_both_formats_are_written(tmp_path: Path) -> None:
    png, svg = plot.draw(data(ROWS), tmp_path / "new" / "speed.svg")

    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_the_same_data_give_the_same_drawing(tmp_path: Path) -> None:
    _, first = plot.draw(data(ROWS), tmp_path / "first")
    _, second = plot.draw(data(ROWS), tmp_path / "second")

    assert first.read_bytes() == second.read_bytes()


def test_a_floor_is_drawn_where_it_is_one_of_speed_against_torch(tmp_path: Path) -> None:
    """The floor of tensors over TLS is a share of bare ssl, so it has no place among multiples of torch."""
    _, drawn = plot.draw(data(ROWS[-1:]), tmp_path / "share")
    without = data(ROWS[-1:])
    without["rows"][0]["floor"] = None
    _, bare = plot.draw(without, tmp_path / "none")

    assert drawn.read_bytes() == bare.read_bytes()


def test_backhaul_alone_is_drawn_too(tmp_path: Path) -> None:
    assert plot.draw(data([Row(Figure("chain of 1"), {"backhaul": [1e-3]})]), tmp_path)
