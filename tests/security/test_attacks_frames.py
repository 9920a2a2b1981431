"""A process of the same user that was admitted, and sends malformed frames.

In a cluster it could call any function anyway. These tests show that bytes which no worker sends, by mistake or on
purpose, end their own connection and nothing else.
"""

from __future__ import annotations

import array
import fcntl
import os
import random
import socket
import struct
import time

import pytest
import torch
from intruder import GHOST, Besieged, Line, MiB, counts, is_cut, run_watched

from backhaul import rpc
from backhaul.errors import ProtocolError
from backhaul.ids import RefId, ShareId
from backhaul.transport.segments import Borrowing
from backhaul.wire import headers, trees
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import HEADER, PLACED, encode, place
from backhaul.wire.messages import KIND_OF, Call, Failure, Fetch, Notices, Ping, Register, Release, Result, Unpin

CALL = KIND_OF[Call]
PING = bytes(encode(Ping(7)))
HUGE = (1 << 63) - 1
FLOAT, LONG, COMPLEX = (headers.DTYPE_CODES[dtype] for dtype in (torch.float32, torch.int64, torch.complex64))
NONE = headers.NO_BUFFER


def frame(metadata: bytes, table: bytes = b"", payload: bytes = b"", claims: int | None = None) -> bytes:
    head = HEADER.pack(b"BH", 1, CALL, len(metadata), len(table), len(payload) if claims is None else claims)
    return head + metadata + table + payload


def assert_cut_off(besieged: Besieged, data: bytes) -> None:
    line = besieged.line()
    line.send(data)
    assert is_cut(line.socket)
    line.close()


# Lengths.

LENGTHS = {
    "payload 2**63-1": (2, 41, HUGE),
    "payload 2**63": (2, 41, 1 << 63),
    "payload 2**64-1": (2, 41, (1 << 64) - 1),
    "payload just over the limit": (2, 41, 64 << 30),
    "payload without a table": (2, 0, HUGE),
    "table 2**32-1": (2, (1 << 32) - 1, 0),
    "table and payload": (2, (1 << 28) + 1, HUGE),
    "all of them": ((1 << 32) - 1, (1 << 32) - 1, (1 << 64) - 1),
}


def test_lengths_that_exceed_any_memory(besieged: Besieged) -> None:
    with besieged.attack():
        for lengths in LENGTHS.values():
            assert_cut_off(besieged, HEADER.pack(b"BH", 1, CALL, *lengths) + bytes(64))


def test_lengths_that_are_allowed_and_never_come(besieged: Besieged) -> None:
    """4 GiB of metadata, 60 GiB of tensors: claimed bytes cost nothing until they arrive."""
    table = headers.encode_single(FLOAT, 0, (15 << 30,), 60 << 30)
    with besieged.attack():
        lines = [besieged.line() for _ in range(8)]
        for line in lines[:4]:
            line.send(HEADER.pack(b"BH", 1, CALL, (1 << 32) - 1, 0, 0) + bytes(64))
        for line in lines[4:]:
            line.send(frame(b"\x92\x01\xc0", table, bytes(64), claims=60 << 30))
        assert besieged.peer.run(_asks_ten_times) < 10
        for line in lines:
            line.close()


def _asks_ten_times() -> float:
    began = time.monotonic()
    for _ in range(10):
        rpc.rpc_sync("worker0", max, args=(1, 2))
    return time.monotonic() - began


# Tensors.


def entry(
    code: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] = (),
    *,
    layout: int = headers.STRIDED,
    flags: int = 0,
    device: int = 0,
    buffer: int = 0,
    offset: int = 0,
    ndim: int | None = None,
) -> bytes:
    flags |= headers.STRIDES if strides else 0
    words = (*shape, *strides)
    ndim = len(shape) if ndim is None else ndim
    return struct.pack(f"<BBBBBIQ{len(words)}q", layout, code, flags, device, ndim, buffer, offset, *words)


