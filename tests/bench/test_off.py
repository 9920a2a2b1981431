"""The comparison with nothing switched on: how rounds become an estimate, and what that says about the limit."""

from __future__ import annotations

import os
import random
import time

import pytest

from backhaul.bench import bare, off
from backhaul.bench.off import Estimate, Turn, estimate, order, ratio


def rounds_around(middle: float, count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(middle, 0.02) for _ in range(count)]


def test_an_interval_contains_its_estimate_and_the_true_value() -> None:
    found = estimate([rounds_around(1.01, 30, seed) for seed in range(8)])
    assert found.low < found.point < found.high
    assert found.low < 0.01 < found.high
    assert found.verdict == "under 2%"


def test_pairs_that_differ_make_the_interval_wide() -> None:
    alike = estimate([rounds_around(1.01, 30, seed) for seed in range(8)])
    apart = estimate([rounds_around(1.01 + (seed % 2) * 0.04, 30, seed) for seed in range(8)])
    assert apart.high - apart.low > 2 * (alike.high - alike.low)


def test_one_round_out_of_line_does_not_count() -> None:
    quiet = [1.01] * 30
    assert estimate([quiet, [*quiet[:-1], 3.0]]) == estimate([quiet, quiet])


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Estimate(0.01, 0.005, 0.015), "under 2%"),
        (Estimate(0.015, 0.005, 0.025), "undecided"),
        (Estimate(0.03, 0.025, 0.035), "over 2%"),
    ],
)
def test_the_verdict_is_that_of_the_whole_interval(found: Estimate, verdict: str) -> None:
    assert found.verdict == verdict


def test_a_steady_drift_cancels_within_a_round() -> None:
    for number in range(2):
        turns = [(how, Turn(1.0 + 0.1 * place, 0.0)) for place, how in enumerate(order(number))]
        assert ratio(turns, "wall") == pytest.approx(1.0)


def test_the_variants_take_turns_in_going_first() -> None:
    assert order(0)[0] != order(1)[0]


def test_the_clock_of_a_process_is_that_of_its_processor_time() -> None:
    before = time.process_time()
    shown = time.clock_gettime(bare.processor_clock(os.getpid()))
    assert before <= shown <= time.process_time()


@pytest.mark.long
def test_two_fresh_groups_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    off.measure(pairs=1, rounds=1)
    shown = " ".join(capsys.readouterr().out.split())
    assert "pairs of groups: 1; rounds of each: 1" in shown
    assert shown.count("undecided") + shown.count("under 2%") + shown.count("over 2%") == 4
