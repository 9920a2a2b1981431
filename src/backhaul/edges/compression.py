"""TopK, BFloat16 and Int8: tensors take fewer bytes on the wire, and arrive with their old shape and dtype.

If a compression is the last transform of a chain, the tensor travels compressed. The message says how
(`wire.messages.Coded`), and the receiver expands the tensor before other code sees it; so the peer needs no setting. A
compression earlier in the chain only reduces precision.

The lost precision can be kept and added to the next tensor that goes the same way (``feedback=True``): see `crossing`.
The gradient that comes back is passed on unchanged, as if nothing had been lost (a straight-through estimate).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from backhaul.edges.edge import Transform
from backhaul.errors import MisuseError, OptionError, ProtocolError
from backhaul.wire.messages import Coded

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 64
_SHORTEST = 16


class Compression(Transform):
    """A transform whose result can be sent as parts that take fewer bytes."""

    code: str
    """Its name in messages."""

    def __init__(self, *, feedback: bool = False) -> None:
        if not isinstance(feedback, bool):
            raise OptionError(f"{type(self).__name__}: feedback={feedback!r} must be True or False")
        self.feedback = feedback

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'feedback=True' if self.feedback else ''})"

    def compress(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts from which `expand` makes the tensor."""
        raise NotImplementedError

    def expand(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The tensor that the receiver makes of the parts."""
        return EXPANDERS[self.code](parts, like.dtype, like.shape)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that the receiver gets, without feedback: `crossing` does the feedback."""
        with torch.no_grad():
            plain = tensor.detach()
            found = self.expand(self.compress(plain), plain)
        return straight_through(tensor, found)


class BFloat16(Compression):
    """Rounds each number to bfloat16: half of the bytes of float32. The receiver gets ``x.bfloat16()`` in x's dtype."""

    code = "bf16"

    def compress(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(torch.bfloat16)]


class Int8(Compression):
    """Rounds each number to one of 255 steps between -m and m, where m is the largest absolute value of its row.

    A row is all that belongs to one index of the first dimension. Rows of fewer than 16 numbers share one scale. Takes
    an eighth of the bytes of float64, or a quarter of those of float32.
    """

    code = "int8"

    def compress(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = _rows(tensor)
        scales = rows.abs().amax(dim=1, keepdim=True) / 127 if rows.numel() else rows.new_zeros(len(rows), 1)
        if not scales.isfinite().all():
            raise MisuseError("Int8: a tensor has numbers that are not finite, which no scale can represent")
        steps = (rows / scales.where(scales > 0, 1.0)).round_().clamp_(-127, 127)
        return [steps.to(torch.int8).reshape(tensor.shape), scales.reshape(-1)]


class TopK(Compression):
    """Keeps the numbers of a tensor that are largest in absolute value, ``fraction`` of them; the others become 0."""

    code = "topk"

    def __init__(self, fraction: float, *, feedback: bool = False) -> None:
        super().__init__(feedback=feedback)
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise OptionError(f"TopK: fraction={fraction!r} must be above 0 and at most 1")
        self.fraction = float(fraction)

    def __repr__(self) -> str:
        return f"TopK({self.fraction:g}{', feedback=True' if self.feedback else ''})"

    def compress(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = tensor.reshape(-1)
        places = flat.abs().topk(math.ceil(self.fraction * len(flat)), sorted=False).indices
        return [flat[places], places.to(torch.int32 if len(flat) < 1 << 31 else torch.int64)]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as rows with one scale each: its own rows, or one row if its rows are too short for a scale each."""
    if not tensor.numel():
        return tensor.reshape(0, 1)
    count = len(tensor) if tensor.dim() else 1
    return tensor.reshape(count if tensor.numel() >= _SHORTEST * count else 1, -1)


def _expand_bf16(parts: Sequence[torch.Tensor], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    (rounded,) = parts
    _require(rounded.dtype is torch.bfloat16 and list(rounded.shape) == list(shape))
    return rounded.to(dtype)


def _expand_int8(parts: Sequence[torch.Tensor], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    steps, scales = parts
    _require(steps.dtype is torch.int8 and list(steps.shape) == list(shape) and scales.dtype in _NAMES)
    rows = _rows(steps)
    _require(list(scales.shape) == [len(rows)])
    return (rows.to(scales.dtype) * scales.reshape(-1, 1)).to(dtype).reshape(steps.shape)


def _expand_topk(parts: Sequence[torch.Tensor], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    values, places = parts
    size = math.prod(shape)
    _require(values.dim() == 1 and len(values) <= size and places.shape == values.shape)
    _require(places.dtype in (torch.int32, torch.int64) and values.dtype in _NAMES)
    _require(not len(places) or (int(places.min()) >= 0 and int(places.max()) < size))
    found = torch.zeros(size, dtype=dtype, device=values.device)
    found[places.long()] = values.to(dtype)
    return found.reshape(list(shape))


EXPANDERS: dict[str, Callable[[Sequence[torch.Tensor], torch.dtype, Sequence[int]], torch.Tensor]] = {
    "bf16": _expand_bf16,
    "int8": _expand_int8,
    "topk": _expand_topk,
}
_EXTRA = {"bf16": 0, "int8": 1, "topk": 1}  # parts besides the first


class _StraightThrough(torch.autograd.Function):
    """Puts one value in the place of another, and passes gradients to the other unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: Sequence[torch.Tensor]) -> torch.Tensor:
        return value[0]  # passed in a list: torch would take a returned input for changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def straight_through(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, with the gradients of ``tensor``."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return value
    found: torch.Tensor = _StraightThrough.apply(tensor, [value])  # type: ignore[no-untyped-call]
    return found


def coded(place: int, compression: Compression, tensor: torch.Tensor) -> Coded:
    """The entry of a message for the tensor at ``place``, which travels in parts."""
    return Coded(place, compression.code, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.requires_grad)


def expanded(codes: Sequence[Coded], tensors: Sequence[torch.Tensor], limit: int) -> list[torch.Tensor]:
    """The tensors of a message, some of which came in parts.

    The first part is at the tensor's place; the others follow all tensors, in the order of the codes. Raises
    `ProtocolError` for parts that do not fit, and if the tensors would take more than ``limit`` bytes.
    """
    extra = 0
    room = limit
    for code in codes:
        _require(code.code in EXPANDERS and code.dtype in DTYPES and len(code.shape) <= _MAX_DIMENSIONS)
        _require(all(0 <= size < 1 << 62 for size in code.shape))
        extra += _EXTRA[code.code]
        room -= math.prod(max(size, 1) for size in code.shape) * DTYPES[code.dtype].itemsize
        if room < 0:
            raise ProtocolError(f"compressed tensors that take more than {limit} bytes")
    count = len(tensors) - extra
    places = [code.place for code in codes]
    _require(len(set(places)) == len(places) and all(0 <= place < count for place in places))
    found, rest = list(tensors[:count]), iter(tensors[max(count, 0) :])
    for code in codes:
        parts = [found[code.place], *(next(rest) for _ in range(_EXTRA[code.code]))]
        _require(all(part.layout is torch.strided and part.device == parts[0].device for part in parts))
        _require(not parts[0].is_meta and not any(part.is_nested for part in parts))
        made = EXPANDERS[code.code]([part.detach() for part in parts], DTYPES[code.dtype], code.shape)
        found[code.place] = made.requires_grad_(code.grad)
    return found


def devices_of(codes: Sequence[Coded], devices: Sequence[torch.device]) -> list[torch.device]:
    """The devices for all tensors of a message, parts included. ``devices``: those of whole tensors and first parts."""
    _require(all(code.code in EXPANDERS and 0 <= code.place < len(devices) for code in codes))
    return [*devices, *(devices[code.place] for code in codes for _ in range(_EXTRA[code.code]))]


def _require(good: bool) -> None:
    if not good:
        _refuse()


def _refuse() -> NoReturn:
    raise ProtocolError("a compressed tensor whose parts do not fit its code")
