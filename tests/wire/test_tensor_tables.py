"""Tables of tensors that no encoder writes: refused, or harmless."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_trips import compressed, dense
from torch import nn

from backhaul.errors import ProtocolError
from backhaul.wire import headers
from backhaul.wire.landing import Landing
from backhaul.wire.tensors import pack_tensors


def entry(
    layout: int = 0,
    dtype: int = 11,
    flags: int = 0,
    device: int = 0,
    sizes: tuple[int, ...] = (2,),
    strides: tuple[int, ...] = (),
    buffer: int = 0,
    offset: int = 0,
    ndim: int | None = None,
) -> bytes:
    words = (*sizes, *strides)
    ndim = len(sizes) if ndim is None else ndim
    return struct.pack(f"<BBBBBIQ{len(words)}q", layout, dtype, flags, device, ndim, buffer, offset, *words)


def table(*entries: bytes, sizes: tuple[int, ...] = (8,), count: int | None = None) -> bytes:
    head = struct.pack(f"<II{len(sizes)}Q", len(entries) if count is None else count, len(sizes), *sizes)
    return head + b"".join(entries)


NONE = headers.NO_BUFFER
BAD_TABLES = {
    "short": (b"\0", 0),
    "counts beyond the table": (struct.pack("<II", 1 << 31, 0), 0),
    "buffers beyond the table": (struct.pack("<II", 0, 1 << 31), 0),
    "payload too large": (table(entry()), 9),
    "payload too small": (table(entry()), 7),
    "empty buffer": (table(entry(), sizes=(8, 0)), 8),
    "trailing bytes": (table(entry()) + b"\0", 8),
    "sizes cut off": (table(entry()[:-8]), 8),
    "ends within a later entry": (table(entry(), entry(ndim=60)), 8),
    "unused buffer": (table(entry(), sizes=(8, 8)), 16),
    "no such buffer": (table(entry(buffer=1)), 8),
    "no buffer": (table(entry(buffer=NONE)), 8),
    "unknown dtype": (table(entry(dtype=200)), 8),
    "unknown layout": (table(entry(layout=6)), 8),
    "unknown flag": (table(entry(flags=64)), 8),
    "coalesced but strided": (table(entry(flags=32)), 8),
    "too many dimensions": (table(entry(sizes=(1,) * 65)), 8),
    "negative size": (table(entry(sizes=(-2,))), 8),
    "two negative sizes": (table(entry(sizes=(-2, -1))), 8),
    "negative stride": (table(entry(flags=16, strides=(-1,))), 8),
    "too large": (table(entry(sizes=(3,))), 8),
    "beyond the end": (table(entry(offset=4)), 8),
    "unaligned": (table(entry(sizes=(1,), offset=2)), 8),
    "span beyond the end": (table(entry(flags=16, strides=(2,))), 8),
    "product that overflows": (table(entry(sizes=(1 << 62, 4))), 8),
    "product that overflows to the size": (table(entry(sizes=(1 << 62, 4, 2))), 8),
    "span that overflows": (table(entry(sizes=(2, 2), flags=16, strides=(1 << 62, 1 << 62))), 8),
    "zero among sizes that overflow": (
        table(entry(sizes=(1 << 62, 1 << 62, 0), buffer=NONE), sizes=()),
        0,
    ),
    "expanded too far": (table(entry(sizes=(1 << 62, 4), flags=16, strides=(0, 0))), 8),
    "empty with a buffer": (table(entry(), entry(sizes=(0,))), 8),
    "meta with a buffer": (table(entry(), entry(device=1)), 8),
    "meta with an offset": (table(entry(device=1, buffer=NONE, offset=4), sizes=()), 0),
    "int that requires grad": (table(entry(dtype=6, flags=1)), 8),
    "float with conj": (table(entry(flags=4)), 8),
    "bool with neg": (table(entry(dtype=0, flags=8)), 8),
    "sparse without components": (table(entry(layout=1, buffer=NONE), sizes=()), 0),
    "sparse on meta": (table(entry(layout=1, buffer=NONE, device=1), entry(), entry(), count=1), 8),
    "sparse with conj": (table(entry(layout=1, dtype=14, flags=4, buffer=NONE), entry(), entry(), count=1), 8),
    "coalesced CSR": (table(entry(layout=2, flags=32, buffer=NONE), *[entry()] * 3, count=1), 8),
    "sparse within sparse": (
        table(entry(layout=1, buffer=NONE), entry(layout=1, buffer=NONE), entry(), count=1),
        8,
    ),
    "component that requires grad": (table(entry(layout=1, buffer=NONE), entry(flags=1), entry(), count=1), 8),
    "component that is expanded": (
        table(
            entry(layout=1, buffer=NONE),
            entry(dtype=8, sizes=(1, 1 << 40), flags=16, strides=(0, 0)),
            entry(sizes=(1,)),
            count=1,
        ),
        8,
    ),
    "component on meta": (
        table(entry(layout=1, buffer=NONE), entry(device=1, buffer=NONE), entry(), count=1),
        8,
    ),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_malformed_tables_are_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        Landing.parse(*BAD_TABLES[name])


def test_the_malformed_tables_differ_from_a_valid_one_in_one_place() -> None:
    landing = Landing.parse(table(entry(), entry(sizes=(1,), offset=4)), 8)
    landing.put(0, struct.pack("<ff", 1, 2))
    assert [tensor.tolist() for tensor in landing.tensors()] == [[1, 2], [2]]
    assert table(entry()) == pack_tensors([torch.zeros(2)]).table


def test_components_that_do_not_fit_together_are_refused() -> None:
    landing = Landing.parse(table(entry(layout=1, buffer=NONE), entry(), entry(), count=1), 8)
    landing.put(0, bytes(8))
    with pytest.raises(ProtocolError, match="refuses"):
        landing.tensors()


def test_memory_that_is_not_available() -> None:
    size = 1 << 60
    landing = Landing.parse(table(entry(sizes=(size // 4,)), sizes=(size,)), size)
    with pytest.raises(MemoryError, match="no memory"):
        landing.place(0)


def test_a_claim_costs_no_memory() -> None:
    """A gigabyte that is placed but never filled does not become resident."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    size = 1 << 30
    before = resident()
    landing = Landing.parse(table(entry(sizes=(size // 4,)), sizes=(size,)), size)
    view = landing.place(0)
    assert len(view) == size
    assert resident() - before < 1 << 26


# Any bytes, any table.


SAMPLE = [
    lambda: torch.arange(6.0).reshape(2, 3).t(),
    lambda: nn.Parameter(torch.ones(2)),
    lambda: dense().to_sparse(),
    lambda: compressed(torch.sparse_csr),
    lambda: torch.tensor([1 + 1j]).conj(),
    lambda: torch.empty(3, device="meta"),
    lambda: torch.zeros(0),
]


def land_anything(data: bytes, payload: int) -> None:
    """Any outcome but a crash or another exception is right."""
    try:
        landing = Landing.parse(data, payload)
        for index, size in enumerate(landing.sizes):
            landing.put(index, bytes(size))
        landing.tensors()
    except ProtocolError:
        pass


@pytest.mark.parametrize("make", SAMPLE)
def test_every_flipped_bit_is_refused_or_harmless(make: Any) -> None:
    packed = pack_tensors([make()])
    payload = sum(map(len, packed.buffers))
    for bit in range(8 * len(packed.table)):
        data = bytearray(packed.table)
        data[bit // 8] ^= 1 << bit % 8
        land_anything(bytes(data), payload)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 4096))
def test_random_bytes_are_refused_or_harmless(data: bytes, payload: int) -> None:
    land_anything(data, payload)


field = st.integers(-1, 5) | st.sampled_from([1 << 31, 1 << 62, -(1 << 63)])
random_entries = st.builds(
    lambda layout, dtype, flags, device, pairs, buffer, offset: entry(
        layout,
        dtype,
        flags,
        device,
        tuple(size for size, _ in pairs),
        tuple(stride for _, stride in pairs) if flags & 16 else (),
        buffer,
        offset,
    ),
    st.sampled_from([0, 0, 0, 1, 2, 4, 6]),
    st.integers(0, len(headers.DTYPES)),
    st.sampled_from([0, 0, 1, 2, 3, 4, 8, 16, 17, 32]),
    st.sampled_from([0, 0, 1, 2]),
    st.lists(st.tuples(field, field), max_size=3),
    st.sampled_from([0, 0, 1, NONE]),
    st.sampled_from([0, 0, 1, 4, 8, 1 << 63]),
)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.lists(random_entries, max_size=4), st.lists(st.integers(0, 64), max_size=2))
def test_random_tables_are_refused_or_harmless(entries: list[bytes], sizes: list[int]) -> None:
    land_anything(table(*entries, sizes=tuple(sizes)), sum(sizes))
