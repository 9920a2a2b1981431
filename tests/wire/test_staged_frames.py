"""Frames whose tensors are on GPUs or go to GPUs, and frames that change after they were made: every byte.

No GPU is needed: the tests say themselves what was staged.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from backhaul.errors import UnsendableError
from backhaul.wire import frames
from backhaul.wire.frames import (
    DEVICE_PLACE,
    HEADER,
    PLACED,
    Frame,
    encode,
    is_failure,
    join,
    kind_of,
    place,
    with_trace,
)
from backhaul.wire.messages import Failure, Ping, Result
from backhaul.wire.tensors import Packed

GPU = 3
PING = bytes.fromhex("91 01")
FIRST, SECOND = DEVICE_PLACE | 1, DEVICE_PLACE | 2


class ToGpu:
    """Sends every tensor to one GPU of the peer. The tensors of these tests are on the CPU, so none is staged."""

    def code(self, device: torch.device) -> int:
        return GPU

    def stage(self, memory: torch.Tensor, size: int, code: int) -> Any:
        raise AssertionError("a tensor on the CPU is sent from where it is")


def staged(monkeypatch: pytest.MonkeyPatch, packed: Packed) -> Frame:
    """The frame of a ping whose tensors were packed like this."""
    monkeypatch.setattr(frames, "pack_staged", lambda tensors, staging: packed)
    return encode(Ping(1), [torch.zeros(1)], ToGpu())


def head_of(frame: Frame) -> tuple[int, int, int, int]:
    """The kind of a frame, and the sizes of its three parts. Checks everything else in the header."""
    magic, version, kind, metadata, table, payload = HEADER.unpack_from(frame.pieces[0])
    assert (magic, version) == (b"BH", 1)
    assert frame.size == len(bytes(frame)) == HEADER.size + metadata + table + payload
    return kind, metadata, table, payload


def test_a_tensor_that_goes_to_a_gpu_differs_only_in_its_device() -> None:
    tensor = torch.tensor([1.0, -2.0])
    plain, moved = encode(Ping(1), [tensor]), encode(Ping(1), [tensor], ToGpu())
    expected = bytearray(bytes(plain))
    expected[HEADER.size + 2 + 16 + 3] = GPU  # after the ping, the counts with one size, layout, dtype and flags
    assert bytes(moved) == bytes(expected)
    assert head_of(moved) == head_of(plain)
    assert not moved.places


def test_a_staged_frame_is_never_one_piece_and_always_keeps_something() -> None:
    """A frame of one piece counts as small, so it may be joined with others or pass them."""
    frame = encode(Ping(1), [torch.zeros(2)], ToGpu())
    assert [len(piece) for piece in frame.pieces[1:]] == [8]
    assert frame.keep


def test_what_was_staged_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    host = object()
    assert staged(monkeypatch, Packed(b"table", [b"abc"], [host], [0], [3], [])).keep == [host]
    assert staged(monkeypatch, Packed(b"table", [], [host], [FIRST], [3], [])).keep == [host]


def test_buffers_in_device_memory_are_named_after_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed(b"table", [b"abc", b"de"], ["kept"], [FIRST, 0, SECOND, 0], [7, 3, 8, 2], [])
    frame = staged(monkeypatch, packed)
    assert head_of(frame) == (kind_of(frame.pieces[0]) | PLACED, 2, 5 + 16, 5)
    places = bytes.fromhex("01000080 00000000 02000080 00000000")
    assert bytes(frame)[HEADER.size :] == PING + b"table" + places + b"abcde"
    assert list(frame.pieces[1:]) == [b"abc", b"de"]
    assert list(frame.places) == [FIRST, 0, SECOND, 0]
    assert frame.keep == ["kept"]


def test_a_staged_table_over_the_limit_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_TABLE", 5)
    packed = Packed(b"table", [b"abc"], [], [0], [3], [])
    assert head_of(staged(monkeypatch, packed))[2] == 5
    with pytest.raises(UnsendableError, match=r"too many tensors; .* stacked"):
        staged(monkeypatch, packed._replace(table=b"table!"))


def test_buffers_of_a_staged_frame_move_to_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed(b"table", [b"abc", b"de", b"f"], ["kept"], [FIRST, 0, 0, SECOND, 0], [7, 3, 2, 8, 1], [])
    frame = staged(monkeypatch, packed)
    kind = head_of(frame)[0]
    placed = place(frame, (5, 0, 6))
    assert head_of(placed) == (kind, 2, 5 + 20, 2)
    assert bytes(placed)[HEADER.size :] == PING + b"table" + struct.pack("<5I", FIRST, 5, 0, SECOND, 6) + b"de"
    assert list(placed.places) == [FIRST, 5, 0, SECOND, 6]
    assert list(placed.pieces[1:]) == [b"de"]
    assert placed.keep == ["kept"]
    for wrong in [(5, 0), (5, 0, 6, 7)]:
        with pytest.raises(ValueError, match="argument"):
            place(frame, wrong)


def test_buffers_move_to_segments() -> None:
    frame = Frame([HEADER.pack(b"BH", 1, 4, 2, 5, 6) + PING + b"table", b"abc", b"de", b"f"], 33, "kept")
    head_of(frame)
    placed = place(frame, (5, 0, 6))
    assert head_of(placed) == (4 | PLACED, 2, 5 + 12, 2)
    assert bytes(placed)[HEADER.size :] == PING + b"table" + struct.pack("<3I", 5, 0, 6) + b"de"
    assert list(placed.pieces[1:]) == [b"de"]
    assert placed.keep == "kept"
    for wrong in [(5, 0), (5, 0, 6, 7)]:
        with pytest.raises(ValueError, match="argument"):
            place(frame, wrong)


def test_a_mark_leaves_the_rest_of_a_frame_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = staged(monkeypatch, Packed(b"table", [b"abc"], ["kept"], [FIRST, 0], [7, 3], []))
    kind, metadata, table, payload = head_of(frame)
    marked = with_trace(frame, "mark")
    assert head_of(marked) == (kind | frames.TRACED, metadata + 5, table, payload)
    assert bytes(marked)[HEADER.size :] == b"\x04mark" + bytes(frame)[HEADER.size :]
    assert marked.pieces[1:] == frame.pieces[1:]
    assert marked.keep == frame.keep
    assert marked.places == frame.places


@pytest.mark.parametrize("bits", [0, PLACED, frames.TRACED, PLACED | frames.TRACED])
def test_the_kind_is_read_without_the_bits(bits: int) -> None:
    for message, failed in ((Failure(1, "w", "T", "x", "t"), True), (Result(1, None), False)):
        head = bytearray(bytes(encode(message)))
        kind = head[3]
        head[3] |= bits
        assert kind_of(bytes(head)) == kind
        assert is_failure(Frame([bytes(head)], len(head))) is failed


def test_joined_frames_are_one_piece() -> None:
    some = [encode(Ping(1)), Frame([b"ab", b"c"], 3), encode(Ping(2))]
    joined = join(some)
    assert joined.pieces == [b"".join(bytes(frame) for frame in some)]
    assert joined.size == len(bytes(joined))
    assert join(some[:1]) is some[0]
