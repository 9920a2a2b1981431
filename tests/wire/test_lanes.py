"""Slices and lanes: large frames that are cut up arrive whole, and small ones come in between."""

from __future__ import annotations

import random

import pytest
import torch

from backhaul.errors import ProtocolError
from backhaul.ids import RefId, ShareId
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import HEADER, MAGIC, SLICE, VERSION, Frame, encode, join, with_trace
from backhaul.wire.lanes import LEAST_SLICE, MOST_SLICE, SMALL, Pace, Slices, may_pass
from backhaul.wire.messages import (
    KIND_OF,
    Call,
    Create,
    Failure,
    Fetch,
    Inquire,
    Leave,
    Notices,
    Ping,
    Register,
    Result,
)

REFS = ((RefId(1, 2, 3), ShareId(4, 5)),)


def sliced(frame: Frame, size: int) -> list[bytes]:
    slices = Slices(frame.pieces)
    cut = []
    while slices.left:
        cut.append(b"".join(slices.take(size)))
    return cut


def header(size: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, SLICE, 0, 0, size)


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, generator=generator) for count in (3, 40_000, 0, 9_000, 20_000)]


def test_slices_are_what_the_byte_table_says() -> None:
    frame = encode(Ping(7))
    assert sliced(frame, 15) == [header(15) + bytes(frame)[:15], header(7) + bytes(frame)[15:]]


@pytest.mark.parametrize("seed", range(8))
def test_two_lanes_in_any_cuts(seed: int) -> None:
    """Large frames in slices, small frames in between, and bytes that come in pieces of any size."""
    rng = random.Random(seed)
    cuts = rng.choice([(1, 20, 21, 4000), (20, 21, 4000, 1 << 20), (1 << 20,)])
    stream = bytearray()
    small = large = 0
    for number in range(rng.randint(1, 3)):
        frame = encode(Result(1000 + number, [number]), tensors(number))
        for piece in sliced(frame, rng.choice([997, 5000, 100_000, 1 << 20])):
            stream += piece
            if rng.random() < 0.3:
                stream += bytes(encode(Result(small, None), tensors(small)[: rng.randint(0, 2)]))
                small += 1
        large += 1
    decoder = Decoder()
    rest = memoryview(stream)
    seen: list[int] = []
    while rest:
        room = decoder.writable()
        count = min(len(rest), len(room), rng.choice(cuts))
        room[:count] = rest[:count]
        decoder.wrote(count)
        rest = rest[count:]
        while (envelope := decoder.next()) is not None:
            number = envelope.message.id
            seen.append(number)
            expected = tensors(number % 1000)
            assert all(map(torch.equal, envelope.tensors, expected))
            assert number < 1000 or len(envelope.tensors) == len(expected)
    assert [number for number in seen if number < 1000] == list(range(small))
    assert [number for number in seen if number >= 1000] == list(range(1000, 1000 + large))


def test_the_bytes_of_a_slice_go_where_they_belong() -> None:
    """A transport that reads whole records gets the tensor's own memory to write to, in every slice."""
    frame = encode(Result(1, None), [torch.arange(100_000.0)])
    slices = Slices(frame.pieces)
    decoder = Decoder()
    direct = 0
    while slices.left:
        for piece in slices.take(100_000):
            rest = memoryview(piece)
            while rest:
                room = decoder.writable()
                direct += len(rest) if len(room) > 64 * 1024 and len(rest) > 1000 else 0
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
                decoder.wrote(count)
                rest = rest[count:]
            envelope = decoder.next()
    assert envelope is not None
    assert torch.equal(envelope.tensors[0], torch.arange(100_000.0))
    assert direct > 250_000


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(MAGIC, VERSION, SLICE, 1, 0, 5),
        HEADER.pack(MAGIC, VERSION, SLICE, 0, 1, 5),
        header(0),
        header(20) + header(5),
        header(30) + b"x" * 30,
    ],
    ids=["metadata", "table", "empty", "a slice in a slice", "garbage"],
)
def test_bad_slices_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().receive_data(data)


def test_many_slices_cost_no_stack() -> None:
    frame = bytes(encode(Ping(7)))
    data = b"".join(header(1) + bytes([byte]) for byte in frame * 2000)
    assert [envelope.message for envelope in Decoder().receive_data(data)] == [Ping(7)] * 2000


# Messages without room.


def no_room(size: int) -> None:
    raise MemoryError(f"{size} are too many")


@pytest.mark.parametrize("cut", [1000, 64 * 1024, 1 << 30])
@pytest.mark.parametrize("lane", ["direct", "slices"])
def test_a_message_over_the_limit_is_drained(lane: str, cut: int) -> None:
    frame = encode(Call(5, ["x"]), [torch.ones(200_000), torch.ones(3)])
    data = bytes(frame) if lane == "direct" else b"".join(sliced(frame, 100_000))
    data += bytes(encode(Ping(6)))
    decoder = Decoder(100_000, drains=True)
    found = [
        envelope for start in range(0, len(data), cut) for envelope in decoder.receive_data(data[start : start + cut])
    ]
    assert [envelope.message for envelope in found] == [Call(5, ["x"]), Ping(6)]
    with pytest.raises(MemoryError, match=f"a message of {frame.size} bytes is over the limit of 100000"):
        found[0].tensors.land()  # type: ignore[attr-defined]


