"""Where the time of a worker went, from handwritten pieces. Times are in milliseconds."""

from __future__ import annotations

import pytest

from backhaul.profiler.replay import Piece
from backhaul.profiler.shares import COLUMNS, Interpreter, shares

MS = 1_000_000
FREE = Interpreter([(at * MS, 0) for at in range(0, 100, 5)])
HELD = Interpreter([(at * MS, 2 * MS) for at in range(0, 100, 5)])


def piece(begin: int, end: int, state: str, computed: float | None = None) -> Piece:
    taken = end - begin if computed is None else computed
    return Piece(begin * MS, end * MS, state, "", round(taken * MS), None)


def parts(*threads: list[Piece], interpreter: Interpreter = FREE) -> dict[str, float]:
    found = shares("worker", threads, interpreter, 0, 100 * MS)
    assert sum(found.seconds.values()) == pytest.approx(0.1)
    assert tuple(found.seconds) == COLUMNS
    return {state: round(seconds * 1e3, 6) for state, seconds in found.seconds.items() if seconds > 1e-9}


def test_a_worker_without_threads_is_idle() -> None:
    assert parts() == {"idle": 100}


def test_one_thread() -> None:
    thread = [piece(0, 20, "compute"), piece(20, 30, "wire"), piece(30, 70, "replies"), piece(70, 75, "gates")]
    assert parts(thread) == {"compute": 20, "wire": 10, "replies": 40, "gates": 5, "idle": 25}


def test_work_goes_before_waiting_and_gates_before_replies() -> None:
    assert parts([piece(0, 100, "replies")], [piece(10, 40, "compute")], [piece(30, 60, "gates")]) == {
        "compute": 30,
        "gates": 20,
        "replies": 50,
    }


def test_threads_that_work_share_the_moment() -> None:
    assert parts([piece(0, 100, "compute")], [piece(0, 50, "wire")]) == {"compute": 75, "wire": 25}


def test_only_time_within_the_window_counts() -> None:
    assert parts([piece(-50, 10, "compute"), piece(90, 200, "wire")]) == {"compute": 10, "wire": 10, "idle": 80}


def test_time_outside_of_the_window_does_not_count() -> None:
    for begin, end in ((-50, -10), (-50, 0), (100, 150), (120, 150), (40, 40)):
        assert parts([piece(begin, end, "compute"), piece(20, 30, "gates")]) == {"gates": 10, "idle": 90}


def test_a_thread_that_does_not_get_the_interpreter_waits_for_it() -> None:
    four = [[piece(0, 100, "compute", computed=25)] for _ in range(4)]
    assert parts(*four, interpreter=HELD) == {"compute": 25, "interpreter": 75}


def test_a_function_that_sleeps_computes() -> None:
    assert parts([piece(0, 100, "compute", computed=0)], interpreter=FREE) == {"compute": 100}


def test_the_nearest_samples_decide_whether_the_interpreter_was_held() -> None:
    half = Interpreter([(at * MS, 2 * MS if at < 50 else 0) for at in range(0, 100, 5)])
    thread = [piece(0, 48, "compute", computed=0), piece(52, 100, "compute", computed=0)]
    assert parts(thread, interpreter=half) == {"interpreter": 48, "compute": 48, "idle": 4}
    assert half.held(11 * MS, 12 * MS) == 1.0
    assert half.held(81 * MS, 82 * MS) == 0.0
    assert Interpreter([]).held(0, 5) == 0.0


def test_the_time_of_the_whole_window_is_in_seconds() -> None:
    assert shares("worker", [], FREE, 20 * MS, 100 * MS).wall == pytest.approx(0.08)
