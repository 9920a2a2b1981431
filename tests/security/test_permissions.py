"""What is said and logged about requests that are refused: bounded, and safe to print."""

from __future__ import annotations

import logging

import pytest

from backhaul.errors import QuotaError, RefusedError
from backhaul.trust import permissions
from backhaul.trust.permissions import Permissions, Stamps, printable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [100.0]
    monkeypatch.setattr(permissions.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def mine(caplog: pytest.LogCaptureFixture) -> Permissions:
    caplog.set_level(logging.WARNING, "backhaul.security")
    return Permissions("me", 1 << 20)


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("short", 5, "short"),
        ("longer", 5, "longe… (6 characters)"),
        ("a\x1b[31mb\n", 20, "a\\x1b[31mb\\n"),
        ("é\x1b", 20, "é\\x1b"),
        ("", 5, ""),
    ],
)
def test_text_of_a_peer_is_cut_and_escaped(text: str, limit: int, shown: str) -> None:
    assert printable(text, limit) == shown


def test_line_breaks_and_tabs_are_kept_where_they_are_wanted() -> None:
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\r"


def test_a_refusal_does_not_say_why_and_an_exceeded_quota_does(
    mine: Permissions, caplog: pytest.LogCaptureFixture
) -> None:
    refused = mine.refuse("peer", "a call", "there is no such function")
    assert isinstance(refused, RefusedError)
    assert "there is no such function" not in str(refused)
    exceeded = mine.over_quota("peer", "a call", "64 calls are running")
    assert isinstance(exceeded, QuotaError)
    assert str(exceeded) == "worker 'me' refused this: 64 calls are running"
    assert [record.getMessage() for record in caplog.records] == [
        "refused worker peer a call: there is no such function",
        "refused worker peer a call: 64 calls are running",
    ]


def test_each_peer_has_its_own_names(mine: Permissions) -> None:
    first = mine.names("peer")
    assert first.peer == "peer"
    assert mine.names("peer") is first
    assert mine.names("other").peer == "other"


def test_ten_lines_a_second_about_each_peer(
    mine: Permissions, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(13):
        mine.note("peer", "a call", number)
    mine.note("other", "a call", "its first line")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [*(f"refused worker peer a call: {number}" for number in range(10)), lines[-1]]
    assert lines[-1] == "refused worker other a call: its first line"
    caplog.clear()
    clock[0] += 1.0  # not more than a second
    mine.note("peer", "a call", "too early")
    assert not caplog.records
    clock[0] += 0.1
    mine.note("peer", "a call", "later")
    assert [record.getMessage() for record in caplog.records] == [
        "4 more lines about worker peer are left out",
        "refused worker peer a call: later",
    ]
    caplog.clear()
    clock[0] += 1.1
    mine.note("peer", "a call", "nothing was left out")
    assert [record.getMessage() for record in caplog.records] == ["refused worker peer a call: nothing was left out"]


def test_stamps_tell_values_apart_and_fit_into_56_bits() -> None:
    """A stamp is a number of a message, which has 64 bits and a sign."""
    stamps = Stamps()
    found = [stamps.of(("value", number)) for number in range(100)]
    assert found == [stamps.of(("value", number)) for number in range(100)]
    assert len(set(found)) == 100
    assert all(0 <= each < 1 << 56 for each in found)
    assert not set(found) & {Stamps().of(("value", number)) for number in range(100)}, "a worker's stamps are its own"


def test_a_refusal_that_takes_long_counts_as_several(mine: Permissions, clock: list[float]) -> None:
    def refusals(seconds: float = 0.0, size: int = 0) -> int:
        """For how many refusals the peer waits after one that costs this much."""
        mine.refusals.forgive()
        for _ in range(100):
            mine.note("peer", "a call", "free of pauses")
        mine.note("peer", "a call", "the one that counts", seconds, size)
        return round(mine.refusals.wait("peer", clock[0]) / 0.02)

    assert refusals() == 1
    assert refusals(seconds=0.00099) == 5
    assert refusals(size=1_990_000) == 10
    assert refusals(seconds=0.00099, size=1_990_000) == 15


def test_fifty_useless_things_count_as_one_refusal(mine: Permissions, clock: list[float]) -> None:
    mine.count("peer", 100 * 50 + 49)
    assert mine.refusals.wait("peer", clock[0]) == 0.0
    mine.count("peer", 50)
    assert mine.refusals.wait("peer", clock[0]) == pytest.approx(0.02)


def test_a_failed_call_is_described_only_if_it_is_logged(
    mine: Permissions, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    described = []

    def describe() -> str:
        described.append("once more")
        return "a traceback"

    for _ in range(12):
        mine.note_failure("peer\x1b", describe)
    assert len(described) == 10
    assert [record.getMessage() for record in caplog.records] == [
        "a call of worker peer\\x1b failed:\na traceback" for _ in range(10)
    ]
