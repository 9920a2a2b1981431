"""Values without parts <-> trees: numbers, text, torch's constants, numpy arrays and scalars."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import torch

from backhaul.errors import MisuseError, ProtocolError
from backhaul.wire import trees
from backhaul.wire.trees import Lift, Lower, Packing, Refusal, Unpacking, check_arity, malformed

_MAX_BYTES = (1 << 32) - 1  # the longest bytes that msgpack can carry

# Only these constants can be named. The tables also resolve aliases such as torch.float.
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}
_LAYOUTS = {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.layout}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.memory_format
}
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,4})?")

# bool, signed, unsigned, float, complex, timedelta, datetime, bytes, text: the kinds whose values are just their bytes
_ARRAY_KINDS = frozenset("biufcmMSU")
_ARRAY_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?")


def lower_atom(value: Any, packing: Packing) -> Any:
    return value


def lower_int(value: int, packing: Packing) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return [trees.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _lift_int(tree: list[Any], unpacking: Unpacking) -> int:
    check_arity(tree, 1)
    if type(tree[1]) is not bytes:
        malformed("an int", tree[1])
    return int.from_bytes(tree[1], "little", signed=True)


def lower_str(value: str, packing: Packing) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, as in the name of a file
        return [trees.TEXT, value.encode("utf-8", "surrogatepass")]
    return value


def _lift_text(tree: list[Any], unpacking: Unpacking) -> str:
    check_arity(tree, 1)
    if type(tree[1]) is not bytes:
        malformed("text", tree[1])
    return tree[1].decode("utf-8", "surrogatepass")


def _lower_bytes(value: bytes, packing: Packing) -> Any:
    if len(value) > _MAX_BYTES:
        raise Refusal("it is longer than 4 GiB: send it as a tensor of uint8")
    return value


def _lower_bytearray(value: bytearray, packing: Packing) -> Any:
    return [trees.BYTE_ARRAY, _lower_bytes(bytes(value), packing)]


def _lift_bytearray(tree: list[Any], unpacking: Unpacking) -> bytearray:
    check_arity(tree, 1)
    if type(tree[1]) is not bytes:
        malformed("a bytearray", tree[1])
    return bytearray(tree[1])


def _lower_complex(value: complex, packing: Packing) -> Any:
    return [trees.COMPLEX, value.real, value.imag]


def _lift_complex(tree: list[Any], unpacking: Unpacking) -> complex:
    check_arity(tree, 2)
    if type(tree[1]) is not float or type(tree[2]) is not float:
        malformed("a complex number", tree[1:])
    return complex(tree[1], tree[2])


def _lower_ellipsis(value: Any, packing: Packing) -> Any:
    return [trees.ELLIPSIS]


def _lift_ellipsis(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 0)
    return ...


def _lower_range(value: range, packing: Packing) -> Any:
    bounds = (value.start, value.stop, value.step)
    return [trees.RANGE, *(lower_int(bound, packing) for bound in bounds)]


def _lift_range(tree: list[Any], unpacking: Unpacking) -> range:
    check_arity(tree, 3)
    bounds = unpacking.lift_parts(tree, 1)
    if any(type(bound) is not int for bound in bounds) or bounds[2] == 0:
        malformed("a range", tree[1:])
    found = range(*bounds)
    _bound(8 * max(0, (found.stop - found.start) // found.step), unpacking)
    return found


def _bound(nbytes: int, unpacking: Unpacking) -> None:
    """Refuse a value of few bytes that represents too many, from a peer that may lie."""
    if unpacking.bounds is not None and nbytes > unpacking.bounds.max_bytes:
        raise ProtocolError(f"a value represents more than {unpacking.bounds.max_bytes} bytes")


def _lift_tensor(tree: list[Any], unpacking: Unpacking) -> torch.Tensor:
    check_arity(tree, 1)
    return unpacking.tensor(tree[1])


def _lower_device(value: torch.device, packing: Packing) -> Any:
    return [trees.DEVICE, str(value)]


def _lift_device(tree: list[Any], unpacking: Unpacking) -> torch.device:
    check_arity(tree, 1)
    if type(tree[1]) is not str or not _DEVICE.fullmatch(tree[1]):
        malformed("a device", tree[1])
    return torch.device(tree[1])


def _lower_size(value: torch.Size, packing: Packing) -> Any:
    return [trees.SIZE, *value]


def _lift_size(tree: list[Any], unpacking: Unpacking) -> torch.Size:
    if any(type(part) is not int or not -(1 << 63) <= part < 1 << 63 for part in tree):
        malformed("a torch.Size", tree[1:])
    return torch.Size(tree[1:])


def _lower_constant(tag: int) -> Lower:
    def lower(value: Any, packing: Packing) -> Any:
        return [tag, str(value).removeprefix("torch.")]

    return lower


def _lift_constant(table: dict[str, Any]) -> Lift:
    def lift(tree: list[Any], unpacking: Unpacking) -> Any:
        check_arity(tree, 1)
        if type(tree[1]) is not str or tree[1] not in table:
            malformed("a constant of this torch", tree[1])
        return table[tree[1]]

    return lift


def numpy_lowerer(kind: type) -> Lower | None:
    """How to lower a numpy type; None for any other, without importing numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if kind is numpy.ndarray:
        return _lower_array
    if issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.void, numpy.object_)):
        return _lower_numpy_scalar
    return None


