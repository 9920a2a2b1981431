"""The page on checkpoints is correct."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul import checkpoint

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


@pytest.mark.parametrize("name", checkpoint.__all__)
def test_the_page_has_every_function_with_its_arguments(name: str) -> None:
    arguments: list[str] = []
    for each in inspect.signature(getattr(checkpoint, name)).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    assert f"`checkpoint.{name}({', '.join(arguments)})`" in PAGE


def functions() -> Iterator[tuple[set[str], str]]:
    """The errors that each function of the package raises, and all its texts."""
    for path in (ROOT / "src" / "backhaul" / "checkpoint").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                inside = list(ast.walk(function))
                calls = [node.func for node in inside if isinstance(node, ast.Call)]
                made = {call.id for call in calls if isinstance(call, ast.Name) and call.id.endswith("Error")}
                texts = [node.value for node in inside if isinstance(node, ast.Constant)]
                yield made, "".join(text for text in texts if isinstance(text, str))


def test_the_page_quotes_the_errors_as_they_are_raised() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|$", PAGE.partition("\n## Errors\n")[2], flags=re.MULTILINE)
    assert len(rows) > 5
    found = list(functions())
    for message, kind in rows:
        pieces = message.split(" … ")
        assert any(kind in made and all(piece in text for piece in pieces) for made, text in found), message
