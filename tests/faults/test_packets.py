"""Tests of the switch: reading, damaging and forging packets."""

from __future__ import annotations

import struct

from packets import ACK, RST, Flow, _checksum, address, ends, read, reset, with_flipped_bit

FLOW = Flow(address("10.78.0.1"), 4000, address("10.78.0.2"), 5000)


def sums_to_zero(packet: bytes) -> bool:
    """Whether a kernel accepts the packet: both checksums, computed over themselves, are zero."""
    start = (packet[0] & 15) * 4
    pseudo = packet[12:20] + struct.pack("!BBH", 0, 6, len(packet) - start)
    return _checksum(packet[:start]) == b"\0\0" and _checksum(pseudo + packet[start:]) == b"\0\0"


def test_a_reset_is_read_as_it_was_forged() -> None:
    packet = reset(FLOW, 12345)
    assert sums_to_zero(packet)
    segment = read(packet)
    assert segment is not None
    assert (segment.flow, segment.number, segment.flags) == (FLOW, 12345, RST)
    assert ends(packet) == (FLOW.source, FLOW.target)
    answer = read(reset(FLOW.back, 0, 7))
    assert answer is not None
    assert (answer.acknowledged, answer.flags) == (7, RST | ACK)


def test_one_bit_of_the_data_is_inverted_and_the_checksum_fits() -> None:
    packet = bytearray(reset(FLOW, 1) + b"payload")
    packet[2:4] = struct.pack("!H", len(packet))
    segment = read(bytes(packet))
    assert segment is not None
    for bit in range(8 * len(b"payload")):
        damaged = with_flipped_bit(bytes(packet), segment, bit)
        assert sums_to_zero(damaged)
        before, after = (int.from_bytes(each[segment.data :], "little") for each in (packet, damaged))
        assert before ^ after == 1 << bit


def test_packets_that_are_not_tcp_are_left_alone() -> None:
    assert read(b"") is None
    assert ends(b"\x60" + bytes(60)) is None
    datagram = bytearray(reset(FLOW, 1))
    datagram[9] = 17
    assert read(bytes(datagram)) is None
