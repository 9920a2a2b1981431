"""Tensors -> table and buffers -> tensors: what arrives is equal, clean, and its receiver's own."""

from __future__ import annotations

import ctypes
import struct
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backhaul.errors import ProtocolError, UnsendableError
from backhaul.wire import headers, spans, tensors
from backhaul.wire.tensors import INLINE, Landing, Packed, pack_tensors

DTYPES = [dtype for dtype in headers.DTYPES if dtype is not None]
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


def land(packed: Packed, *, place: bool = False) -> list[torch.Tensor]:
    landing = Landing.parse(packed.table, sum(map(len, packed.buffers)))
    assert landing.sizes == [len(buffer) for buffer in packed.buffers]
    for index, buffer in enumerate(packed.buffers):
        if place:
            landing.place(index)[:] = buffer
        else:
            landing.put(index, buffer)
    return landing.tensors()


def trip(*given: torch.Tensor) -> list[torch.Tensor]:
    return land(pack_tensors(given))


def quiet_empty(size: Any, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        return torch.empty(size, dtype=dtype)


def filled(size: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose bytes are 0, 1, 0, 1...: valid in every dtype, bool included."""
    tensor = quiet_empty(size, dtype)
    for index in range(tensor.nbytes):
        ctypes.c_ubyte.from_address(tensor.data_ptr() + index).value = index % 2
    return tensor


def raw(tensor: torch.Tensor) -> list[Any]:
    """The elements in order, as plain numbers."""
    return spans.physical(tensor).clone(memory_format=torch.contiguous_format).flatten().tolist()


def check(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert got.dtype is sent.dtype
    assert got.shape == sent.shape
    assert got.requires_grad == sent.requires_grad
    assert got.is_leaf
    assert not got._is_view()
    assert got.is_conj() == sent.is_conj()
    assert got.is_neg() == sent.is_neg()
    assert not got.is_inference()
    assert raw(got) == raw(sent)
    assert got.untyped_storage().resizable()
    if sent.numel():
        assert got.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(), (3,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_every_dtype_and_shape_survives(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    sent = filled(size, dtype)
    check(trip(sent)[0], sent)
    for got in trip(sent, filled((2,), dtype))[:1]:
        check(got, sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_with_gaps(dtype: torch.dtype) -> None:
    sent = filled((4, 6), dtype)[:, ::2]
    check(trip(sent)[0], sent)


def base() -> torch.Tensor:
    return torch.arange(120.0).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("sent", "elements", "strides"),
    [
        (base(), 120, None),
        (base().permute(3, 1, 0, 2), 120, (1, 20, 60, 5)),
        (base().contiguous(memory_format=torch.channels_last), 120, (60, 1, 15, 3)),
        (torch.ones(1).expand(1000), 1, (0,)),
        (torch.ones(3, 1).expand(3, 7), 3, (1, 0)),
        (torch.arange(10.0).unfold(0, 4, 1), 10, (1, 1)),
        (base()[0, 1], 20, None),
        (base()[:, 0, 0, 0], 2, None),
        (base()[..., ::2], 72, None),
        (base()[:, :1, ::2, 0].expand(2, 5, 2), 4, (2, 0, 1)),
        (torch.arange(10.0)[::3].as_strided((2, 2), (3, 3)), 4, None),
    ],
)
def test_a_tensor_travels_compactly_and_keeps_its_strides(
    sent: torch.Tensor, elements: int, strides: tuple[int, ...] | None
) -> None:
    packed = pack_tensors([sent])
    assert [len(buffer) for buffer in packed.buffers] == [4 * elements]
    (got,) = land(packed)
    check(got, sent)
    assert got.stride() == (strides or spans.contiguous_strides(sent.shape))


@pytest.mark.parametrize("extra", [0, 1])
def test_small_buffers_are_snapshots_and_large_ones_are_not_copied(extra: int) -> None:
    sent = torch.zeros(INLINE + extra, dtype=torch.uint8)
    packed = pack_tensors([sent])
    (buffer,) = packed.buffers
    sent.fill_(7)
    if extra:
        assert isinstance(buffer, memoryview)
        assert buffer.format == "B"
        assert buffer[0] == 7
        assert packed.keep == [sent]
    else:
        assert isinstance(buffer, bytes)
        assert buffer[0] == 0
        assert packed.keep == []


def test_a_view_keeps_its_tensor_alive() -> None:
    sent = torch.zeros(INLINE + 1, dtype=torch.uint8)
    alive = weakref.ref(sent)
    view = tensors.view_of(sent, 4)
    del sent
    assert alive() is not None
    assert bytes(view) == bytes(4)


def test_packing_leaves_the_tensor_resizable() -> None:
    for count in (10, INLINE):
        sent = torch.zeros(count)
        pack_tensors([sent])
        sent.resize_(2 * count)


def test_what_arrives_can_be_written_and_resized() -> None:
    for got in trip(torch.zeros(3), torch.zeros(3, 2).t(), torch.zeros(100_000)):
        got.add_(1)
        assert got.min() == 1
        got.resize_(200_000)


def test_huge_buffers_are_placed() -> None:
    sent = torch.arange(1 << 20, dtype=torch.float64)
    check(land(pack_tensors([sent]), place=True)[0], sent)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_put_takes_any_bytes(kind: Any) -> None:
    packed = pack_tensors([torch.arange(3.0)])
    landing = Landing.parse(memoryview(packed.table), 12)
    landing.put(0, kind(packed.buffers[0]))
    assert landing.tensors()[0].tolist() == [0, 1, 2]


def test_put_checks_the_size() -> None:
    landing = Landing.parse(pack_tensors([torch.zeros(3)]).table, 12)
    with pytest.raises(ProtocolError, match="has 11 bytes"):
        landing.put(0, bytes(11))


def test_a_buffer_that_never_arrived() -> None:
    with pytest.raises(ProtocolError, match="never arrived"):
        Landing.parse(pack_tensors([torch.zeros(3)]).table, 12).tensors()


def test_no_tensors() -> None:
    assert pack_tensors([]) == (b"", [], [])
    assert Landing.parse(b"", 0).tensors() == []
    with pytest.raises(ProtocolError):
        Landing.parse(b"", 1)


# Gradients, parameters, bits


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_requires_grad_makes_a_leaf(dtype: torch.dtype) -> None:
    leaf = filled((2, 3), dtype).requires_grad_()
    for sent in (leaf, leaf.t()):
        check(trip(sent)[0], sent)


def test_a_result_of_autograd_arrives_as_a_leaf() -> None:
    sent = torch.ones(3, requires_grad=True) * 2
    (got,) = trip(sent)
    got.sum().backward()
    assert got.grad is not None
    assert got.grad_fn is None


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_stay_parameters(grad: bool) -> None:
    sent = nn.Parameter(torch.ones(2, 3), requires_grad=grad)
    for got in (*trip(sent), *trip(sent, torch.ones(1))[:1]):
        check(got, sent)


def test_conj_and_neg_bits() -> None:
    z = torch.tensor([[1 + 2j, 3 - 1j], [0j, 1j]])
    for sent in (z.conj(), z.t().conj(), z.conj().imag, z.conj().imag[:, :1], z[:, :1].conj()):
        (got,) = trip(sent)
        check(got, sent)
        assert torch.equal(got, sent)
    with_grad = z.clone().requires_grad_().conj()
    check(trip(with_grad)[0], with_grad)


def test_built_outside_of_inference_mode_and_default_device() -> None:
    packed = pack_tensors([torch.ones(2, requires_grad=True), torch.ones(3)])
    with torch.inference_mode(), torch.device("meta"):
        got = land(packed)
    assert [tensor.is_inference() for tensor in got] == [False, False]
    assert [tensor.device.type for tensor in got] == ["cpu", "cpu"]
    with torch.inference_mode():
        sent = torch.ones(2)
    assert trip(sent)[0].is_inference() is False


def test_meta_tensors() -> None:
    sent = torch.empty((1 << 20, 1 << 20), device="meta", requires_grad=True)
    turned = sent.detach().t()
    packed = pack_tensors([sent, turned, nn.Parameter(sent)])
    assert packed.buffers == []
    got = land(packed)
    assert [tensor.is_meta for tensor in got] == [True] * 3
    assert [tensor.requires_grad for tensor in got] == [True, False, True]
    assert got[1].stride() == turned.stride()
    assert type(got[2]) is nn.Parameter


# Sharing


def test_views_of_one_storage_alias_again() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    packed = pack_tensors([x, x.t(), x[1], x.view(torch.int32)])
    assert [len(buffer) for buffer in packed.buffers] == [48]
    whole, turned, row, ints = land(packed)
    for got, sent in ((whole, x), (turned, x.t()), (row, x[1]), (ints, x.view(torch.int32))):
        check(got, sent)
        assert got.stride() == sent.stride()
    whole.fill_(1)
    assert turned.sum() == 12
    assert row.tolist() == [1] * 4
    assert ints.unique().tolist() == [0x3F800000]
    assert x[0, 1] == 1
    assert x[0, 2] == 2


def test_views_of_mixed_element_sizes_stay_aligned() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    small, large = memory[9:60], memory[16:48].view(torch.complex128)
    got = trip(small, large)
    check(got[0], small)
    check(got[1], large)
    got[0].fill_(0)
    assert got[1].abs().sum() == 0


def test_a_shared_large_region_is_not_copied() -> None:
    x = torch.zeros(INLINE)
    packed = pack_tensors([x[: INLINE // 2], x[INLINE // 2 :]])
    (buffer,) = packed.buffers
    x.view(torch.uint8)[5] = 9
    assert buffer[5] == 9


def test_bytes_between_views_stay_private() -> None:
    x = torch.full((8, 4), 7, dtype=torch.uint8)
    packed = pack_tensors([x[:, 0], x[:, 2], x[:, 2:3].expand(8, 5)])
    (buffer,) = packed.buffers
    assert bytes(buffer) == (b"\x07\x00\x07\x00" * 8)[:31]
    got = land(packed)
    got[1].fill_(9)
    assert got[0].tolist() == [7] * 8
    assert got[2].tolist() == [[9] * 5] * 8


def test_overlapping_elements_with_gaps_between_views() -> None:
    x = torch.arange(40, dtype=torch.int16)
    odd = x.as_strided((3, 2, 2), (10, 2, 2))
    packed = pack_tensors([odd, x[:1]])
    got = land(packed)
    check(got[0], odd)
    values = [struct.unpack_from("<h", packed.buffers[0], 2 * i)[0] for i in range(25)]
    assert values == [i if i % 10 in (0, 2, 4) else 0 for i in range(25)]


def test_distant_views_do_not_drag_the_storage_along() -> None:
    x = torch.zeros(1_000_000)
    packed = pack_tensors([x[:10], x[5:20], x[-10:]])
    assert [len(buffer) for buffer in packed.buffers] == [80, 40]
    first, second, last = land(packed)
    first.fill_(1)
    assert second.tolist() == [1] * 5 + [0] * 10
    assert last.tolist() == [0] * 10


def test_columns_of_a_wide_matrix_travel_alone_unless_they_share_elements() -> None:
    x = torch.arange(400_000.0).reshape(100, 4000)
    packed = pack_tensors([x[:, 3], x[:, 7]])
    assert [len(buffer) for buffer in packed.buffers] == [400, 400]
    assert torch.equal(land(packed)[1], x[:, 7])
    first, other, again = trip(x[:, 3], x[:, 7], x[:, 2:4])
    first.fill_(-1)
    assert again[:, 1].tolist() == [-1] * 100
    assert torch.equal(again[:, 0], x[:, 2])
    assert torch.equal(other, x[:, 7])
    # the third one joins the two that were apart
    first, other, joint = trip(x[:, 3], x[:, 7], x[:, 3:8:4])
    joint.fill_(-1)
    assert torch.equal(first, other)


def test_distant_single_views_stay_compact() -> None:
    x = torch.zeros(1000, 1000)
    packed = pack_tensors([x[0, ::2], x[-1]])
    assert [len(buffer) for buffer in packed.buffers] == [2000, 4000]
    assert land(packed)[0].is_contiguous()


def test_values_of_a_sparse_tensor_sent_beside_it_alias() -> None:
    values = torch.ones(2)
    sparse = coo([[0, 2]], values, (4,))
    got, got_values = trip(sparse, sparse._values())
    got_values.fill_(5)
    assert got.to_dense().tolist() == [5, 0, 5, 0]


# Sparse layouts


def dense() -> torch.Tensor:
    return torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5]])


def coo(indices: list[list[int]], values: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    where = torch.tensor(indices, dtype=torch.long)
    return torch.sparse_coo_tensor(where, values, size, check_invariants=True)


def compressed(layout: torch.layout, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dense().to_sparse(layout=layout, **options)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: dense().to_sparse(),
        lambda: dense().to_sparse(1),
        lambda: coo([[1, 1]], torch.ones(2, 3), (4, 3)),
        lambda: coo([[], []], torch.empty(0), (4, 3)),
        lambda: coo([[0, 2]], torch.ones(1).expand(2), (4,)),
        lambda: compressed(torch.sparse_csr),
        lambda: compressed(torch.sparse_csc),
        lambda: compressed(torch.sparse_bsr, blocksize=(2, 2)),
        lambda: compressed(torch.sparse_bsc, blocksize=(2, 2)),
    ],
)
def test_sparse_layouts(make: Any, grad: bool) -> None:
    sent = make().requires_grad_(grad)
    (got,) = trip(sent)
    assert got.layout is sent.layout
    assert got.shape == sent.shape
    assert got.requires_grad is grad
    assert got.is_leaf
    assert torch.equal(got.detach().to_dense(), sent.detach().to_dense())
    if sent.layout is torch.sparse_coo:
        assert got.is_coalesced() == sent.is_coalesced()
        assert got.dense_dim() == sent.dense_dim()


def test_a_sparse_parameter() -> None:
    (got,) = trip(nn.Parameter(dense().to_sparse()))
    assert type(got) is nn.Parameter
    assert got.layout is torch.sparse_coo


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str
)
def test_wrong_indices_are_refused(layout: torch.layout) -> None:
    block = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    packed = pack_tensors([compressed(layout, **block)])
    for number in (99, -1, 1 << 40):
        packed.buffers[0] = struct.pack("<q", number) + bytes(packed.buffers[0][8:])
        with pytest.raises(ProtocolError):
            land(packed)


def test_a_false_claim_to_be_coalesced_is_refused() -> None:
    packed = pack_tensors([coo([[1, 1]], torch.ones(2), (4,))])
    start = 8 + 8 * 2
    table = bytearray(packed.table)
    table[start + 2] |= headers.COALESCED
    with pytest.raises(ProtocolError):
        land(packed._replace(table=bytes(table)))


def test_sparse_values_must_have_the_claimed_dtype() -> None:
    packed = pack_tensors([dense().to_sparse()])
    table = bytearray(packed.table)
    table[8 + 8 * 2 + 1] = headers.DTYPE_CODES[torch.int32]
    with pytest.raises(ProtocolError, match="values of"):
        land(packed._replace(table=bytes(table)))


# What cannot be sent


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (quantised, "dequantize"),
        (nested, "unbind"),
        (lambda: torch.ones(2).as_subclass(Odd), "plain copy"),
        (lambda: torch.ones(2, 2).to_sparse().to("meta"), r"\.cpu\(\)"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
    ],
)
def test_unsendable_tensors_say_what_to_do(make: Any, advice: str) -> None:
    with pytest.raises(UnsendableError, match=advice):
        pack_tensors([make()])


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]])
def test_a_freed_storage_is_not_read(view: Any) -> None:
    sent = torch.ones(64, 64)
    seen, part = view(sent), view(sent)[1:]
    sent.untyped_storage().resize_(16)
    for group in ([seen], [seen, part]):
        with pytest.raises(UnsendableError, match="freed or shrunk"):
            pack_tensors(group)
    assert sent.untyped_storage().nbytes() == 16


def test_tensors_inside_a_transform_have_no_memory() -> None:
    with pytest.raises(UnsendableError, match="no access"):
        torch.func.vmap(lambda x: (pack_tensors([x]), x)[1])(torch.ones(3, 2))


# Tables that nobody writes


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
    "unknown device": (table(entry(device=2)), 8),
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


def test_the_literal_tables_above_are_right_but_for_one_thing() -> None:
    landing = Landing.parse(table(entry(), entry(sizes=(1,), offset=4)), 8)
    landing.put(0, struct.pack("<ff", 1, 2))
    assert [tensor.tolist() for tensor in landing.tensors()] == [[1, 2], [2]]
    assert table(entry()) == pack_tensors([torch.zeros(2)]).table


def test_components_that_do_not_fit_together_are_refused() -> None:
    landing = Landing.parse(table(entry(layout=1, buffer=NONE), entry(), entry(), count=1), 8)
    landing.put(0, bytes(8))
    with pytest.raises(ProtocolError, match="refuses"):
        landing.tensors()


def test_memory_that_cannot_be_had() -> None:
    size = 1 << 60
    landing = Landing.parse(table(entry(sizes=(size // 4,)), sizes=(size,)), size)
    with pytest.raises(ProtocolError, match="no memory"):
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


@settings(max_examples=300, deadline=None)
@given(st.lists(random_entries, max_size=4), st.lists(st.integers(0, 64), max_size=2))
def test_random_tables_are_refused_or_harmless(entries: list[bytes], sizes: list[int]) -> None:
    land_anything(table(*entries, sizes=tuple(sizes)), sum(sizes))


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of one or two storages, in any dtype and with any strides."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        memory = filled((256,), torch.uint8)
        for _ in range(draw(st.integers(1, 3))):
            dtype = draw(st.sampled_from(DTYPES))
            room = 256 // dtype.itemsize
            sizes = draw(st.lists(st.integers(0, 3), max_size=3))
            strides = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
            start = draw(st.integers(0, max(0, room - max(1, spans.span(sizes, strides)))))
            if start + spans.span(sizes, strides) > room:
                continue
            tensor = quiet_empty(0, dtype).set_(memory.untyped_storage(), start, sizes, strides)
            found.append(tensor)
    return found


@settings(max_examples=300, deadline=None)
@given(views(), st.booleans())
def test_any_views_arrive_equal_and_alias_as_they_did(sent: list[torch.Tensor], place: bool) -> None:
    got = land(pack_tensors(sent), place=place)
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        check(one, other)
    # Write to one of them on both sides: all the others must still agree.
    for one, other in zip(got, sent, strict=True):
        if one.numel():
            for tensor in (one, other):
                ctypes.c_ubyte.from_address(tensor.data_ptr()).value = 1
    for one, other in zip(got, sent, strict=True):
        assert raw(one) == raw(other)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_dense_means_that_every_element_is_seen(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    seen = {0}
    for size, stride in dims:
        seen = {start + step * stride for start in seen for step in range(size)}
    assert spans.span(sizes, strides) == max(seen) + 1
    assert spans.is_dense(sizes, strides) <= (len(seen) == max(seen) + 1)


def test_huge_pages_are_a_linux_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors._madvise.cache_clear()
    monkeypatch.setattr(tensors.sys, "platform", "darwin")
    tensors._ask_for_huge_pages(0, 1 << 30)
    tensors._madvise.cache_clear()
