"""Which bytes of which storage the tensors of one message need.

A *span* is the stretch of memory from a tensor's first element to its last. Tensors
over one storage must alias at the receiver too, so they travel as one `Region` of
that storage and are rebuilt over it. Two rules keep a region honest:

- It carries only bytes that some tensor of the message can see. Gaps between views
  travel as zeros: the column beside the one that was sent stays private.
- Views that lie far apart get a region each, unless they share an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# A region may be this much larger than what its views need before it is split.
_SLACK_FACTOR = 2
_SLACK_BYTES = 4096

# Element size -> a dtype that copies elements of that size bit by bit.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Region(NamedTuple):
    """One buffer to send: its memory, and where in it each member starts."""

    memory: torch.Tensor  # its data_ptr() is the first byte; it keeps the memory alive
    nbytes: int
    members: list[tuple[int, int]]  # (place among the tensors given, byte offset)


class _View(NamedTuple):
    place: int  # among the tensors given
    tensor: torch.Tensor
    low: int  # first byte in the storage
    high: int  # one past the last byte
    dense: bool


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements in a tensor's span, with the first and the last one; 0 for an empty tensor."""
    last = 0
    for size, stride in zip(sizes, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether every element of the span belongs to the tensor. May be False by mistake for unusual overlaps."""
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride > reach:
                return False
            reach += (size - 1) * stride
    return True


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a freshly made tensor of these sizes."""
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as plain numbers: without conj or neg bit, without gradient, and with a dtype of `_RAW`."""
    return torch.empty(0, dtype=_RAW[tensor.dtype.itemsize], device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def compact(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A copy without gaps of a tensor that has gaps, and the strides that read the copy.

    Expanded dimensions stay expanded.
    """
    sizes, strides = tensor.shape, tensor.stride()
    kept = [1 if stride == 0 else size for size, stride in zip(sizes, strides, strict=True)]
    copy = physical(tensor).as_strided(kept, strides).clone(memory_format=torch.contiguous_format)
    packed = contiguous_strides(kept)
    return copy, tuple(0 if old == 0 else new for old, new in zip(strides, packed, strict=True))


def regions(tensors: Sequence[torch.Tensor]) -> list[Region]:
    """The regions to send for these tensors. All of them must be over one storage, and none may be empty."""
    views = []
    for place, tensor in enumerate(tensors):
        item = tensor.dtype.itemsize
        sizes, strides = tensor.shape, tensor.stride()
        low = int(tensor.storage_offset()) * item
        views.append(_View(place, tensor, low, low + span(sizes, strides) * item, is_dense(sizes, strides)))
    views.sort(key=lambda view: (view.low, view.high))
    groups = [views]
    if _is_wasteful(views):
        groups = _runs(views)
        groups = [part for group in groups for part in (_overlaps(group) if _is_wasteful(group) else [group])]
    return [_region(group) for group in groups]


def _bounds(views: list[_View]) -> tuple[int, int]:
    # Each view must start in the region at a multiple of its element size. Element sizes are powers of two, so it is
    # enough to align the region to the largest.
    low = min(view.low for view in views)
    low -= low % max(view.tensor.dtype.itemsize for view in views)
    return low, max(view.high for view in views)


def _is_wasteful(views: list[_View]) -> bool:
    if len(views) == 1:
        return False
    low, high = _bounds(views)
    needed = sum(min(view.high - view.low, view.tensor.nbytes) for view in views)
    return high - low > _SLACK_FACTOR * needed + _SLACK_BYTES


def _runs(views: list[_View]) -> list[list[_View]]:
    """Group views (sorted by start) whose spans overlap."""
    runs: list[list[_View]] = []
    end = -1
    for view in views:
        if view.low < end:
            runs[-1].append(view)
        else:
            runs.append([view])
        end = max(end, view.high)
    return runs


def _overlaps(views: list[_View]) -> list[list[_View]]:
    """Group views that share an element, exactly. Costs an index per element: for rare layouts only."""
    unit = min(view.tensor.dtype.itemsize for view in views)
    groups: list[tuple[list[_View], torch.Tensor]] = []
    for view in views:
        units = _units(view, unit)
        apart = []
        merged = [view]
        for members, known in groups:
            if bool(torch.isin(units, known).any()):
                merged = members + merged
                units = torch.cat((known, units))
            else:
                apart.append((members, known))
        groups = [*apart, (merged, units)]
    return [members for members, _ in groups]


def _units(view: _View, unit: int) -> torch.Tensor:
    """Every address that the view can see, in steps of `unit` bytes."""
    item = view.tensor.dtype.itemsize
    units = torch.arange(view.low // unit, (view.low + item) // unit, device="cpu")
    for size, stride in zip(view.tensor.shape, view.tensor.stride(), strict=True):
        if stride:
            steps = torch.arange(size, device="cpu") * (stride * item // unit)
            units = (units[:, None] + steps).flatten()
    return units


def _region(views: list[_View]) -> Region:
    low, high = _bounds(views)
    members = [(view.place, view.low - low) for view in views]
    storage = views[0].tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))
    if _has_gaps(views, low):
        memory = _without_gaps(memory, views, low)
    return Region(memory, high - low, members)


def _has_gaps(views: list[_View], low: int) -> bool:
    end = low
    for view in sorted(views, key=lambda view: view.low):
        if view.dense:
            if view.low > end:
                return True
            end = max(end, view.high)
    return end < max(view.high for view in views)


def _without_gaps(memory: torch.Tensor, views: list[_View], low: int) -> torch.Tensor:
    """A copy of the memory in which only the views' own bytes are not zero."""
    copy = torch.zeros(memory.numel(), dtype=torch.uint8, device=memory.device)
    for view in views:
        start, end = view.low - low, view.high - low
        if view.dense:
            copy[start:end] = memory[start:end]
            continue
        source = physical(view.tensor)
        kept = [1 if stride == 0 else size for size, stride in zip(source.shape, source.stride(), strict=True)]
        source = source.as_strided(kept, source.stride())
        target = torch.empty(0, dtype=source.dtype, device=copy.device).set_(
            copy.untyped_storage(), start // source.itemsize, source.shape, source.stride()
        )
        target.copy_(source)
    return copy
