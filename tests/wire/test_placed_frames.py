"""Frames some of whose buffers lie in segments. The segments are real ones."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_exchange import check_tensor, chunks, head, take, take_in_place

from backhaul.errors import ProtocolError
from backhaul.transport import segments
from backhaul.transport.segments import Borrowing
from backhaul.wire import headers
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import DEVICE_PLACE, HEADER, PLACED, encode, place
from backhaul.wire.landing import Landing, Later
from backhaul.wire.messages import Ping, Result

pytestmark = pytest.mark.usefixtures("one_thread")

ROOM = 64 * 1024
COUNT = 3


class Pool:
    """Segments that were passed to a `Borrowing`, and what this end has put into them."""

    def __init__(self) -> None:
        self._made = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(COUNT)]
        for descriptor in self._made:
            os.ftruncate(descriptor, ROOM + segments._CONTROL)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, segments._SEALS)

    def borrowing(self) -> Borrowing:
        made = Borrowing()
        made.add([os.dup(descriptor) for descriptor in self._made])
        return made

    def decoder(self, limit: int = 64 << 30) -> Decoder:
        return Decoder(limit, self.borrowing())

    def frame(self, number: int, tensors: Sequence[torch.Tensor], ids: Sequence[int]) -> bytes:
        """A message whose buffers are put into these segments."""
        frame = encode(Result(number, [3, 0]), tensors)
        if len(frame.pieces) == 1:
            # Small messages are one piece. Cut it as a large one is.
            *_, metadata, table, _ = HEADER.unpack_from(frame.pieces[0])
            data = bytes(frame.pieces[0])
            end = HEADER.size + metadata + table
            pieces: list[bytes | memoryview] = [data[:end]]
            for size in Landing.parse(data[end - table : end], len(data) - end).sizes:
                pieces.append(data[end : end + size])
                end += size
            frame = msgspec.structs.replace(frame, pieces=pieces)
        for piece, id in zip(frame.pieces[1:], ids, strict=True):
            if id:
                os.pwrite(self._made[id - 1], piece, 0)
        return bytes(place(frame, ids))

    def close(self) -> None:
        for descriptor in self._made:
            os.close(descriptor)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def some() -> list[torch.Tensor]:
    base = torch.arange(60.0)
    return [
        torch.arange(100, dtype=torch.int64),
        base[:40],
        base[20:].reshape(5, 8).t(),
        torch.nn.Parameter(torch.ones(7, 3)),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
    ]


PLACES = [(1, 2, 3, 0), (0, 0, 1, 0), (3, 0, 0, 1), (0, 0, 0, 2), (0, 1, 0, 0)]


def check(got: Sequence[Envelope], sent: Sequence[torch.Tensor], number: int = 1) -> None:
    assert [envelope.message for envelope in got] == [Result(number, [3, 0]), Ping(5)]
    for one, other in zip(got[0].tensors, sent, strict=True):
        check_tensor(one, other)
    assert got[0].tensors[1].untyped_storage().data_ptr() == got[0].tensors[2].untyped_storage().data_ptr()


@pytest.mark.parametrize("ids", PLACES)
def test_buffers_may_be_in_the_stream_or_in_segments(pool: Pool, ids: Sequence[int]) -> None:
    data = pool.frame(1, some(), ids) + bytes(encode(Ping(5)))
    check(take(pool.decoder(), [data]), some())


@pytest.mark.long
@pytest.mark.parametrize("ids", PLACES)
def test_cut_at_every_byte(pool: Pool, ids: Sequence[int]) -> None:
    data = pool.frame(1, some(), ids) + bytes(encode(Ping(5)))
    for cut in range(1, len(data)):
        check(take(pool.decoder(), [data[:cut], data[cut:]]), some())
        check(take_in_place(pool.decoder(), [data[:cut], data[cut:]]), some())


def test_byte_by_byte(pool: Pool) -> None:
    data = pool.frame(1, some(), (1, 0, 3, 0)) + bytes(encode(Ping(5)))
    check(take_in_place(pool.decoder(), [data[i : i + 1] for i in range(len(data))]), some())


def test_a_large_buffer_between_two_in_segments(pool: Pool) -> None:
    """The large buffer is received in place, while its neighbours are there already."""
    large = torch.arange(200_000)
    tensors = [torch.arange(10), large, torch.arange(20), large + 1]
    data = pool.frame(1, tensors, (1, 0, 2, 0)) + bytes(encode(Ping(5)))
    for step in (1000, 65_536, len(data)):
        got = take_in_place(pool.decoder(), [data[i : i + step] for i in range(0, len(data), step)])
        for one, other in zip(got[0].tensors, tensors, strict=True):
            check_tensor(one, other)
        assert got[1].message == Ping(5)


def test_several_frames_after_each_other(pool: Pool) -> None:
    """The places of one frame's buffers do not apply to the next frame."""
    x, y = torch.arange(10), torch.arange(5.0)
    frames = [pool.frame(1, [x, y], (1, 0)), bytes(encode(Result(2, [3, 0]), [y, x])), pool.frame(3, [y, x], (0, 2))]
    data = b"".join(frames)
    for cuts in ([7], [50], [100, 3], [len(data)]):
        got = take_in_place(pool.decoder(), chunks(data, cuts * len(data)))
        for envelope, tensors in zip(got, [[x, y], [y, x], [y, x]], strict=True):
            for one, other in zip(envelope.tensors, tensors, strict=True):
                check_tensor(one, other)


