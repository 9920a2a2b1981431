"""What is known about a peer: the state machine alone, in tables."""

from __future__ import annotations

import math

from backhaul.agent.fate import Fate


def test_a_new_fate_is_present_and_has_no_incarnation() -> None:
    fate = Fate()
    assert fate.state == "present"
    assert fate.continues("one")
    assert not fate.is_given_up(1e9, 1.0)


def test_repeated_doubts_keep_the_first_time_and_the_last_reason() -> None:
    fate = Fate("seven")
    assert fate.doubt(10.0, "refused")
    assert not fate.doubt(12.0, "no route")
    assert fate.suspected
    assert (fate.since, fate.reason, fate.tries) == (10.0, "no route", 2)


def test_an_answer_ends_the_suspicion() -> None:
    fate = Fate("seven")
    assert not fate.answered()
    fate.doubt(10.0, "refused")
    assert fate.answered()
    assert (fate.state, fate.since, fate.reason, fate.tries) == ("present", math.inf, "", 0)
    assert fate.doubt(20.0, "refused")
    assert fate.since == 20.0


def test_a_fate_that_is_over_stays_over() -> None:
    fate = Fate("seven")
    assert fate.end("killed", certain=True)
    assert not fate.end("silent", certain=False)
    assert not fate.doubt(1.0, "refused")
    assert not fate.answered()
    assert fate.over
    assert fate.certain
    assert fate.reason == "killed"
    assert not fate.continues("seven")


def test_only_the_same_incarnation_continues_a_fate() -> None:
    fate = Fate("seven")
    assert fate.continues("seven")
    assert not fate.continues("eight")
    fate.doubt(1.0, "refused")
    assert fate.continues("seven")


def test_a_peer_is_given_up_after_the_whole_time_without_an_answer() -> None:
    fate = Fate("seven")
    fate.doubt(100.0, "refused")
    assert not fate.is_given_up(159.9, 60.0)
    assert fate.is_given_up(160.0, 60.0)
    assert not fate.is_given_up(1e12, math.inf)
    fate.answered()
    assert not fate.is_given_up(1e12, 60.0)


def test_the_pause_between_attempts_doubles_up_to_a_second() -> None:
    fate = Fate("seven")
    pauses = []
    for _ in range(8):
        fate.doubt(100.0, "refused")
        pauses.append(round(fate.next_try(100.0, 60.0) - 100.0, 3))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
    assert fate.next_try(159.5, 60.0) == 160.0
    assert fate.next_try(161.0, 60.0) == 161.0
    assert fate.next_try(1e6, math.inf) == 1e6 + 1.0


def test_a_fate_that_is_over_is_not_given_up_again() -> None:
    fate = Fate("seven")
    fate.doubt(10.0, "refused")
    assert fate.end("killed", certain=True)
    assert not fate.is_given_up(1e9, 1.0)


def test_nothing_is_certain_before_the_end() -> None:
    fate = Fate("seven")
    assert not fate.certain
    fate.doubt(10.0, "refused")
    assert not fate.certain
    fate.end("silent for long", certain=False)
    assert not fate.certain
