"""IPv4 packets with TCP in them: read, damaged and forged. Pure."""

from __future__ import annotations

import ipaddress
import struct
from typing import NamedTuple

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
_TCP = 6
_IP_HEADER = struct.Struct("!BBHHHBBH4s4s")
_TCP_HEADER = struct.Struct("!HHIIBBHHH")


class Flow(NamedTuple):
    """One direction of a connection."""

    source: bytes
    source_port: int
    target: bytes
    target_port: int

    @property
    def back(self) -> Flow:
        return Flow(self.target, self.target_port, self.source, self.source_port)


class Segment(NamedTuple):
    """The fields of a TCP packet's header, and the offset of its data."""

    flow: Flow
    number: int
    acknowledged: int
    flags: int
    start: int
    """Offset of the TCP header."""
    data: int
    """Offset of the data; it reaches to the end of the packet."""


def address(text: str) -> bytes:
    return ipaddress.IPv4Address(text).packed


def ends(packet: bytes) -> tuple[bytes, bytes] | None:
    """The addresses of sender and receiver; None for what is not IPv4."""
    if len(packet) < _IP_HEADER.size or packet[0] >> 4 != 4:
        return None
    return packet[12:16], packet[16:20]


def read(packet: bytes) -> Segment | None:
    """The TCP header of a packet; None if it is not TCP."""
    found = ends(packet)
    if found is None or packet[9] != _TCP:
        return None
    start = (packet[0] & 0xF) * 4
    source_port, target_port, number, acknowledged, offset, flags, *_ = _TCP_HEADER.unpack_from(packet, start)
    flow = Flow(found[0], source_port, found[1], target_port)
    return Segment(flow, number, acknowledged, flags, start, start + (offset >> 4) * 4)


def with_flipped_bit(packet: bytes, segment: Segment, bit: int) -> bytes:
    """The packet with one bit of its data inverted and a checksum that fits, so that the kernel delivers it."""
    damaged = bytearray(packet)
    at, shift = divmod(bit % (8 * (len(packet) - segment.data)), 8)
    damaged[segment.data + at] ^= 1 << shift
    return _with_checksums(damaged, segment.start)


def reset(flow: Flow, number: int, acknowledged: int | None = None) -> bytes:
    """A packet of this flow that ends the connection at its receiver.

    ``number`` must be the next sequence number that the receiver expects. With ``acknowledged`` it answers a SYN.
    """
    flags = RST if acknowledged is None else RST | ACK
    tcp = _TCP_HEADER.pack(flow.source_port, flow.target_port, number, acknowledged or 0, 5 << 4, flags, 0, 0, 0)
    ip = _IP_HEADER.pack(0x45, 0, _IP_HEADER.size + len(tcp), 0, 0, 64, _TCP, 0, flow.source, flow.target)
    return _with_checksums(bytearray(ip + tcp), _IP_HEADER.size)


def _with_checksums(packet: bytearray, start: int) -> bytes:
    packet[10:12] = b"\0\0"
    packet[10:12] = _checksum(packet[:start])
    packet[start + 16 : start + 18] = b"\0\0"
    pseudo = bytes(packet[12:20]) + struct.pack("!BBH", 0, _TCP, len(packet) - start)
    packet[start + 16 : start + 18] = _checksum(pseudo + packet[start:])
    return bytes(packet)


def _checksum(data: bytes | bytearray) -> bytes:
    if len(data) % 2:
        data = bytes(data) + b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
