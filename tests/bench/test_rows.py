"""Numbers of rounds: spreads and ratios, and how they compare with the floors."""

from __future__ import annotations

import pytest

from backhaul.bench.compare import FIGURES
from backhaul.bench.floors import FLOORS, floor_of, standing
from backhaul.bench.footprint import idle_figure, launched_figures
from backhaul.bench.rows import RATIOS, Row, Spread
from backhaul.bench.workloads import WORKLOADS, Figure


def row(name: str, ours: str = "backhaul", /, **rounds: list[float]) -> Row:
    return Row(Figure(name, ours=ours), {system.replace("_", "-"): numbers for system, numbers in rounds.items()})


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    assert row("any", torch=[2.0, 40.0, 6.0], backhaul=[1.0, 10.0, 2.0]).ratio("torch", "backhaul") == (3.0, 2.5, 3.5)


def test_no_ratio_to_a_system_without_numbers() -> None:
    assert row("any", torch=[], backhaul=[1.0]).ratio("torch", "backhaul") is None
    assert row("any", backhaul=[1.0]).ratio("torch", "backhaul") is None


def test_rounds_of_zero_have_no_ratio() -> None:
    assert row("any", torch=[1.0], backhaul=[0.0]).ratio("torch", "backhaul") is None
    assert row("any", torch=[1.0, 4.0], backhaul=[0.0, 2.0]).ratio("torch", "backhaul") == (2.0, 2.0, 2.0)


def test_a_system_that_failed_keeps_its_completed_rounds() -> None:
    assert row("any", torch=[2.0], backhaul=[1.0, 10.0, 2.0]).ratio("torch", "backhaul") == (2.0, 2.0, 2.0)


def test_a_note_stands_in_place_of_numbers() -> None:
    found = row("any", torch=[2.0], backhaul=[1.0])
    found.give_up("torch", "hangs")
    assert found.spread("torch") is None
    assert found.notes == {"torch": "hangs"}


@pytest.mark.parametrize(
    ("torch", "ping_pong", "met", "text"),
    [
        (2.9, 1.0, "nothing", "BELOW 3x"),
        (3.0, 1.0, "floor", "floor 3x"),
        (5.0, 1.0, "aim", "aim 5x"),
        (5.0, 0.3, "floor", "floor 3x"),  # too far from a bare socket for the aim
    ],
)
def test_a_row_is_judged_against_its_floor_and_aim(torch: float, ping_pong: float, met: str, text: str) -> None:
    assert standing(row("no-op p50", torch=[torch], backhaul=[1.0], ping_pong=[ping_pong])) == (met, text)


@pytest.mark.parametrize(
    ("torch", "met", "text"), [(1.9, "nothing", "BELOW 2x"), (2.0, "floor", "floor 2x"), (3.0, "aim", "aim 3x")]
)
def test_a_small_call_over_tls_is_held_against_torch_without(torch: float, met: str, text: str) -> None:
    found = row("TLS no-op p50", "backhaul-tls", torch=[torch], backhaul=[0.1], backhaul_tls=[1.0], ssl=[0.2])
    assert standing(found) == (met, text)


@pytest.mark.parametrize(
    ("ssl", "met", "text"), [(0.59, "nothing", "BELOW 0.6x"), (0.6, "floor", "floor 0.6x"), (0.9, "aim", "aim 0.9x")]
)
def test_tensors_over_tls_are_held_against_bare_ssl(ssl: float, met: str, text: str) -> None:
    found = row("TLS echo 64 MiB", "backhaul-tls", torch=[0.1], backhaul=[0.1], backhaul_tls=[1.0], ssl=[ssl])
    assert standing(found) == (met, text)


@pytest.mark.parametrize(
    ("seconds", "met", "text"),
    [(0.2, "nothing", "ABOVE 0.1"), (0.1, "floor", "floor <0.1"), (0.01, "aim", "aim <0.02")],
)
def test_idle_workers_have_a_ceiling(seconds: float, met: str, text: str) -> None:
    assert standing(Row(idle_figure(10.0), {"backhaul": [seconds]})) == (met, text)


def test_three_seconds_are_not_held_against_the_ceiling_of_ten() -> None:
    assert standing(Row(idle_figure(3.0), {"backhaul": [5.0]})) is None


def test_a_row_without_a_floor_or_torch_is_not_judged() -> None:
    assert standing(row("nested x 8", torch=[1.0], backhaul=[1.0])) is None
    assert standing(row("no-op p50", backhaul=[1.0])) is None


@pytest.mark.parametrize(("wake_ups", "met", "text"), [(51, "nothing", "ABOVE 50"), (50, "aim", "aim <50")])
@pytest.mark.parametrize("launcher", ["cluster(2)", "backhaul run -n 3"])
def test_workers_that_a_launcher_left_idle_have_ceilings(launcher: str, wake_ups: int, met: str, text: str) -> None:
    cpu, woken = launched_figures(launcher, 10.0)
    assert standing(Row(cpu, {"backhaul": [0.021]})) == ("nothing", "ABOVE 0.02")
    assert standing(Row(woken, {"backhaul": [wake_ups]})) == (met, text)


def test_on_one_processor_nothing_may_be_slower_than_torch() -> None:
    assert standing(row("no-op p50", torch=[1.0], backhaul=[1.0]), pinned=True) == ("aim", "aim 1x")
    assert standing(row("no-op p50", torch=[0.99], backhaul=[1.0]), pinned=True) == ("nothing", "BELOW 1x")
    assert standing(row("nested x 8", torch=[0.99], backhaul=[1.0]), pinned=True) == ("nothing", "BELOW 1x")


def test_on_one_processor_tensors_over_tls_are_still_held_against_bare_ssl() -> None:
    large = Figure("TLS echo 64 MiB", ours="backhaul-tls")
    assert floor_of(large, pinned=True) == FLOORS[large.name]
    assert floor_of(Figure("TLS echo 1 MiB", ours="backhaul-tls"), pinned=True) is None


def test_every_floor_belongs_to_a_figure() -> None:
    assert set(FLOORS) <= set(FIGURES)
    assert all(floor.at_least < floor.aim for floor in FLOORS.values())


def test_every_floor_is_against_a_system_that_does_the_same_work() -> None:
    workloads = {figure.name: (workload, figure) for workload in WORKLOADS.values() for figure in workload.figures}
    for name, floor in FLOORS.items():
        if name not in workloads:  # a figure of the footprint, which also measures torch
            continue
        workload, figure = workloads[name]
        assert {floor.against, figure.ours} <= set(workload.systems)
        assert (floor.against, figure.ours) in RATIOS[figure.ours]


def test_the_speed_of_a_row_is_that_of_its_own_transport() -> None:
    assert row("any", torch=[4.0], backhaul=[1.0], backhaul_tls=[2.0]).speed == (4.0, 4.0, 4.0)
    assert row("any", "backhaul-tls", torch=[4.0], backhaul=[1.0], backhaul_tls=[2.0]).speed == (2.0, 2.0, 2.0)
