"""Frames whose only tensor is in a segment of device memory. The decoder reads most of them in a way of its own.

Both ways must accept and refuse the same frames. No GPU is needed: the segments are pages without memory, and nothing
opens them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from recorded_exchange import check_tensor, chunks, head, take, take_in_place

from backhaul.errors import BackhaulError, ProtocolError
from backhaul.transport.segments import Borrowing
from backhaul.wire import frames, headers
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import DEVICE_PLACE, PLACED, SLICE, TRACED, encode
from backhaul.wire.landing import Landing, LandingOfOne, Later
from backhaul.wire.messages import KIND_OF, Call, Ping, Result
from device_pages import Pages

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = 1 << 12, 100
PING = KIND_OF[Ping]
BODY = b"\x91\x05"
FLOAT32 = headers.DTYPE_CODES[torch.float32]
GPU = headers.GPU
FIRST = DEVICE_PLACE | 1


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    made = Pages(*SIZES)
    yield made
    made.close()


class General(Decoder):
    """A decoder without the fast way."""

    def _next_on_device(self, *_: int) -> None:
        return None


def table(
    shape: Sequence[int] = (5, 2), nbytes: int | None = None, code: int = FLOAT32, flags: int = 0, device: int = GPU
) -> bytes:
    size = 4 * int(torch.Size(shape).numel()) if nbytes is None else nbytes
    return struct.pack("<IIQBBBBBIQ", 1, 1, size, 0, code, flags, device, len(shape), 0, 0) + struct.pack(
        f"<{len(shape)}q", *shape
    )


def frame(table: bytes, *places: int, kind: int = PING, body: bytes = BODY, payload: bytes = b"") -> bytes:
    rest = table + struct.pack(f"<{len(places)}I", *places)
    return head(kind | PLACED, len(body), len(rest), len(payload)) + body + rest + payload


GOOD = frame(table(), FIRST)


def seen(envelope: Envelope) -> tuple[Any, ...]:
    tensors = envelope.tensors
    if type(tensors) is not Later:
        return envelope.message, envelope.size, [(tensor.dtype, tensor.shape) for tensor in tensors]
    landing = tensors._landing
    fast = type(landing) is LandingOfOne
    if fast:
        sizes = [landing._alone.nbytes]  # type: ignore[union-attr]
        lent = [(landing._lease._segment.id, landing._lease.size)]  # type: ignore[union-attr]
    else:
        sizes = list(getattr(landing, "sizes", ()))
        leases = getattr(landing, "_leases", {})
        lent = [(leases[index]._segment.id, leases[index].size) for index in sorted(leases)]
    try:
        tensors.land()
        landed: Any = [(tensor.dtype, tensor.shape) for tensor in tensors]
    except (BackhaulError, MemoryError) as error:
        landed = type(error)
    return envelope.message, envelope.size, sizes, lent, landed


def outcome(decoder: Decoder, pieces: Iterable[bytes], *, in_place: bool) -> Any:
    """What comes out of it; or "refused"."""
    try:
        got = (take_in_place if in_place else take)(decoder, pieces)
    except ProtocolError:
        return "refused"
    return [seen(envelope) for envelope in got]


def both(
    pages: Pages, data: bytes, sizes: Iterable[int] = (), *limits: int, in_place: bool = False, **options: Any
) -> Any:
    """What comes out of both ways, which must be the same, and so must the segments that are free afterwards.

    ``sizes`` of the pieces in which the data comes.
    """
    pieces = list(chunks(data, sizes))
    found = []
    for kind in (Decoder, General):
        pages.use()
        decoder = kind(limits[0] if limits else 64 << 30, pages.borrowing(), *limits[1:], **options)
        found.append((outcome(decoder, pieces, in_place=in_place), pages.in_use()))
    assert found[0] == found[1]
    return found[0][0]


def test_the_fast_way_is_taken(pages: Pages) -> None:
    (envelope,) = Decoder(segments=pages.borrowing()).receive_data(GOOD)
    assert isinstance(envelope.tensors, Later)
    assert type(envelope.tensors._landing) is LandingOfOne
    assert envelope.size == len(GOOD) - 4 + 40
    (general,) = General(segments=pages.borrowing()).receive_data(GOOD)
    assert isinstance(general.tensors, Later)
    assert type(general.tensors._landing) is Landing
    assert general.size == envelope.size


def test_a_message_that_is_dropped_unread_frees_its_segment(pages: Pages) -> None:
    pages.use()
    got = Decoder(segments=pages.borrowing()).receive_data(GOOD)
    assert pages.in_use() == [True, True]
    del got
    assert pages.in_use() == [False, True]


SMALL = bytes(encode(Ping(7)))
WITH_TENSOR = bytes(encode(Result(8, [3, 0]), [torch.arange(6.0)]))
BESIDE = {
    "alone": GOOD,
    "twice": GOOD + GOOD,
    "before others": GOOD + SMALL + WITH_TENSOR,
    "after others": WITH_TENSOR + SMALL + GOOD,
    "between": SMALL + GOOD + WITH_TENSOR + GOOD + SMALL,
    "marked": bytes(frames.with_trace(frames.Frame([GOOD], len(GOOD)), "mark")) + GOOD,
    "two tensors": frame(
        struct.pack("<IIQQ", 2, 2, 4, 8)
        + struct.pack("<BBBBBIQq", 0, FLOAT32, 0, GPU, 1, 0, 0, 1)
        + struct.pack("<BBBBBIQq", 0, FLOAT32, 0, GPU, 1, 1, 0, 2),
        FIRST,
        DEVICE_PLACE | 2,
    )
    + GOOD,
}


def sliced(data: bytes, *sizes: int) -> bytes:
    return b"".join(head(SLICE, 0, 0, len(piece)) + piece for piece in chunks(data, sizes) if piece)


@pytest.mark.parametrize("beside", BESIDE)
def test_cut_anywhere_and_beside_others(pages: Pages, beside: str) -> None:
    data = BESIDE[beside]
    whole = both(pages, data)
    assert whole != "refused"
    for in_place in (False, True):
        assert both(pages, data, [1] * len(data), in_place=in_place) == whole
    for cut in range(1, len(data), 3):
        assert both(pages, data, [cut]) == whole


@pytest.mark.parametrize("beside", BESIDE)
def test_in_slices_between_others(pages: Pages, beside: str) -> None:
    data = BESIDE[beside]
    whole = both(pages, data)
    for size in (7, 50):
        cut = sliced(data, *[size] * (len(data) // size))
        assert both(pages, cut) == whole
        assert both(pages, cut, [13] * (len(cut) // 13), in_place=True) == whole
    around = sliced(data[:10]) + GOOD + sliced(data[10:])
    assert sorted(map(repr, both(pages, around))) == sorted(map(repr, [*both(pages, GOOD), *whole]))


# What is wrong with it, or unusual.

REFUSED = {
    "no place": frame(table()),
    "two places": frame(table(), FIRST, FIRST),
    "half a place": frame(table() + b"\x01\x00"),
    "a segment that was not passed": frame(table(), DEVICE_PLACE | 3),
    "segment 0": frame(table(), DEVICE_PLACE),
    "the highest number": frame(table(), 0xFFFF_FFFF),
    "a segment of host memory that was not passed": frame(table(), 1),
    "a place in the payload without a payload": frame(table(), 0),
    "a payload beside it": frame(table(), FIRST, payload=bytes(40)),
    "a byte of payload": frame(table(), FIRST, payload=b"x"),
    "more than the segment has": frame(table((SIZES[0] // 4 + 1,)), FIRST),
    "more than the other segment has": frame(table((26,)), DEVICE_PLACE | 2),
    "no bytes": frame(table((0,)), FIRST),
    "fewer bytes than the shape says": frame(table(nbytes=36), FIRST),
    "a negative size": frame(table((-5, -2), 40), FIRST),
    "sizes that overflow": frame(table((1 << 62, 4), 0), FIRST),
    "as many bytes as 64 bits can say": frame(table(((1 << 62) - 1, 4, 1), (1 << 64) - 16), FIRST),
    "65 dimensions": frame(table((1,) * 65, 4), FIRST),
    "an unknown dtype": frame(table(code=200, nbytes=40), FIRST),
    "an unknown layout": GOOD.replace(table(), b"".join((table()[:16], b"\x09", table()[17:]))),
    "an integer that requires grad": frame(table((5,), 40, headers.DTYPE_CODES[torch.int64], headers.GRAD), FIRST),
    "unknown flags": frame(table(flags=0x40), FIRST),
    "the meta device": frame(table(device=headers.META), FIRST),
    "a table that ends early": frame(table()[:-8], FIRST),
    "a table that is too long": frame(table() + bytes(8), FIRST),
    "no table": frame(b""),
    "another buffer": frame(table().replace(struct.pack("<IQ", 0, 0), struct.pack("<IQ", 1, 0), 1), FIRST),
    "a body that is not msgpack": frame(table(), FIRST, body=b"\xc1\x05"),
    "a body of another kind": frame(table(), FIRST, kind=KIND_OF[Call]),
    "an unknown kind": frame(table(), FIRST, kind=63),
    "a slice in a segment": frame(table(), FIRST, kind=SLICE),
    "another version": GOOD[:2] + b"\x02" + GOOD[3:],
    "no magic": b"XX" + GOOD[2:],
}
ACCEPTED = {
    "no dimensions": frame(table(()), FIRST),
    "64 dimensions": frame(table((1,) * 64), FIRST),
    "all of a segment": frame(table((25,)), DEVICE_PLACE | 2),
    "an empty body of metadata": frame(table(), FIRST, body=b"\x91\x00"),
    "for the CPU": frame(table(device=headers.CPU), FIRST),
    "for a GPU that is not here": frame(table(device=254), FIRST),
    "where it is expected": frame(table(device=headers.EXPECTED), FIRST),
    "requires grad": frame(table(flags=headers.GRAD), FIRST),
    "a parameter": frame(table(flags=headers.GRAD | headers.PARAMETER), FIRST),
    "conjugated": frame(table((5,), 40, headers.DTYPE_CODES[torch.complex64], headers.CONJ), FIRST),
    "a part of its buffer": frame(table((1,), 40), FIRST),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_hostile_frames_are_refused(pages: Pages, kind: str) -> None:
    data = REFUSED[kind]
    assert both(pages, data) == "refused"
    assert both(pages, data, [1] * len(data)) == "refused"
    assert both(pages, data, [len(data) - 1]) == "refused"


@pytest.mark.parametrize("kind", ACCEPTED)
def test_unusual_frames_are_read(pages: Pages, kind: str) -> None:
    data = ACCEPTED[kind]
    ((_, size, sizes, lent, landed),) = both(pages, data)
    assert size == len(data) - 4 + sum(sizes)
    assert [lease_size for _, lease_size in lent] == sizes
    # There is no GPU, and nothing behind the page.
    assert issubclass(landed, BackhaulError)


@pytest.mark.parametrize("drains", [False, True])
def test_the_limits_are_for_all_of_a_message(pages: Pages, drains: bool) -> None:
    found = []
    for limit in range(len(GOOD) + 60):
        got = both(pages, GOOD + SMALL, (), limit, drains=drains)
        found.append("refused" if got == "refused" else got[0][-1] is MemoryError)
    # With less, only the tensor is given up, if the decoder drains. `size` does not count the place.
    enough = len(GOOD) - 4 + 40
    assert found.index(False) == enough
    assert set(found[enough:]) == {False}
    for limit in range(len(GOOD) + 4):
        got = both(pages, GOOD + SMALL, (), 64 << 30, limit, drains=drains)
        assert (got == "refused") == (limit < len(GOOD))


@pytest.mark.parametrize("borrowing", [None, Borrowing()])
def test_without_segments(borrowing: Borrowing | None) -> None:
    for kind in (Decoder, General):
        with pytest.raises(ProtocolError, match="unknown kind" if borrowing is None else "has not been passed"):
            kind(segments=borrowing).receive_data(GOOD)


def test_a_decoder_for_peers_that_may_lie(pages: Pages) -> None:
    assert both(pages, GOOD + SMALL, bounded=True) == both(pages, GOOD + SMALL)


# Random and mutated frames.

_BYTES = 0, 1, 2, 3, 4, 5, 8, 40, 63, 64, 127, 128, 129, 255


def random_frame(chance: random.Random) -> bytes:
    code = chance.choice([0, 1, 2, FLOAT32, FLOAT32, 9, 12, 200])
    shape = [chance.choice([0, 1, 1, 2, 3, 5, 26, -1, 1 << 62]) for _ in range(chance.randrange(5))]
    nbytes = chance.choice([None, None, None, 0, 4, 40, 100, 104, (1 << 64) - 1])
    if nbytes is None:
        nbytes = 4
        for size in shape:
            nbytes *= max(0, size)
        nbytes %= 1 << 64
    made = table(shape, nbytes, code, chance.choice([0, 0, 0, 1, 2, 4, 64]), chance.choice([0, 1, 2, 2, 3, 255]))
    numbers = [0, 1, 2, 3, FIRST, FIRST, FIRST, DEVICE_PLACE | 2, DEVICE_PLACE | 3, DEVICE_PLACE]
    places = [chance.choice(numbers) for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 2]))]
    kind = chance.choice([PING, PING, PING, KIND_OF[Result], PING | TRACED, SLICE])
    return frame(made, *places, kind=kind, payload=bytes(chance.choice([0, 0, 0, 1, 40])))


def mutated(chance: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(made))
        change = chance.randrange(5)
        if change < 2:
            made[at] ^= 1 << chance.randrange(8)
        elif change == 2:
            made[at] = chance.choice(_BYTES)
        elif change == 3:
            del made[at : at + chance.randrange(1, 9)]
        else:
            made[at:at] = bytes(chance.randrange(1, 9))
        if not made:
            break
    return bytes(made)


def compare(pages: Pages, seed: int) -> Any:
    chance = random.Random(seed)
    parts = [mutated(chance, chance.choice([GOOD, GOOD, random_frame(chance)])) for _ in range(chance.randrange(1, 3))]
    parts.insert(chance.randrange(len(parts) + 1), chance.choice([b"", SMALL, WITH_TENSOR]))
    data = b"".join(parts)
    if chance.random() < 0.2:
        data = sliced(data, *[chance.randrange(1, 90) for _ in range(5)])
    limits = chance.choice([(), (), (150,), (120,), (1 << 30, 90), ((1 << 64) - 1,)])
    options = {"drains": chance.random() < 0.3}
    whole = both(pages, data, (), *limits, **options)
    sizes = [chance.randrange(1, 80) for _ in range(8)]
    assert both(pages, data, sizes, *limits, in_place=chance.random() < 0.5, **options) == whole
    return whole


def test_random_and_mutated_frames(pages: Pages) -> None:
    outcomes = [compare(pages, seed) for seed in range(400)]
    read = [seen for outcome in outcomes if outcome != "refused" for seen in outcome if len(seen) == 5]
    assert "refused" in outcomes
    assert len(read) > 50


@pytest.mark.long
def test_many_random_and_mutated_frames(pages: Pages) -> None:
    for seed in range(400, 10_000):
        compare(pages, seed)


# Tensors. Without a GPU they land on the CPU: as a gradient does whose tensor came from there.


class Lease:
    """The bytes of a segment, in host memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.taken = 0

    def take(self, device: torch.device) -> torch.Tensor:
        self.taken += 1
        return torch.frombuffer(bytearray(self._data), dtype=torch.uint8).to(device)

    def fill(self, target: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the tensor is not on a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3)])
@pytest.mark.parametrize("device", [headers.CPU, headers.EXPECTED])
def test_a_tensor_lands_where_it_is_expected(dtype: torch.dtype, shape: tuple[int, ...], device: int) -> None:
    sent = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    flags = headers.GRAD if dtype.is_floating_point else 0
    made = headers.encode_single(headers.DTYPE_CODES[dtype], flags, shape, sent.nbytes, device)
    alone = headers.recognise_alone(made)
    assert alone is not None
    assert headers.recognise_alone(made) is alone
    lease = Lease(bytes(sent.flatten().view(torch.uint8).tolist()))
    (got,) = LandingOfOne(alone, lease, made).land([torch.device("cpu")])
    check_tensor(got, sent.requires_grad_(bool(flags)))
    assert lease.taken == 1


def test_a_tensor_that_names_no_device_must_be_expected() -> None:
    made = table(device=headers.EXPECTED)
    alone = headers.recognise_alone(made)
    assert alone is not None
    lease = Lease(bytes(40))
    with pytest.raises(ProtocolError, match="does not expect it"):
        LandingOfOne(alone, lease, made).land()
    assert not lease.taken
