"""Bytes -> messages: whatever the bytes and however they are cut, there is one answer or one error.

The decoder may return messages, wait for more, or raise ProtocolError, and nothing else. It touches no memory beyond
what has arrived. `test_bad_frames` and `test_decoder_fuzz` try to break these rules.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from recorded_exchange import EXCHANGE, FRAMES, SMALL, STREAM, check_all, check_tensor, chunks, take, take_in_place

from backhaul.errors import ProtocolError
from backhaul.ids import RefId, ShareId
from backhaul.wire import landing
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import HEADER, LONGEST_TRACE, MAGIC, SLICE, VERSION, encode, with_trace
from backhaul.wire.messages import (
    KINDS,
    AwaitEnd,
    AwaitReady,
    Call,
    Create,
    Failure,
    Fetch,
    Goodbye,
    Notices,
    Ping,
    Register,
    Result,
    Tally,
    Unpin,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_recorded_exchange_has_every_kind_of_message() -> None:
    assert {type(message) for message, _ in EXCHANGE} == set(KINDS.values())
    assert 1_000 < len(STREAM) < 5_000


# Literal frames.


NO_TENSORS = "00000000 0000000000000000"

REF, SHARE = RefId(1, 2, 3), ShareId(4, 5)

LITERAL = [
    (f"4248 01 01 03000000 {NO_TENSORS} 92 01 c0", Call(1, None)),
    (f"4248 01 01 04000000 {NO_TENSORS} 93 01 c0 90", Call(1, None)),
    (f"4248 01 01 0c000000 {NO_TENSORS} 93 01 c0 91 92 93010203 920405", Call(1, None, ((REF, SHARE),))),
    (f"4248 01 02 0e000000 {NO_TENSORS} 92 02 93 00 c3 cb3ff8000000000000", Result(2, [0, True, 1.5])),
    (f"4248 01 03 0a000000 {NO_TENSORS} 95 03 a177 a154 a178 a174", Failure(3, "w", "T", "x", "t")),
    (f"4248 01 03 0b000000 {NO_TENSORS} 96 03 a177 a154 a178 a174 05", Failure(3, "w", "T", "x", "t", 5)),
    (f"4248 01 04 02000000 {NO_TENSORS} 91 04", Ping(4)),
    (f"4248 01 05 03000000 {NO_TENSORS} 92 05 00", AwaitReady(5, 0)),
    (f"4248 01 06 03000000 {NO_TENSORS} 92 06 01", AwaitEnd(6, 1)),
    (f"4248 01 07 04000000 {NO_TENSORS} 91 cd012c", Tally(300)),
    (f"4248 01 08 01000000 {NO_TENSORS} 90", Goodbye()),
    (f"4248 01 09 08000000 {NO_TENSORS} 94 07 93010203 c0 90", Create(7, REF, None)),
    (f"4248 01 0a 06000000 {NO_TENSORS} 92 08 93010203", Fetch(8, REF)),
    (
        f"4248 01 0b 10000000 {NO_TENSORS} 94 09 0c 0a 92 9201 93010203 9203 920405",
        Notices(9, 12, 10, (Register(REF), Unpin(SHARE))),
    ),
]


@pytest.mark.parametrize(("text", "message"), LITERAL)
def test_literal_frames(text: str, message: object) -> None:
    data = bytes.fromhex(text)
    assert Decoder().receive_data(data) == [Envelope(message, [], size=len(data))]


def test_a_literal_frame_with_a_tensor() -> None:
    data = bytes.fromhex(
        "4248 01 02 05000000 29000000 0800000000000000"
        "92 09 92 03 00"
        "01000000 01000000 0800000000000000"
        "00 0b 00 00 01 00000000 0000000000000000"
        "0200000000000000"
        "0000803f 000000c0"
    )
    (envelope,) = Decoder().receive_data(data)
    check_all([envelope], [(Result(9, [3, 0]), [torch.tensor([1.0, -2.0])])])


# The mark of a tracer.

TRACED = f"4248 01 41 07000000 {NO_TENSORS} 01 61 94 07 c0 90 c0"


def test_a_literal_frame_with_a_mark() -> None:
    (envelope,) = Decoder().receive_data(bytes.fromhex(TRACED))
    assert envelope == Envelope(Call(7, None), [], "a", 27)


def test_the_mark_of_one_frame_is_not_that_of_the_next() -> None:
    data = bytes(with_trace(encode(Call(7, None)), "a")) + bytes(encode(Call(8, None)))
    assert [envelope.trace for envelope in Decoder().receive_data(data)] == ["a", ""]


@pytest.mark.parametrize("numel", [2, 50_000, 300_000])
def test_a_mark_and_tensors(numel: int) -> None:
    tensor = torch.arange(numel, dtype=torch.float32)
    frame = with_trace(encode(Result(9, [3, 0]), [tensor]), "m" * LONGEST_TRACE)
    assert frame.size == sum(map(len, frame.pieces))
    (envelope,) = Decoder().receive_data(bytes(frame))
    assert envelope.message == Result(9, [3, 0])
    assert envelope.trace == "m" * LONGEST_TRACE
    assert envelope.size == frame.size
    assert torch.equal(envelope.tensors[0], tensor)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"4248 01 41 00000000 {NO_TENSORS}", "longer than its metadata"),
        (f"4248 01 41 01000000 {NO_TENSORS} 05", "longer than its metadata"),
        (f"4248 01 41 02000000 {NO_TENSORS} 02 61", "longer than its metadata"),
        (f"4248 01 41 05000000 {NO_TENSORS} 02 c3a4 91 04", "not text"),
        (f"4248 01 41 02000000 {NO_TENSORS} 01 61", "not a valid Call"),
        (f"4248 01 7f 02000000 {NO_TENSORS} 01 61", "unknown kind 127"),
    ],
)
def test_an_invalid_mark_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Decoder().receive_data(bytes.fromhex(text))


def test_no_bytes_give_no_message() -> None:
    decoder = Decoder()
    assert decoder.receive_data(b"") == []
    assert decoder.next() is None


# Chunks.


def test_many_frames_in_one_chunk() -> None:
    check_all(Decoder().receive_data(STREAM * 50), EXCHANGE * 50)


@pytest.mark.parametrize("feed", [take, take_in_place])
def test_one_byte_at_a_time(feed: Any) -> None:
    check_all(feed(Decoder(), chunks(STREAM, [1] * len(STREAM))), EXCHANGE)


@pytest.mark.long
@pytest.mark.parametrize("feed", [take, take_in_place])
def test_cut_in_two_at_every_byte(feed: Any) -> None:
    for cut in range(len(STREAM) + 1):
        decoder = Decoder()
        pieces = [STREAM[:cut], STREAM[cut:]]
        check_all(feed(decoder, pieces), EXCHANGE)


def test_a_message_comes_with_its_last_byte_and_not_before() -> None:
    decoder = Decoder()
    for frame in FRAMES:
        assert decoder.receive_data(frame[:-1]) == []
        assert len(decoder.receive_data(frame[-1:])) == 1


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("I")])
def test_any_kind_of_buffer_is_accepted(kind: Any) -> None:
    message = next(made for made in (Result(1, "a" * length) for length in range(4)) if encode(made).size % 4 == 0)
    frame = encode(message)
    assert Decoder().receive_data(kind(bytes(frame))) == [Envelope(message, [], size=frame.size)]


def test_decoded_messages_do_not_depend_on_the_chunk_s_memory() -> None:
    chunk = bytearray(STREAM)
    got = Decoder().receive_data(chunk)
    chunk[:] = bytes(len(chunk))
    check_all(got, EXCHANGE)


# Large tensors.


def large(numel: int = 300_000) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32)


def test_a_large_tensor_is_received_in_place() -> None:
    tensor = large()
    frame = bytes(encode(Ping(1), [tensor]))
    decoder = Decoder()
    head = len(frame) - tensor.nbytes
    assert decoder.receive_data(frame[: head + 100]) == []
    room = decoder.writable()
    assert len(room) == tensor.nbytes - 100
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(room))
    room[:] = frame[head + 100 :]
    decoder.wrote(len(room))
    envelope = decoder.next()
    assert envelope is not None
    assert envelope.tensors[0].data_ptr() == address - 100
    check_tensor(envelope.tensors[0], tensor)


def test_receiving_in_place_stops_at_the_end_of_its_buffer() -> None:
    sent = [(Ping(1), [large(), large(70_000)]), (Ping(2), [torch.ones(3)]), (Ping(3), ())]
    data = b"".join(bytes(encode(*each)) for each in sent)
    for step in (10_000, 65_536, 1_000_000, len(data)):
        steps = [step] * (len(data) // step + 1)
        check_all(take(Decoder(), chunks(data, steps)), sent)
        check_all(take_in_place(Decoder(), chunks(data, steps)), sent)


@pytest.mark.parametrize("around", [-1, 0, 1])
def test_tensors_near_the_threshold_of_receiving_in_place(around: int) -> None:
    tensor = torch.arange(landing.COLLECT_BELOW + around).to(torch.uint8)
    sent = [(Ping(1), [tensor, torch.ones(5), tensor.clone()]), (Ping(2), ())]
    data = b"".join(bytes(encode(*each)) for each in sent)
    for step in (777, 40_000, len(data)):
        steps = [step] * (len(data) // step + 1)
        check_all(take(Decoder(), chunks(data, steps)), sent)
        check_all(take_in_place(Decoder(), chunks(data, steps)), sent)


def test_large_metadata_is_collected_and_the_buffer_shrinks_again() -> None:
    sent = [(Result(1, "x" * 3_000_000), ()), (Ping(2), ())]
    data = b"".join(bytes(encode(*each)) for each in sent)
    decoder = Decoder()
    check_all(take_in_place(decoder, chunks(data, [100_000] * 40)), sent)
    assert len(decoder._buffer) > 3_000_000
    decoder.writable()
    assert len(decoder._buffer) == SMALL


def test_the_buffer_does_not_grow_with_the_stream() -> None:
    decoder = Decoder()
    check_all(take_in_place(decoder, chunks(STREAM * 300, [60_001] * 100)), EXCHANGE * 300)
    assert len(decoder._buffer) <= 4 * SMALL


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "in slices"])
def test_a_strict_decoder_refuses_maps_whole_or_sliced(sliced: bool) -> None:
    frame = bytes(encode(Call(1, {(1, 2): 3})))
    if sliced:
        frame = HEADER.pack(MAGIC, VERSION, SLICE, 0, 0, len(frame)) + frame
    assert [type(each.message) for each in Decoder().receive_data(frame)] == [Call]
    with pytest.raises(ProtocolError, match="map"):
        Decoder(bounded=True).receive_data(frame)