def table(sizes: tuple[int, ...], *entries: bytes, count: int | None = None) -> bytes:
    count = len(entries) if count is None else count
    return struct.pack(f"<II{len(sizes)}Q", count, len(sizes), *sizes) + b"".join(entries)


def sparse(
    indices: list[int], layout: int, sizes: tuple[int, int], *, flags: int = 0, rows: int = 3
) -> tuple[bytes, bytes]:
    """A matrix of three values with these indices: its table and its payload."""
    whole = entry(FLOAT, sizes, layout=layout, flags=flags, buffer=NONE)
    values = entry(FLOAT, (3,), buffer=1)
    data = struct.pack(f"<{len(indices)}q", *indices)
    if layout == headers.COO:
        parts = [entry(LONG, (2, 3)), values]
    else:
        first = len(indices) - 3
        parts = [entry(LONG, (first,)), entry(LONG, (3,), offset=8 * first), values]
    return table((len(data), 12), whole, *parts, count=1), data + bytes(12)


LIES = {
    "larger than its buffer": (table((16,), entry(FLOAT, (5,))), bytes(16)),
    "much larger": (table((16,), entry(FLOAT, (1 << 40,))), bytes(16)),
    "sizes that overflow": (table((16,), entry(FLOAT, (1 << 32, 1 << 32))), bytes(16)),
    "sizes that overflow to 16 bytes": (table((16,), entry(FLOAT, (1 << 62, 4, 2))), bytes(16)),
    "sizes that overflow but for a zero": (table((), entry(FLOAT, (1 << 62, 1 << 62, 0), buffer=NONE)), b""),
    "a negative size": (table((16,), entry(FLOAT, (-4,))), bytes(16)),
    "a buffer that is not there": (table((16,), entry(FLOAT, (4,), buffer=1)), bytes(16)),
    "an offset behind the end": (table((16,), entry(FLOAT, (4,), offset=4)), bytes(16)),
    "an offset of 2**64-4": (table((16,), entry(FLOAT, (4,), offset=(1 << 64) - 4)), bytes(16)),
    "an odd offset": (table((16,), entry(FLOAT, (2,), offset=2)), bytes(16)),
    "strides outside the buffer": (table((16,), entry(FLOAT, (2, 2), (4, 1))), bytes(16)),
    "strides of 2**62": (table((16,), entry(FLOAT, (2, 2), (1 << 62, 1))), bytes(16)),
    "strides that overflow": (table((16,), entry(FLOAT, (3, 3), (HUGE, HUGE))), bytes(16)),
    "a negative stride": (table((16,), entry(FLOAT, (4,), (-1,))), bytes(16)),
    "buffers of 0 bytes": (table((0, 16), entry(FLOAT, (4,), buffer=1)), bytes(16)),
    "buffers that sum to 2**64": (table(((1 << 63), (1 << 63)), entry(FLOAT, (4,))), b""),
    "a buffer that nobody uses": (table((16, 16), entry(FLOAT, (4,))), bytes(32)),
    "2**32-1 tensors": (table((16,), entry(FLOAT, (4,)), count=(1 << 32) - 1), bytes(16)),
    "255 dimensions": (table((4,), entry(FLOAT, (1,) * 255)), bytes(4)),
    "dimensions that are not there": (table((4,), entry(FLOAT, (1,), ndim=64)), bytes(4)),
    "a dtype that does not exist": (table((16,), entry(200, (4,))), bytes(16)),
    "a layout that does not exist": (table((16,), entry(FLOAT, (4,), layout=9)), bytes(16)),
    "integers that require grad": (table((16,), entry(LONG, (2,), flags=headers.GRAD)), bytes(16)),
    "COO, an index too large": sparse([0, 1, 5, 0, 0, 0], headers.COO, (3, 3)),
    "COO, a negative index": sparse([0, 1, -1, 0, 0, 0], headers.COO, (3, 3)),
    "COO, an index of 2**63-1": sparse([0, 1, HUGE, 0, 0, 0], headers.COO, (3, 3)),
    "COO, coalesced and out of order": sparse([2, 1, 1, 0, 0, 0], headers.COO, (3, 3), flags=headers.COALESCED),
    "CSR, a column too large": sparse([0, 1, 2, 3, 0, 1, 3], headers.CSR, (3, 3)),
    "CSR, a negative column": sparse([0, 1, 2, 3, 0, 1, -1], headers.CSR, (3, 3)),
    "CSR, rows that end beyond the values": sparse([0, 1, 2, 100, 0, 1, 2], headers.CSR, (3, 3)),
    "CSR, rows that start elsewhere": sparse([-5, 1, 2, 3, 0, 1, 2], headers.CSR, (3, 3)),
    "CSC, a row too large": sparse([0, 1, 2, 3, 0, 1, 1 << 40], headers.CSC, (3, 3)),
    "a component that is expanded": (
        table((8, 4), entry(FLOAT, (9, 9), layout=headers.COO, buffer=NONE), entry(LONG, (2, 1 << 30), (0, 0)),
              entry(FLOAT, (1 << 30,), (0,), buffer=1), count=1),
        bytes(12),
    ),
    "a component that is missing": (table((16,), entry(FLOAT, (3, 3), layout=headers.COO, buffer=NONE)), bytes(16)),
}  # fmt: skip


