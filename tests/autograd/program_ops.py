"""The operations of the random programs, each with the kinds of its inputs and results.

A *kind* is a dtype and a shape: ``d.m`` is a float64 matrix. Dtypes are d float64, f float32, h bfloat16 and
z complex128; shapes are m 3x3, v 3, s scalar and e 5x3, a table of embeddings. Results stay within about 1, so that
long programs have gradients of a sensible size. ``number`` is a random parameter of an operation: a seed, a row.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul.devices.driver import record_use

DTYPES = {"d": torch.float64, "f": torch.float32, "h": torch.bfloat16, "z": torch.complex128}
SHAPES: dict[str, tuple[int, ...]] = {"m": (3, 3), "v": (3,), "s": (), "e": (5, 3)}
NUMBERS = 1000
ON = os.environ.get("BACKHAUL_PROGRAMS_DEVICE", "cpu")
"""Where the tensors of the programs are: ``cpu``; ``cuda``; ``mixed``: every other worker has them on the GPU."""
DEVICE = torch.device("cpu" if ON == "cpu" else "cuda:0")
"""The device of the tensors in one process."""


def device_of(worker: int) -> torch.device:
    """The device of one worker's tensors."""
    return torch.device("cpu") if ON == "mixed" and worker % 2 else DEVICE


class Operation(NamedTuple):
    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    feature: str
    view: bool  # the results share memory with the first input
    changeable: bool  # an in-place operation on the result breaks no backward
    in_place: bool  # whether it changes its first input, which must be changeable
    differentiable: bool
    table: bool  # whether its first input, a leaf or straight from one, gets a sparse gradient


OPERATIONS: dict[str, Operation] = {}


