"""`make test` names missing modules and files, and no test file is too long."""

from __future__ import annotations

from pathlib import Path

from longest import LONG, LONGEST
from suite import PURE, PURE_TESTS, UNTRACED, missing

ROOT = Path(__file__).parent.parent
MOST_LINES = 700


def test_every_module_and_file_that_the_suite_names_exists() -> None:
    assert missing(PURE, (*PURE_TESTS, *UNTRACED)) == []
    named = {*LONGEST, *LONG}
    assert missing((), [f"tests/{name}" for name in named]) == []


def test_a_missing_module_or_file_is_reported() -> None:
    found = missing(["wire", "ids", "wire.nothing"], ["tests/wire", "tests/agent/test_nothing.py"])
    assert found == ["backhaul.wire.nothing", "tests/agent/test_nothing.py"]


def test_no_file_of_tests_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert len(lengths) > 300
    assert {str(path): lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