def test_a_tensor_gives_its_segment_back(pool: Pool) -> None:
    decoder = pool.decoder()
    control = ROOM
    os.pwrite(pool._made[0], b"\x01\x00", control)  # the sender has taken it
    (envelope,) = decoder.receive_data(pool.frame(1, [torch.arange(10)], [1]))
    assert os.pread(pool._made[0], 1, control) == b"\x01"
    del envelope
    assert os.pread(pool._made[0], 1, control) == b"\x00"


@pytest.mark.parametrize("step", [1000, 1 << 30])
def test_only_buffers_in_the_stream_are_drained(pool: Pool, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver has no room for the second of four buffers. The third is in a segment."""

    def no_room(size: int) -> None:
        raise MemoryError(f"{size} are too many")

    monkeypatch.setattr("backhaul.wire.payload._LARGE", 50_000)
    small, large = torch.arange(10), torch.arange(10_000)
    data = pool.frame(1, [small, large, small + 1, small + 2], (1, 0, 2, 0)) + bytes(encode(Ping(5)))
    decoder = Decoder(segments=pool.borrowing(), check_room=no_room)
    got = take(decoder, [data[i : i + step] for i in range(0, len(data), step)])
    assert [envelope.message for envelope in got] == [Result(1, [3, 0]), Ping(5)]
    with pytest.raises(MemoryError, match=r"has no room .* 80000 are too many"):
        got[0].tensors.land()  # type: ignore[attr-defined]


# Malformed frames.


def placed(table: bytes, payload: bytes = b"", kind: int = 4) -> bytes:
    body = b"\x91\x05"
    return head(kind | PLACED, len(body), len(table), len(payload)) + body + table + payload


def single(shape: Sequence[int], nbytes: int, *ids: int) -> bytes:
    return headers.encode_single(1, 0, tuple(shape), nbytes) + struct.pack(f"<{len(ids)}I", *ids)


BAD = {
    "no table": (placed(b""), "unknown kind"),
    "no places": (placed(single([10], 10)), "."),
    "a place too many": (placed(single([10], 10, 1, 1)), "."),
    "half a table": (placed(b"\x01\x00\x00\x00"), "ends early"),
    "many buffers": (placed(struct.pack("<II", 1, (1 << 32) - 1)), "claims 4294967295 buffers in segments"),
    "a segment that is not there": (placed(single([10], 10, COUNT + 1)), "has not been passed"),
    "more than the segment has": (placed(single([ROOM + 1], ROOM + 1, 1)), "or is smaller"),
    "far more than any has": (placed(single([1 << 62], 1 << 62, 1)), "over the limit|or is smaller"),
    "a payload for what is in a segment": (placed(single([10], 10, 1), bytes(10)), "."),
    "no payload for what is in none": (placed(single([10], 10, 0)), "."),
    "a buffer of nothing": (placed(single([0], 0, 1)), "."),
    "over the limit": (placed(single([(1 << 36) + 1], (1 << 36) + 1, 1)), "over the limit"),
}


class DeviceLender:
    """Lends segments of device memory, and notes which ones."""

    def __init__(self) -> None:
        self.lent: list[tuple[int, int]] = []

    def lend(self, id: int, size: int) -> object:
        raise AssertionError("the buffer is in device memory")

    def lend_device(self, id: int, size: int) -> object:
        self.lent.append((id, size))
        return object()


def test_a_buffer_in_device_memory_is_taken_later() -> None:
    """The thread that handles the message takes it, on its own stream."""
    lender = DeviceLender()
    (envelope,) = Decoder(segments=lender).receive_data(placed(single([10], 10, DEVICE_PLACE | 2)))
    assert lender.lent == [(2, 10)]
    assert isinstance(envelope.tensors, Later)


@pytest.mark.parametrize("kind", BAD)
def test_malformed_placed_frames_are_refused(pool: Pool, kind: str) -> None:
    data, says = BAD[kind]
    with pytest.raises(ProtocolError, match=says):
        pool.decoder().receive_data(data)


def test_without_segments_the_flag_is_refused(pool: Pool) -> None:
    with pytest.raises(ProtocolError, match="unknown kind 130"):
        Decoder().receive_data(pool.frame(1, [torch.arange(10)], [1]))


def test_the_limit_is_for_all_of_a_message(pool: Pool) -> None:
    tensors = [torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)]
    data = pool.frame(1, tensors, (1, 0))
    with pytest.raises(ProtocolError, match="over the limit of 1500"):
        pool.decoder(1500).receive_data(data)
    assert len(pool.decoder(3000).receive_data(data)) == 1


@pytest.mark.long
@settings(max_examples=1500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.sampled_from(PLACES))
def test_mutated_frames(pool: Pool, random: object, ids: Sequence[int]) -> None:
    """The decoder returns a message, waits for more, or raises ProtocolError: the same in one piece and in many."""
    number = random.randrange  # type: ignore[attr-defined]
    data = bytearray(pool.frame(1, some(), ids) + bytes(encode(Ping(5))))
    for _ in range(1 + number(3)):
        # Mostly in the header and the table, where everything means something.
        at = number(min(len(data), 60 if number(2) else 400))
        change = number(6)
        if change < 3:
            data[at] ^= 1 << number(8)
        elif change == 3:
            data[at : at + 4] = number(5).to_bytes(4, "little")
        elif change == 4:
            del data[at : at + 1 + number(8)]
        else:
            data[at:at] = bytes(1 + number(8))
    results = []
    for pieces in ([bytes(data)], chunks(bytes(data), [1 + number(64) for _ in range(6)])):
        try:
            got = take_in_place(pool.decoder(1 << 30), pieces)
            results.append([[tensor.shape for tensor in envelope.tensors] for envelope in got])
        except ProtocolError:
            results.append(None)  # type: ignore[arg-type]
    assert results[0] == results[1]