def _operation(
    kinds: str,
    feature: str = "local operations",
    *,
    view: bool = False,
    changeable: bool = False,
    in_place: bool = False,
    differentiable: bool = True,
    table: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    takes, gives = (tuple(side.split()) for side in kinds.split("->"))

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[run.__name__] = Operation(
            run, takes, gives, feature, view, changeable, in_place, differentiable, table
        )
        return run

    return add


def run_disturbed(operation: Operation, number: int, values: Sequence[Any]) -> Any:
    """Run an operation. On a GPU some operations run late, or on another stream, to find missing synchronisation.

    The result is ready on the current stream afterwards, as a user would have it.
    """
    if ON == "cpu" or not all(isinstance(each, Tensor) and each.is_cuda for each in values):
        return operation.run(number, *values)
    if number % 4 == 0:
        torch.cuda._sleep(number * 1000)  # type: ignore[no-untyped-call]
    if number % 3 or operation.view or operation.in_place or operation.table:
        return operation.run(number, *values)
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    other.wait_stream(here)
    with torch.cuda.stream(other):
        # Torch's engine may add to a gradient in place while another stream still reads it: torch alone is wrong then,
        # too (tests/cuda/test_cuda_streams.py). So each input gets a separate gradient.
        result = operation.run(number, *(each * 1 for each in values))
    here.wait_stream(other)
    for stream, used in ((other, values), (here, result)):
        for each in tree_leaves(used):
            if isinstance(each, Tensor) and each.is_cuda and not each.is_sparse:
                record_use(each, stream)
    return result


def random_tensor(kind: str, seed: int, device: torch.device = DEVICE) -> Tensor:
    return _random_tensor(kind, seed).to(device)


def _random_tensor(kind: str, seed: int) -> Tensor:
    dtype, shape = kind.split(".")
    values = torch.rand(SHAPES[shape], generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    if dtype == "z":
        other = torch.rand(SHAPES[shape], generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        return torch.complex(values, other) / 2
    return values.to(DTYPES[dtype])


@_operation("d.m d.m -> d.m", changeable=True)
def add(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a + b * 0.5


@_operation("d.m d.m -> d.m", changeable=True)
def multiply(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a * b


@_operation("d.m d.m -> d.m", changeable=True)
def matmul(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a @ b / 2


@_operation("d.m d.m -> d.m")
def tanh_of_sum(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a + b)


@_operation("d.m -> d.m", changeable=True)
def sin(number: int, a: Tensor) -> Tensor:
    return a.sin()


@_operation("d.m -> d.m")
def softmax(number: int, a: Tensor) -> Tensor:
    return a.softmax(-1)


@_operation("d.m -> d.m")
def relu(number: int, a: Tensor) -> Tensor:
    return a.relu()


@_operation("d.m d.s -> d.m", changeable=True)
def scale(number: int, a: Tensor, s: Tensor) -> Tensor:
    return a * s


@_operation("d.m -> d.s")
def mean(number: int, a: Tensor) -> Tensor:
    return a.mean()


@_operation("d.v d.v -> d.m")
def outer(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch.outer(a, b)


@_operation("d.m d.v -> d.v")
def apply(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b)


@_operation("d.m -> d.m", "detach", differentiable=False)
def detach(number: int, a: Tensor) -> Tensor:
    return a.detach().clone()


@_operation("d.m -> d.m", "no_grad", differentiable=False)
def without_grad(number: int, a: Tensor) -> Tensor:
    with torch.no_grad():
        return a.cos()


# Views.


@_operation("d.m -> d.m", "views", view=True)
def transpose(number: int, a: Tensor) -> Tensor:
    return a.t()


@_operation("d.m -> d.v", "views", view=True)
def row(number: int, a: Tensor) -> Tensor:
    return a[number % 3]


@_operation("d.m -> d.v", "views", view=True)
def diagonal(number: int, a: Tensor) -> Tensor:
    return a.diagonal()


@_operation("d.v -> d.m", "views", view=True)
def expand(number: int, a: Tensor) -> Tensor:
    return a.expand(3, 3)


@_operation("d.m -> d.v d.v d.v", "views", view=True)
def unbind(number: int, a: Tensor) -> tuple[Tensor, ...]:
    return a.unbind(number % 2)


@_operation("d.e -> d.m", "views", view=True)
def rows_of_table(number: int, table: Tensor) -> Tensor:
    return table[1:4]


# In place. The first input is changed, and is the result.


@_operation("d.m -> d.m", "in place", in_place=True, changeable=True)
def halve_in_place(number: int, a: Tensor) -> Tensor:
    return a.mul_(0.5)


@_operation("d.m d.m -> d.m", "in place", in_place=True, changeable=True)
def add_in_place(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b, alpha=0.5)


@_operation("d.m -> d.m", "in place", in_place=True)
def tanh_in_place(number: int, a: Tensor) -> Tensor:
    return a.tanh_()


@_operation("d.m d.v -> d.m", "in place on a view", in_place=True, changeable=True)
def set_row_in_place(number: int, a: Tensor, b: Tensor) -> Tensor:
    a[number % 3] = b
    return a


@_operation("d.m d.s -> d.m", "in place on a view", in_place=True)
def scale_diagonal_in_place(number: int, a: Tensor, s: Tensor) -> Tensor:
    a.diagonal().mul_(s)
    return a


# Complex.


@_operation("d.m d.m -> z.m", "complex")
def complex_of(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch.complex(a, b) / 2


@_operation("z.m z.m -> z.m", "complex")
def complex_matmul(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a @ b / 3


@_operation("z.m -> z.m", "lazy conjugates", view=True)
def conjugate(number: int, a: Tensor) -> Tensor:
    return a.conj()


@_operation("z.m -> d.m", "complex", view=True)
def real(number: int, a: Tensor) -> Tensor:
    return a.real


@_operation("z.m -> d.m", "complex", view=True)
def imaginary(number: int, a: Tensor) -> Tensor:
    return a.imag


@_operation("z.m z.m -> d.m", "complex")
def real_of_product(number: int, a: Tensor, b: Tensor) -> Tensor:
    return (a * b.conj()).real + torch.view_as_real(a.resolve_conj()).sum(-1) / 2


# Other precisions.


@_operation("d.m -> f.m", "float32")
def to_float32(number: int, a: Tensor) -> Tensor:
    return a.float()


@_operation("d.m -> h.m", "bfloat16")
def to_bfloat16(number: int, a: Tensor) -> Tensor:
    return a.bfloat16()


@_operation("f.m f.m -> f.m", "float32")
def matmul_float32(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b)


@_operation("h.m h.m -> h.m", "bfloat16")
def multiply_bfloat16(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a * b + a / 2


@_operation("f.m h.m -> f.m", "mixed precision")
def multiply_mixed(number: int, a: Tensor, b: Tensor) -> Tensor:
    return a * b


@_operation("f.m -> d.m", "float32")
def from_float32(number: int, a: Tensor) -> Tensor:
    return a.double()


@_operation("h.m -> d.m", "bfloat16")
def from_bfloat16(number: int, a: Tensor) -> Tensor:
    return a.double()


# Sparse gradients.


@_operation("d.e -> d.m", "sparse gradients", table=True)
def embedding(number: int, table: Tensor) -> Tensor:
    return functional.embedding(torch.tensor([number % 5, 1, number % 5]).to(table.device), table, sparse=True)


@_operation("d.e -> d.m", "sparse gradients", table=True)
def embedding_bag(number: int, table: Tensor) -> Tensor:
    indices = torch.tensor([0, number % 5, 1, number // 5 % 5]).to(table.device)
    return (
        functional.embedding_bag(indices, table, torch.tensor([0, 1, 2]).to(table.device), mode="sum", sparse=True) / 2
    )


# Functions with a backward of their own.


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (a,) = ctx.saved_tensors
        return 3 * a**2 * grads[0]


class _Cross(torch.autograd.Function):
    """Has two results, notices a result without a gradient, and gives no gradient to its second input."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        return a * b, a - b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, b = ctx.saved_tensors
        parts = [] if grads[0] is None else [grads[0] * b]
        parts += [] if grads[1] is None else [grads[1]]
        return (sum(parts) if parts else None), None


class _Fork(torch.autograd.Function):
    """Has two results, whose missing gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        return a * 0.5, a.t().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 0.5 + grads[1].t()


@_operation("d.m -> d.m", "custom functions")
def cube(number: int, a: Tensor) -> Tensor:
    return _Cube.apply(a)  # type: ignore[no-untyped-call, no-any-return]


@_operation("d.m d.m -> d.m d.m", "custom functions")
def cross(number: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _Cross.apply(a, b)  # type: ignore[no-untyped-call, no-any-return]


@_operation("d.m -> d.m d.m", "custom functions")
def fork(number: int, a: Tensor) -> tuple[Tensor, Tensor]:
    return _Fork.apply(a)  # type: ignore[no-untyped-call, no-any-return]


_seeding = threading.Lock()  # workers in one process share torch's generator


@_operation("d.m -> d.m", "dropout")
def dropout(number: int, a: Tensor) -> Tensor:
    # Torch fills its mask in the order of memory. A sent expanded tensor arrives expanded, a clone of it is not.
    with _seeding:
        torch.manual_seed(number)
        return functional.dropout(a.contiguous(), 0.4)


def _segment(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(dropout(number, torch.sin(a) @ b) + a)


@_operation("d.m d.m -> d.m", "checkpoints")
def checkpoint(number: int, a: Tensor, b: Tensor) -> Tensor:
    return torch_checkpoint(  # type: ignore[no-any-return]
        _segment, number, a, b, use_reentrant=False, preserve_rng_state=False
    )


DIRECT: dict[str, tuple[Callable[..., Any], int]] = {
    "mul": (torch.mul, 2),
    "sub": (torch.sub, 2),
    "tanh": (torch.tanh, 1),
}
"""Torch functions that programs call remotely on matrices, and how many matrices they take."""
