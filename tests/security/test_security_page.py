"""docs/security.md names what holds each promise, and all that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from attacks import ATTACKS

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## What holds each promise\n(.*?)^## ", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"`(\w+)`")


def promises() -> list[str]:
    """The rows of the table."""
    found = SECTION.search((ROOT / "docs" / "security.md").read_text())
    assert found is not None
    return [line for line in found[1].splitlines() if line.startswith("| ") and not line.startswith("| promise")]


def named(row: str) -> list[str]:
    return NAME.findall(row.rsplit("|", 2)[1])


def all_tests() -> set[str]:
    return {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_promise_names_tests_that_exist() -> None:
    rows = promises()
    assert len(rows) > 20
    known = all_tests() | ATTACKS.keys()
    for row in rows:
        found = named(row)
        assert any(name.startswith("test_") for name in found), f"no test in the row: {row}"
        assert set(found) <= known, f"these do not exist: {set(found) - known}"


def test_every_attack_belongs_to_a_promise() -> None:
    missing = ATTACKS.keys() - {name for row in promises() for name in named(row)}
    assert not missing, f"not in docs/security.md: {sorted(missing)}"
