"""A process that forks while it has segments of device memory: they stay the parent's, and the child leaves them alone.

No GPU is needed: the segments have a shared page, but no memory on a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from backhaul.devices import pages
from backhaul.devices.memory import SharedMemory
from backhaul.devices.segments import DeviceBorrowing, DeviceLending, Placed
from crew import Crew, Hand


@pytest.fixture(scope="module")
def hand() -> Iterator[Hand]:
    """A process that forks instead of this one."""
    with Crew(1, group=False) as crew:
        yield crew[0]


def in_a_child(work: Callable[[], object]) -> bool:
    """Whether the work succeeds in a forked process."""
    child = os.fork()
    if not child:
        done = 1
        try:
            work()
            done = 0
        finally:
            os._exit(done)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Events:
    """Events of the driver, which must not be called in a child."""

    def __init__(self, ended: int) -> None:
        self._ended = ended

    def __del__(self) -> None:
        os.write(self._ended, b"!")


def segment(id: int, events: object = None) -> Any:
    """A segment at its sender."""
    made: Any = pages.Segment.__new__(pages.Segment)
    made.id, made.device, made.size, made.used_at, made.events = id, 0, 100, 0.0, events
    made.memory = SimpleNamespace(size=made.size)
    made._start_page((b"", b""), "GPU-elsewhere", b"x" * 16)
    made.descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    return made


def the_sender_forks() -> None:
    ended, say_so = os.pipe()
    lending = DeviceLending(1 << 30, print)
    made = lending._segments = [segment(1, _Events(say_so)), segment(2)]
    lending._trials = {1: segment(3)}
    made[0].page[0] = made[1].page[0] = 1
    placed = Placed(made[0], 100)

    def work() -> None:
        nonlocal made, placed
        lending.close()  # as the worker does in a child
        del placed
        made = []

    lending._lock.acquire()  # by another thread of the parent
    assert in_a_child(work)
    assert [list(each.page[:2]) for each in (*made, *lending._trials.values())] == [[1, 0], [1, 0], [0, 0]]
    lending._lock.release()
    os.set_blocking(ended, False)
    with pytest.raises(BlockingIOError):
        os.read(ended, 1)
    lending.close()
    assert made[1].page[1]


def the_receiver_forks() -> None:
    theirs = segment(1)
    theirs.page[0] = 1
    borrowing = DeviceBorrowing()
    borrowing.add(*map(os.dup, theirs.descriptors))
    lease = borrowing.lend(1, 100)

    def work() -> None:
        nonlocal lease
        del lease

    assert in_a_child(work)
    assert theirs.page[0], "the child has freed a segment whose data the parent has not copied out"
    del lease
    assert not theirs.page[0]


def a_child_of_a_child() -> None:
    theirs = segment(1)
    theirs.page[0] = 1
    assert in_a_child(lambda: in_a_child(lambda: theirs.stay([])) or os._exit(1))
    assert theirs.page[0]


def device_memory_is_not_freed_in_a_child() -> None:
    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *arguments: os.write(say_so, b"!")

    called, say_so = os.pipe()
    memory = SharedMemory.__new__(SharedMemory)
    memory._process, memory.size, memory._mapped = os.getpid(), 100, True
    import backhaul.devices.memory as module

    module.library = Driver  # type: ignore[assignment]
    assert in_a_child(memory.close)
    os.set_blocking(called, False)
    with pytest.raises(BlockingIOError):
        os.read(called, 1)
    memory._address, memory._handle = module.ctypes.c_ulonglong(), module.ctypes.c_ulonglong()
    memory.close()
    assert os.read(called, 1)


@pytest.mark.parametrize(
    "story", [the_sender_forks, the_receiver_forks, a_child_of_a_child, device_memory_is_not_freed_in_a_child]
)
def test_segments_stay_the_parents(hand: Hand, story: Callable[[], None]) -> None:
    hand.run(story)
