"""The operators of torch that every peer of a federation may call.

They are pure, have no state and touch no file. None of them is run if its result may be larger than a message: with
two tensors of a thousand bytes a peer could ask for one of a million, and with two of a million for all the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from backhaul.errors import MisuseError, QuotaError
from backhaul.wire import callables

ELEMENTWISE = """
abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clone cos cosh
detach div eq erf erfc exp expm1 floor floor_divide fmod ge gt isfinite isinf isnan le lerp log log10 log1p log2
logical_and logical_not logical_or logical_xor lt maximum minimum mul ne neg pow reciprocal relu remainder round rsqrt
sigmoid sign sin sinh sqrt square sub tan tanh true_divide trunc
"""
REDUCTIONS = "all allclose any argmax argmin equal logsumexp mean numel prod std sum var"
PRODUCTS = "addmm bmm matmul mm"

_Size = Callable[[Sequence[torch.Tensor]], int]


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    """How many elements there are when tensors of these shapes are broadcast against each other, if they can be.

    Not with `torch.broadcast_shapes`, which imports half of torch when it is first called.
    """
    turned = (reversed(shape) for shape in shapes)
    return math.prod(max(sizes) if min(sizes) else 0 for sizes in itertools.zip_longest(*turned, fillvalue=1))


def _broadcast(tensors: Sequence[torch.Tensor]) -> int:
    return _elements(tensor.shape for tensor in tensors)


def _product(tensors: Sequence[torch.Tensor]) -> int:
    """How many elements at most a product of matrices has, and what is added to it."""
    if len(tensors) < 2:
        return 0
    *added, left, right = [tensor.shape for tensor in tensors]
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return _elements([(*left[:-2], rows, columns), (*right[:-2], 1, 1), *added])


class Bounded:
    """An operator that runs only if its result has no more than ``limit`` bytes."""

    __slots__ = ("__name__", "_limit", "_operator", "_size")

    def __init__(self, operator: Callable[..., Any], size: _Size, limit: int) -> None:
        self.__name__ = operator.__name__
        self._operator = operator
        self._size = size
        self._limit = limit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if "out" in kwargs or not all(isinstance(value, _PLAIN) for value in values):
            raise MisuseError(f"torch.{self.__name__}: other workers may give it tensors, numbers and the like")
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if self._size is _product and any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            raise MisuseError(f"torch.{self.__name__}: give the tensors in their order, not by name")
        if tensors and self._size(tensors) * _element_size(tensors, values) > self._limit:
            raise QuotaError(f"the result of torch.{self.__name__} may be larger than {self._limit} bytes")
        if not all(map(_is_all_there, tensors)):
            # To send one takes no bytes, and to multiply two of them minutes.
            raise MisuseError(f"torch.{self.__name__}: some elements of a tensor are one: send tensor.contiguous()")
        return self._operator(*args, **kwargs)


_PLAIN = (torch.Tensor, bool, int, float, complex, type(None), torch.dtype, str, list, tuple)


def _element_size(tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> int:
    """At most so many bytes has an element of the result."""
    if any(isinstance(value, complex | torch.dtype) for value in values):
        return 16
    return max(8, *(tensor.element_size() for tensor in tensors))


def _is_all_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory for each of its elements."""
    if tensor.layout is not torch.strided:
        return True
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


_known: dict[str, tuple[Callable[..., Any], _Size]] = {}


def find(name: str, limit: int) -> Bounded | None:
    """The operator of that name, "module:qualname", with results of at most ``limit`` bytes; None if it is none."""
    if not _known:
        _known.update(
            {
                callables.name_of(operator): (operator, size)
                for size, names in ((_broadcast, ELEMENTWISE), (_broadcast, REDUCTIONS), (_product, PRODUCTS))
                for operator in (getattr(torch, each) for each in names.split())
            }
        )
    known = _known.get(name)
    return None if known is None else Bounded(*known, limit)
