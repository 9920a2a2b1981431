"""Sparse layouts keep their layout, and malformed ones are refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from tensor_trips import compressed, coo, dense, land, trip
from torch import nn

from backhaul.errors import ProtocolError
from backhaul.wire import headers
from backhaul.wire.tensors import pack_tensors


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
