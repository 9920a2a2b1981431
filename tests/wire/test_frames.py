"""Messages -> frames: every byte against the table in `frames`, and how the bytes are cut into pieces."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from backhaul.errors import UnsendableError
from backhaul.ids import RefId, ShareId
from backhaul.wire import frames
from backhaul.wire.frames import Frame, encode, with_trace
from backhaul.wire.messages import (
    KIND_OF,
    KINDS,
    AwaitEnd,
    AwaitReady,
    Call,
    Check,
    Coded,
    Create,
    Failed,
    Failure,
    Fetch,
    Goodbye,
    Gradients,
    Inquire,
    Inspect,
    Leave,
    Mark,
    Notices,
    Pass,
    Ping,
    Recall,
    Register,
    Registered,
    Release,
    Report,
    Resolve,
    Resolved,
    Result,
    Shortcut,
    Sweep,
    Swept,
    TakePart,
    Tally,
    Unpin,
)

# magic, version, kind, then M, T and P: all numbers little-endian
HEAD = "42 48 01"
NO_TENSORS = "00000000 0000000000000000"

REF, SHARE = RefId(1, 2, 3, 6), ShareId(4, 5)
PASS, PASS_BYTES = Pass(1, 2, 3, True, False), "95 01 02 03 c3 c2"

LITERAL = [
    (Call(1, None), f"{HEAD} 01 07000000 {NO_TENSORS} 96 01 c0 90 c0 90 90"),
    (Call(1, None, (), Mark(2, 3, False)), f"{HEAD} 01 0b000000 {NO_TENSORS} 96 01 c0 90 94 02 03 c2 c0 90 90"),
    (Call(1, None, ((REF, SHARE),)), f"{HEAD} 01 10000000 {NO_TENSORS} 96 01 c0 91 92 9401020306 920405 c0 90 90"),
    (Result(2, [0, True, 1.5]), f"{HEAD} 02 11000000 {NO_TENSORS} 95 02 93 00 c3 cb3ff8000000000000 90 c0 90"),
    (
        Result(2, None, (), None, (Coded(0, "topk", "float32", (4,), True),)),
        f"{HEAD} 02 18000000 {NO_TENSORS} 95 02 c0 90 c0 91 95 00 a4746f706b a7666c6f61743332 91 04 c3",
    ),
    (
        Failure(3, "w", "T", "x", "t"),
        f"{HEAD} 03 0c000000 {NO_TENSORS} 97 03 a177 a154 a178 a174 c0 90",
    ),
    (Ping(4), f"{HEAD} 04 02000000 {NO_TENSORS} 91 04"),
    (AwaitReady(5, 0), f"{HEAD} 05 03000000 {NO_TENSORS} 92 05 00"),
    (AwaitEnd(6, 1), f"{HEAD} 06 03000000 {NO_TENSORS} 92 06 01"),
    (Tally(300), f"{HEAD} 07 04000000 {NO_TENSORS} 91 cd012c"),
    (Goodbye(), f"{HEAD} 08 01000000 {NO_TENSORS} 90"),
    (Create(7, REF, None), f"{HEAD} 09 0c000000 {NO_TENSORS} 97 07 9401020306 c0 90 c0 90 90"),
    (Fetch(8, REF), f"{HEAD} 0a 08000000 {NO_TENSORS} 93 08 9401020306 c0"),
    (
        Notices(9, 12, 10, (Register(REF), Registered(REF, False), Unpin(SHARE), Release(REF))),
        f"{HEAD} 0b 20000000 {NO_TENSORS} 94 09 0c 0a 94 9201 9401020306 9302 9401020306 c2 9203 920405 9204"
        " 9401020306",
    ),
    (
        Notices(9, 12, 11, (Sweep((1, 2)), Swept(()), Recall((SHARE,)))),
        f"{HEAD} 0b 13000000 {NO_TENSORS} 94 09 0c 0b 93 9205 920102 9206 90 9207 91 920405",
    ),
    (
        Gradients(PASS, (6, 7), (1,), shortcuts=(Shortcut(3, 1, 2),)),
        f"{HEAD} 0c 14000000 {NO_TENSORS} 97 {PASS_BYTES} 92 06 07 91 01 90 90 90 91 93 03 01 02",
    ),
    (TakePart(PASS, (6, 7)), f"{HEAD} 0d 0a000000 {NO_TENSORS} 92 {PASS_BYTES} 92 06 07"),
    (Resolve(PASS), f"{HEAD} 0e 07000000 {NO_TENSORS} 91 {PASS_BYTES}"),
    (Resolved(PASS), f"{HEAD} 0f 07000000 {NO_TENSORS} 91 {PASS_BYTES}"),
    (Report(PASS, False, (6,), ()), f"{HEAD} 10 0b000000 {NO_TENSORS} 94 {PASS_BYTES} c2 91 06 90"),
    (
        Failed(PASS, "w", "T", "x", "t"),
        f"{HEAD} 11 11000000 {NO_TENSORS} 97 {PASS_BYTES} a177 a154 a178 a174 c0 90",
    ),
    (Check(8, PASS, 9), f"{HEAD} 12 09000000 {NO_TENSORS} 93 08 {PASS_BYTES} 09"),
    (Leave(5), f"{HEAD} 13 02000000 {NO_TENSORS} 91 05"),
    (Inquire(6, (5, 4)), f"{HEAD} 14 05000000 {NO_TENSORS} 92 06 92 05 04"),
    (Inspect(7, "t", {"a": 1}), f"{HEAD} 15 08000000 {NO_TENSORS} 93 07 a174 81 a161 01"),
]


@pytest.mark.parametrize(("message", "expected"), LITERAL, ids=lambda value: type(value).__name__)
def test_small_messages_are_these_bytes(message: object, expected: str) -> None:
    frame = encode(message)
    assert bytes(frame) == bytes.fromhex(expected)
    assert frame.size == len(bytes(frame))
    assert len(frame.pieces) == 1


def test_the_literals_have_every_kind_of_message() -> None:
    assert {type(message) for message, _ in LITERAL} == set(KINDS.values())
    assert {KIND_OF[kind] for kind in KINDS.values()} == set(KINDS)


def test_the_mark_of_a_tracer_comes_before_the_message() -> None:
    frame = with_trace(encode(Call(1, None)), "ab")
    expected = f"{HEAD} 41 0a000000 {NO_TENSORS} 02 6162 96 01 c0 90 c0 90 90"
    assert bytes(frame) == bytes.fromhex(expected)
    assert frame.size == len(bytes(frame))


def test_a_tensor_adds_its_table_and_its_bytes() -> None:
    frame = encode(Result(9, [3, 0]), [torch.tensor([1.0, -2.0])])
    expected = bytes.fromhex(
        f"{HEAD} 02 08000000 29000000 0800000000000000"
        "95 09 92 03 00 90 c0 90"  # the message: [9, [TENSOR, 0], no references, no mark, no codes]
        "01000000 01000000 0800000000000000"  # one tensor, one buffer, of 8 bytes
        "00 0b 00 00 01 00000000 0000000000000000"  # strided, float32, no flags, cpu, 1 dimension, buffer 0 at 0
        "0200000000000000"
        "0000803f 000000c0"
    )
    assert bytes(frame) == expected
    assert len(frame.pieces) == 1
    assert frame.size == len(expected)


def test_several_tensors_share_one_table() -> None:
    given = [torch.zeros(2, dtype=torch.uint8), torch.zeros(0), torch.ones(3, dtype=torch.int16)]
    data = bytes(encode(Ping(1), given))
    _, _, _, metadata, table, payload = frames.HEADER.unpack_from(data)
    assert (metadata, payload) == (2, 8)
    assert len(data) == frames.HEADER.size + metadata + table + payload
    counts = struct.unpack_from("<II2Q", data, frames.HEADER.size + metadata)
    assert counts == (3, 2, 2, 6)


def test_small_buffers_are_joined_and_copied() -> None:
    tensor = torch.zeros(100_000, dtype=torch.uint8)  # over INLINE: pack_tensors itself does not copy it
    frame = encode(Ping(1), [tensor])
    before = bytes(frame)
    tensor.fill_(1)
    assert len(frame.pieces) == 1
    assert bytes(frame) == before
    assert frame.keep is None


def test_large_buffers_are_pieces_that_point_into_the_tensor() -> None:
    tensor = torch.arange(100_000, dtype=torch.int32)
    frame = encode(Ping(1), [tensor])
    head, piece = frame.pieces
    assert isinstance(piece, memoryview)
    assert ctypes.addressof(ctypes.c_ubyte.from_buffer(piece)) == tensor.data_ptr()
    assert frame.size == len(head) + tensor.nbytes == sum(len(piece) for piece in frame.pieces)
    assert frame.keep


def test_large_pieces_outlive_the_tensor() -> None:
    frame = encode(Ping(1), [torch.full((100_000,), 7, dtype=torch.int32)])
    assert bytes(frame.pieces[1])[:8] == bytes.fromhex("07000000 07000000")


def test_many_small_buffers_that_are_large_together_are_not_joined() -> None:
    frame = encode(Ping(1), [torch.zeros(50_000, dtype=torch.uint8) for _ in range(3)])
    assert [len(piece) for piece in frame.pieces[1:]] == [50_000] * 3


def test_the_border_between_one_piece_and_several(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(50, dtype=torch.uint8), torch.ones(50, dtype=torch.uint8)]
    size = encode(Ping(1), tensors).size
    monkeypatch.setattr(frames, "_JOIN_BELOW", size)
    assert len(encode(Ping(1), tensors).pieces) == 1
    monkeypatch.setattr(frames, "_JOIN_BELOW", size - 1)
    assert len(encode(Ping(1), tensors).pieces) == 3


def test_metadata_over_the_limit_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Result(1, "x" * 20)
    size = encode(message).size - frames.HEADER.size
    monkeypatch.setattr(frames, "MAX_METADATA", size)
    encode(message)
    monkeypatch.setattr(frames, "MAX_METADATA", size - 1)
    with pytest.raises(UnsendableError, match=f"take {size} bytes .* send large data as tensors"):
        encode(message)


def test_a_table_over_the_limit_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.zeros(1)] * 4
    *_, table, _ = frames.HEADER.unpack_from(encode(Ping(1), given).pieces[0])
    monkeypatch.setattr(frames, "MAX_TABLE", table)
    encode(Ping(1), given)
    monkeypatch.setattr(frames, "MAX_TABLE", table - 1)
    with pytest.raises(UnsendableError, match=r"too many tensors; .* stacked"):
        encode(Ping(1), given)


def test_the_numbers_that_both_ends_of_a_connection_know() -> None:
    assert (frames.MAGIC, frames.VERSION, frames.SLICE) == (b"BH", 1, 0)
    assert (frames.PLACED, frames.TRACED, frames.DEVICE_PLACE) == (0x80, 0x40, 0x8000_0000)
    assert (frames.MAX_METADATA, frames.MAX_TABLE, frames.LONGEST_TRACE) == (0xFFFF_FFFF, 0x1000_0000, 0xFF)
    assert not {frames.SLICE, frames.PLACED, frames.TRACED} & set(KINDS)


def test_the_limits_fit_the_header() -> None:
    packed = frames.HEADER.pack(b"BH", 1, 255, frames.MAX_METADATA, frames.MAX_TABLE, (1 << 64) - 1)
    assert len(packed) == frames.HEADER.size == 20


class Special(torch.Tensor):
    pass


def test_an_unsendable_tensor_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(UnsendableError, match="not a plain tensor"):
        encode(Ping(1), [torch.ones(1).as_subclass(Special)])


def test_bytes_of_a_frame_are_its_pieces_in_order() -> None:
    assert bytes(Frame([b"ab", memoryview(b"cd")], 4)) == b"abcd"