def test_tables_of_tensors_that_lie(besieged: Besieged) -> None:
    tree = b"\x92\x01\x92\x03\x00"  # a call whose tree is the first tensor
    with besieged.attack():
        for lie, payload in LIES.values():
            assert_cut_off(besieged, frame(tree, lie, payload))


@pytest.mark.parametrize("name", LIES)
def test_a_lying_table_is_refused_by_the_decoder(name: str) -> None:
    lie, payload = LIES[name]
    with pytest.raises(ProtocolError):
        Decoder().receive_data(frame(b"\x92\x01\x92\x03\x00", lie, payload))


def test_a_table_that_does_not_lie_is_taken() -> None:
    good, payload = sparse([0, 1, 2, 0, 0, 0], headers.COO, (3, 3))
    (envelope,) = Decoder().receive_data(frame(b"\x92\x01\x92\x03\x00", good, payload))
    assert envelope.tensors[0].shape == (3, 3)


# Nesting.


@pytest.mark.parametrize("depth", [200, 10_000, 100_000])
def test_deep_nesting(besieged: Besieged, depth: int) -> None:
    """Metadata that is too nested for msgpack ends the connection. A tree that is too nested gets an error answer."""
    bodies = {
        "lists": b"\x92\x00" * depth + b"\xc0",
        "lists without tags": b"\x91" * depth + b"\xc0",
        "maps": b"\x81\xa1k" * depth + b"\xc0",
        "dicts": b"\x93\x02\x01" * depth + b"\xc0",
        "keys of dicts": b"\x93\x02" * depth + b"\xc0" + b"\xc0" * depth,
        "sets": b"\x92\x08" * depth + b"\xc0",
        "extensions": b"\x93\x1d\xa4rref" * depth + b"\xc0",
    }
    with besieged.attack():
        for body in bodies.values():
            line = besieged.line()
            line.send(frame(b"\x92\x01" + body))
            answer = line.answer(within=1.0)
            assert answer is None or isinstance(answer, Failure)
            assert (
                is_cut(line.socket) if answer is None else "nested too deeply" in answer.text or "tag" in answer.text
            ), answer
            line.close()


# References.


def _hold_something() -> None:
    global kept
    kept = rpc.RRef(torch.arange(1000.0))


kept: object = None


