"""Finds what a function does to dtypes and memory formats by trying it on small tensors.

``nn.Module._apply`` receives functions that often cannot be sent, such as lambdas. A `Conversion` can be sent instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Conversion(NamedTuple):
    """The dtypes that change, and the memory formats that tensors of 4 and 5 dimensions are brought into."""

    dtypes: list[tuple[torch.dtype, torch.dtype]]
    formats: list[tuple[int, torch.memory_format]]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = dict(self.dtypes).get(tensor.dtype, tensor.dtype)
        format = dict(self.formats).get(tensor.dim(), torch.preserve_format)
        return tensor.to(dtype=dtype, memory_format=format)


def conversion_of(fn: Callable[[torch.Tensor], torch.Tensor]) -> Conversion:
    """What ``fn``, an argument of ``nn.Module._apply``, does to dtypes and memory formats.

    Raises what ``fn`` raises for a float32 tensor.
    """
    with torch.no_grad():
        dtypes = [(dtype, made) for dtype in _DTYPES if (made := _dtype_made(fn, dtype)) is not dtype]
        return Conversion(dtypes, _formats_made(fn))


def _dtype_made(fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    try:
        return fn(torch.zeros(1, dtype=dtype)).dtype
    except Exception:
        if dtype is torch.float32:
            raise
        return dtype  # the model may have no tensors of this dtype; if it has some, they stay as they are


def _formats_made(fn: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[int, torch.memory_format]]:
    made: dict[int, torch.memory_format | None] = {}
    for dim in _FORMATS:
        try:
            made[dim] = _format_made(fn, dim)
        except Exception:
            continue
    asked = next((format for format in made.values() if format is not None), None)
    # If ``fn`` fails for one number of dimensions, the same format is assumed for it. The conversion then fails on the
    # module's tensors too, as it must.
    found = [(dim, made.get(dim, asked)) for dim in _FORMATS]
    return [(dim, format) for dim, format in found if format is not None]


def _format_made(fn: Callable[[torch.Tensor], torch.Tensor], dim: int) -> torch.memory_format | None:
    """The format that ``fn`` gives to contiguous and channels-last tensors alike; None if it keeps each as it is."""
    plain = torch.zeros((2,) * dim)
    last = _FORMATS[dim]
    made = [fn(plain), fn(plain.to(memory_format=last))]
    if all(tensor.is_contiguous(memory_format=last) for tensor in made):
        return last
    if all(tensor.is_contiguous() for tensor in made):
        return torch.contiguous_format
    return None
