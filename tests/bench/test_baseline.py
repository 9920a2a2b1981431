"""Comparing a run with the ratios of an earlier one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from backhaul.bench import baseline
from backhaul.bench.baseline import BadBaseline, Loss
from backhaul.bench.command import check
from backhaul.bench.compare import FIGURES, Result
from backhaul.bench.entrants import Fault
from backhaul.bench.rows import Row
from backhaul.bench.workloads import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = Path("baseline.json")


def rows(**ratios: float) -> list[Row]:
    return [
        Row(Figure(name.replace("_", " ")), {"torch": [ratio], "backhaul": [1.0]}) for name, ratio in ratios.items()
    ]


def result(**ratios: float) -> Result:
    return Result(["backhaul", "torch"], rows(**ratios), [], 0.0, {})


def test_only_steady_figures_with_a_ratio_count() -> None:
    unsteady = Row(Figure("no-op p99", steady=False), {"torch": [2.0], "backhaul": [1.0]})
    without_torch = Row(Figure("plan"), {"backhaul": [1.0]})
    assert baseline.ratios([*rows(nested=2.0), unsteady, without_torch]) == {"nested": 2.0}


def test_the_ratio_of_a_row_over_tls_is_that_of_tls() -> None:
    tls = Row(Figure("TLS no-op p50", ours="backhaul-tls"), {"torch": [4.0], "backhaul": [1.0], "backhaul-tls": [2.0]})
    assert baseline.ratios([tls]) == {"TLS no-op p50": 2.0}


def test_a_loss_of_up_to_a_quarter_is_allowed() -> None:
    before = {"a": 4.0, "b": 4.0, "c": 4.0, "only before": 1.0}
    assert baseline.losses({"a": 3.0, "b": 2.9, "c": 9.0, "only now": 0.1}, before) == [Loss("b", 4.0, 2.9)]


def test_a_loss_says_how_much() -> None:
    assert str(Loss("chain of 4", 2.0, 1.0)) == "chain of 4: 1.00x, was 2.00x (-50%)"


def test_a_written_baseline_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baseline.write(path, rows(a=1.23456, b=2.0), {"cpus": 2})
    assert baseline.read(path) == {"a": 1.235, "b": 2.0}
    assert json.loads(path.read_text())["host"] == {"cpus": 2}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch/backhaul": []}', '{"torch/backhaul": {"a": "fast"}}'])
def test_a_file_that_is_not_a_baseline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadBaseline, match="--write-baseline"):
        baseline.read(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadBaseline, match="No such file"):
        baseline.read(tmp_path / "none.json")


def lost_in(before: dict[str, float], result: Result, again: Callable[[list[str]], Result]) -> int:
    """The exit code without a look at the floors."""
    return check(FILE, before, result, again, floors=False)


def never(names: list[str]) -> Result:
    raise AssertionError(f"nothing was lost, but measured again: {names}")


def test_a_run_that_lost_nothing_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert lost_in({"chain of 4": 2.0}, result(chain_of_4=1.9, chain_of_1=1.0), never) == 0
    output = capsys.readouterr().out
    assert "1 of 1 ratios" in output
    assert "new: chain of 1" in output


def test_a_slower_figure_is_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def again(names: list[str]) -> Result:
        asked.append(names)
        return result(**{"no-op p50": 6.0})

    before = {"chain of 4": 2.0, "no-op p50": 6.0}
    assert lost_in(before, result(**{"chain of 4": 2.0, "no-op p50": 3.0}), again) == 0
    assert asked == [["no-op"]]
    assert "2 of 2 ratios" in capsys.readouterr().out


def test_a_figure_that_is_slower_twice_fails_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"chain of 4": 2.0, "chain of 1": 2.0}
    first, second = result(chain_of_4=1.0, chain_of_1=2.0), result(chain_of_4=1.2)
    assert lost_in(before, first, lambda names: second) == 1
    output = capsys.readouterr().out
    assert "lost: chain of 4: 1.20x, was 2.00x (-40%)" in output
    assert "1 of 2 ratios" in output


def test_a_slower_figure_that_is_not_measured_again_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert lost_in({"chain of 4": 2.0}, result(chain_of_4=1.0), lambda names: result(chain_of_1=1.0)) == 1
    assert "lost: chain of 4: 1.00x" in capsys.readouterr().out


def test_a_figure_that_nobody_measures_any_more_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert lost_in({"chain of 4": 2.0, "chain of 3": 2.0}, result(chain_of_4=2.0), never) == 1
    assert "gone: chain of 3" in capsys.readouterr().out


def test_a_failure_in_the_second_look_fails() -> None:
    second = result(chain_of_4=2.0)
    second.faults.append(Fault("backhaul", "chain of 4", "hangs", "..."))
    assert lost_in({"chain of 4": 2.0}, result(chain_of_4=1.0), lambda names: second) == 1


def test_a_figure_below_its_floor_is_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def again(names: list[str]) -> Result:
        asked.append(names)
        return result(**{"no-op p50": 3.5, "no-op p99": 1.0})

    first = result(**{"no-op p50": 2.5, "chain of 4": 2.5})
    assert check(FILE, {"no-op p50": 2.5}, first, again) == 0
    assert asked == [["no-op"]]
    output = capsys.readouterr().out
    assert "measuring again what is below a floor: no-op\n" in output
    assert "\nfloor: " not in output


def test_a_figure_below_its_floor_twice_fails_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = result(**{"no-op p50": 2.5}), result(**{"no-op p50": 2.9})
    assert check(FILE, {"no-op p50": 2.5}, first, lambda names: second) == 1
    assert "\nfloor: no-op p50: BELOW 3x\n" in capsys.readouterr().out


def test_a_figure_below_its_floor_that_is_not_measured_again_fails() -> None:
    first = result(**{"no-op p50": 2.5})
    assert check(FILE, {"no-op p50": 2.5}, first, lambda names: result(chain_of_4=2.5)) == 1


def test_losses_and_missed_floors_are_measured_again_together(capsys: pytest.CaptureFixture[str]) -> None:
    first = result(**{"no-op p50": 2.5, "chain of 4": 2.5})
    good = result(**{"no-op p50": 3.0, "chain of 4": 4.0})
    assert check(FILE, {"no-op p50": 2.5, "chain of 4": 4.0}, first, lambda names: good) == 0
    said = "measuring again what lost more than 25% or is below a floor: no-op, chain of 4\n"
    assert said in capsys.readouterr().out


def test_without_torch_there_is_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Result(["backhaul"], [Row(Figure("chain of 4"), {"backhaul": [1.0]})], [], 0.0, {"torch": "not there"})
    assert lost_in({"chain of 4": 2.0}, alone, never) == 1
    assert "no ratio to torch" in capsys.readouterr().err


def test_the_committed_baseline_is_valid() -> None:
    before = baseline.read(ROOT / "bench-baseline.json")
    assert baseline.gone(before, FIGURES) == []
    assert {"no-op p50", "echo 64 MiB", "chain of 4"} <= set(before)
