"""The ledger is empty after the last report of a pass, in any order of reports, and never before."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from backhaul.autograd.completion import Ledger
from backhaul.autograd.functions import ROOT
from backhaul.errors import ProtocolError


class Report(NamedTuple):
    consumed: tuple[int, ...]
    emitted: tuple[int, ...]


TABLE: dict[str, list[Report]] = {
    "roots that reach no other worker": [Report((ROOT,), ())],
    "one hop": [Report((ROOT,), (1,)), Report((1,), ())],
    "there and back": [Report((ROOT,), (1,)), Report((1,), (2,)), Report((2,), ())],
    "two ways": [Report((ROOT,), (1, 2)), Report((1,), (3,)), Report((2,), (4,)), Report((3,), ()), Report((4,), ())],
    "two ways that meet": [Report((ROOT,), (1, 2)), Report((1,), (3,)), Report((2,), (4,)), Report((3, 4), ())],
    "a gate in the run of the roots": [Report((ROOT, 2), (1,)), Report((1,), (2,))],
    "a gate in the run of the roots that goes on": [
        Report((ROOT, 2), (1, 3)),
        Report((1,), (2,)),
        Report((3,), ()),
    ],
    "a call to itself, in one run": [Report((ROOT, 1), (1,))],
    "two runs that wait for each other by turns": [Report((ROOT, 2, 4), (1, 3)), Report((1, 3), (2, 4))],
}


@pytest.mark.parametrize("name", TABLE)
def test_a_pass_is_over_with_its_last_report_in_any_order(name: str) -> None:
    for order in itertools.permutations(TABLE[name]):
        ledger = Ledger()
        assert [ledger.report(*report) for report in order] == [False] * (len(order) - 1) + [True], order
        assert not ledger.open


def test_the_ledger_holds_the_roots_and_runs_that_were_reported_once() -> None:
    ledger = Ledger()
    assert ledger.open == {ROOT}
    ledger.report([ROOT], [1, 2])
    assert ledger.open == {1, 2}
    ledger.report([2], [3])
    assert ledger.open == {1, 3}
    # It comes before the report that emitted it.
    ledger.report([4], [])
    assert ledger.open == {1, 3, 4}
    ledger.report([1], [4])
    assert ledger.open == {3}


def test_the_open_runs_are_a_snapshot() -> None:
    ledger = Ledger()
    before = ledger.open
    ledger.report([ROOT], [])
    assert before == {ROOT}


def random_pass(draw: random.Random) -> list[Report]:
    """Runs, each caused by a chain of messages from the roots, which are in the first run.

    A run with gates consumes several messages, and may even have caused some of them itself.
    """
    runs = draw.randint(1, 9)
    consumed: list[list[int]] = [[ROOT]] + [[] for _ in range(runs - 1)]
    emitted: list[list[int]] = [[] for _ in range(runs)]
    messages = itertools.count(1)
    ends = [(draw.randrange(run), run) for run in range(1, runs)]
    ends += [(draw.randrange(runs), draw.randrange(runs)) for _ in range(draw.randrange(2 * runs))]
    draw.shuffle(ends)
    for emitter, consumer in ends:
        message = next(messages)
        emitted[emitter].append(message)
        consumed[consumer].append(message)
    return [Report(tuple(c), tuple(e)) for c, e in zip(consumed, emitted, strict=True)]


def under_way(reports: Sequence[Report], reported: Sequence[Report]) -> set[int]:
    """By definition: messages that one end has reported, and the other has not."""
    consumed = {message for report in reported for message in report.consumed}
    emitted = {ROOT} | {message for report in reported for message in report.emitted}
    return consumed ^ emitted


@pytest.mark.parametrize("seed", range(10))
def test_random_passes_are_never_over_before_the_last_report(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        reports = random_pass(draw)
        draw.shuffle(reports)
        ledger = Ledger()
        for count, report in enumerate(reports, 1):
            over = ledger.report(*report)
            assert ledger.open == under_way(reports, reports[:count])
            assert over == (count == len(reports)), (reports, count)


def test_a_run_that_does_not_report_keeps_every_pass_open() -> None:
    draw = random.Random(11)
    for _ in range(300):
        reports = random_pass(draw)
        missing = draw.choice(reports)
        ledger = Ledger()
        assert not any(ledger.report(*report) for report in reports if report is not missing)
        assert ledger.open


REPEATED: dict[str, Report] = {
    "consumed before": Report((ROOT,), ()),
    "emitted before": Report((), (1,)),
    "consumed twice": Report((2, 2), ()),
    "emitted twice": Report((), (3, 3)),
}


@pytest.mark.parametrize("report", REPEATED.values(), ids=REPEATED.keys())
def test_a_peer_that_may_lie_cannot_report_work_twice(report: Report) -> None:
    """An id that is reported twice would leave the ledger, and the pass would be over too early."""
    ledger = Ledger(doubts=True)
    assert not ledger.report([ROOT], [1])
    with pytest.raises(ProtocolError, match="reported before"):
        ledger.report(*report)
    assert ledger.open == {1}
    assert ledger.report([1], [])


@pytest.mark.parametrize("parts", [[20_001], [20_000, 1], [1, 20_000]])
def test_a_peer_that_may_lie_can_report_a_bounded_number_of_messages(parts: list[int]) -> None:
    ledger = Ledger(doubts=True)
    ids = itertools.count(1)
    *accepted, refused = [list(itertools.islice(ids, part)) for part in parts]
    for emitted in accepted:
        assert not ledger.report([], emitted)
    with pytest.raises(ProtocolError, match="reported before" if len(parts) == 1 else "more than 20000 messages"):
        ledger.report([], refused)
