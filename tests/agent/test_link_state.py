"""What a worker knows about its link with a peer: literal tables for each method of `LinkState`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from backhaul.agent.link_state import BACKLOG, MOST_HELD, SMALL, LinkState
from backhaul.agent.pending import Slot
from backhaul.agent.role import NOBODY
from backhaul.transport.base import Way

REPLY: Any = "reply"
PATIENCE = 8.0

State = LinkState[str]


def slot(id: int = 1, deadline: float = math.inf, future: Any = None) -> Slot:
    return Slot(id, f"call {id}", deadline, True, future)


def state_with(*slots: Slot, patience: float = PATIENCE) -> State:
    state: State = LinkState(patience)
    for each in slots:
        assert state.open(each, watched=each.future is not None)
    return state


def future_slot(id: int = 1, deadline: float = math.inf) -> Slot:
    return slot(id, deadline, future=object())


# Requests.


def test_a_reply_finishes_its_slot_once() -> None:
    one, other = slot(1), slot(2)
    state = state_with(one, other)
    assert len(state) == 2
    assert state.answered(1, REPLY) is one
    assert (one.done, one.envelope, one.error) == (True, REPLY, None)
    assert not other.done
    assert 1 not in state
    assert 2 in state
    assert state.answered(1, "again") is None  # type: ignore[arg-type]
    assert one.envelope == REPLY
    assert state.answered(7, REPLY) is None, "nobody has asked"


def test_a_request_that_is_given_up_is_finished_by_the_thread_that_gave_it_up() -> None:
    one = slot()
    state = state_with(one)
    assert state.give_up(one)
    assert not one.done
    assert not state.give_up(one)
    assert state.answered(1, REPLY) is None
    error = TimeoutError()
    assert state.finish(one, error) == ()
    assert (one.done, one.error, one.envelope) == (True, error, None)


def test_a_request_that_was_answered_is_not_given_up() -> None:
    one = slot()
    state = state_with(one)
    state.answered(1, REPLY)
    assert not state.give_up(one)


@pytest.mark.parametrize(
    ("now", "overdue", "left", "next_deadline"),
    [(0.9, [], 3, 1.0), (1.0, [1], 2, 2.0), (2.5, [1, 2], 1, math.inf)],
)
def test_futures_expire(now: float, overdue: list[int], left: int, next_deadline: float) -> None:
    state = state_with(future_slot(1, 1.0), future_slot(2, 2.0), future_slot(3))
    assert [each.id for each in state.expire(now)] == overdue
    assert (len(state), state.futures, state.next_deadline()) == (left, left, next_deadline)
    assert state.expire(now) == []


def test_a_thread_that_waits_watches_its_own_deadline() -> None:
    state = state_with(slot(1, 1.0))
    assert state.next_deadline() == math.inf
    assert state.expire(9.0) == []
    assert len(state) == 1


@pytest.mark.parametrize("end", ["answered", "given up", "expired", "lost"])
def test_futures_are_counted(end: str) -> None:
    one, other, plain = future_slot(1, 1.0), future_slot(2), slot(3)
    state = state_with(one, other, plain)
    assert state.futures == 2
    if end == "answered":
        state.answered(1, REPLY)
    elif end == "given up":
        state.give_up(one)
    elif end == "expired":
        state.expire(1.0)
    else:
        state.lose()
    assert state.futures == (0 if end == "lost" else 1)
    state.answered(3, REPLY)
    assert state.futures == (0 if end == "lost" else 1), "no future"


# Waiting.


def test_no_thread_waits_for_a_finished_slot() -> None:
    one = slot()
    state = state_with(one, slot(2))
    state.read()
    state.answered(1, REPLY)
    assert not state.wait(one, "a")
    assert one.waiters == ()
    assert not state.wanted


def test_no_thread_waits_while_the_reading_role_is_free() -> None:
    one = slot()
    state = state_with(one)
    assert not state.wait(one, "a")
    assert one.waiters == ()


def test_a_waiting_thread_is_woken_for_its_slot_and_for_the_role() -> None:
    one = slot()
    state = state_with(one)
    token = state.read()
    assert state.wait(one, "a")
    assert one.waiters == ("a",)
    assert state.wanted
    assert state.stop_reading(token) == "a"
    assert not state.being_read


def test_several_threads_wait_for_one_slot() -> None:
    one = slot()
    state = state_with(one)
    state.read()
    assert state.wait(one, "a")
    assert state.wait(one, "b")
    assert state.give_up(one)
    assert state.finish(one, None) == ("a", "b")


def test_a_thread_waits_for_a_given_up_slot_even_if_nobody_reads() -> None:
    """The thread that took the slot out is about to finish it."""
    one = slot()
    state = state_with(one)
    assert state.give_up(one)
    assert state.wait(one, "a")
    assert not state.wanted, "its reply will not be read"
    assert state.finish(one, None) == ("a",)
    assert state.stop_waiting(one, "a") is None


def test_a_thread_that_stops_waiting_leaves_no_trace() -> None:
    one = slot()
    state = state_with(one)
    token = state.read()
    state.wait(one, "a")
    assert state.stop_waiting(one, "a") is None
    assert one.waiters == ()
    assert not state.wanted
    assert state.stop_reading(token) is None


def test_a_thread_that_was_woken_for_the_role_and_has_its_reply_names_the_next() -> None:
    one, other = slot(1), slot(2)
    state = state_with(one, other, slot(3))
    token = state.read()
    state.wait(one, "a")
    state.wait(other, "b")
    state.answered(1, REPLY)
    assert state.stop_reading(token) == "a"
    assert state.stop_waiting(one, "a") == "b"


def test_a_thread_can_be_woken_for_a_slot_without_lining_up() -> None:
    one = slot()
    state = state_with(one)
    state.watch(one, "a")
    state.watch(one, "b")
    assert not state.wanted
    state.stop_watching(one, "a")
    assert one.waiters == ("b",)


def test_a_thread_can_line_up_without_a_slot() -> None:
    state = state_with()
    assert not state.line_up("a"), "the role is free"
    token = state.read()
    assert state.line_up("a")
    assert state.line_up("b")
    assert state.leave("a") is None
    assert state.stop_reading(token) == "b"


# Reading.


def test_one_thread_reads_at_a_time() -> None:
    state = state_with()
    token = state.read()
    assert token != NOBODY
    assert state.being_read
    assert state.read() == NOBODY
    state.stop_reading(token)
    assert state.read() not in (NOBODY, token)


def test_a_lost_link_is_not_read() -> None:
    state = state_with()
    state.lose()
    assert state.read() == NOBODY
    assert not state.line_up("a")


# Holding back.


@pytest.mark.parametrize(
    ("under_way", "held", "size", "expected"),
    [
        (BACKLOG, 0, 1, False),
        (BACKLOG + 1, 0, 1, True),
        (BACKLOG + 1, 0, SMALL, True),
        (BACKLOG + 1, 0, SMALL + 1, False),
        (BACKLOG + 1, MOST_HELD - 1, 1, True),
        (BACKLOG + 1, MOST_HELD, 1, False),
    ],
)
def test_which_frames_may_be_held_back(under_way: int, held: int, size: int, expected: bool) -> None:
    state = state_with(*map(slot, range(under_way)))
    for number in range(held):
        state.hold(f"frame {number}")  # type: ignore[arg-type]
    assert state.may_hold(size) == expected
    state.lose()
    assert not state.may_hold(size)


def test_held_frames_leave_in_order_and_once() -> None:
    state: LinkState[Any] = LinkState(PATIENCE)
    frames: list[Any] = ["a", "b", "c"]
    assert [state.hold(frame) for frame in frames] == [True, False, False]
    assert state.holds == 3
    assert list(state.take_held()) == frames
    assert (state.holds, list(state.take_held())) == (0, [])
    assert state.hold(frames[0]), "the first again"


# Silence.

LOOKS: list[tuple[str, list[tuple[float, str | None]]]] = [
    ("a silent peer is pinged, and lost at last", [(0, "ping"), (2, None), (4, None), (6, "lose")]),
    ("the number of looks means nothing", [(0, "ping"), (0, None), (2, None), (2, None), (5, None), (6, "lose")]),
    ("a look after a long stop pings again", [(0, "ping"), (2, None), (100, "ping"), (102, None), (106, "lose")]),
    ("so do several looks after it", [(0, "ping"), (100, "ping"), (100, None), (100, None), (104, None)]),
    ("a peer that is heard is not lost", [(0, "ping"), (4, None), (5, "heard"), (7, "ping"), (11, None), (13, "lose")]),
]


@pytest.mark.parametrize(("what", "looks"), LOOKS, ids=[what for what, _ in LOOKS])
def test_each_look_at_a_peer_waits_pings_or_loses_it(what: str, looks: list[tuple[float, str | None]]) -> None:
    state = state_with(slot())
    found: list[tuple[float, str | None]] = []
    for at, expected in looks:
        if expected == "heard":
            state.heard()
            found.append((at, "heard"))
        else:
            found.append((at, state.look(1000 + at)))
    assert found == looks


def test_a_lost_peer_is_looked_at_no_more() -> None:
    state = state_with()
    state.lose()
    assert state.look(0.0) is None


def test_hearing_from_the_peer_changes_the_read_counter() -> None:
    state = state_with()
    before = state.reads
    state.heard()
    assert state.reads != before


# Loss.


def test_loss_takes_out_all_slots_once() -> None:
    slots = [slot(1), future_slot(2, 5.0)]
    state = state_with(*slots)
    state.hold("frame")  # type: ignore[arg-type]
    assert state.lose() == slots
    assert not any(each.done for each in slots), "`finish` follows"
    assert (len(state), state.holds, state.futures, state.lost) == (0, 0, 0, True)
    assert state.next_deadline() == math.inf
    assert state.lose() is None
    assert not state.open(slot(3), watched=False)
    assert 3 not in state


def test_the_thread_that_loses_the_link_closes_a_channel_that_nobody_reads() -> None:
    state = state_with()
    state.lose()
    assert state.close()
    assert not state.must_close()


def test_the_reader_of_a_lost_link_closes_its_channel() -> None:
    state = state_with()
    token = state.read()
    assert not state.must_close()
    state.lose()
    assert not state.close()
    state.stop_reading(token)
    assert state.must_close()
    assert not state.must_close(), "once"


def test_a_reader_that_has_stopped_leaves_closing_to_the_losing_thread() -> None:
    state = state_with()
    token = state.read()
    state.lose()
    state.stop_reading(token)
    assert not state.must_close()
    assert state.close()


def test_a_look_that_comes_late_pings_again() -> None:
    """The looking thread was stopped, not the peer: silence counts from the next ping."""
    state = state_with(slot())
    assert state.look(1000.0) == "ping"
    assert state.look(1000.0 + 0.51 * PATIENCE) == "ping"
    assert state.look(1000.0 + 1.01 * PATIENCE) is None
    assert state.look(1000.0 + 1.27 * PATIENCE) == "lose"


def test_a_peer_that_takes_many_bytes_is_alive() -> None:
    much = 1 << 20
    state = state_with(slot())
    assert state.look(1000.0, Way(1, much)) == "ping"
    assert state.look(1004.0, Way(2, much)) == "ping"
    assert state.look(1008.0, Way(2, much)) is None
    assert state.look(1010.0, Way(2, much)) == "lose"


def test_a_peer_that_takes_few_bytes_may_be_dead() -> None:
    """The peer's system takes what it has room for, whether or not the peer's process reads."""
    state = state_with(slot())
    assert state.look(1000.0, Way(1, 100)) == "ping"
    assert state.look(1003.0, Way(2, 100)) is None
    assert state.look(1006.0, Way(3, 100)) == "lose"


def test_the_unanswered_requests() -> None:
    one, other = slot(1), slot(2)
    state = state_with(one, other)
    assert state.unanswered() == [one, other]
    state.answered(1, REPLY)
    assert state.unanswered() == [other]


def test_only_calls_of_the_user_are_counted_as_settled() -> None:
    call, question, future = slot(1), Slot(2, "question", math.inf, False), future_slot(3)
    state = state_with(call, question, future)
    counts = []
    for id in (1, 2, 3):
        state.answered(id, REPLY)
        counts.append(state.calls_settled)
    assert counts == [1, 1, 1], "that of a future counts when its callbacks have run"
