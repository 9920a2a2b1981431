"""What a function does to tensors, found out by giving it some: it may be one that cannot be sent."""

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
    """Which dtypes become which others, and to which memory format tensors of 4 and of 5 dimensions come."""

    dtypes: list[tuple[torch.dtype, torch.dtype]]
    formats: list[tuple[int, torch.memory_format]]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = dict(self.dtypes).get(tensor.dtype, tensor.dtype)
        format = dict(self.formats).get(tensor.dim(), torch.preserve_format)
        return tensor.to(dtype=dtype, memory_format=format)


def conversion_of(fn: Callable[[torch.Tensor], torch.Tensor]) -> Conversion:
    """What ``fn``, as given to ``nn.Module._apply``, does to dtypes and memory formats.

    Raises what ``fn`` raises for a tensor of float32.
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
        return dtype  # perhaps no model has tensors of it; one that has will be used as it is


def _formats_made(fn: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[int, torch.memory_format]]:
    made: dict[int, torch.memory_format | None] = {}
    for dim in _FORMATS:
        try:
            made[dim] = _format_made(fn, dim)
        except Exception:
            continue
    asked = next((format for format in made.values() if format is not None), None)
    # It fails for tensors of the other number of dimensions, so it has to fail for the module's.
    found = [(dim, made.get(dim, asked)) for dim in _FORMATS]
    return [(dim, format) for dim, format in found if format is not None]


def _format_made(fn: Callable[[torch.Tensor], torch.Tensor], dim: int) -> torch.memory_format | None:
    """The format in which tensors of both formats come out, if there is one."""
    plain = torch.zeros((2,) * dim)
    last = _FORMATS[dim]
    made = [fn(plain), fn(plain.to(memory_format=last))]
    if all(tensor.is_contiguous(memory_format=last) for tensor in made):
        return last
    if all(tensor.is_contiguous() for tensor in made):
        return torch.contiguous_format
    return None
