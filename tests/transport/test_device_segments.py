"""Messages whose tensors are in segments of device memory: descriptors travel once, and bytes in order.

No GPU is needed: the segments are pages without memory, which the receiver does not open.
"""

from __future__ import annotations

import fcntl
import gc
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from segment_links import Link, descriptors

from backhaul.devices.pages import PAGE, SEALS
from backhaul.devices.segments import _MOST, Placed
from backhaul.errors import ProtocolError
from backhaul.transport.segments import Borrowing
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import DEVICE_PLACE, HEADER, MAGIC, PLACED, VERSION, Frame, encode
from backhaul.wire.landing import LandingOfOne, Later
from backhaul.wire.messages import KIND_OF, Ping
from device_pages import Pages, page

SIZES = 1 << 12, 1 << 12


class Segment:
    """A segment, at its sender."""

    def __init__(self, pages: Pages, id: int) -> None:
        self.id = id
        self.descriptors = pages.descriptors(id)
        self.stayed = 0

    def stay(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors
        self.stayed += 1

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def place(segment: Any, size: int = 40) -> Placed:
    return Placed(segment, size)


def frame(number: int, placed: Sequence[Placed], payload: bytes = b"") -> Frame:
    """A message with a tensor of bytes in each segment, and one in the payload if that has bytes."""
    body = bytes((0x91, number % 128))
    sizes = [each.size for each in placed] + ([len(payload)] if payload else [])
    table = struct.pack(f"<II{len(sizes)}Q", len(sizes), len(sizes), *sizes)
    for index, size in enumerate(sizes):
        table += struct.pack("<BBBBBIQq", 0, 1, 0, 2, 1, index, 0, size)
    places = [each.id | DEVICE_PLACE for each in placed] + ([0] if payload else [])
    table += struct.pack(f"<{len(places)}I", *places)
    head = HEADER.pack(MAGIC, VERSION, KIND_OF[Ping] | PLACED, len(body), len(table), len(payload)) + body + table
    pieces = [head, payload] if payload else [head]
    return Frame(pieces, len(head) + len(payload), list(placed), places)


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages(*SIZES)
    yield made
    made.close()


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


@pytest.fixture
def segments(pages: Pages) -> Iterator[list[Segment]]:
    made = [Segment(pages, 1), Segment(pages, 2)]
    yield made
    for segment in made:
        segment.close()


def received(link: Link, count: int) -> list[Envelope]:
    found: list[Envelope] = []
    while len(found) < count:
        if (envelope := link.far.next()) is not None:
            found.append(envelope)
        elif not link.far.read(0):
            assert not link.near.flush() or link.far.read(1)
    return found


def test_descriptors_travel_once(link: Link, segments: list[Segment]) -> None:
    before = descriptors()
    segment = segments[0]
    for number in range(5):
        placed = place(segment)
        assert bool(placed.descriptors) == (number == 0)
        assert link.near.write(frame(number, [placed]))
        assert placed.sent
        assert not placed.descriptors
        (envelope,) = received(link, 1)
        assert envelope.message == Ping(number)
        assert isinstance(envelope.tensors, Later)
        assert type(envelope.tensors._landing) is LandingOfOne
        assert link.near.on_devices == 40 * (number + 1)
    # The sender's two are closed. The receiver has two: that of the memory until it opens it, and that of the mapping.
    assert descriptors() == before
    assert not segment.stayed


def test_a_message_with_a_new_segment_and_a_known_one(link: Link, segments: list[Segment]) -> None:
    link.near.write(frame(0, [place(segments[0])]))
    placed = [place(segments[0]), place(segments[1])]
    assert link.near.write(frame(1, placed))
    assert all(each.sent for each in placed)
    assert link.near.write(frame(2, [place(segments[1])]))
    assert [envelope.message for envelope in received(link, 3)] == [Ping(0), Ping(1), Ping(2)]
    assert link.near.on_devices == 160


def test_nothing_leaves_alone_if_one_of_several_needs_a_descriptor(link: Link, segments: list[Segment]) -> None:
    known, new = place(segments[0]), place(segments[1])
    link.near.write(frame(0, [known]))
    link.near.on_devices = 0
    known = place(segments[0])
    assert not link.near._leaves_alone(frame(0, [known, new]))
    assert not known.sent
    assert not new.sent
    assert new.descriptors
    assert not link.near.on_devices


def test_a_segment_and_a_payload(link: Link, segments: list[Segment]) -> None:
    for number in range(2):
        assert link.near.write(frame(number, [place(segments[0])], b"x" * 100))
    assert [envelope.message for envelope in received(link, 2)] == [Ping(0), Ping(1)]
    assert link.near.on_devices == 80


def test_messages_beside_others_while_the_socket_is_full(link: Link, segments: list[Segment]) -> None:
    """The rest of a message follows later, and its segment counts as sent."""
    sent: list[Placed] = []
    ping = encode(Ping(100))
    number = 0
    while True:
        placed = place(segments[number % 2])
        sent.append(placed)
        complete = link.near.write(frame(number, [placed]))
        number += 1
        if not complete:
            break
        if number % 3 == 0 and not link.near.write(ping):
            break
    assert all(placed.sent for placed in sent)
    assert link.near.on_devices == 40 * number
    pings = number // 3 if complete else (number - 1) // 3
    got = [envelope.message.id for envelope in received(link, number + pings)]
    assert [id for id in got if id != 100] == [each % 128 for each in range(number) if each % 128 != 100]
    assert link.near.flush()


def test_a_message_that_does_not_leave_gives_its_segment_back(segments: list[Segment]) -> None:
    made = frame(0, [place(segments[0])])
    assert not segments[0].descriptors
    del made
    assert segments[0].stayed == 1
    assert len(segments[0].descriptors) == 2


def test_a_peer_that_names_a_segment_before_it_is_passed(link: Link, segments: list[Segment]) -> None:
    made = frame(0, [place(segments[0])])
    link.raw(bytes(made))
    assert link.far.read(1)
    with pytest.raises(ProtocolError, match="has not been passed"):
        link.far.next()


# What a bad peer may pass.


def memory() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


BAD: dict[str, Callable[[], list[int]]] = {
    "no memory": lambda: [page(1, 100)],
    "a page that may shrink": lambda: [page(1, 100, seals=fcntl.F_SEAL_SEAL), memory()],
    "a page that may grow": lambda: [page(1, 100, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL), memory()],
    "a page that may get seals": lambda: [page(1, 100, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), memory()],
    "a page that nobody can write": lambda: [page(1, 100, seals=SEALS | fcntl.F_SEAL_WRITE), memory()],
    "another magic": lambda: [page(1, 100, magic=b"BHDEVSEX"), memory()],
    "a longer page": lambda: [page(1, 100, length=2 * PAGE, magic=b"no magic", seals=0), memory()],
    "the memory first": lambda: [memory(), page(1, 100)],
    "too many": lambda: [each for number in range(4 * _MOST + 1) for each in (page(number, 100), memory())],
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_pages_are_refused_and_closed(kind: str) -> None:
    before = descriptors()
    borrowing = Borrowing()
    with pytest.raises(ProtocolError):
        borrowing.add(BAD[kind]())
    del borrowing
    gc.collect()
    assert descriptors() == before


def test_segments_that_the_peer_has_given_up_are_forgotten() -> None:
    borrowing = Borrowing()
    borrowing.add([page(1, 100, given_up=True), memory()])
    with pytest.raises(ProtocolError, match="has not been passed"):
        borrowing.lend_device(1, 100)
    borrowing.add([page(2, 100), memory(), page(3, 100, given_up=True), memory()])
    assert borrowing.lend_device(2, 100).size == 100


def test_a_page_may_change_after_it_was_read() -> None:
    """The peer can write to it at any time. What was read first counts."""
    made = page(1, 100)
    borrowing = Borrowing()
    borrowing.add([os.dup(made), memory()])
    os.pwrite(made, b"\xff" * 200, 8)
    os.close(made)
    assert borrowing.lend_device(1, 100).size == 100
    with pytest.raises(ProtocolError, match="or is smaller"):
        borrowing.lend_device(1, 101)
