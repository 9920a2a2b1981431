"""Records: sealed messages are opened again, however they are cut, and damaged ones are refused."""

from __future__ import annotations

import random
import struct
from zlib import crc32

import pytest
import torch

from backhaul.errors import ProtocolError
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Ping
from backhaul.wire.records import HEADER, MOST, Records, seal


def sealed(*frames: Frame) -> bytes:
    return b"".join(b"".join(seal([memoryview(piece) for piece in frame.pieces])) for frame in frames)


def feed(records: Records, data: bytes, step: int) -> list[Envelope]:
    found = []
    rest = memoryview(data)
    while rest:
        room = records.writable()
        count = min(len(room), len(rest), step)
        assert count, "no room for what comes next"
        room[:count] = rest[:count]
        records.wrote(count)
        rest = rest[count:]
        while (envelope := records.next()) is not None:
            found.append(envelope)
    return found


def messages(large: int) -> list[Frame]:
    return [encode(Ping(1)), encode(Call(2, "x" * 100), [torch.arange(large)]), encode(Ping(3))]


@pytest.mark.parametrize("step", [1, 7, HEADER.size, 100, 1 << 30])
def test_sealed_messages_are_opened_again(step: int) -> None:
    found = feed(Records(Decoder()), sealed(*messages(1000)), step)
    assert [envelope.message.id for envelope in found] == [1, 2, 3]
    assert torch.equal(found[1].tensors[0], torch.arange(1000))


def test_a_very_large_message_is_split_into_records() -> None:
    size = MOST // 8 + 1000
    data = sealed(*messages(size))
    found = feed(Records(Decoder()), data, 1 << 20)
    assert torch.equal(found[1].tensors[0], torch.arange(size))
    assert len(data) == sum(frame.size for frame in messages(size)) + 4 * HEADER.size


def test_a_large_message_comes_first() -> None:
    """The buffer grows although nothing was taken from it yet."""
    (_, large, _) = messages(100_000)
    (envelope,) = feed(Records(Decoder()), sealed(large), 1 << 20)
    assert torch.equal(envelope.tensors[0], torch.arange(100_000))


def record(data: bytes) -> bytes:
    return HEADER.pack(len(data), crc32(struct.pack("<I", len(data))), crc32(data)) + data


def test_a_record_has_between_one_byte_and_the_most() -> None:
    frame = bytes(encode(Ping(1)))
    small = b"".join(record(frame[at : at + 1]) for at in range(len(frame)))
    assert [envelope.message for envelope in feed(Records(Decoder()), small, 7)] == [Ping(1)]
    large = bytes(encode(Call(2, None), [torch.arange(MOST // 8)]))
    (envelope,) = feed(Records(Decoder()), record(large[:MOST]) + record(large[MOST:]), 1 << 20)
    assert torch.equal(envelope.tensors[0], torch.arange(MOST // 8))
    for wrong in (record(b""), record(large[: MOST + 1])):
        with pytest.raises(ProtocolError, match="the head of a record"):
            feed(Records(Decoder()), wrong, 1 << 20)


def test_pieces_of_other_formats() -> None:
    numbers = memoryview(bytes(range(80)))
    sealed = b"".join(seal([numbers]))
    assert len(sealed) == HEADER.size + 80
    assert b"".join(seal([numbers.cast("q")])) == sealed
    assert b"".join(seal([numbers.cast("B", (8, 10))])) == sealed
    assert seal([]) == []


def test_any_flipped_bit_is_noticed() -> None:
    """At once, or at the end of its record: no later record is needed."""
    data = sealed(*messages(50))
    chance = random.Random(1)
    for bit in chance.sample(range(8 * len(data)), 500):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="not what the peer sent"):
            feed(Records(Decoder()), bytes(damaged), 64)


def test_a_large_record_leaves_no_large_buffer() -> None:
    records = Records(Decoder())
    feed(records, sealed(*messages(MOST // 16)), 1 << 20)
    assert len(records.writable()) <= 64 * 1024
