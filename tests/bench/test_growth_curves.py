"""Growth: what is flat and what grows, and a short real run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from backhaul.bench import curves, growth
from backhaul.bench.curves import GROUPS, SMOKE, Curve, Sizes


def curve(*costs: float, what: str = "call") -> Curve:
    made = Curve("peers", "processes", what)
    for place, cost in enumerate(costs):
        for off in (0.9, 1.0, 1.3):
            made.add(2**place, cost * off)
    return made


def test_the_cost_at_a_size_is_the_median_of_its_rounds() -> None:
    assert curve(3.0, 5.0).medians == {1: 3.0, 2: 5.0}


@pytest.mark.parametrize(
    ("costs", "factor", "to_lowest", "verdict"),
    [
        ((1.0, 1.0, 1.0, 1.0), 1.0, 1.0, "flat"),
        ((1.0, 1.2, 1.2, 1.4), 1.4 / 1.1, 1.4, "flat"),
        ((1.0, 1.4, 1.9, 1.7), 1.7 / 1.2, 1.7, "unclear"),  # too near to the limit to be called flat
        ((9.0, 2.0, 1.0, 3.2), 3.2 / 5.5, 3.2, "unclear"),  # high costs at small sizes hide the growth
        ((1.0, 2.0, 4.0, 8.0), 8.0 / 1.5, 8.0, "GROWS"),
        ((4.0, 2.0, 1.0), 0.25, 0.5, "flat"),
        ((1.0,), 1.0, 1.0, "flat"),
    ],
)
def test_a_curve_is_judged_by_the_lower_half_of_its_sizes_and_by_the_lowest(
    costs: tuple[float, ...], factor: float, to_lowest: float, verdict: str
) -> None:
    assert growth.factor(curve(*costs)) == pytest.approx(factor)
    assert growth.factor_to_lowest(curve(*costs)) == pytest.approx(to_lowest)
    assert growth.verdict(curve(*costs)) == verdict


def test_the_table_has_a_part_for_each_axis_and_a_verdict_for_each_row() -> None:
    memory = Curve("contexts", "contexts alive", "one more: memory", "bytes", {1000: [2048.0], 2000: [2048.0]})
    file = io.StringIO()
    growth.write([curve(40e-6, 50e-6), curve(2e-3, 4e-3, what="slow call"), memory], 0.5, file)
    lines = [line.split() for line in file.getvalue().splitlines() if line.strip()]

    assert lines[0][-3:] == ["load", "before:", "0.50"]
    assert lines[1] == ["processes", "1", "2", "factor", "to", "lowest"]
    assert lines[2] == ["call", "40.0", "us", "50.0", "us", "1.25x", "1.25x", "flat"]
    assert lines[3] == ["slow", "call", "2.00", "ms", "4.00", "ms", "2.00x", "2.00x", "GROWS"]
    assert lines[4] == ["contexts", "alive", "1,000", "2,000", "factor", "to", "lowest"]
    assert lines[5] == ["one", "more:", "memory", "2.00", "KiB", "2.00", "KiB", "1.00x", "1.00x", "flat"]


def test_a_curve_of_one_size_has_no_verdict() -> None:
    file = io.StringIO()
    growth.write([curve(1e-6)], 0.0, file)
    assert file.getvalue().split()[-3:] == ["call", "1.00", "us"]


@pytest.mark.parametrize(
    ("first", "second", "code"), [((1.0, 1.0), None, 0), ((1.0, 9.0), (1.0, 1.0), 0), ((1.0, 9.0), (1.0, 8.0), 1)]
)
def test_check_measures_what_grows_once_more(
    first: tuple[float, ...],
    second: tuple[float, ...] | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[list[str]] = []

    def measure(sizes: Sizes, groups: list[str], say: object) -> list[Curve]:
        asked.append(sorted(groups))
        return [curve(*(first if len(asked) == 1 else second or ()))] if groups else []

    monkeypatch.setattr(curves, "measure", measure)

    assert growth.main(["--smoke", "--check"]) == code
    assert asked == [sorted(GROUPS), ["peers"] if second else []]
    assert ("GROWS" in capsys.readouterr().out) == bool(code)


def test_without_check_growth_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "measure", lambda *_: [curve(1.0, 9.0)])
    assert growth.main(["--smoke"]) == 0


def test_a_group_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        growth.main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_the_plot_is_drawn_from_the_data(tmp_path: Path) -> None:
    data = json.loads(json.dumps(growth.as_json([curve(1e-6, 2e-6), curve(1e-6, 1e-6)], 0.0)))

    files = growth.draw(data, tmp_path / "deep" / "growth.svg")

    assert files == [tmp_path / "deep" / "growth.png", tmp_path / "deep" / "growth.svg"]
    assert all(file.stat().st_size > 1000 for file in files)
    assert growth.paths(tmp_path)[0] == tmp_path / "growth.png"


@pytest.mark.slow
def test_a_short_run_has_every_curve(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    command = [sys.executable, "-m", "backhaul", "bench", "--growth", "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(path.read_text())
    sizes = {
        "processes": SMOKE.peers,
        "contexts alive": SMOKE.contexts,
        "references alive": SMOKE.references,
        "messages in one context": SMOKE.messages,
        "passes in one context before": SMOKE.passes,
        "nodes of a graph": SMOKE.nodes,
    }
    assert list(dict.fromkeys(curve["axis"] for curve in data["curves"])) == list(sizes)
    assert len(data["curves"]) == 4 + 1 + 3 + 6 + 1 + 3
    for each in data["curves"]:
        assert [point["size"] for point in each["points"]] == list(sizes[each["axis"]])
        assert all(cost > 0 for point in each["points"] for cost in point["rounds"]), each
        assert each["what"] in done.stdout
