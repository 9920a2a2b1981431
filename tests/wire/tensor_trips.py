"""Sends tensors of all kinds there and back, and checks what arrived."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch

from backhaul.compat import use_up_warning
from backhaul.wire import headers, spans
from backhaul.wire.landing import Landing
from backhaul.wire.tensors import Packed, pack_tensors

DTYPES = [dtype for dtype in headers.DTYPES if dtype is not None]


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


# Sparse ones.


def dense() -> torch.Tensor:
    return torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5]])


def coo(indices: list[list[int]], values: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    where = torch.tensor(indices, dtype=torch.long)
    use_up_warning(torch.sparse_coo)
    return torch.sparse_coo_tensor(where, values, size, check_invariants=True)


def compressed(layout: torch.layout, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dense().to_sparse(layout=layout, **options)
