"""Which thread runs which requests: one thread serves all peers while requests are short, and a blocked request delays
no other."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from threading import get_ident

import pytest

from awaiting import await_events
from backhaul import rpc
from backhaul.agent.leading import Lead, Pace
from backhaul.agent.link_state import LinkState
from backhaul.agent.role import Role
from backhaul.agent.serving import Served
from backhaul.testing import InProcessCluster
from backhaul.worker import current

PATIENCE = 10.0
SOON = PATIENCE / 2  # before a ping comes to the help of a message that no thread reads
SLOW, QUICK = 0.001, 0.0004
LONG = 0.002

asked = threading.Event()
gate = threading.Event()
last_gate = threading.Event()
idle = threading.Event()


@pytest.fixture(params=["memory", "sockets"])
def trio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessCluster]:
    """Three workers that know each other. worker1 serves.

    No line is slow, unless a test calls `measure`: on a busy machine any line could get a lead of its own.
    """
    monkeypatch.setattr("backhaul.agent.serving.SLOW", math.inf)
    for event in (asked, gate, last_gate, idle):
        event.clear()
    with InProcessCluster(3, sockets=request.param == "sockets") as workers:
        for caller in (0, 2):
            for _ in range(2 * Pace.MEMORY):
                assert workers[caller].rpc_sync("worker1", int) == 0
        yield workers
        gate.set()
        last_gate.set()


@pytest.fixture
def without_ticks(trio: InProcessCluster) -> InProcessCluster:
    """Switch off ticks: a busy leader must pass on its lead without their help."""
    off, watch = threading.Event(), trio[1].agent.watch

    def tick() -> bool:
        off.set()
        return False

    watch.ticks[0] = tick
    watch.wake()
    assert off.wait(PATIENCE), "the last real tick may still be under way"
    return trio


def line_of(workers: InProcessCluster, caller: int) -> Served:
    (found,) = workers[1].agent.serving.lines_of(caller)
    return found


def lead_of(workers: InProcessCluster, caller: int) -> Lead:
    lead = line_of(workers, caller).lead
    assert lead is not None
    return lead


def measure(line: Served) -> None:
    """Have a line of `trio` count as slow while its messages take long."""
    line.pace = Pace(SLOW)


def compute(seconds: float) -> int:
    """Keeps its thread busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return get_ident()


def block() -> str:
    asked.set()
    assert gate.wait(PATIENCE)
    return "blocked"


def block_last() -> str:
    assert last_gate.wait(PATIENCE)
    return "blocked"


def open_gate() -> int:
    gate.set()
    return get_ident()


def ask_back() -> tuple[int, int, int]:
    """A request that waits for a call of its own."""
    return get_ident(), rpc.rpc_sync("worker0", int, args=("3",)), get_ident()


def ask_to_block() -> str:
    """A request that waits until worker0 gets through to this worker by another caller."""
    return rpc.rpc_sync("worker0", block)


# The pace, without workers.


def test_a_new_line_is_quick() -> None:
    pace = Pace(SLOW)
    assert (pace.slow, pace.quick) == (False, True)


def test_one_long_message_does_not_make_a_line_slow() -> None:
    pace = Pace(SLOW)
    pace.handled(1.5 * SLOW)
    assert not pace.slow
    for _ in range(4 * Pace.MEMORY):
        pace.handled(1.5 * SLOW)
    assert (pace.slow, pace.quick) == (True, False)


def test_a_slow_line_becomes_quick_again_after_short_messages() -> None:
    pace = Pace(SLOW)
    for _ in range(4 * Pace.MEMORY):
        pace.handled(2 * SLOW)
    found = []
    while pace.slow or not pace.quick:
        pace.handled(QUICK / 4)
        found.append((pace.slow, pace.quick))
    assert (False, False) in found, "not at once: a line would go back and forth"


def test_the_parts_of_a_message_count_as_one() -> None:
    pace = Pace(SLOW)
    for _ in range(2 * Pace.MEMORY):
        for _ in range(4):
            pace.spent(SLOW / 2)
        pace.handled(0.0)
    assert pace.slow


