"""Segments at their sender: descriptors are closed once, and a copy that fails costs its segment only.

No GPU is needed: the segments have a page, but no memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest

from backhaul.devices import pages, segments
from backhaul.devices.driver import DriverError
from backhaul.devices.segments import DeviceLending, Placed


class _Outgoing:
    def __init__(self) -> None:
        self.filled = 0
        self.fails = False

    def fill(self, source: int, size: int, stream: int) -> None:
        if self.fails:
            raise DriverError("a copy failed")
        self.filled += 1


class _Memory:
    """A tensor on a GPU."""

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        pass

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def data_ptr(self) -> int:
        return 0


def segment(id: int = 1, size: int = 100) -> Any:
    made: Any = pages.Segment.__new__(pages.Segment)
    made.id, made.device, made.size, made.used_at = id, 0, size, 0.0
    made.page = mmap.mmap(-1, pages.PAGE)
    made.descriptors = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]
    made.outgoing = _Outgoing()
    made.memory = made  # for its size
    return made


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> DeviceLending:
    monkeypatch.setattr(segments.driver, "torch_stream", lambda device: None)
    monkeypatch.setattr(segments.driver, "current_stream", lambda device: ~device)
    made = DeviceLending(1 << 30, lambda text: None)
    made._opened.add(0)  # the peer has opened a segment on trial
    return made


def place(lending: DeviceLending, size: int) -> Placed | None:
    memory: Any = _Memory()
    return lending.place(memory, size)


def test_the_smallest_free_segment_that_fits_is_taken(lending: DeviceLending) -> None:
    lending._segments = [segment(1, 400), segment(2, 100), segment(3, 200)]
    held = [place(lending, size) for size in (90, 90, 150)]
    assert [each.id for each in held if each is not None] == [2, 3, 1]
    assert [each.page[0] for each in lending._segments] == [1, 1, 1]
    del held
    assert [each.page[0] for each in lending._segments] == [0, 0, 0]
    lending.close()


def test_a_copy_that_fails_costs_its_segment_only(lending: DeviceLending) -> None:
    bad, good = segment(1), segment(2, 200)
    lending._segments = [bad, good]
    bad.outgoing.fails = True
    with pytest.raises(DriverError, match="a copy failed"):
        place(lending, 50)
    assert lending._segments == [good]
    assert (bad.page[0], bad.page[1], bad.descriptors) == (0, 1, [])
    placed = place(lending, 50)
    assert placed is not None
    assert placed.id == 2
    del placed
    lending.close()


@pytest.mark.parametrize("taken", [False, True])
def test_descriptors_are_closed_once(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Two threads may give the segment up, or one may take the descriptors for a message at that moment."""
    made = segment()
    closed: list[int] = []
    close = os.close

    def close_after_another_thread(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)
        if len(closed) == 1:
            if taken:
                mine, made.descriptors = made.descriptors, []
                made.stay(mine)
            else:
                made.forget()

    expected = sorted(made.descriptors)
    monkeypatch.setattr(pages.os, "close", close_after_another_thread)
    made.forget()
    monkeypatch.undo()
    assert sorted(closed) == expected
