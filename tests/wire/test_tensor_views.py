"""Views of one storage: they alias again at the receiver, and bring only the bytes that they show."""

from __future__ import annotations

import ctypes
import struct

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_trips import DTYPES, check, coo, filled, land, quiet_empty, raw, trip

from backhaul.wire import spans
from backhaul.wire.tensors import INLINE, pack_tensors


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


# Any views.


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
def test_a_tensor_is_dense_if_it_sees_every_element(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    seen = {0}
    for size, stride in dims:
        seen = {start + step * stride for start in seen for step in range(size)}
    assert spans.span(sizes, strides) == max(seen) + 1
    assert spans.is_dense(sizes, strides) <= (len(seen) == max(seen) + 1)
