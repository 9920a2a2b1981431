"""Outbox: small frames pass large ones, and the calls of one thread still leave in their order."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from backhaul.agent import outbox
from backhaul.agent.outbox import Departure, Outbox

SMALL, IN_A_SEGMENT, LARGE = "small", "in a segment", "large"


class World:
    """Threads that send to one outbox, and a channel that takes what it gives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.outbox: Outbox[Any] = Outbox(10_000)
        self.made: dict[int, int] = defaultdict(int)  # calls by thread
        self.sent: list[tuple[int, int]] = []  # thread and number of each call, as they left
        self.passed = 0
        self.frames: dict[int, tuple[int, int]] = {}

    def send(self, thread: int, kind: str) -> None:
        """A call, or a reply for thread -1. A thread whose frame is waited for makes no other call meanwhile."""
        if any(each.waiter == thread for each in self.all()):
            return
        frame: Any = SimpleNamespace(holds=kind == LARGE, size=10)
        departure = Departure(frame, kind == SMALL, calls=thread >= 0)
        if thread >= 0:
            self.frames[id(departure)] = (thread, self.made[thread])
            self.made[thread] += 1
        if self.outbox.under_way is None:
            self.outbox.begin(departure)
            waits = kind == LARGE
        else:
            waits = self.outbox.add(departure)
        if waits and thread >= 0:
            departure.waiter = thread
        self.kept.append(departure)

    kept: list[Departure]

    def all(self) -> list[Departure]:
        return [each for each in self.kept if not each.left]

    def pump(self) -> None:
        box = self.outbox
        if self.random.random() < 0.5 and box.under_way is not None and box.next_small() is not None:
            self.passed += 1
            self.left(box.passed())
        elif box.under_way is not None:
            self.left(box.left())
            box.next()

    def left(self, departure: Departure | None) -> None:
        if departure is not None and id(departure) in self.frames:
            self.sent.append(self.frames[id(departure)])


def run(seed: int) -> World:
    world = World(seed)
    world.kept = []
    chance = world.random
    for _ in range(200):
        if chance.random() < 0.5:
            world.send(chance.randrange(-1, 3), chance.choice([SMALL, SMALL, IN_A_SEGMENT, LARGE]))
        else:
            world.pump()
    while world.outbox.under_way is not None:
        world.pump()
    return world


def in_order(world: World) -> bool:
    return all(
        [number for sender, number in world.sent if sender == thread] == list(range(count))
        for thread, count in world.made.items()
    )


@pytest.mark.parametrize("seed", range(100))
def test_the_calls_of_each_thread_leave_in_their_order(seed: int) -> None:
    assert in_order(run(seed))


def test_small_calls_pass_large_ones() -> None:
    assert sum(run(seed).passed for seed in range(20)) > 100


def test_without_the_rule_calls_leave_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_may_be_followed", lambda departure: False)
    assert not all(in_order(run(seed)) for seed in range(20))


# What each method decides, one by one.

LIMIT = 25


def departure(*, passes: bool = False, calls: bool = False, holds: bool = False, waiter: Any = None) -> Departure:
    frame: Any = SimpleNamespace(holds=holds, size=10)
    return Departure(frame, passes, calls, waiter=waiter)


def box_with(*departures: Departure, under_way: Departure | None = None) -> Outbox[str]:
    box: Outbox[str] = Outbox(LIMIT)
    box.begin(under_way or departure())
    for each in departures:
        box.add(each)
    return box


def test_a_frame_whose_memory_may_change_is_waited_for() -> None:
    box = box_with()
    assert box.add(departure(holds=True)) is True
    assert box.add(departure()) is False


def test_a_frame_is_waited_for_when_too_much_waits() -> None:
    box = box_with()
    assert [box.add(departure()) for _ in range(4)] == [False, False, False, True]
    assert box.waiting == 40
    assert box.full


def test_bytes_that_leave_make_room() -> None:
    one, small = departure(), departure(passes=True)
    box = box_with(one, small, departure())
    assert (box.waiting, box.full) == (30, True)
    assert box.next_small() is small
    assert (box.waiting, box.full) == (20, False)
    assert small.begun
    assert not one.begun
    assert box.passed() is small
    assert small.left
    assert box.passed() is None
    box.left()
    assert box.next() is one
    assert (one.begun, one.left) == (True, False)
    assert box.left() is one
    assert one.left


def test_a_small_reply_passes_a_large_call_and_a_small_call_does_not() -> None:
    """Only calls have an order: one thread may have made the large call and then the small one."""
    reply, call = departure(passes=True), departure(passes=True, calls=True)
    box = box_with(reply, call, under_way=departure(calls=True))
    assert (reply.passes, call.passes) == (True, False)
    assert box.next_small() is reply
    assert box.next_small() is None


def test_a_small_call_does_not_pass_a_small_call_that_has_begun() -> None:
    first, second, reply = (
        departure(passes=True, calls=True),
        departure(passes=True, calls=True),
        departure(passes=True),
    )
    box = box_with(first, second)
    box.left()
    assert box.next() is first
    assert box.next_small() is None, "its thread may have made the first one, too"
    box = box_with(reply, under_way=first)
    assert box.next_small() is reply


def test_a_large_reply_leaves_before_small_calls() -> None:
    call, reply = departure(passes=True, calls=True), departure()
    box = box_with(call, reply)
    box.left()
    assert box.next() is reply
    assert box.left() is reply
    assert box.next() is call
    assert box.left() is call
    assert box.next() is None


def test_a_large_call_leaves_after_small_ones_that_came_before_it() -> None:
    before, large = departure(passes=True, calls=True), departure(calls=True, waiter="thread")
    box = box_with(before, large)
    box.left()
    assert box.next() is before


def test_the_duty_to_write_goes_to_a_waiting_thread() -> None:
    under_way, waited, other = departure(waiter="first"), departure(waiter="second"), departure()
    box = box_with(other, waited, under_way=under_way)
    assert box.take_duty()
    assert not box.take_duty()
    assert box.hand_over(under_way) is waited
    assert waited.pumps
    assert not other.pumps
    assert box.hand_over() is under_way
    assert box_with(departure()).hand_over() is None


def test_a_thread_gives_up_a_frame() -> None:
    begun, waited, small = departure(waiter="first"), departure(waiter="second"), departure(passes=True, waiter="third")
    box = box_with(waited, small, under_way=begun)
    assert box.give_up(begun) is False, "the peer needs all of a frame that has begun"
    assert box.give_up(waited) is True
    assert box.give_up(small) is True
    assert [each.waiter for each in (begun, waited, small)] == [None, None, None]
    assert box.waiting == 0
    box.left()
    assert box.next() is None


def test_threads_are_woken_when_there_is_room() -> None:
    box = box_with(departure(), departure())
    assert not box.await_room("early")
    box.add(departure())
    assert box.await_room("one")
    assert box.await_room("other")
    assert box.take_room() == []
    box.left()
    box.next()
    assert box.take_room() == ["one", "other"]
    assert box.take_room() == []


def test_all_unsent_frames_are_lost_with_the_channel() -> None:
    under_way, rest, small, passing = departure(), departure(), departure(passes=True), departure(passes=True)
    box = box_with(passing, rest, small, under_way=under_way)
    assert box.next_small() is passing
    assert box.lose() == [under_way, passing, rest, small]
    assert all(each.lost and not each.left for each in (under_way, passing, rest, small))
    assert (box.waiting, box.full, box.under_way, box.passing) == (0, False, None, None)
    assert box.next() is None
    assert box.lose() == []
