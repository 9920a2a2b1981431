"""Checks of gradients from a peer that may lie. They must match the sent tensors, and count against a quota.

A gradient of another shape, dtype, device or layout is refused before torch sees it. An expanded gradient of a few
bytes could keep all processors busy endlessly, and an oversized one would stay in memory while a run waits for the
right one. Strides are not trusted either: a gradient whose elements share memory is copied. The copy takes as much
memory as the tensor that was sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch

from backhaul.errors import ProtocolError, QuotaError
from backhaul.wire import spans
from backhaul.wire.messages import Failed

_MAX_TEXT = 4000

Gradients = Sequence[torch.Tensor | None]


class Like(NamedTuple):
    """The properties of a sent tensor that its gradient must have too."""

    shape: torch.Size
    dtype: torch.dtype
    layout: torch.layout
    device: torch.device


def like(tensor: torch.Tensor) -> Like:
    return Like(tensor.shape, tensor.dtype, tensor.layout, tensor.device)


def checked(gradient: torch.Tensor, sent: Like) -> torch.Tensor:
    """The gradient in a form that is safe for torch. Raises `ProtocolError` if it does not match the sent tensor."""
    if (
        gradient.shape != sent.shape
        or gradient.dtype is not sent.dtype
        or gradient.device != sent.device
        or gradient.layout not in (torch.strided, torch.sparse_coo, sent.layout)
        or gradient.requires_grad
        or type(gradient) is not torch.Tensor
    ):
        found = Like(gradient.shape, gradient.dtype, gradient.layout, gradient.device)
        raise ProtocolError(f"a gradient that is {_text(found)}, for a tensor that is {_text(sent)}")
    if gradient.layout is torch.strided and not spans.is_dense(gradient.shape, gradient.stride()):
        return gradient.contiguous()
    return gradient


def _text(what: Like) -> str:
    return f"{what.dtype}{list(what.shape)}, {what.layout} on {what.device}"


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of memory that a tensor takes."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    parts: tuple[torch.Tensor, ...]
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return sum(part.nbytes for part in parts)


class Charges:
    """The bytes of gradients that wait on this worker, by the peer that sent them. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()

    def add(self, peer: int, size: int) -> None:
        """Charge a peer. Raises `QuotaError` if that would exceed its limit."""
        with self._lock:
            if self._held[peer] + size > self._limit:
                raise QuotaError(f"more than {self._limit} bytes of gradients from this peer wait to be used")
            self._held[peer] += size

    def take(self, peer: int, size: int) -> None:
        with self._lock:
            self._held[peer] -= size

    def of(self, peer: int) -> int:
        return self._held[peer]


class Box(dict[int, Gradients]):
    """The gradients that wait in one pass, by source. They are charged to their peers until they are removed.

    Not thread-safe. Call `charge` before you put gradients in.
    """

    def __init__(self, charges: Charges) -> None:
        super().__init__()
        self._charges = charges
        self._charged: dict[int, tuple[int, int]] = {}

    def charge(self, gradients: Mapping[int, Gradients], peer: int) -> None:
        """Charge the peer for these gradients. Raises `QuotaError` if that would exceed its limit."""
        for source, found in gradients.items():
            size = sum(nbytes(gradient) for gradient in found if gradient is not None)
            self._charges.add(peer, size)
            self._discharge(source)  # the gradient that this one replaces
            self._charged[source] = peer, size

    def _discharge(self, source: int) -> None:
        charged = self._charged.pop(source, None)
        if charged is not None:
            self._charges.take(*charged)

    def __delitem__(self, source: int) -> None:
        super().__delitem__(source)
        self._discharge(source)

    def pop(self, source: int, *default: Any) -> Any:
        found = super().pop(source, *default)
        self._discharge(source)
        return found

    def clear(self) -> None:
        super().clear()
        for source in list(self._charged):
            self._discharge(source)

    def __del__(self) -> None:
        self.clear()


def is_sorted(places: Sequence[int], end: int) -> bool:
    """Whether the places are distinct, ascending, and below ``end``."""
    return all(before < place for before, place in pairwise((-1, *places, end)))


def checked_all(
    gradients: Mapping[int, tuple[torch.Tensor | None]], sent: Callable[[int], Like | None]
) -> dict[int, tuple[torch.Tensor | None]]:
    """The gradients of a message by source, each `checked` against the sent tensor. Raises `ProtocolError`."""
    found: dict[int, tuple[torch.Tensor | None]] = {}
    for source, (gradient,) in gradients.items():
        like = sent(source)
        found[source] = (gradient if gradient is None or like is None else checked(gradient, like),)
    return found


def abridged(message: Failed) -> Failed:
    """The report of a peer that may lie, shortened and without a traceback, for passing on."""
    return msgspec.structs.replace(
        message,
        worker=message.worker[:_MAX_TEXT],
        type_name=message.type_name[:_MAX_TEXT],
        text=message.text[:_MAX_TEXT],
        traceback="",
        tree=None,
        refs=(),
    )
