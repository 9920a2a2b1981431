"""The benchmark runs, says all it should, and shows the floors that calls and gradients must reach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLS = [
    "no-op p50",
    "no-op p99",
    "echo 1 KiB",
    "echo 64 KiB",
    "echo 1 MiB",
    "echo 16 MiB",
    "5,000 in flight",
]
NESTED = "nested x 8"
GRADIENTS = [
    "chain of 1",
    "chain of 4",
    "chain of 16",
    "fan-out of 2",
    "fan-out of 8",
    "fan-out of 32",
    "U-shape",
    "1,500 nodes, no calls",
]
PLAN = "share of its plan"
UNUSED = "fan-out of 8, 1 unused"
NO_SOCKET = {NESTED, *GRADIENTS, PLAN}
FLOORS = {"no-op p50": 2.5, "chain of 4": 1.5, "chain of 16": 1.5, "fan-out of 8": 1.5}


def compare(*options: str, json_path: Path) -> tuple[str, dict[str, Any]]:
    """What the benchmark prints, and the JSON it writes."""
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), *options, "--json", str(json_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(json_path.read_text())


def test_the_table_and_the_json_have_every_row(tmp_path: Path) -> None:
    text, data = compare("--smoke", json_path=tmp_path / "bench.json")

    works = [*CALLS, NESTED, *GRADIENTS, PLAN]
    assert [row["work"] for row in data["rows"]] == works
    assert isinstance(data["stalls"], list)
    heading, *lines = text.splitlines()[1:]
    assert heading.split() == ["work", "backhaul", "torch", "ping-pong", "torch/backhaul", "backhaul/ping-pong"]
    for row, line in zip(data["rows"], lines[: len(works)], strict=True):
        work = row["work"]
        systems = {"backhaul", "torch", "ping-pong"}
        systems -= {"ping-pong"} if work in NO_SOCKET else set()
        systems -= {"torch"} if work == PLAN else set()
        ratios = {"torch/backhaul", "backhaul/ping-pong"}
        ratios = {ratio for ratio in ratios if set(ratio.split("/")) <= systems}
        assert line.startswith(work)
        assert line.count("x (") == len(ratios)
        spreads = row["share" if work == PLAN else "seconds"]
        assert set(spreads) == systems
        assert set(row["ratios"]) == ratios
        assert row["notes"] == {}
        for spread in (*spreads.values(), *row["ratios"].values()):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert " % (" in lines[works.index(PLAN)]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The table of a quick run, and its rows by their names."""
    text, data = compare("--quick", json_path=tmp_path_factory.mktemp("bench") / "bench.json")
    return text, {row["work"]: row for row in data["rows"]}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("work", "floor"), FLOORS.items())
def test_is_so_many_times_faster_than_torch(quick: tuple[str, dict[str, Any]], work: str, floor: float) -> None:
    text, rows = quick

    assert rows[work]["ratios"]["torch/backhaul"]["median"] >= floor, text


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_table_says_where_torch_hangs(quick: tuple[str, dict[str, Any]]) -> None:
    text, rows = quick

    assert rows[UNUSED]["notes"] == {"torch": "hangs"}
    assert set(rows[UNUSED]["seconds"]) == {"backhaul"}
    assert rows[UNUSED]["ratios"] == {}
    (line,) = (line for line in text.splitlines() if line.startswith(UNUSED))
    assert " hangs " in line
