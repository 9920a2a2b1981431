"""The table of faults. The test of each row states what it expects and what it has measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from measuring import Measure

TABLE_VARIABLE = "BACKHAUL_FAULT_TABLE"
"""If this variable is set, the table is printed at the end."""

_measured = pytest.StashKey[list[str]]()
_rows = pytest.StashKey[list[tuple[str, str, str, str]]]()


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    return Measure(request.node.stash.setdefault(_measured, []))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    mark = item.get_closest_marker("fault")
    if mark is not None and (call.when == "call" or report.skipped):
        how = {"passed": "", "failed": "FAILED ", "skipped": "skipped "}[report.outcome]
        if hasattr(report, "wasxfail"):
            how = f"not yet ({report.wasxfail}) "
        row, expected = mark.args
        measured = how + "; ".join(item.stash.get(_measured, []))
        item.config.stash.setdefault(_rows, []).append((row, expected, measured, item.name))
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(_rows, [])
    if not rows or not os.environ.get(TABLE_VARIABLE):
        return
    terminalreporter.section("faults: row | expected | measured")
    for row, expected, measured, name in rows:
        terminalreporter.write_line(f"{row}")
        terminalreporter.write_line(f"    expected  {expected}")
        terminalreporter.write_line(f"    measured  {measured}")
        terminalreporter.write_line(f"    test      {name}")
