"""The benchmark runs, says all it should, and shows the floor that a no-op call must reach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKS = [
    "no-op p50",
    "no-op p99",
    "echo 1 KiB",
    "echo 64 KiB",
    "echo 1 MiB",
    "echo 16 MiB",
    "5,000 in flight",
    "nested x 8",
]
BARE = {"nested x 8"}  # a bare socket cannot do these


def compare(*options: str, json_path: Path) -> tuple[str, dict[str, Any]]:
    """What the benchmark prints, and the JSON it writes."""
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), *options, "--json", str(json_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(json_path.read_text())


def test_the_table_and_the_json_have_every_row(tmp_path: Path) -> None:
    text, data = compare("--smoke", json_path=tmp_path / "bench.json")

    assert [row["work"] for row in data["rows"]] == WORKS
    assert isinstance(data["stalls"], list)
    heading, *lines = text.splitlines()[1:]
    assert heading.split() == ["work", "backhaul", "torch", "ping-pong", "torch/backhaul", "backhaul/ping-pong"]
    for work, line in zip(WORKS, lines[: len(WORKS)], strict=True):
        assert line.startswith(work)
        assert line.count("x (") == (1 if work in BARE else 2)
    for row in data["rows"]:
        bare = row["work"] not in BARE
        assert set(row["seconds"]) == {"backhaul", "torch"} | ({"ping-pong"} if bare else set())
        assert set(row["ratios"]) == {"torch/backhaul"} | ({"backhaul/ping-pong"} if bare else set())
        for spread in (*row["seconds"].values(), *row["ratios"].values()):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]


@pytest.mark.slow
def test_a_noop_call_is_at_least_two_and_a_half_times_faster_than_torchs(tmp_path: Path) -> None:
    text, data = compare("--quick", json_path=tmp_path / "bench.json")

    ratio = data["rows"][WORKS.index("no-op p50")]["ratios"]["torch/backhaul"]["median"]
    assert ratio >= 2.5, text