def test_a_message_that_is_still_being_read_makes_a_line_slow() -> None:
    pace = Pace(SLOW)
    while not pace.slow:
        pace.spent(SLOW)
        assert pace._spent < 100 * SLOW
    assert not pace.quick


# Several lines.


def test_short_requests_of_all_peers_run_on_one_thread(without_ticks: InProcessCluster) -> None:
    assert lead_of(without_ticks, 0) is lead_of(without_ticks, 2)
    threads = {without_ticks[caller].rpc_sync("worker1", get_ident) for _ in range(5) for caller in (0, 2)}
    assert len(threads) == 1


def test_a_line_whose_requests_take_long_is_led_alone_until_they_are_short(without_ticks: InProcessCluster) -> None:
    workers = without_ticks
    shared = lead_of(workers, 0)
    measure(line_of(workers, 0))
    for _ in range(4 * Pace.MEMORY):
        workers[0].rpc_sync("worker1", compute, args=(LONG,))
    assert await_events(workers[1], lambda: lead_of(workers, 0) is not shared, PATIENCE)
    assert lead_of(workers, 2) is shared
    # So a request on this line does not delay those of other lines.
    blocked = workers[0].rpc_async("worker1", block)
    blocked.attend()
    assert asked.wait(PATIENCE)
    assert workers[2].rpc_sync("worker1", open_gate, timeout=PATIENCE)
    assert blocked.wait() == "blocked"
    while lead_of(workers, 0) is not shared:
        workers[0].rpc_sync("worker1", int)
    assert workers[0].rpc_sync("worker1", int, args=("4",)) == 4
    assert workers[2].rpc_sync("worker1", int, args=("5",)) == 5


def test_the_only_line_is_never_led_alone() -> None:
    with InProcessCluster(2) as workers:
        for _ in range(4 * Pace.MEMORY):
            workers[0].rpc_sync("worker1", compute, args=(LONG,))
        assert line_of(workers, 0).pace.slow
        workers[0].rpc_sync("worker1", int)
        assert lead_of(workers, 0) is workers[1].agent.serving._shared


def test_a_tick_frees_the_other_lines_of_a_leader_that_is_blocked(trio: InProcessCluster) -> None:
    blocked = trio[0].rpc_async("worker1", block)
    blocked.attend()
    assert asked.wait(PATIENCE)
    assert trio[2].rpc_sync("worker1", open_gate, timeout=PATIENCE)
    assert blocked.wait() == "blocked"


def blocked_request(workers: InProcessCluster) -> tuple[rpc.Future[str], Lead]:
    """A request of worker0 that blocks the leader, and its lead."""
    blocked = workers[0].rpc_async("worker1", block)
    blocked.attend()
    assert asked.wait(PATIENCE)
    return blocked, lead_of(workers, 0)


def test_one_tick_takes_the_lead_of_an_old_request(without_ticks: InProcessCluster) -> None:
    blocked, lead = blocked_request(without_ticks)
    lead.began -= 60
    assert without_ticks[1].agent.serving.tick()
    assert without_ticks[2].rpc_sync("worker1", open_gate, timeout=SOON)
    assert blocked.wait() == "blocked"