def _lower_array(array: Any, packing: Packing) -> Any:
    numpy = sys.modules["numpy"]
    if array.dtype.kind not in _ARRAY_KINDS or not _ARRAY_DTYPE.fullmatch(array.dtype.str):
        return packing.lower_unknown(array, f"an array of dtype {array.dtype} cannot be sent as its bytes")
    index = None
    if array.nbytes:
        flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        # torch warns about a tensor over read-only memory, so copy it.
        index = packing.add(torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
    return [trees.ARRAY, array.dtype.str, index, *array.shape]


def _lift_array(tree: list[Any], unpacking: Unpacking) -> Any:
    if len(tree) < 3:
        malformed("an array", tree[1:])
    numpy = _numpy()
    dtype = _numpy_dtype(tree[1])
    shape = tuple(tree[3:])
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            malformed("the shape of an array", shape)
        count *= size
    if tree[2] is None:
        if count * dtype.itemsize:
            malformed("an empty array", tree[1:])
        # The array is empty, but a result made of it, such as a sum, may have as many elements as the other sizes say.
        _bound(math.prod(size for size in shape if size) * max(8, dtype.itemsize), unpacking)
        return numpy.empty(shape, dtype)
    tensor = unpacking.tensor(tree[2])
    if (
        type(tensor) is not torch.Tensor
        or tensor.dtype is not torch.uint8
        or tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.dim() != 1
        or not tensor.is_contiguous()
        or tensor.numel() != count * dtype.itemsize
    ):
        malformed("an array", tree[1:])
    # No other value uses the tensor. The array keeps the tensor, and so the memory, alive.
    return tensor.numpy().view(dtype).reshape(shape)


def _lower_numpy_scalar(value: Any, packing: Packing) -> Any:
    return [trees.NUMPY_SCALAR, value.dtype.str, value.tobytes()[: value.dtype.itemsize]]


def _lift_numpy_scalar(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 2)
    dtype = _numpy_dtype(tree[1])
    if type(tree[2]) is not bytes or len(tree[2]) != dtype.itemsize:
        malformed("a numpy scalar", tree[1:])
    return _numpy().ndarray((), dtype, tree[2])[()]


def _numpy_dtype(name: Any) -> Any:
    if type(name) is not str or not _ARRAY_DTYPE.fullmatch(name):
        malformed("the dtype of an array", name)
    dtype = _numpy().dtype(name)
    if dtype.str != name:
        malformed("the dtype of an array", name)
    return dtype


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise MisuseError("a numpy array arrived, but numpy is not installed on this worker") from error
    return numpy


LOWER: dict[type, Lower] = {
    type(None): lower_atom,
    bool: lower_atom,
    float: lower_atom,
    int: lower_int,
    str: lower_str,
    bytes: _lower_bytes,
    bytearray: _lower_bytearray,
    complex: _lower_complex,
    type(...): _lower_ellipsis,
    range: _lower_range,
    torch.Tensor: trees.lower_tensor,
    torch.nn.Parameter: trees.lower_tensor,
    torch.device: _lower_device,
    torch.Size: _lower_size,
    torch.dtype: _lower_constant(trees.DTYPE),
    torch.layout: _lower_constant(trees.LAYOUT),
    torch.memory_format: _lower_constant(trees.MEMORY_FORMAT),
}

LIFT: dict[int, Lift] = {
    trees.BIG_INT: _lift_int,
    trees.TEXT: _lift_text,
    trees.BYTE_ARRAY: _lift_bytearray,
    trees.COMPLEX: _lift_complex,
    trees.ELLIPSIS: _lift_ellipsis,
    trees.RANGE: _lift_range,
    trees.TENSOR: _lift_tensor,
    trees.DEVICE: _lift_device,
    trees.SIZE: _lift_size,
    trees.DTYPE: _lift_constant(_DTYPES),
    trees.LAYOUT: _lift_constant(_LAYOUTS),
    trees.MEMORY_FORMAT: _lift_constant(_MEMORY_FORMATS),
    trees.ARRAY: _lift_array,
    trees.NUMPY_SCALAR: _lift_numpy_scalar,
}
