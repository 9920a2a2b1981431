"""Groups of many workers: a small one of each system, and the table."""

from __future__ import annotations

import io

import pytest

from backhaul.bench import scale
from backhaul.bench.scale import STEPS, Outcome


def test_the_table_names_each_step_and_what_failed() -> None:
    seconds = dict.fromkeys(STEPS, 0.5)
    outcomes = [
        Outcome("backhaul", 64, seconds, 20 << 20, 0, processor={"shutdown": 0.75}),
        Outcome("torch", 32, {"start": 1.0}, failed="call: worker 3 died"),
    ]
    file = io.StringIO()
    scale.write(outcomes, 1.5, file)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[0].endswith("load before: 1.50")
    assert lines[1].split() == ["backhaul,", "64", "torch,", "32"]
    assert next(line for line in lines if line.startswith("all call all, the first")).split()[-3:] == ["0.50", "s", "-"]
    assert next(line for line in lines if line.startswith("processor time: shutdown")).split()[-3:] == [
        "0.75",
        "s",
        "-",
    ]
    assert next(line for line in lines if line.startswith("memory")).split()[-4:-2] == ["20", "MiB"]
    assert lines[-1] == "failed: torch, 32: call: worker 3 died"


@pytest.mark.slow
def test_small_groups(capfd: pytest.CaptureFixture[str]) -> None:
    for system in ("backhaul", "torch"):
        outcome = scale.measure(system, 3, 120.0)
        assert not outcome.failed
        assert outcome.seconds.keys() == STEPS.keys()
        assert outcome.processor.keys() == STEPS.keys()
        assert all(each > 0 for each in outcome.processor.values())
        assert outcome.memory > 1 << 20
        assert outcome.connections == (0 if system == "backhaul" else None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_four_workers() -> None:
    """All call all, each has a reference to a value of each, one backward goes over all, and they part."""
    outcome = scale.measure("backhaul", 64, 300.0)
    assert not outcome.failed
    assert outcome.seconds.keys() == STEPS.keys()
    assert outcome.connections == 0  # made when they are needed
