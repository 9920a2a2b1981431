"""The runner of `make matrix`: how it reads reports and failures. Pure except for one run of a small suite."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load(name: str) -> Any:
    """A script of the runner, under a unique name, because other suites have a `run` too."""
    spec = importlib.util.spec_from_file_location(f"matrix_{name}", ROOT / "matrix" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load("run")
environments = sys.modules["environments"]
Pair: Any = environments.Pair
PAIR = Pair("3.12", "2.11.0")

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="it broke&#10;here">...</failure></testcase>
<testcase classname="tests.a" name="three"><skipped message="no root"/></testcase>
<testcase classname="" name="tests.b"><error message="collection failure">...</error></testcase>
</testsuite></testsuites>"""


def test_a_pair_as_users_write_it() -> None:
    assert Pair.parse("3.12:2.11.0") == PAIR
    assert PAIR.folder == ROOT / ".venv-matrix/py3.12-torch2.11.0"
    for wrong in ("3.12", "2.11.0:3.12", "3.12:2.11", "3.12:latest"):
        with pytest.raises(ValueError, match=r"write it as 3\.12:2\.11\.0"):
            Pair.parse(wrong)


def test_a_report_is_counted() -> None:
    """A file that cannot be collected counts as a failure."""
    outcome = run.read(PAIR, REPORT, 1.0)
    assert outcome.counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert outcome.failures == ["tests.a.two: it broke", ".tests.b: collection failure"]
    assert outcome.skips == ["no root"]
    assert not outcome.passed
    assert run.row(outcome) == "| 3.12 | 2.11.0 | 1 | 2 | 1 |"


def test_the_table_names_what_failed_was_skipped_or_not_run() -> None:
    missing = run.Outcome(Pair("3.13", "2.6.0"), "no python3.13 here")
    text = run.table([run.read(PAIR, REPORT, 1.0), missing], ["pure"])
    assert "| 3.13 | 2.6.0 | not run: no python3.13 here | | |" in text
    assert "Python 3.12, torch 2.11.0, failed:\n  tests.a.two: it broke" in text
    assert "Python 3.12, torch 2.11.0, skipped:\n  1 no root" in text


def test_a_matrix_is_good_if_pairs_ran_and_none_failed() -> None:
    good = run.Outcome(PAIR, counts={"passed": 3, "skipped": 1})
    missing = run.Outcome(PAIR, "no interpreter")
    assert run.is_good([good, missing])
    assert not run.is_good([missing])
    assert not run.is_good([good, run.read(PAIR, REPORT, 1.0)])
    assert not run.is_good([run.Outcome(PAIR, counts={"skipped": 3})])


def test_the_sets_name_tests_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tests/test_matrix.py" in run.files(run.SETS)
    assert run.files(["all"]) == ["tests"]
    monkeypatch.setitem(run.SETS, "pure", ["tests/test_nothing_like_it.py"])
    with pytest.raises(ValueError, match="test_nothing_like_it"):
        run.files(["pure"])


def test_an_interpreter_is_found_or_missed() -> None:
    own = "{}.{}".format(*sys.version_info[:2])
    assert environments.interpreter(own)
    with pytest.raises(environments.NotAvailable, match=r"no python3\.99"):
        environments.interpreter("3.99")


def test_a_pair_without_an_environment_is_shown_as_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--pairs", "3.99:2.11.0", "--no-install"]) == 1
    assert (
        "| 3.99 | 2.11.0 | not run: there is no environment, and --no-install was given | | |"
        in capsys.readouterr().out
    )
    assert run.main(["--pairs", "3.99:2.11.0"]) == 1
    assert "not run: no python3.99 on the PATH" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_of_one_pair_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    small = tmp_path / "test_small.py"
    small.write_text("def test_good(): pass\ndef test_bad(): assert False, 'indeed'\n")
    arguments = ["-c", "/dev/null", "-p", "no:cacheprovider", "-o", "markers=slow", str(small)]
    outcome = run.run(PAIR, Path(sys.executable), arguments)
    assert outcome.counts == {"passed": 1, "failed": 1}
    assert "indeed" in outcome.failures[0]
    outcome = run.run(PAIR, Path(sys.executable), ["--no-such-option"])
    assert "pytest ended with 4" in outcome.why


def _minor(pair: Any) -> int:
    return int(pair.python.split(".")[1])


@pytest.mark.parametrize("page", ["docs/versions.md", "pyproject.toml"])
def test_the_documented_versions_are_those_of_the_runner(page: str) -> None:
    """The table of docs/versions.md has the pairs of the runner. The ranges of pyproject.toml begin with them."""
    pairs = [Pair.parse(pair) for pair in run.PAIRS]
    text = (ROOT / page).read_text()
    if page == "docs/versions.md":
        assert re.findall(r"^\| (3\.\d+) \| ([\d.]+) \|", text, re.M) == pairs
    else:
        assert re.findall(r"Python :: (3\.\d+)", text) == sorted({pair.python for pair in pairs})
        major, minor = min(tuple(map(int, pair.torch.split(".")[:2])) for pair in pairs)
        assert f'"torch>={major}.{minor}"' in text
        assert f'requires-python = ">=3.{min(map(_minor, pairs))}"' in text
