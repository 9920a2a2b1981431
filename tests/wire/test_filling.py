"""Frames into which a device still copies data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backhaul.wire import frames
from backhaul.wire.filling import Copying, Filling
from backhaul.wire.frames import Frame, encode, with_trace
from backhaul.wire.messages import Ping
from backhaul.wire.tensors import Packed


class Copy:
    """A copy that a test makes, byte by byte."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.made = 0

    def done(self) -> int:
        return self.made


def test_bytes_are_there_up_to_the_first_that_is_missing() -> None:
    first, second = Copy(4), Copy(3)
    filling = Filling([(2, first), (8, second)], 12)  # two bytes before, between and one after them were there before
    assert filling.missing == 10
    second.made = 3
    assert filling.missing == 10
    first.made = 1
    assert filling.missing == 9
    first.made = 4
    assert filling.missing == 0


def test_what_follows_a_copy_waits_for_it() -> None:
    copy = Copy(4)
    filling = Filling([(0, copy)], 100)
    assert filling.missing == 100
    copy.made = 3
    assert filling.missing == 97
    copy.made = 4
    assert filling.missing == 0


def test_a_copy_of_nothing() -> None:
    assert Filling([(0, Copy(0)), (0, Copy(0))], 0).missing == 0


def test_what_the_device_fails_with_is_raised() -> None:
    class Broken(Copy):
        def done(self) -> int:
            raise RuntimeError("the device has failed")

    with pytest.raises(RuntimeError, match="has failed"):
        _ = Filling([(0, Broken(1))], 1).missing


class ToHost:
    def code(self, device: torch.device) -> int:
        return 1

    def stage(self, memory: torch.Tensor, size: int, code: int) -> Any:
        raise AssertionError("no tensor of this test is on a GPU")


def staged(monkeypatch: pytest.MonkeyPatch, buffers: list[Any], copies: list[tuple[int, Copying]]) -> Frame:
    """The frame of a message with these buffers."""
    sizes = [len(buffer) for buffer in buffers]
    packed = Packed(b"table", buffers, ["kept"], [0] * len(buffers), sizes, copies)
    monkeypatch.setattr(frames, "pack_staged", lambda tensors, staging: packed)
    return encode(Ping(1), [torch.zeros(1)], ToHost())


def test_a_frame_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [Copy(4), Copy(5)]
    buffers = [memoryview(b"aaaa"), b"own", memoryview(b"bbbbb")]
    frame = staged(monkeypatch, buffers, [(0, copies[0]), (2, copies[1])])
    assert frame.filling is not None
    assert frame.filling.missing == 12
    copies[0].made = 4
    assert frame.filling.missing == 5
    with pytest.raises(ValueError, match="still copies"):
        bytes(frame)
    marked = with_trace(frame, "mark")
    assert marked.filling is frame.filling
    copies[1].made = 5
    assert bytes(frame).endswith(b"aaaaownbbbbb")
    assert bytes(marked).endswith(b"aaaaownbbbbb")


def test_only_memory_of_the_user_makes_a_sender_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = memoryview(b"copied")
    frame = staged(monkeypatch, [copied, b"own"], [(0, Copy(6))])
    assert frame.keep
    assert not frame.holds
    assert not with_trace(frame, "mark").holds
    assert staged(monkeypatch, [copied, memoryview(b"the user's")], [(0, Copy(6))]).holds
    assert staged(monkeypatch, [memoryview(b"the user's")], []).holds


def test_without_a_copy_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert staged(monkeypatch, [memoryview(b"abc")], []).filling is None
    assert encode(Ping(1), [torch.zeros(100_000)]).filling is None
