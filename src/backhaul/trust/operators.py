"""Operators of torch that a worker of a federation may expose: ``rpc.expose(torch.matmul)``.

Operators are native code, and strangers choose their arguments. So the table has few of them, an operator is exposed
only by name, and it accepts only the parameters and dtypes that its line in the table lists. The lines leave out
everything that can end the process: for example, dividing the smallest integer by -1 raises a signal, not an exception.
``fuzz/operator_cases.py`` tries the operators in separate processes.

An operator does not run if its result may be larger than a message, or if it would take far longer than its operands
take to send.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from backhaul.errors import MisuseError, QuotaError

_MAX_DIM = 64
_MAX_PRODUCTS = 1 << 33  # the most multiplications of a matrix product; they take about a second

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
NUMBERS = FLOATS | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
ALL = NUMBERS | {torch.bool}

_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def _is_tensor(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_dim(value: Any) -> bool:
    return type(value) is int and -_MAX_DIM <= value < _MAX_DIM


_CHECKS: dict[str, _Check] = {
    "tensor": _is_tensor,
    "operand": lambda value: _is_tensor(value) or _is_number(value),
    "number": _is_number,
    "bound": lambda value: value is None or _is_number(value),
    "dim": lambda value: value is None or _is_dim(value),
    "dims": lambda value: (
        value is None
        or _is_dim(value)
        or (type(value) in (list, tuple) and len(value) <= _MAX_DIM and all(map(_is_dim, value)))
    ),
    "flag": lambda value: type(value) is bool,
}


_REQUIRED = ("tensor", "operand")


class Operator(NamedTuple):
    """A line of the table."""

    function: Callable[..., Any]
    dtypes: frozenset[torch.dtype]
    parameters: dict[str, str]
    """Parameter -> its kind in `_CHECKS`, in the order of the parameters."""
    is_product: bool = False


def _operators(names: str, dtypes: frozenset[torch.dtype], product: bool = False, **parameters: str) -> list[Operator]:
    return [Operator(getattr(torch, name), dtypes, parameters, product) for name in names.split()]


TABLE: dict[str, Operator] = {
    operator.function.__name__: operator
    for operator in (
        *_operators("abs exp log neg relu sigmoid sqrt tanh", FLOATS, input="tensor"),
        *_operators("add sub", NUMBERS, input="tensor", other="operand", alpha="number"),
        *_operators("mul", NUMBERS, input="tensor", other="operand"),
        *_operators("div", FLOATS, input="tensor", other="operand"),
        *_operators("maximum minimum", NUMBERS, input="tensor", other="tensor"),
        *_operators("eq ge gt le lt ne", ALL, input="tensor", other="operand"),
        *_operators("clamp", FLOATS, input="tensor", min="bound", max="bound"),
        *_operators("mean sum", FLOATS, input="tensor", dim="dims", keepdim="flag"),
        *_operators("argmax", FLOATS, input="tensor", dim="dim", keepdim="flag"),
        *_operators("mm bmm", FLOATS, True, input="tensor", mat2="tensor"),
        *_operators("matmul", FLOATS, True, input="tensor", other="tensor"),
    )
}


def find(function: Any) -> Operator | None:
    """The line of an operator; None for a function that is not torch's own.

    Raises MisuseError for a function of torch that is not in the table.
    """
    operator = TABLE.get(getattr(function, "__name__", ""))
    if operator is not None and operator.function is function:
        return operator
    if is_native(function):
        raise MisuseError(
            f"expose: torch.{getattr(function, '__name__', function)} is native code that does not check enough to "
            f"be called by strangers: expose a function of your own that checks its arguments, or one of "
            f"{', '.join(sorted(TABLE))}"
        )
    return None


def is_native(function: Any) -> bool:
    """Whether a function is torch's own: native code, or Python code that passes its arguments to native code."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    if isinstance(function, types.FunctionType):
        return function.__module__.partition(".")[0] == "torch"
    kinds = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
    if not isinstance(function, kinds):
        return False
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    home = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
    return home.partition(".")[0] == "torch" or (isinstance(owner, type) and issubclass(torch.Tensor, owner))


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    """The number of elements when tensors of these shapes are broadcast together, if they can be.

    It does not use `torch.broadcast_shapes`, which imports half of torch on the first call.
    """
    turned = (reversed(shape) for shape in shapes)
    return math.prod(max(sizes) for sizes in itertools.zip_longest(*turned, fillvalue=1))


def _product(left: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """The most elements that a matrix product may have, and the number of its multiplications."""
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    elements = _elements([(*left[:-2], rows, columns), (*right[:-2], 1, 1)])
    return elements, elements * max([1, *left[-1:]])


class Bounded:
    """An operator that accepts only what its line in the table lists, and returns at most ``limit`` bytes.

    A call raises MisuseError for other arguments, and QuotaError for too large a result or too much work. Thread-safe.
    """

    __slots__ = ("__name__", "_limit", "_operator")

    def __init__(self, operator: Operator, limit: int) -> None:
        self.__name__ = operator.function.__name__
        self._operator = operator
        self._limit = limit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self._operator.parameters
        names = list(parameters)
        if len(args) > len(names) or any(name not in names[len(args) :] for name in kwargs):
            raise MisuseError(f"torch.{self.__name__}: other workers may give it {', '.join(names)}")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in given.items():
            if not _CHECKS[parameters[name]](value):
                raise MisuseError(f"torch.{self.__name__}: its {name} is not a {parameters[name]}")
        missing = [name for name, kind in parameters.items() if kind in _REQUIRED and name not in given]
        if missing:
            raise MisuseError(f"torch.{self.__name__}: its {missing[0]} is missing")
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            self._check(tensor)
        self._check_work(tensors)
        return self._operator.function(**given)

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in self._operator.dtypes:
            raise MisuseError(f"torch.{self.__name__}: other workers may not give it tensors of {tensor.dtype}")
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            raise MisuseError(f"torch.{self.__name__}: other workers may give it strided tensors that have data")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            # An expanded tensor costs almost no bytes to send, but multiplying two of them takes minutes.
            raise MisuseError(f"torch.{self.__name__}: elements of a tensor share memory: send tensor.contiguous()")

    def _check_work(self, tensors: Sequence[torch.Tensor]) -> None:
        shapes = [tensor.shape for tensor in tensors]
        if self._operator.is_product and len(shapes) == 2:
            elements, work = _product(*shapes)
        else:
            elements = work = _elements(shapes)
        if elements * 8 > self._limit:
            raise QuotaError(f"the result of torch.{self.__name__} may be larger than {self._limit} bytes")
        if work > _MAX_PRODUCTS:
            raise QuotaError(f"torch.{self.__name__} would take {work} multiplications; the limit is {_MAX_PRODUCTS}")
