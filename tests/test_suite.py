"""`make test` names missing modules and files, `make quick` leaves out what it should, and no test file is too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from longest import LONG, LONGEST, starts_processes
from suite import PURE, PURE_TESTS, UNTRACED, missing

ROOT = Path(__file__).parent.parent
MOST_LINES = 700
# Folders whose tests need processes: `make quick` runs none of them.
PROCESSES_ONLY = {"doctor", "dropin"}


def test_every_module_and_file_that_the_suite_names_exists() -> None:
    assert missing(PURE, (*PURE_TESTS, *UNTRACED)) == []
    named = {*LONGEST, *LONG}
    assert missing((), [f"tests/{name}" for name in named]) == []


def test_a_missing_module_or_file_is_reported() -> None:
    found = missing(["wire", "ids", "wire.nothing"], ["tests/wire", "tests/agent/test_nothing.py"])
    assert found == ["backhaul.wire.nothing", "tests/agent/test_nothing.py"]


@pytest.mark.parametrize(
    ("source", "starts"),
    [
        ("import subprocess", True),
        ("def test() -> None:\n    import subprocess", True),
        ("from multiprocessing import get_context", True),
        ("from backhaul import cluster", True),
        ("from backhaul import rpc, cluster as start", True),
        ("from backhaul.cluster import Cluster", True),
        ("from crew import Crew", True),
        ("from crew import (\n    Crew,\n)", True),
        ("from attacks import sweep", True),  # it imports intruder, and that imports crew
        ("from backhaul import rpc", False),
        ("from backhaul.testing import InProcessCluster as cluster", False),
        ("from awaiting import eventually", False),
    ],
)
def test_files_that_start_processes_are_known_by_their_imports(source: str, starts: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_something.py"
    file.write_text(source)
    assert starts_processes(file) is starts


def test_each_folder_has_tests_that_make_quick_runs() -> None:
    tests = ROOT / "tests"
    quick = {
        file.relative_to(tests).parts[0]
        for file in tests.glob("*/test_*.py")
        if not starts_processes(file) and file.relative_to(tests).as_posix() not in LONG
    }
    layers = {path.parent.name for path in (ROOT / "src" / "backhaul").glob("*/__init__.py")}
    assert {folder.name for folder in tests.iterdir() if folder.name in layers} - quick == PROCESSES_ONLY


def test_no_file_of_tests_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert len(lengths) > 300
    assert {str(path): lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
