"""The role: which thread holds it, which one is next, and that it is never lost."""

from __future__ import annotations

import pytest

from backhaul.agent.role import NOBODY, Role


def held() -> tuple[Role[str], int]:
    role: Role[str] = Role()
    return role, role.take()


def busy() -> tuple[Role[str], int]:
    role, token = held()
    role.begin()
    return role, token


# Taking and releasing.


def test_a_role_is_free_until_it_is_taken() -> None:
    role: Role[str] = Role()
    assert (role.free, role.holder, role.busy, role.turn, role.wanted) == (True, NOBODY, False, 0, False)
    token = role.take()
    assert token != NOBODY
    assert (role.free, role.holder, role.holds(token)) == (False, token, True)


def test_a_role_is_taken_once() -> None:
    role, token = held()
    assert role.take() == NOBODY
    assert role.holds(token)


def test_every_holder_has_a_token_of_its_own() -> None:
    role: Role[str] = Role()
    tokens = []
    for _ in range(5):
        tokens.append(role.take())
        role.release(tokens[-1])
    assert len(set(tokens)) == 5
    assert not any(role.holds(token) for token in tokens)


def test_an_outdated_token_releases_nothing() -> None:
    role, token = held()
    role.release(token)
    second = role.take()
    role.line_up("a")
    assert role.release(token) is None
    assert role.holds(second)
    assert role.wanted


# Candidates.


def test_a_thread_cannot_line_up_for_a_free_role() -> None:
    role: Role[str] = Role()
    assert not role.line_up("a")
    assert not role.wanted


@pytest.mark.parametrize(
    ("lined_up", "leaving", "woken"),
    [
        ([], [], [None]),
        (["a"], [], ["a", None]),
        (["a", "b", "c"], [], ["a", "b", "c", None]),
        (["a", "b", "c"], ["a"], ["b", "c", None]),
        (["a", "b", "c"], ["b"], ["a", "c", None]),
        (["a", "b"], ["a", "b"], [None]),
        (["a", "b"], ["somebody else"], ["a", "b", None]),
    ],
)
def test_release_names_the_candidates_in_order(
    lined_up: list[str], leaving: list[str], woken: list[str | None]
) -> None:
    role, token = held()
    for each in lined_up:
        assert role.line_up(each)
    for each in leaving:
        assert role.leave(each) is None, "the role is held: it is nobody's turn"
    found = []
    for _ in woken:
        found.append(role.release(token))
        token = role.take()
    assert found == woken


def test_a_candidate_that_was_woken_and_leaves_names_the_next() -> None:
    role, token = held()
    role.line_up("a")
    role.line_up("b")
    role.line_up("c")
    assert role.release(token) == "a"
    assert role.leave("a") == "b"
    assert role.leave("b") == "c"
    assert role.leave("c") is None
    assert role.free


def test_a_candidate_that_leaves_wakes_nobody_if_another_thread_took_the_role() -> None:
    role, token = held()
    role.line_up("a")
    role.line_up("b")
    assert role.release(token) == "a"
    assert role.take()
    assert role.leave("a") is None
    assert role.wanted


# Passing on.


def test_only_a_busy_holder_loses_the_role() -> None:
    role: Role[str] = Role()
    assert role.pass_on() == NOBODY
    token = role.take()
    assert role.pass_on() == NOBODY
    role.begin()
    successor = role.pass_on()
    assert successor not in (NOBODY, token)
    assert role.holds(successor)
    assert not role.busy, "the successor has begun nothing"
    assert role.pass_on() == NOBODY


@pytest.mark.parametrize(("begun", "turn", "passes"), [(1, 1, True), (1, 0, False), (3, 2, False), (3, 3, True)])
def test_a_role_passes_only_while_its_holder_is_in_the_given_turn(begun: int, turn: int, passes: bool) -> None:
    role, token = held()
    for _ in range(begun):
        role.finish(token)
        role.begin()
    assert role.turn == begun
    assert (role.pass_on(turn) != NOBODY) == passes
    assert role.holds(token) != passes


def test_finish_returns_whether_the_role_is_still_held() -> None:
    role, token = busy()
    assert role.finish(token)
    assert not role.busy
    role.begin()
    successor = role.pass_on()
    role.begin()  # the successor
    assert not role.finish(token)
    assert role.busy, "that is the successor's"
    assert role.finish(successor)


def test_release_of_a_role_that_was_passed_on_does_nothing() -> None:
    role, token = busy()
    successor = role.pass_on()
    role.line_up("a")
    assert role.release(token) is None
    assert role.holds(successor)
    assert role.release(successor) == "a"


def test_a_successor_that_was_never_started_is_undone() -> None:
    role, token = busy()
    successor = role.pass_on()
    role.undo(successor, token)
    assert role.holds(token)
    assert role.busy
    again = role.pass_on(role.turn)
    assert again not in (NOBODY, token, successor)


def test_nothing_is_undone_once_the_role_has_moved_on() -> None:
    role, token = busy()
    successor = role.pass_on()
    role.release(successor)
    role.undo(successor, token)
    assert role.free
    third = role.take()
    role.undo(successor, token)
    assert role.holds(third)


def test_an_ended_role_cannot_be_held_or_taken() -> None:
    role, token = busy()
    role.end()
    assert not role.holds(token)
    assert not role.finish(token)
    assert role.take() == NOBODY
    assert role.release(token) is None
    assert not role.free


def test_the_token_of_nobody_is_false() -> None:
    """Callers ask ``if token``."""
    assert not NOBODY
