"""``backhaul bench`` runs and says all it should. The floors are judged by ``make bench-check``, in rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backhaul.__main__ import main
from backhaul.bench.compare import FIGURES, NAMES, Result
from backhaul.bench.entrants import Fault
from backhaul.bench.floors import FLOORS
from backhaul.bench.launched import CLUSTER, RUN
from backhaul.bench.rows import Row
from backhaul.bench.workloads import WORKLOADS, Figure

HERE = Path(__file__).resolve().parent
PLAN = "share of its plan"
UNUSED = "fan-out of 8, 1 unused"
LAUNCHED = [f"{launcher}, idle 0.2 s{more}" for launcher in (CLUSTER, RUN) for more in ("", ", wake-ups")]
WITH_SOCKET = {"no-op p50", "no-op p99", "5,000 in flight", "two clients"}  # and the echoes
HEADINGS = ["work", "backhaul", "torch", "ping-pong", "memcpy"]
RATIOS = ["torch/backhaul", "backhaul/ping-pong", "backhaul/memcpy"]
TLS_HEADINGS = ["work", "backhaul-tls", "backhaul", "torch", "ssl", "tcp"]
TLS_RATIOS = ["torch/backhaul-tls", "ssl/backhaul-tls", "backhaul-tls/tcp", "backhaul-tls/backhaul"]

# One of each kind: single calls, two clients at once, gradients, Backhaul alone. Not TLS, which needs six more
# processes.
SOME = {
    "no-op": ["no-op p50", "no-op p99"],
    "echo 1 KiB": ["echo 1 KiB"],
    "two clients": ["two clients"],
    "chain of 1": ["chain of 1"],
    "plan": [PLAN],
}

WITHOUT_MATPLOTLIB = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
from backhaul.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def bench(
    *options: str | Path, code: int = 0, program: tuple[str, ...] = ("-m", "backhaul"), **environment: str
) -> str:
    """The output of ``backhaul bench``."""
    command = [sys.executable, *program, "bench", *map(str, options)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def systems_of(work: str) -> set[str]:
    if work.startswith("TLS"):
        return set(TLS_HEADINGS[1:])
    systems = {"backhaul"}
    systems |= {"torch"} if work not in (PLAN, *LAUNCHED) else set()
    systems |= {"ping-pong"} if work in WITH_SOCKET or work.startswith("echo") else set()
    systems |= {"memcpy"} if work.startswith("echo") else set()
    return systems


def check_rows(text: str, rows: list[dict[str, Any]], works: list[str]) -> None:
    """Check that the tables and the JSON have these rows, with the right contents."""
    assert [row["work"] for row in rows] == works
    over_tls = [row for row in rows if row["work"].startswith("TLS")]
    rows = [row for row in rows if row not in over_tls]
    lines = text.splitlines()[1:]
    check_table(lines, [*HEADINGS, *RATIOS, "met"], rows, RATIOS)
    if over_tls:
        check_table(lines[len(rows) + 1 :], [*TLS_HEADINGS, *TLS_RATIOS, "met"], over_tls, TLS_RATIOS)


def check_table(lines: list[str], headings: list[str], rows: list[dict[str, Any]], possible: list[str]) -> None:
    assert lines[0].split() == headings
    for row, line in zip(rows, lines[1 : len(rows) + 1], strict=True):
        work = row["work"]
        ratios = {ratio for ratio in possible if set(ratio.split("/")) <= systems_of(work)}
        assert line.startswith(work)
        assert line.count("x (") == len(ratios)
        assert set(row["systems"]) == systems_of(work)
        assert set(row["ratios"]) == ratios
        assert row["notes"] == {}
        for spread in (*row["systems"].values(), *row["ratios"].values()):
            assert 0 <= spread["low"] <= spread["median"] <= spread["high"]
            assert spread["median"] > 0 or row["unit"] in ("CPU seconds", "wake-ups")  # idle workers may do nothing
        assert (row["met"] is None) is (work not in FLOORS)


def baseline(path: Path, **ratios: float) -> Path:
    """A file for ``--check``."""
    path.write_text(json.dumps({"torch/backhaul": ratios}))
    return path


def test_a_table_json_a_plot_and_two_baselines(tmp_path: Path) -> None:
    only = [part for name in SOME for part in ("--only", name)]
    results = ["--json", tmp_path / "new" / "bench.json", "--plot", tmp_path / "plots"]
    before = baseline(tmp_path / "before.json", **{"no-op p50": 0.01, "chain of 1": 1000.0, "chain of 4": 1000.0})
    text = bench("--smoke", *only, *results, "--check", before, "--write-baseline", tmp_path / "now.json", code=1)

    data = json.loads((tmp_path / "new" / "bench.json").read_text())
    check_rows(text, data["rows"], [work for works in SOME.values() for work in works])
    assert isinstance(data["stalls"], list)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"bench.png", "bench.svg"}
    assert "measuring again what lost more than 25%: chain of 1\n" in text
    assert text.count("rounds: 1") == 2
    assert [line[:18] for line in text.splitlines() if line.startswith("lost: ")] == ["lost: chain of 1: "]
    assert "1 of 2 ratios are no more than 25% below" in text  # the chain of 4 was not measured
    now = json.loads((tmp_path / "now.json").read_text())
    assert set(now["torch/backhaul"]) == {"no-op p50", "echo 1 KiB", "two clients", "chain of 1"}


def test_without_matplotlib_and_without_torch_rpc(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(WITHOUT_MATPLOTLIB)
    text = bench(
        *("--smoke", "--only", "parameter server", "--plot", tmp_path),
        program=(str(tmp_path / "bench.py"),),
        PYTHONPATH=str(HERE / "dropin" / "torch_without_rpc"),
        TORCH_WITHOUT_RPC="built",
    )

    assert "left out: torch: this build of torch has no torch.distributed.rpc" in text
    assert "no plot: it needs matplotlib; pip install 'backhaul[bench]'" in text
    assert "parameter server" in text
    assert not list(tmp_path.glob("*.png"))


def test_several_servers_and_one_processor(tmp_path: Path) -> None:
    """All work on several servers, without torch: its processes would take as long again."""
    works = [name for name, workload in WORKLOADS.items() if workload.is_wide]
    only = [part for name in works for part in ("--only", name)]
    text = bench(
        *("--smoke", "--pin", *only, "--json", tmp_path / "bench.json"),
        PYTHONPATH=str(HERE / "dropin" / "torch_without_rpc"),
        TORCH_WITHOUT_RPC="built",
    )

    assert "on one processor" in text
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["work"] for row in rows] == [figure.name for name in works for figure in WORKLOADS[name].figures]
    assert len(rows) == 9
    for row in rows:
        assert row["notes"] == {}
        assert row["systems"]["backhaul"]["median"] > 0


@pytest.mark.parametrize(("system", "code"), [("backhaul", 1), ("backhaul-tls", 1), ("torch", 0)])
def test_the_exit_code_says_whether_something_went_wrong_for_backhaul(
    system: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(Figure("nested x 8"), {}, {system: "dies"})
    result = Result(["backhaul", "torch"], [row], [], 0.0, {}, [Fault(system, "nested", "dies", "it died")])
    monkeypatch.setattr("backhaul.bench.compare.run", lambda plan: result)

    assert main(["bench"]) == code
    assert "rounds: 0" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *options: str | Path) -> str:
    """Errors in the command line are reported before anything is measured."""
    with pytest.raises(SystemExit) as ending:
        main(["bench", *map(str, options)])
    assert ending.value.code == 2
    return capsys.readouterr().err


def test_an_unknown_name_is_refused_and_the_known_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--only", "no-op", "--only", "chain of 5")

    assert "there is no work called 'chain of 5'" in said
    assert '"chain of 4"' in said


def test_a_wrong_baseline_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refusal(capsys, "--check", tmp_path / "none.json")


def test_a_place_that_cannot_be_written_to_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write to" in refusal(capsys, "--json", tmp_path / "file" / "bench.json")


def test_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(NAMES)


@pytest.mark.parametrize("other", ["explain", "growth"])
def test_the_other_arguments_go_to_the_other_measurement(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def main_of_the_other(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    monkeypatch.setattr(f"backhaul.bench.{other}.main", main_of_the_other)

    assert main(["bench", "--quick", "--only", "a", "--json", "b", f"--{other}", "--plot", "c", "--any"]) == 3
    assert given == [["--quick", "--only", "a", "--json", "b", "--plot", "c", "--any"]]


def test_a_baseline_is_refused_for_other_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--check is for the comparison" in refusal(capsys, "--check", "a", "--growth")


def test_pinning_is_refused_for_other_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--pin is for the comparison" in refusal(capsys, "--pin", "--growth")


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_table_and_the_json_have_every_row(tmp_path: Path) -> None:
    before = baseline(tmp_path / "before.json", **{"no-op p50": 0.01, "memory of an idle worker": 0.01})
    text = bench("--smoke", "--json", tmp_path / "bench.json", "--check", before)

    assert "2 of 2 ratios" in text
    works = [work for work in FIGURES if work not in ("echo 256 MiB", UNUSED)]
    works.insert(works.index("memory of an idle worker"), "3 idle workers, 0.2 s")
    works += LAUNCHED
    check_rows(text, json.loads((tmp_path / "bench.json").read_text())["rows"], works)


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_table_says_where_torch_hangs(tmp_path: Path) -> None:
    text = bench("--quick", "--only", UNUSED, "--json", tmp_path / "bench.json")
    rows = {row["work"]: row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}

    assert rows[UNUSED]["notes"] == {"torch": "hangs"}
    assert set(rows[UNUSED]["systems"]) == {"backhaul"}
    assert rows[UNUSED]["ratios"] == {}
    (line,) = (line for line in text.splitlines() if line.startswith(UNUSED))
    assert " hangs " in line
