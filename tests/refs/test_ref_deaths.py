"""References and real deaths: SIGKILL of holders, owners and sharers."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from backhaul import rpc
from backhaul.rpc import RRef
from backhaul.worker import current
from crew import Crew

_kept: list[Any] = []
_lines: list[Any] = []


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number


def make(owner: str, count: int) -> int:
    """Make values there, and keep references to them here."""
    _kept.extend(rpc.remote(owner, Thing, args=(i,)) for i in range(count))
    return sum(rref.rpc_sync().get() for rref in _kept[-5:])


def keep(rrefs: list[RRef[Thing]]) -> None:
    _kept.extend(rrefs)


def hand_on(to: str, count: int) -> None:
    rpc.rpc_sync(to, keep, args=(_kept[:count],))


def hand_on_without_waiting(to: str) -> None:
    """The reference is on its way, and this worker may be killed before it is registered."""
    rpc.rpc_async(to, keep, args=(_kept,))


def numbers() -> list[int]:
    return [rref.to_here().number for rref in _kept]


def look_at_lines(peer: str) -> int:
    """Note the lines that a worker has opened to this one.

    The worker forgets a line that is over, though calls that came on it still run.
    """
    _lines.extend(line for line in list(current().agent.serving.lines) if line.peer.name == peer)
    return len(_lines)


def kept_of_the_dead() -> int:
    """What a dead worker has left here, once everything that came on its lines has been read and run."""
    for line in _lines:
        assert line.over.wait(10)
    deadline = time.monotonic() + 10
    while any(line.calls_started != line.calls_finished for line in _lines):
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
    return len(_kept)


def counts() -> dict[str, int]:
    return current().references.counts()


def let_go() -> None:
    _kept.clear()
    gc.collect()


def wait_until_values(count: int, seconds: float) -> float:
    """When this worker has that many values left; the time it took."""
    start = time.monotonic()
    while counts()["values"] != count:
        if time.monotonic() - start > seconds:
            raise AssertionError(f"after {seconds} s: {counts()}")
        threading.Event().wait(0.01)
    return time.monotonic() - start


def use_until_lost(seconds: float) -> tuple[float, str]:
    """Use a reference until that raises; when, and the name in the error."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            _kept[0].rpc_sync().get()
        except rpc.WorkerLostError as error:
            return time.time(), error.worker
    raise AssertionError("its uses go on to succeed")


def every_use_names(owner: str) -> int:
    """How many uses of a reference to a dead owner's value raise an error that names it."""
    rref = _kept[0]
    uses = (
        rref.to_here,
        lambda: rref.rpc_sync().get(),
        lambda: rref.rpc_async().get().wait(),
        lambda: rref.remote().get().to_here(),
        lambda: rpc.rpc_sync("worker0", keep, args=([rref],)),
    )
    named = 0
    for use in uses:
        try:
            use()
        except rpc.WorkerLostError as error:
            named += owner in str(error)
    return named


def test_values_of_a_killed_holder_are_freed_within_6_seconds() -> None:
    with Crew(3) as crew:
        assert crew[1].run(make, "worker0", 1000) == sum(range(995, 1000))
        crew[1].run(hand_on, "worker2", 10)
        assert crew[0].run(counts)["values"] == 1000
        crew[1].kill()
        # Only the ten that another worker has been given are left, and they are good.
        assert crew[0].run(wait_until_values, 10, 6.0) < 6.0
        assert crew[2].run(numbers) == list(range(10))
        crew[2].run(let_go)
        crew[0].run(wait_until_values, 0, 6.0)


def test_every_use_names_a_killed_owner() -> None:
    with Crew(3) as crew:
        crew[1].run(make, "worker2", 3)
        waiting = crew[1].start(use_until_lost, 20.0)
        killed = time.time()
        crew[2].kill()
        at, name = waiting.result(20)
        assert at - killed < 1
        assert name == "worker2"
        assert crew[1].run(every_use_names, "worker2") == 5
        crew[1].run(let_go)
        assert crew[1].run(wait_until_used_none, 6.0)


def wait_until_used_none(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while counts()["used"] and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return counts()["used"] == 0


def join(place: dict[str, Any]) -> None:
    rpc.init_rpc(**place)


def test_a_worker_that_replaces_a_dead_one_starts_without_references() -> None:
    with Crew(4, group=False) as crew:
        for rank in range(3):
            crew[rank].run(join, crew.place(rank, None))
        crew[1].run(make, "worker0", 3)
        crew[1].run(hand_on, "worker2", 3)
        crew[1].kill()
        crew[3].run(join, crew.place(1, None))
        # Its references count, and are not taken for those of the dead one that had the same rank.
        assert crew[3].run(make, "worker0", 3) == 3
        assert crew[2].run(numbers) == [0, 1, 2]
        assert crew[0].run(wait_until_values, 6, 6.0) < 6.0
        crew[2].run(hand_on, "worker1", 3)
        crew[2].run(let_go)
        assert crew[3].run(numbers) == [0, 1, 2, 0, 1, 2]
        crew[3].run(let_go)
        crew[0].run(wait_until_values, 0, 6.0)


def test_a_worker_that_was_stopped_and_goes_on_can_be_given_references() -> None:
    with Crew(3, unresponsive_after=1.0, rpc_timeout=8.0) as crew:
        crew[0].run(make, "worker2", 2)
        crew[0].run(hand_on, "worker1", 1)
        crew[1].signal(signal.SIGSTOP)
        with pytest.raises(rpc.BackhaulError):
            crew[0].run(hand_on, "worker1", 1)
        crew[1].signal(signal.SIGCONT)
        crew[1].run(let_go)
        crew[0].run(hand_on, "worker1", 2)
        crew[0].run(let_go)
        assert crew[1].run(numbers)[-2:] == [0, 1]
        crew[1].run(let_go)
        crew[2].run(wait_until_values, 0, 8.0)


@pytest.mark.parametrize("attempt", range(3))
def test_a_reference_survives_the_immediate_death_of_its_sender(attempt: int) -> None:
    """If the receiver has got the message at all, the reference in it is good."""
    with Crew(3) as crew:
        crew[1].run(hand_on, "worker2", 0)
        assert crew[2].run(look_at_lines, "worker1") == 1
        crew[1].run(make, "worker0", 20)
        crew[1].run(hand_on_without_waiting, "worker2")
        crew[1].kill()
        arrived = crew[2].run(kept_of_the_dead)
        assert arrived in (0, 20)
        if arrived:
            assert crew[2].run(numbers) == list(range(20))
        crew[2].run(let_go)
        crew[0].run(wait_until_values, 0, 6.0)
