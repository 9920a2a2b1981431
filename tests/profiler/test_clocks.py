"""The offset of another clock, from round trips."""

from __future__ import annotations

import random

from backhaul.profiler.clocks import HOME, RoundTrip, align, trips


def test_the_shortest_round_trip_gives_the_offset() -> None:
    found = align(
        [RoundTrip(0, 1000 + 90, 100), RoundTrip(200, 1000 + 205, 210), RoundTrip(300, 1000 + 301, 340)],
        same_host=False,
    )
    assert (found.offset, found.error, found.rounds) == (1000, 5, 3)
    assert found.to_home(1207) == 207


def test_the_offset_is_right_to_within_the_error() -> None:
    """The two directions may take different times."""
    chance = random.Random(1)
    for _ in range(200):
        offset = chance.randrange(-(10**9), 10**9)
        made = []
        for _ in range(5):
            asked = chance.randrange(10**6)
            read = asked + chance.randrange(1000)
            made.append(RoundTrip(asked, read + offset, read + chance.randrange(1000)))
        found = align(made, same_host=False)
        assert abs(found.offset - offset) <= found.error


def test_workers_of_one_host_share_a_clock() -> None:
    found = align([RoundTrip(0, 60, 100)], same_host=True)
    assert (found.offset, found.error) == (0, 0)
    assert (found.measured_offset, found.measured_error) == (10, 50)


def test_round_trips_that_contradict_a_shared_clock_win() -> None:
    """As in a container with its own clock."""
    found = align([RoundTrip(0, 5000, 100)], same_host=True)
    assert (found.offset, found.error, found.method) == (4950, 50, "round trips")


def test_each_round_trip_is_made() -> None:
    answers = iter([7, 8, 9])
    found = trips(lambda: next(answers), 3)
    assert [trip.there for trip in found] == [7, 8, 9]
    assert all(trip.asked <= trip.answered for trip in found)


def test_the_own_clock_is_exact_and_was_not_measured() -> None:
    assert HOME.to_home(5) == 5
    assert (HOME.error, HOME.measured_offset, HOME.measured_error, HOME.rounds) == (0, 0, 0, 0)
