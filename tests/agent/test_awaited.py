"""Messages that a thread of the peer waits for: on which line they leave, and in whose segments their tensors are.

No GPU is needed: the lines only note what they get.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backhaul.agent import outgoing
from backhaul.agent.link import MOST_AWAITED, Link
from backhaul.agent.outgoing import Outgoing
from backhaul.ids import WorkerInfo
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Ping


class Lending:
    """The segments of one line. ``open``: whether the peer can open them. ``full``: whether all are in use."""

    def __init__(self, name: str, *, open: bool = True, full: bool = False) -> None:
        self.name, self.open, self.full = name, open, full

    def takes(self, tensors: Any) -> bool:
        return self.open


class Line:
    """``left``: the segments, if any, of each frame that left on the line, and its other bytes."""

    def __init__(self, lending: Lending | None) -> None:
        self.channel = SimpleNamespace(device_lending=lending)
        self.left: list[tuple[str, int]] = []

    def post(self, frame: Any) -> None:
        self.left.append((frame.keep[0] if frame.places else "", frame.size))

    reply = post


class Tensor:
    """A tensor on a GPU, or on the CPU."""

    def __init__(self, size: int, *, is_cuda: bool = True) -> None:
        self.size, self.is_cuda = size, is_cuda


def encode(message: Any, tensors: Any, staging: Any) -> Frame:
    """As in `wire.frames`: what goes in no segment is in the frame."""
    lending: Any = None if staging is None else staging._lending
    in_segments = [each for each in tensors if each.is_cuda and lending is not None and not lending.full]
    rest = sum(each.size for each in tensors if each not in in_segments)
    if in_segments:
        return Frame([b""], 30 + rest, [lending.name], [1])
    return Frame([b""], 30 + rest, [0] if any(each.is_cuda for each in tensors) else None)


class Worker:
    """Posts gradients to a worker that has opened the line ``theirs``, and to which ``mine`` leads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, theirs: Lending | None, mine: Lending | None = None) -> None:
        monkeypatch.setattr(outgoing, "encode", encode)
        self.theirs, self.mine = Line(theirs), Line(mine or Lending("mine"))
        self.outgoing: Any = Outgoing.__new__(Outgoing)
        link, served = Link(WorkerInfo("worker1", 1)), self.theirs
        link.opened(served)  # type: ignore[arg-type]
        self.outgoing._links = {1: link}
        self.outgoing.devices = SimpleNamespace(crosses=False)
        self.outgoing.observers = ()
        self.outgoing._route = lambda to, deadline: self.mine

    def post(self, *tensors: Tensor) -> None:
        self.outgoing.post_awaited(1, Ping(1), tensors)


def test_they_take_the_line_where_the_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, Lending("theirs"))
    worker.post(Tensor(1 << 20))
    worker.post(Tensor(100, is_cuda=False))
    assert worker.theirs.left == [("theirs", 30), ("", 130)]
    assert not worker.mine.left


def test_large_ones_on_the_cpu_take_the_other_line(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, Lending("theirs"))
    worker.post(Tensor(MOST_AWAITED, is_cuda=False))
    assert (worker.theirs.left, worker.mine.left) == ([], [("", 30 + MOST_AWAITED)])


def test_a_frame_leaves_on_the_line_of_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line numbers its segments, so on another line the receiver would read other data."""
    worker = Worker(monkeypatch, Lending("theirs"))
    worker.post(Tensor(1 << 20), Tensor(MOST_AWAITED, is_cuda=False))
    assert not worker.theirs.left
    assert worker.mine.left == [("mine", 30 + MOST_AWAITED)]


@pytest.mark.parametrize("theirs", [None, Lending("theirs", open=False)])
def test_without_segments_there_they_take_the_other_line(
    monkeypatch: pytest.MonkeyPatch, theirs: Lending | None
) -> None:
    worker = Worker(monkeypatch, theirs)
    worker.post(Tensor(1 << 20))
    assert (worker.theirs.left, worker.mine.left) == ([], [("mine", 30)])


def test_without_a_free_segment_they_take_the_other_line(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, Lending("theirs", full=True))
    worker.post(Tensor(1 << 20))
    assert not worker.theirs.left
    assert len(worker.mine.left) == 1
