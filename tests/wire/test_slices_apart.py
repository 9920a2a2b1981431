"""Slices that go over other connections: how a large frame is split, and joined again. Without I/O."""

from __future__ import annotations

import pytest
import torch

from backhaul.errors import ProtocolError
from backhaul.transport.strands import Strands
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import HEADER, MAGIC, SLICE, VERSION, encode
from backhaul.wire.landing import land
from backhaul.wire.lanes import LAST, LEAST_APART, MOST_SLICE, Slices
from backhaul.wire.messages import Result

LARGE = 2 << 20  # elements: 8 MiB


class Announced:
    """Notes the slices that a decoder expects from strands."""

    def __init__(self) -> None:
        self.places: list[tuple[int, memoryview | None, int]] = []
        self.finished: list[int] = []

    def expect(self, strand: int, place: memoryview | None, size: int) -> None:
        self.places.append((strand, place, size))

    def finish(self, size: int) -> None:
        self.finished.append(size)


def cut(tensors: list[torch.Tensor], spread: bool) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """A message in slices: the bytes for the connection itself, and those for strands 1 and 2."""
    frame = encode(Result(7, None), tensors)
    slices = Slices(frame.pieces)
    own, apart = [], []
    while slices.left:
        if spread and slices.apart:
            number = 1 + len(apart) % 2
            head, data = slices.take_apart(number)
            own.append(bytes(head))
            apart.append((number, bytes(data)))
        else:
            own.append(b"".join(slices.take(100_000)))
    return own, apart


@pytest.mark.parametrize("sizes", [[LARGE], [10, LARGE, 3, LARGE, 20_000], [LARGE, 200_000], [LEAST_APART]])
@pytest.mark.parametrize("step", [7919, 1 << 30])
def test_slices_from_other_connections_land_in_their_tensors(sizes: list[int], step: int) -> None:
    tensors = [torch.rand(size) for size in sizes]
    own, apart = cut(tensors, spread=True)
    assert apart
    assert all(LEAST_APART <= len(data) <= MOST_SLICE for _, data in apart)
    announced = Announced()
    decoder = Decoder(apart=announced)
    data = b"".join(own)
    found = []
    for start in range(0, len(data) - 1, step):
        found += decoder.receive_data(data[start : min(start + step, len(data) - 1)])
    assert not found  # the end of the frame comes on the channel's own connection
    for (strand, place, size), (number, piece) in zip(announced.places, apart, strict=True):
        assert place is not None
        assert (strand, size) == (number, len(piece))
        place[:] = piece
    (envelope,) = decoder.receive_data(data[-1:])
    assert all(torch.equal(*pair) for pair in zip(envelope.tensors, tensors, strict=True))
    assert announced.finished == [envelope.size]


def test_the_end_of_a_frame_stays_on_the_main_connection() -> None:
    slices = Slices(encode(Result(7, None), [torch.rand(LARGE)]).pieces)
    assert slices.apart == 0  # the head comes first
    slices.take(len(slices._pieces[-1]))
    while slices.apart:
        slices.take_apart(1)
    assert LAST <= slices.left < LAST + LEAST_APART


def test_a_whole_tensor_may_go_over_another_connection() -> None:
    first, second = bytes(MOST_SLICE), b"x" * MOST_SLICE
    slices = Slices([b"head", first, second, bytes(LAST)])
    slices.take(len(b"head"))
    for expected in (first, second):
        assert slices.apart == MOST_SLICE
        head, data = slices.take_apart(1)
        assert (head, data) == (header(1, MOST_SLICE), expected)
    assert (slices.apart, slices.left) == (0, LAST)


def test_tensors_without_room_are_dropped_on_every_connection() -> None:
    own, apart = cut([torch.rand(LARGE), torch.rand(LARGE)], spread=True)
    announced = Announced()
    (envelope,) = Decoder(1 << 20, drains=True, apart=announced).receive_data(b"".join(own))
    assert [(strand, place) for strand, place, _ in announced.places] == [(number, None) for number, _ in apart]
    assert envelope.message == Result(7, None)
    with pytest.raises(MemoryError, match="over the limit"):
        land(envelope.tensors)


def header(strand: int, size: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, SLICE, strand, 0, size)


@pytest.mark.parametrize("limit", [1 << 20, 1 << 30], ids=["dropped", "taken"])
def test_an_announcement_is_at_most_what_is_left_of_a_message(limit: int) -> None:
    tensor = torch.rand(LARGE)
    own, _ = cut([tensor], spread=True)
    left = encode(Result(7, None), [tensor]).size - (len(own[0]) - HEADER.size)
    for size in (left, left // 2, 1):
        announced = Announced()
        Decoder(limit, drains=True, apart=announced).receive_data(own[0] + header(1, size))
        ((strand, place, announced_size),) = announced.places
        assert (strand, announced_size, place is None) == (1, size, limit == 1 << 20)
    with pytest.raises(ProtocolError, match=r"fewer left|do not belong to one tensor"):
        Decoder(limit, drains=True, apart=Announced()).receive_data(own[0] + header(1, left + 1))


def test_announcements_that_make_no_sense() -> None:
    own, _ = cut([torch.rand(LARGE)], spread=True)
    with pytest.raises(ProtocolError, match="unknown kind"):
        Decoder().receive_data(b"".join(own))
    with pytest.raises(ProtocolError, match="no large message has begun"):
        Decoder(apart=Announced()).receive_data(header(1, 5))
    with pytest.raises(ProtocolError, match="do not belong to one tensor"):
        Decoder(apart=Announced()).receive_data(own[0] + header(1, 1 << 30))
    strands = Strands(2)
    with pytest.raises(ProtocolError, match="on connection 3, and there are 2 besides this one"):
        Decoder(apart=strands).receive_data(own[0] + header(3, LEAST_APART))
    with pytest.raises(ProtocolError, match="ends before its slices on other connections"):
        Decoder(apart=strands).receive_data(b"".join(own))
    strands.close()
