"""The building blocks of models, and the check that workers get the gradients of one process.

A *program* builds a model out of `call`, `start` and `make`, and returns its roots. Under `alone` these run the
function in this process, with copies of arguments and results as a message makes them; otherwise they are `rpc_sync`,
`rpc_async` and `remote`. So one program serves as the test and as its own reference.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import ContextError
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker

WITHIN = 10.0

Accumulate = Literal["context", "grad"]
Program = Callable[[], Any]
Leaves = Mapping[int, Sequence[Tensor]]
"""The leaves that get a gradient, by the rank of the worker that uses them."""

W: dict[str, Tensor] = {}
"""The weights of a test by name. Workers of one process share them, so each weight is used on one worker only."""

_alone: ContextVar[bool] = ContextVar("alone", default=False)


def new_weights(names: str = "abcdefgh", size: int = 4, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    W.clear()
    for name in names:
        W[name] = torch.randn(size, size, dtype=torch.float64, generator=generator).requires_grad_()


def leaf(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Kept:
    """Stands for an RRef in one process."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def to_here(self) -> Any:
        return copied(self.value)

    def local_value(self) -> Any:
        return self.value


def copied(value: Any, memo: dict[int, Tensor] | None = None) -> Any:
    """The value as a message delivers it: tensors are copies, and a tensor that occurs twice is one."""
    memo = {} if memo is None else memo
    if isinstance(value, Tensor):
        if id(value) not in memo:
            memo[id(value)] = value.clone()
        return memo[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(copied(item, memo) for item in value)
    if isinstance(value, dict):
        return {key: copied(item, memo) for key, item in value.items()}
    return value


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    if _alone.get():
        return copied(function(*copied(args)))
    return rpc.rpc_sync(to, function, args=args)


def start(to: str, function: Callable[..., Any], *args: Any) -> Any:
    if not _alone.get():
        return rpc.rpc_async(to, function, args=args)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(call(to, function, *args))
    return future


def make(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return Kept(function(*copied(args))) if _alone.get() else rpc.remote(to, function, args=args)


@contextmanager
def alone() -> Iterator[None]:
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def gradients(workers: InProcessCluster, context_id: int) -> list[dict[Tensor, Tensor]]:
    """The context's gradients on each worker; none on a worker that does not know the context."""
    return [gradients_on(worker, context_id) for worker in workers]


def gradients_on(worker: Worker, context_id: int) -> dict[Tensor, Tensor]:
    with worker.as_current():
        try:
            return dict(dist_autograd.get_gradients(context_id))
        except ContextError:
            return {}


def await_no_leftovers(workers: InProcessCluster) -> None:
    """Return when all workers have no contexts, passes and gates; fail if that takes too long."""
    deadline = time.monotonic() + WITHIN
    while any(any(worker.autograd.counts().values()) for worker in workers):
        left = {worker.info.name: worker.autograd.counts() for worker in workers}
        assert time.monotonic() < deadline, f"left behind: {left}"
        threading.Event().wait(0.001)


def take_grads(leaves: Leaves) -> dict[int, list[Tensor | None]]:
    """Remove the ``.grad`` of the leaves and return it."""
    taken = {rank: [tensor.grad for tensor in tensors] for rank, tensors in leaves.items()}
    for tensors in leaves.values():
        for tensor in tensors:
            tensor.grad = None
    return taken


def assert_same(got: Tensor, expected: Tensor, exact: bool = True) -> None:
    assert got.dtype == expected.dtype
    assert got.layout == expected.layout
    if got.is_sparse:
        got, expected = got.to_dense(), expected.to_dense()
    assert got.stride() == expected.stride()
    if exact:
        assert torch.equal(got, expected), f"{got} is not {expected}"
    else:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def reference(program: Program, leaves: Leaves, grad_tensors: Any = None) -> dict[int, list[Tensor | None]]:
    """The gradients that one process computes."""
    with alone():
        torch.autograd.backward(program(), grad_tensors)
    return take_grads(leaves)


def check(
    workers: InProcessCluster,
    program: Program,
    leaves: Leaves,
    *,
    exact: bool = True,
    accumulate: Accumulate = "context",
    grad_tensors: Any = None,
    same_as: Program | None = None,
) -> None:
    """Check that the program's gradients are those of one process, each on its leaf's worker and nowhere else.

    ``exact`` means bit for bit. ``same_as`` computes the same without calls, for programs that cannot run `alone`.
    """
    expected = reference(same_as or program, leaves, grad_tensors)
    assert all(grad is not None for grads in expected.values() for grad in grads), "a leaf that gets no gradient"
    with workers[0].as_current(), dist_autograd.context() as context_id:
        roots = program()
        dist_autograd.backward(context_id, roots, grad_tensors=grad_tensors, accumulate=accumulate)
        found = gradients(workers, context_id)
    del roots
    if accumulate == "grad":
        assert not any(found)
        got = take_grads(leaves)
    else:
        assert not any(tensor.grad is not None for tensors in leaves.values() for tensor in tensors)
        for rank, by_leaf in enumerate(found):
            assert set(map(id, by_leaf)) == set(map(id, leaves.get(rank, ()))), f"leaves on worker{rank}"
        got = {rank: [found[rank][tensor] for tensor in tensors] for rank, tensors in leaves.items()}
    for rank, grads in expected.items():
        for mine, its in zip(got[rank], grads, strict=True):
            assert mine is not None
            assert its is not None
            assert_same(mine, its, exact)
    await_no_leftovers(workers)


def layer(name: str, x: Tensor) -> Tensor:
    return torch.tanh(x @ W[name])


def multiply(name: str, x: Tensor) -> Tensor:
    return x * W[name]


def double(x: Tensor) -> Tensor:
    return x * 2


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def identity(value: Any) -> Any:
    return value


def relay(path: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    """Each worker of the path calls the next one, and applies its own layer to the result."""
    if not path:
        return x
    (to, name), rest = path[0], list(path[1:])
    return torch.sin(call(to, relay_inside, name, rest, x))


def relay_inside(name: str, rest: Sequence[tuple[str, str]], x: Tensor) -> Tensor:
    return layer(name, x) + relay(rest, layer(name, x))


def on_threads(count: int, work: Callable[[int], None]) -> None:
    """Run the function on ``count`` threads at once. Raises what one of them raised."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
