"""Tensors -> table and buffers -> tensors: they arrive equal, clean, and owned by the receiver."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from tensor_trips import DTYPES, check, filled, land, trip
from torch import nn

from backhaul.errors import ProtocolError, UnsendableError
from backhaul.wire import landing, spans, tensors
from backhaul.wire.landing import Landing
from backhaul.wire.tensors import INLINE, pack_tensors

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


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


# Buffers.


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


def test_received_tensors_can_be_written_and_resized() -> None:
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
    assert pack_tensors([]) == (b"", [], [], [], [], [])
    assert Landing.parse(b"", 0).tensors() == []
    with pytest.raises(ProtocolError):
        Landing.parse(b"", 1)


def test_huge_pages_are_requested_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    landing._madvise.cache_clear()
    monkeypatch.setattr(landing.sys, "platform", "darwin")
    landing._ask_for_huge_pages(0, 1 << 30)
    landing._madvise.cache_clear()


# Gradients, parameters, bits.


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


# What cannot be sent.


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