def test_a_large_tensor_is_drained_in_few_reads() -> None:
    """Each read costs the interpreter some microseconds."""
    data = memoryview(bytes(encode(Call(5, ["x"]), [torch.ones(4 << 20)])) + bytes(encode(Ping(6))))
    decoder = Decoder(100_000, drains=True)
    found = []
    reads = 0
    while data:
        room = decoder.writable()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        decoder.wrote(count)
        found += list(iter(decoder.next, None))
        reads += 1
    assert [envelope.message for envelope in found] == [Call(5, ["x"]), Ping(6)]
    assert reads < 50, "16 MiB at 512 KiB each"


@pytest.mark.parametrize("cut", [1, 1000, 1 << 30])
@pytest.mark.parametrize("lane", ["direct", "slices"])
@pytest.mark.parametrize("trace", ["", "a tracer's mark"])
@pytest.mark.parametrize("id", [5, 200, 60_000, 1 << 20, 1 << 40])
def test_values_over_the_limit_are_drained(lane: str, cut: int, trace: str, id: int) -> None:
    values = "x" * 2_000
    ref = RefId(1, 2, 3)
    large = [
        encode(Call(id, values)),
        encode(Call(id, values), [torch.ones(3)]),
        encode(Create(id, ref, values)),
        encode(Result(id, values)),
        encode(Failure(id, "worker1", "ValueError", values, "")),
    ]
    for frame, stands in zip(large, [Call, Call, Call, Result, Result], strict=True):
        sent = with_trace(frame, trace) if trace else frame
        data = bytes(sent) if lane == "direct" else b"".join(sliced(sent, 512))
        data += bytes(encode(Ping(6)))
        decoder = Decoder(1_000, drains=True)
        found = [each for at in range(0, len(data), cut) for each in decoder.receive_data(data[at : at + cut])]
        assert [envelope.message for envelope in found] == [stands(id, []), Ping(6)]
        with pytest.raises(MemoryError, match=f"a message of {sent.size} bytes is over the limit of 1000"):
            found[0].tensors.land()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "frame",
    [
        encode(Notices(1, 2, 3, tuple(Register(RefId(1, 1, number)) for number in range(5000)))),
        Frame([HEADER.pack(MAGIC, VERSION, KIND_OF[Call], 20_000, 0, 0) + bytes(20_000)], HEADER.size + 20_000),
        Frame([HEADER.pack(MAGIC, VERSION, KIND_OF[Call], 20_000, 0, 0) + b"\x92\xc0" * 10_000], HEADER.size + 20_000),
    ],
    ids=["what nobody waits for", "no array", "no number"],
)
def test_other_values_over_the_limit_end_the_connection(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        Decoder(10_000, drains=True).receive_data(bytes(frame))


@pytest.mark.parametrize("cut", [1000, 64 * 1024, 1 << 30])
def test_a_tensor_without_room_is_drained(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.wire.payload._LARGE", 500_000)
    frame = encode(Call(5, ["x"]), [torch.ones(100_000), torch.ones(200_000), torch.ones(50_000)])
    data = bytes(frame) + bytes(encode(Ping(6)))
    decoder = Decoder(check_room=no_room)
    found = [
        envelope for start in range(0, len(data), cut) for envelope in decoder.receive_data(data[start : start + cut])
    ]
    assert [envelope.message for envelope in found] == [Call(5, ["x"]), Ping(6)]
    with pytest.raises(MemoryError, match=f"a message of {frame.size} bytes has no room .* 800000 are too many"):
        found[0].tensors.land()  # type: ignore[attr-defined]


# Pace and passing.


def test_the_pace_follows_the_link() -> None:
    pace = Pace()
    while pace.size < MOST_SLICE:
        assert pace.took(pace.size, 0.001)
    assert not pace.took(pace.size, 0.001)
    for _ in range(20):
        pace.took(pace.size, 0.5)
    assert pace.size == LEAST_SLICE
    assert not pace.took(pace.size, 0.05)
    assert not pace.took(100, 0.0001)  # the end of a frame says nothing about large slices


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        (Call(1, None), True),
        (Ping(0), True),
        (Result(1, "x"), True),
        (Call(1, None, REFS), False),
        (Result(1, None, REFS), False),
        (Create(1, RefId(0, 1, 2), None), False),
        (Fetch(1, RefId(0, 1, 2), None), False),
        (Notices(1, 0, 1, ()), False),
        (Leave(1), False),
        (Inquire(1, ()), False),
    ],
)
def test_only_some_kinds_of_messages_pass(message: object, passes: bool) -> None:
    frame = encode(message)
    assert may_pass(frame) is passes
    assert may_pass(join([encode(Ping(1)), frame])) is passes


def test_large_messages_do_not_pass() -> None:
    assert not may_pass(encode(Result(1, "x" * SMALL)))
    assert not may_pass(encode(Result(1, None), [torch.ones(100_000)]))
