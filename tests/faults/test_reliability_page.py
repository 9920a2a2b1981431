"""docs/reliability.md names the test of each row, and every test of a fault is on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_TEST = re.compile(r"`(test_\w+)`")


def fault_tests() -> dict[str, bool]:
    """The tests by name, and whether each is marked as the test of a fault."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = any("mark.fault" in ast.unparse(each) for each in node.decorator_list)
    return found


def test_every_row_names_tests_that_exist() -> None:
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| fault"))
    ]
    assert len(rows) > 30
    for row in rows:
        named = _TEST.findall(row.rsplit("|", 2)[1])
        assert named, f"no test in the row: {row}"
        assert set(named) <= fault_tests().keys(), f"tests that do not exist: {set(named) - fault_tests().keys()}"


def test_every_test_of_a_fault_is_on_the_page() -> None:
    named = set(_TEST.findall(PAGE.read_text()))
    missing = {name for name, is_fault in fault_tests().items() if is_fault} - named
    assert not missing, f"not in docs/reliability.md: {sorted(missing)}"
