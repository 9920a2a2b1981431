"""The table that describes the tensors of one message: its bytes, written and checked.

Little-endian throughout; the table is empty when there are no tensors::

    offset  size  field
    0       4     tensors: how many the message has
    4       4     buffers: how many follow the message
    8       8*b   size of each buffer in bytes, never 0
    ...           one entry for each tensor, one after the other:

    0       1     layout: 0 strided, 1 COO, 2 CSR, 3 CSC, 4 BSR, 5 BSC
    1       1     dtype: index into `DTYPES`
    2       1     flags: 1 requires grad, 2 Parameter, 4 conj, 8 neg, 16 strides follow, 32 coalesced
    3       1     device of the receiver: 0 cpu, 1 meta, 2 + n the GPU n, 255 the one that the receiver expects it on
    4       1     n: number of dimensions
    5       4     buffer: its index; all ones when the tensor has no memory of its own
    9       8     offset of the first element in the buffer, in bytes
    17      8*n   size of each dimension
    ...     8*n   stride of each dimension, in elements; only with flag 16

The entry of a sparse tensor is followed by the strided entries of its components:
indices and values for COO; compressed indices, plain indices and values for the rest.
Several entries may point into one buffer: those tensors alias one another.

Nothing in a table is believed: `parse` checks every field against the others, in
integers that cannot overflow, before any memory is allocated for a tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from backhaul.errors import ProtocolError
from backhaul.wire import spans

GRAD, PARAMETER, CONJ, NEG, STRIDES, COALESCED = 1, 2, 4, 8, 16, 32
CPU, META, GPU, EXPECTED = 0, 1, 2, 255
STRIDED, COO, CSR, CSC, BSR, BSC = range(6)
NO_BUFFER = 0xFFFFFFFF

LAYOUTS = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
LAYOUT_CODES = {layout: code for code, layout in enumerate(LAYOUTS)}
COMPONENTS = (0, 2, 3, 3, 3, 3)  # layout -> number of component entries that follow

# The position in this list is the code on the wire: append only. None: this torch does not have it.
DTYPES: list[torch.dtype | None] = [
    getattr(torch, name, None)
    for line in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64",
        "float16 bfloat16 float32 float64 complex32 complex64 complex128",
        "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
        "bits8 bits16 bits1x8 bits2x4 bits4x2",
        "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    )
    for name in line.split()
]
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

_LIMIT = 1 << 63  # torch counts elements and bytes in signed 64 bits
_MAX_NDIM = 64

_COUNTS = struct.Struct("<II")
_ENTRY = struct.Struct("<BBBBBIQ")
_SINGLE = struct.Struct("<IIQBBBBBIQ")  # counts, one buffer, one entry without its sizes
_PLAIN = struct.Struct("<QQBBBBB12s")  # the same bytes, in fields that are quick to compare
_ONE_EACH = 1 << 32 | 1
_START_OF_FIRST = bytes(12)


# Caches of tables that were made or parsed: most programs send and receive the same few kinds of tensor. No result
# depends on these caches, so all workers of a process share them.
_REMEMBERED = 1024
_MAX_REMEMBERED_SIZE = 4096
_made: dict[tuple[int, int, tuple[int, ...], int], bytes] = {}
singles: dict[bytes, tuple[int, Sequence[Small]]] = {}  # with the bytes that follow the table: see `recognise`
_alone: dict[bytes, Alone] = {}
_parsed: dict[bytes, tuple[int, Table]] = {}
_MAX_PARSED_BYTES = 1 << 18  # the most bytes of tables in `_parsed`; a parsed table takes up to 45 times its bytes
_parsed_bytes = 0


class Header(NamedTuple):
    """One entry of a table."""

    layout: int
    dtype: torch.dtype
    flags: int
    device: int
    sizes: Sequence[int]
    strides: Sequence[int] | None  # None when contiguous
    buffer: int
    offset: int
    nbytes: int  # of its span


Small = tuple[torch.dtype, Sequence[int], int, int]
"""What a receiver needs to know about a plain tensor: dtype, shape, flags, bytes."""


class Table(NamedTuple):
    """The contents of a table that was checked."""

    headers: Sequence[Header]
    sizes: Sequence[int]  # of the buffers
    owners: Sequence[Header | None]  # for each buffer: the only tensor in it, if that fills it; else None
    claimed: int = 0  # bytes that the shapes represent beyond the memory of the tensors: see `claim`
    plain: Sequence[Small] | None = None  # if each is for the CPU, contiguous, and alone in the buffer of its index


class Alone(NamedTuple):
    """The only tensor of a message, which is contiguous."""

    dtype: torch.dtype
    shape: Sequence[int]
    requires_grad: bool
    device: int
    """The code of the device to which it goes."""
    nbytes: int


class Plain(NamedTuple):
    """A tensor that is contiguous and shares its memory with no other tensor of the message."""

    code: int  # of its dtype
    flags: int
    shape: tuple[int, ...]
    nbytes: int


@lru_cache(maxsize=256)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


@lru_cache(maxsize=256)
def _single(ndim: int) -> struct.Struct:
    return struct.Struct(f"{_SINGLE.format}{ndim}q")


def encode_single(code: int, flags: int, shape: tuple[int, ...], nbytes: int, device: int = CPU) -> bytes:
    """The table of a message with one contiguous tensor."""
    key = code | device << 8, flags, shape, nbytes
    table = _made.get(key)
    if table is None:
        ndim = len(shape)
        table = _single(ndim).pack(1, 1, nbytes, STRIDED, code, flags, device, ndim, 0, 0, *shape)
        if len(_made) >= _REMEMBERED:
            _made.clear()
        _made[key] = table
    return table


def encode_plain(tensors: Sequence[Plain]) -> bytes:
    """The table of a message with plain tensors, each in its own buffer."""
    sizes = [each.nbytes for each in tensors]
    entries = []
    for index, (code, flags, shape, _) in enumerate(tensors):
        entries.append(_ENTRY.pack(STRIDED, code, flags, CPU, len(shape), index, 0))
        entries.append(_words(len(shape)).pack(*shape))
    counts = _COUNTS.pack(len(tensors), len(tensors))
    return b"".join((counts, struct.pack(f"<{len(sizes)}Q", *sizes), *entries))


def encode(count: int, headers: Iterable[Header], sizes: Sequence[int]) -> bytes:
    """The table of `count` tensors. The headers include those of the components of sparse tensors."""
    parts = [_COUNTS.pack(count, len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes)]
    for header in headers:
        ndim = len(header.sizes)
        flags = header.flags if header.strides is None else header.flags | STRIDES
        code = DTYPE_CODES[header.dtype]
        parts.append(_ENTRY.pack(header.layout, code, flags, header.device, ndim, header.buffer, header.offset))
        parts.append(_words(ndim).pack(*header.sizes))
        if header.strides is not None:
            parts.append(_words(ndim).pack(*header.strides))
    return b"".join(parts)


def parse(table: bytes | memoryview, payload: int) -> Table:
    """The contents of a table. Raises ProtocolError if it contradicts itself, or the total size of the buffers."""
    if not len(table):
        if payload:
            raise ProtocolError(f"{payload} bytes of buffers but no tensor table")
        return Table((), (), ())
    key = bytes(table) if len(table) <= _MAX_REMEMBERED_SIZE else b""
    known = _parsed.get(key)
    if known is not None and known[0] == payload:
        return known[1]
    try:
        found = _parse(table, payload)
    except struct.error as error:
        raise ProtocolError(f"the tensor table ends early: {error}") from error
    if key:
        _remember(key, payload, found)
    return found


def _remember(key: bytes, payload: int, found: Table) -> None:
    global _parsed_bytes
    _parsed_bytes += len(key)
    if len(_parsed) >= _REMEMBERED or _parsed_bytes > _MAX_PARSED_BYTES:
        _parsed.clear()
        _parsed_bytes = len(key)
    _parsed[key] = payload, found


def split_places(table: bytes) -> tuple[bytes, Sequence[int], int]:
    """Split a table that ends with places into the table proper, the places, and the number of bytes in segments.

    Raises ProtocolError.
    """
    try:
        _, buffers = _COUNTS.unpack_from(table)
        if _COUNTS.size + 12 * buffers > len(table):
            raise ProtocolError(f"a tensor table of {len(table)} bytes claims {buffers} buffers in segments")
        end = len(table) - 4 * buffers
        places = struct.unpack_from(f"<{buffers}I", table, end)
        sizes = struct.unpack_from(f"<{buffers}Q", table, _COUNTS.size)
    except struct.error as error:
        raise ProtocolError(f"the tensor table ends early: {error}") from error
    return table[:end], places, sum(size for size, place in zip(sizes, places, strict=True) if place)


def recognise(table: bytes, payload: int) -> Sequence[Small] | None:
    """The tensors of a message if all of them are plain (`Table.plain`), from a cache if possible; else None.

    None also for invalid tables: the caller then calls `parse`, which reports the error. Raises ProtocolError for the
    unknown dtype of an only tensor.
    """
    known = singles.get(table)
    if known is not None:
        return known[1] if known[0] == payload else None
    if table[0] != 1:  # the lowest byte of the number of tensors
        try:
            return parse(table, payload).plain
        except ProtocolError:
            return None
    only = parse_single(table)
    if only is None:
        return None
    if len(singles) >= _REMEMBERED:
        singles.clear()
    nbytes = only[-1]
    singles[table] = nbytes, (only,)
    return (only,) if nbytes == payload else None


def recognise_alone(table: bytes) -> Alone | None:
    """The result of `parse_alone`, from a cache if possible. Raises ProtocolError."""
    found = _alone.get(table)
    if found is None:
        found = parse_alone(table)
        if found is not None:
            if len(_alone) >= _REMEMBERED:
                _alone.clear()
            _alone[table] = found
    return found


def parse_single(table: bytes | memoryview) -> Small | None:
    """The only tensor of a message if it is contiguous, for the CPU and not a Parameter.

    Nearly every message with tensors is like that. None for any other table, and for an invalid one. Raises
    ProtocolError for an unknown dtype.
    """
    found = parse_alone(table)
    if found is None or found.device != CPU or found.dtype is torch.complex32:
        return None
    return found.dtype, found.shape, GRAD if found.requires_grad else 0, found.nbytes


def parse_alone(table: bytes | memoryview) -> Alone | None:
    """The only tensor of a message if it is contiguous; None for any other table, and for an invalid one.

    Raises ProtocolError for an unknown dtype.
    """
    if len(table) < _SINGLE.size:
        return None
    counts, size, layout, code, flags, device, ndim, where = _PLAIN.unpack_from(table)
    if (
        counts != _ONE_EACH
        or layout != STRIDED
        or device == META
        or where != _START_OF_FIRST
        or flags & ~GRAD
        or ndim > _MAX_NDIM
        or len(table) != _SINGLE.size + 8 * ndim
    ):
        return None
    dtype = _dtype(code)
    shape = _words(ndim).unpack_from(table, _SINGLE.size)
    if (
        not size
        or math.prod(shape) * dtype.itemsize != size
        or (ndim and min(shape) < 0)
        or (flags and not (dtype.is_floating_point or dtype.is_complex))
    ):
        return None
    return Alone(dtype, shape, bool(flags), device, size)


def _parse(table: bytes | memoryview, payload: int) -> Table:
    count, buffers = _COUNTS.unpack_from(table)
    # An entry takes at least its fixed part, so the received bytes bound both counts.
    if _COUNTS.size + 8 * buffers + _ENTRY.size * count > len(table):
        raise ProtocolError(f"a tensor table of {len(table)} bytes claims {count} tensors, {buffers} buffers")
    sizes = list(struct.unpack_from(f"<{buffers}Q", table, _COUNTS.size))
    if sum(sizes) != payload or (sizes and min(sizes) == 0):
        raise ProtocolError(f"tensor buffers of {sizes!r:.200} bytes, but {payload} bytes follow")
    headers: list[Header] = []
    position = _COUNTS.size + 8 * buffers
    for _ in range(count):
        position = _parse_entry(table, position, sizes, headers, component=False)
        for _ in range(COMPONENTS[headers[-1].layout]):
            position = _parse_entry(table, position, sizes, headers, component=True)
    if position != len(table):
        raise ProtocolError(f"the tensor table has {len(table) - position} bytes too many")
    unused = set(range(buffers)).difference(header.buffer for header in headers)
    if unused:
        raise ProtocolError(f"no tensor uses the buffers {sorted(unused)!r:.200}")
    owners = _owners(headers, sizes)
    plain = None
    if len(headers) == buffers and all(map(_is_plain, headers, range(buffers), owners)):
        plain = [(header.dtype, header.sizes, header.flags, header.nbytes) for header in headers]
    return Table(headers, sizes, owners, sum(map(_claim, headers)), plain)


def _is_plain(header: Header, index: int, owner: Header | None) -> bool:
    return (
        owner is header
        and header.buffer == index
        and header.strides is None
        and header.device == CPU
        and not header.flags & ~(GRAD | PARAMETER)
        and header.dtype is not torch.complex32  # torch warns about it: see `compat.use_up_warning`
    )


def _claim(header: Header) -> int:
    if header.layout == STRIDED and header.buffer != NO_BUFFER:
        return 0 if header.strides is None else claim(header.sizes, header.dtype.itemsize, header.nbytes)
    return claim(header.sizes, header.dtype.itemsize)


def claim(sizes: Sequence[int], itemsize: int, nbytes: int | None = None) -> int:
    """The bytes that a result of the size of this tensor may need beyond the ``nbytes`` of memory that it has.

    The elements of a tensor may share memory. It may have no memory for its elements at all: on the meta device, if it
    is sparse, or if it is empty in spite of large sizes (the sum over its empty dimension has as many elements as the
    other sizes say). Then ``nbytes`` is None, and a result may have elements of eight bytes.
    """
    elements = math.prod(size for size in sizes if size)
    if nbytes is not None:
        return max(0, elements * itemsize - nbytes)
    return elements * max(8, itemsize) if sizes else 0


def _owners(headers: Sequence[Header], sizes: Sequence[int]) -> list[Header | None]:
    owners: list[Header | None] = [None] * len(sizes)
    users = [0] * len(sizes)
    for header in headers:
        if header.buffer != NO_BUFFER:
            users[header.buffer] += 1
            if header.nbytes == sizes[header.buffer]:
                owners[header.buffer] = header
    return [owner if count == 1 else None for owner, count in zip(owners, users, strict=True)]


def _parse_entry(
    table: bytes | memoryview, position: int, sizes: list[int], headers: list[Header], *, component: bool
) -> int:
    """Read the entry at `position`, check it, append it, and return the position of the next one."""
    layout, code, flags, device, ndim, buffer, offset = _ENTRY.unpack_from(table, position)
    position += _ENTRY.size
    if ndim > _MAX_NDIM:
        raise ProtocolError(f"a tensor of {ndim} dimensions")
    dtype = _dtype(code)
    _check_kind(layout, dtype, flags, device, component)
    shape = _words(ndim).unpack_from(table, position)
    position += 8 * ndim
    strides = None
    if flags & STRIDES:
        strides = _words(ndim).unpack_from(table, position)
        position += 8 * ndim
    if ndim and (min(shape) < 0 or min(strides or (0,)) < 0):
        raise ProtocolError(f"a tensor of sizes {shape} and strides {strides}")
    numel = math.prod(shape)
    reach = numel if strides is None else spans.span(shape, strides)
    nbytes = reach * dtype.itemsize
    # The product of the sizes without their zeros must not overflow either: torch may multiply those before a zero.
    if math.prod(size for size in shape if size) * dtype.itemsize >= _LIMIT or nbytes >= _LIMIT:
        raise ProtocolError(f"a tensor of sizes {shape} and strides {strides}")
    if component and numel > reach:
        # torch reads every element of a component to check it, so a component must not be larger than its bytes here.
        raise ProtocolError("a component of a sparse tensor that is expanded")
    if layout != STRIDED or device == META or numel == 0:
        if buffer != NO_BUFFER or offset:
            raise ProtocolError("a tensor without memory of its own claims a buffer")
    elif buffer >= len(sizes):
        raise ProtocolError(f"a tensor in buffer {buffer} of {len(sizes)}")
    elif offset % dtype.itemsize or offset + nbytes > sizes[buffer]:
        raise ProtocolError(f"a tensor of {nbytes} bytes at {offset} in a buffer of {sizes[buffer]}")
    headers.append(Header(layout, dtype, flags, device, shape, strides, buffer, offset, nbytes))
    return position


def _dtype(code: int) -> torch.dtype:
    dtype = DTYPES[code] if code < len(DTYPES) else None
    if dtype is None:
        raise ProtocolError(f"a tensor of dtype {code}, which this torch does not know")
    return dtype


def _check_kind(layout: int, dtype: torch.dtype, flags: int, device: int, component: bool) -> None:
    """Refuse a combination that no tensor can have."""
    allowed = CONJ | NEG | STRIDES
    if component:
        if layout != STRIDED:
            raise ProtocolError("a component of a sparse tensor that is not strided")
    elif layout == STRIDED:
        allowed |= GRAD | PARAMETER
    else:
        allowed = GRAD | PARAMETER | (COALESCED if layout == COO else 0)
    if layout >= len(LAYOUTS) or flags & ~allowed:
        raise ProtocolError(f"a tensor of layout {layout} with flags {flags:#x}")
    if device == META and (component or layout != STRIDED):
        raise ProtocolError(f"a tensor on device {device}")
    if flags & GRAD and not (dtype.is_floating_point or dtype.is_complex):
        raise ProtocolError(f"a tensor of {dtype} that requires grad")
    if flags & CONJ and not dtype.is_complex:
        raise ProtocolError(f"a tensor of {dtype} with its conj bit set")
    if flags & NEG and dtype is torch.bool:
        raise ProtocolError("a negated tensor of bool")