def test_a_tick_leaves_a_young_request_alone_and_does_not_hurry(
    without_ticks: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, lead = blocked_request(without_ticks)
    serving, before = without_ticks[1].agent.serving, lead._role.holder
    hurried: list[bool] = []
    monkeypatch.setattr(serving.watch, "hurry", lambda: hurried.append(True))
    lead.began += 60
    assert serving.tick()
    assert (lead._role.holder, hurried) == (before, [])
    lead.began -= 60.001
    assert serving.tick(), "the second tick that sees this request"
    assert hurried
    assert lead._role.holder != before
    assert without_ticks[2].rpc_sync("worker1", open_gate, timeout=SOON)
    assert blocked.wait() == "blocked"


def test_the_first_request_after_a_pause_is_not_old(
    without_ticks: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch thread may tick as soon as a request has begun."""
    lead = lead_of(without_ticks, 0)
    lead.began -= 60
    ages: list[float] = []
    begin = Role.begin

    def begin_noted(role: Role[object]) -> None:
        begin(role)
        if role is lead._role:
            ages.append(time.monotonic() - lead.began)

    monkeypatch.setattr(Role, "begin", begin_noted)
    assert without_ticks[0].rpc_sync("worker1", int) == 0
    assert ages
    assert max(ages) < 30


def test_the_end_of_a_line_leaves_the_others(trio: InProcessCluster) -> None:
    line, (opened,) = line_of(trio, 0), trio[0].agent.calling()
    line.shutdown()
    assert line.over.wait(PATIENCE)
    assert await_events(trio[0], lambda: opened.ended, PATIENCE)
    assert trio[2].rpc_sync("worker1", int, args=("2",)) == 2
    assert trio[0].rpc_sync("worker1", int, args=("3",)) == 3, "over a new line"


def test_a_lead_without_lines_has_no_thread_and_no_descriptor() -> None:
    with InProcessCluster(2, sockets=True) as workers:
        assert workers[0].rpc_sync("worker1", int) == 0
        shared = lead_of(workers, 0)
        assert shared.fileno() >= 0
        assert not shared._role.free
    assert shared.fileno() < 0
    assert shared._role.free


def test_a_reply_does_not_wait_for_a_long_series_of_requests(without_ticks: InProcessCluster) -> None:
    """Three requests that are read at once: the first reply leaves before the last request ends."""
    before = without_ticks[0].rpc_async("worker1", block)
    before.attend()
    assert asked.wait(PATIENCE)
    first, _, last = (
        without_ticks[0].rpc_async("worker1", function, args=args, timeout=PATIENCE / 2)  # no ping comes to its help
        for function, args in ((int, ("7",)), (compute, (LONG,)), (block_last, ()))
    )
    gate.set()
    assert first.wait() == 7
    last_gate.set()
    assert (before.wait(), last.wait()) == ("blocked", "blocked")


# A leader whose request waits.


def test_a_request_that_waits_for_a_call_keeps_its_lead(without_ticks: InProcessCluster) -> None:
    without_ticks[0].rpc_sync("worker1", ask_back)  # opens the connection back
    before, value, after = without_ticks[0].rpc_sync("worker1", ask_back)
    assert (value, after) == (3, before)
    assert without_ticks[2].rpc_sync("worker1", get_ident) == before


def test_a_request_that_comes_meanwhile_runs_on_another_thread(without_ticks: InProcessCluster) -> None:
    """worker1 waits for worker0, which waits until worker2 has called worker1."""
    without_ticks[0].rpc_sync("worker1", ask_back)  # opens the connection back
    waiting = without_ticks[0].rpc_async("worker1", ask_to_block)
    waiting.attend()
    assert asked.wait(PATIENCE)
    thread = without_ticks[2].rpc_sync("worker1", open_gate, timeout=SOON)
    assert waiting.wait() == "blocked"
    assert without_ticks[2].rpc_sync("worker1", get_ident) == thread, "it leads now"
    assert not without_ticks[1].agent.serving.detached


def test_a_request_that_was_read_with_the_waiting_one_is_not_forgotten(
    without_ticks: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in one write: the first waits until the second has run."""
    without_ticks[0].rpc_sync("worker1", ask_back)  # opens the connection back
    with monkeypatch.context() as held:
        held.setattr(LinkState, "may_hold", lambda state, size: True)
        held.setattr(without_ticks[0].agent.watch, "remind", lambda line: None)  # no tick sends the first one alone
        first = without_ticks[0].rpc_async("worker1", ask_to_block)
        second = without_ticks[0].rpc_async("worker1", open_gate, timeout=SOON)
    second.attend()
    assert second.wait()
    assert first.wait() == "blocked"


def test_a_request_that_blocks_after_its_call_loses_its_lead(trio: InProcessCluster) -> None:
    trio[0].rpc_sync("worker1", ask_back)  # opens the connection back
    serving, lead = trio[1].agent.serving, lead_of(trio, 0)

    def tick() -> bool:
        found = serving.tick()
        if lead.waits and lead not in serving.active:
            idle.set()
        return found

    trio[1].agent.watch.ticks[0] = tick
    blocked = trio[0].rpc_async("worker1", ask_and_block)
    blocked.attend()
    assert asked.wait(PATIENCE)
    assert trio[2].rpc_sync("worker1", open_gate, timeout=SOON)
    assert blocked.wait() == "blocked"


def ask_and_block() -> str:
    """A request that waits so long for a call of its own that ticks leave its lead alone; then it blocks."""
    assert rpc.rpc_sync("worker0", await_idle)
    return block()


def await_idle() -> bool:
    return idle.wait(PATIENCE)


def test_a_thread_that_has_lost_its_lead_leaves_the_next_leader_alone(trio: InProcessCluster) -> None:
    trio[0].rpc_sync("worker1", ask_back)  # opens the connection back
    watched[:] = [lead_of(trio, 0)]
    waiting = trio[0].rpc_async("worker1", block_and_ask)
    waiting.attend()
    assert asked.wait(PATIENCE)
    assert trio[2].rpc_sync("worker1", open_gate, timeout=PATIENCE), "a tick has passed the lead on"
    assert waiting.wait() is False
    assert trio[2].rpc_sync("worker1", int, args=("2",), timeout=PATIENCE) == 2


watched: list[Lead] = []


def is_kept() -> bool:
    """Whether a leader that waits keeps the lead."""
    return watched[0].waits


def block_and_ask() -> bool:
    block()
    return rpc.rpc_sync("worker0", is_kept)


def test_nested_calls_of_any_depth_wait_for_each_other_without_ticks(without_ticks: InProcessCluster) -> None:
    without_ticks[0].agent.watch.ticks[0] = lambda: False
    assert without_ticks[0].rpc_sync("worker1", descend, args=(12,), timeout=PATIENCE) == 12


def descend(depth: int) -> int:
    there = "worker0" if current().agent.me.name == "worker1" else "worker1"
    return 1 + rpc.rpc_sync(there, descend, args=(depth - 1,)) if depth else 0


# Without threads.


def refuse(_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_slow_line_stays_with_the_others_if_it_gets_no_thread(
    without_ticks: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = without_ticks
    shared = lead_of(workers, 0)
    measure(line_of(workers, 0))
    with monkeypatch.context() as patch:
        patch.setattr(workers[1].agent.pool, "run", refuse)
        for _ in range(4 * Pace.MEMORY):
            workers[0].rpc_sync("worker1", compute, args=(LONG,))
        assert workers[2].rpc_sync("worker1", int, args=("2",)) == 2
        assert line_of(workers, 0).pace.slow
        assert lead_of(workers, 0) is shared
    workers[0].rpc_sync("worker1", compute, args=(LONG,))
    assert await_events(workers[1], lambda: lead_of(workers, 0) is not shared, PATIENCE)


def test_a_line_stays_alone_if_the_others_have_no_thread(
    without_ticks: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = without_ticks
    measure(line_of(workers, 0))
    for _ in range(4 * Pace.MEMORY):
        workers[0].rpc_sync("worker1", compute, args=(LONG,))
    shared = workers[1].agent.serving._shared
    assert await_events(workers[1], lambda: lead_of(workers, 0) is not shared, PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(workers[1].agent.serving, "lead_together", refuse)
        for _ in range(8 * Pace.MEMORY):
            workers[0].rpc_sync("worker1", int)
        assert lead_of(workers, 0) is not shared
    while lead_of(workers, 0) is not shared:
        workers[0].rpc_sync("worker1", int)