def guess(besieged: Besieged, count: int) -> None:
    """Ask for values under guessed names, and send false notices about them."""
    besieged.victim.run(_hold_something)
    before = besieged.victim.run(counts)
    choose = random.Random(8)
    line = besieged.line(GHOST)
    for start in range(0, count, 500):
        names = [
            RefId(0, choose.choice((0, GHOST)), choose.choice((start, choose.getrandbits(62)))) for _ in range(500)
        ]
        line.send(b"".join(bytes(encode(Fetch(start + place, name))) for place, name in enumerate(names)))
        lies = [lie for name in names[:20] for lie in (Release(name), Unpin(ShareId(0, name.number)))]
        line.send(bytes(encode(Notices(count + start, 1, start + 1, tuple(lies)))))
        # There is a reply to the notices and to each guess, except for values that the intruder itself may still make.
        waiting = {count + start, *(start + place for place, name in enumerate(names) if name.creator == 0)}
        while waiting:
            answer = line.answer()
            assert isinstance(answer, Failure if getattr(answer, "id", 0) < count else Result), answer
            waiting.discard(answer.id)
    # The answer to these goes to the address that the intruder claims. It cannot be reached there, and is given up.
    line.send(bytes(encode(Notices(2 * count, 1, 2 * count, tuple(map(Register, names))))))
    assert is_cut(line.socket, within=20)
    # The worker has waited until now for values that the intruder itself would make.
    deadline = time.monotonic() + 30
    while (after := besieged.victim.run(counts))["owned"] > before["owned"]:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.05)


def test_guessed_references(besieged: Besieged) -> None:
    with besieged.attack():
        guess(besieged, 2_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_100_000_guessed_references(besieged: Besieged) -> None:
    with besieged.attack(memory=256 * MiB):  # it remembers what was asked for until the intruder is gone
        guess(besieged, 100_000)


# Segments.


def guess_segments(count: int) -> int:
    """In the attacked process: frames whose buffers are in segments that were not passed."""
    choose = random.Random(8)
    large = encode(Result(1, None), [torch.zeros(1 << 18, dtype=torch.uint8)])
    head = bytearray(bytes(place(large, [1])))
    refused = 0
    for _ in range(count):
        struct.pack_into("<I", head, len(head) - 4, choose.choice((choose.getrandbits(32) or 1, choose.randint(1, 64))))
        try:
            Decoder(segments=Borrowing()).receive_data(head)
        except ProtocolError:
            refused += 1
    return refused


def test_100_000_guessed_segments(besieged: Besieged) -> None:
    with besieged.attack():
        assert besieged.victim.run(run_watched, guess_segments, 100_000) == (100_000, [])


def _pass(line: Line, descriptors: list[int], data: bytes) -> None:
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    line.socket.sendmsg([data], beside if descriptors else [])
    for descriptor in descriptors:
        os.close(descriptor)


def memfd(size: int, seals: int = 0) -> int:
    descriptor = os.memfd_create("intruder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_descriptors_that_are_no_segments(besieged: Besieged) -> None:
    large = encode(Result(1, None), [torch.zeros(1 << 18, dtype=torch.uint8)])
    placed = bytes(place(large, [1]))
    before = len(os.listdir(f"/proc/{besieged.pid}/fd"))
    with besieged.attack():
        for make in (
            lambda: list(os.pipe()),
            lambda: [os.open("/dev/zero", os.O_RDWR)],
            lambda: [os.open("/", os.O_RDONLY)],
            lambda: [memfd(1 << 20)],
            lambda: [memfd(1 << 12, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)],
            lambda: [memfd(1 << 20) for _ in range(200)],
            list,
        ):
            for data in (placed, PING, HEADER.pack(b"BH", 1, CALL | PLACED, 2, 41, HUGE)):
                line = besieged.line()
                descriptors = make()
                _pass(line, descriptors, data)
                if descriptors or data is not PING:
                    assert is_cut(line.socket)
                line.close()
    deadline = time.monotonic() + 10
    while len(os.listdir(f"/proc/{besieged.pid}/fd")) > before + 2:
        assert time.monotonic() < deadline, "descriptors stay open"
        time.sleep(0.05)


def test_trees_have_no_tag_beyond_those_tried_here() -> None:
    assert trees.EXTENSION == 0x1D
    assert trees.DICT == 2
    assert trees.SET == 8
