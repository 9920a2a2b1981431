"""Trainers with modules under DDP, and the reference in one process.

Every worker has *parts*: modules by name, with the same initial values on all workers. Some parts of the trainers are
under DDP. A *program* computes the loss of a step with `part` and `call`, on a trainer or on the master. In the
reference it runs in one process, in which each worker still has its own parts. DDP is then just an average of the
gradients of the trainers' parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from models import Accumulate, Kept, copied
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.worker import current
from crew import Crew

TRAINERS = (0, 1)
SERVER, MASTER = 2, 3
WITHIN = 30.0
NUMBER = torch.float64

Options = dict[str, Any]
Program = Callable[[int], Tensor]
Gradients = dict[str, Tensor]
"""Gradients by the names of parts and parameters; missing ones are left out."""
Found = dict[int, Gradients]
"""By the rank of the worker."""

_parts: dict[int, dict[str, nn.Module]] = {}  # by rank; in a worker's process only its own
_turn: ContextVar[int] = ContextVar("turn")  # the worker whose turn it is in the reference


class Forked(nn.Module):
    """Uses one of its halves, or both, or returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, ways: Sequence[str]) -> Tensor:
        for way in ways:
            x = torch.tanh(getattr(self, way)(x))
        return x * 2


class Outer(nn.Module):
    """Makes a remote call in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(call(SERVER, apply, "middle", self.before(x)))
        return result


class Saving(nn.Module):
    """Computes its hidden values again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))
        return result


def new_parts() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        parts = {
            "table": nn.Embedding(20, 6),
            "sparse": nn.Embedding(20, 6, sparse=True),
            "front": nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            "middle": nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            "twin": nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            "dense": nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
            "forked": Forked(),
            "outer": Outer(),
            "saving": Saving(),
            "local": nn.Linear(6, 6),
        }
        return {name: module.to(NUMBER) for name, module in parts.items()}


def rank() -> int:
    turn = _turn.get(None)
    return rpc.get_worker_info().id if turn is None else turn


def part(name: str) -> nn.Module:
    """A part of the current worker."""
    return _parts[rank()][name]


def part_names() -> list[str]:
    return list(_parts[rank()])


def put_part(name: str, module: Any) -> None:
    _parts[rank()][name] = module


def bare(name: str) -> nn.Module:
    """A part without DDP around it."""
    module = part(name)
    return module.module if isinstance(module, DistributedDataParallel) else module


def call(to: int, function: Callable[..., Any], *args: Any) -> Any:
    return start(to, function, *args).wait()


def start(to: int, function: Callable[..., Any], *args: Any) -> Any:
    if _turn.get(None) is None:
        return rpc.rpc_async(f"worker{to}", function, args=args)
    token = _turn.set(to)
    try:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(copied(function(*copied(args))))
        return future
    finally:
        _turn.reset(token)


def keep(to: int, function: Callable[..., Any], *args: Any) -> Any:
    """A reference to the result, which stays there."""
    if _turn.get(None) is None:
        return rpc.remote(f"worker{to}", function, args=args)
    return Kept(call(to, function, *args))


def apply(name: str, *args: Any) -> Tensor:
    result: Tensor = part(name)(*args)
    return result


def ids(who: int, step: int) -> Tensor:
    return torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(100 * step + who))


def inputs(who: int, step: int) -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(100 * step + 20 + who), dtype=NUMBER)


def target(who: int, step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + 10 + who), dtype=NUMBER)


def hybrid(step: int) -> Tensor:
    """The usual model: rows of a table on the server, then a module under DDP here."""
    return mse_loss(part("dense")(call(SERVER, apply, "table", ids(rank(), step))), target(rank(), step))


def loss_there(step: int, x: Tensor | None = None) -> Tensor:
    """A trainer's loss, in its caller's context."""
    rows = call(SERVER, apply, "table", ids(rank(), step))
    return mse_loss(part("dense")(rows if x is None else rows + x), target(rank(), step))


def names() -> dict[int, str]:
    """The names of this worker's parameters, by id."""
    return {id(value): f"{name}.{key}" for name in part_names() for key, value in bare(name).named_parameters()}


def gradients_here(context_id: int) -> Gradients:
    """All gradients that a context has here, as dense copies."""
    known = names()
    return {
        known[id(leaf)]: each.clone().to_dense() for leaf, each in current().autograd.gradients_here(context_id).items()
    }


def grads_here() -> Gradients:
    """The ``.grad`` of all parameters here, as dense copies."""
    return {
        f"{name}.{key}": value.grad.clone().to_dense()
        for name in part_names()
        for key, value in bare(name).named_parameters()
        if value.grad is not None
    }


def collect(context_id: int) -> Found:
    """The gradients of a context on all workers."""
    return {info.id: rpc.rpc_sync(info, gradients_here, args=(context_id,)) for info in current().get_worker_infos()}


def run_pass(program: Program, step: int = 0, accumulate: Accumulate = "context") -> Found:
    """Run one pass in a new context. Returns its gradients."""
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [program(step)], accumulate=accumulate, timeout=WITHIN)
        return collect(context_id)


def join_group(init_method: str, timeout: float = WITHIN) -> None:
    """Join the process group. Only trainers call this."""
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank(),
        world_size=len(TRAINERS),
        timeout=timedelta(seconds=timeout),
    )


def set_up(wrapped: Mapping[str, Options]) -> None:
    """Make new parts. On trainers, the given parts are under DDP, with these options."""
    _parts[rank()] = new_parts()
    if rank() in TRAINERS:
        for name, options in wrapped.items():
            _parts[rank()][name] = DistributedDataParallel(_parts[rank()][name], **options)


def await_clean(seconds: float = 10.0) -> None:
    """Return when this worker has no contexts, passes and gates."""
    autograd = current().autograd
    deadline = time.monotonic() + seconds
    while any(autograd.counts().values()) or not autograd.engine.idle():
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {autograd.counts()}, idle: {autograd.engine.idle()}")
        threading.Event().wait(0.005)


def together(crew: Crew, ranks: Iterable[int], function: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Run the function on these workers at once."""
    futures = {each: crew[each].start(function, *args) for each in ranks}
    return {each: future.result(300) for each, future in futures.items()}


@contextmanager
def one_process() -> Iterator[None]:
    """A block in which this process plays all workers."""
    before = dict(_parts)
    _parts.update({each: new_parts() for each in (*TRAINERS, SERVER, MASTER)})
    try:
        yield
    finally:
        _parts.clear()
        _parts.update(before)


@contextmanager
def as_worker(number: int) -> Iterator[None]:
    """Inside `one_process`: a block in which this worker is current."""
    token = _turn.set(number)
    try:
        yield
    finally:
        _turn.reset(token)


def alone(program: Program, initiator: int, step: int) -> Found:
    """The gradients that one process computes, before averaging."""
    with one_process():
        with as_worker(initiator):
            program(step).backward()  # type: ignore[no-untyped-call]
        found = {}
        for each in (*TRAINERS, SERVER, MASTER):
            with as_worker(each):
                found[each] = grads_here()
        return found


def averaged(found: dict[int, Found], replicated: Collection[str]) -> dict[int, Found]:
    """Average the gradients of these parts over the trainers.

    ``found`` has the gradients in each initiator's context. A trainer's own gradients are those of its own context, or
    of the only context.
    """
    own = {each: found[each if each in found else next(iter(found))][each] for each in TRAINERS}
    keys = {key for grads in own.values() for key in grads if key.partition(".")[0] in replicated}
    means = {key: sum_of(grads[key] for grads in own.values() if key in grads) / len(TRAINERS) for key in keys}
    return {
        initiator: {
            each: {**grads, **(means if each in TRAINERS and (len(found) == 1 or each == initiator) else {})}
            for each, grads in by_rank.items()
        }
        for initiator, by_rank in found.items()
    }


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def expected(
    program: Program, step: int = 0, *, initiators: Sequence[int] = TRAINERS, replicated: Collection[str] = ("dense",)
) -> dict[int, Found]:
    """The expected gradients in each initiator's context after a pass."""
    return averaged({each: alone(program, each, step) for each in initiators}, replicated)


def plus(one: dict[int, Found], other: dict[int, Found]) -> dict[int, Found]:
    """The sum of the gradients of two passes."""
    return {
        initiator: {each: added(one[initiator][each], other[initiator][each]) for each in one[initiator]}
        for initiator in one
    }


def added(one: Gradients, other: Gradients) -> Gradients:
    return {key: sum_of(g[key] for g in (one, other) if key in g) for key in {**one, **other}}


def assert_same(got: Gradients, wanted: Gradients, where: object = "") -> None:
    assert got.keys() == wanted.keys(), where
    for name, gradient in got.items():
        try:
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)
        except AssertionError as error:
            raise AssertionError(f"{where} {name}: {error}") from None


def assert_found(got: Mapping[int, Found], wanted: Mapping[int, Found]) -> None:
    assert got.keys() == wanted.keys()
    for initiator, by_rank in got.items():
        for each, gradients in by_rank.items():
            assert_same(gradients, wanted[initiator][each], f"context of {initiator}, worker {each}:")


def check(
    crew: Crew,
    program: Program,
    wrapped: Mapping[str, Options] | None = None,
    *,
    initiators: Sequence[int] = TRAINERS,
    steps: int = 2,
    accumulate: Accumulate = "context",
) -> None:
    """Run a pass of each initiator at once, for some steps. The gradients must be those of one process, averaged."""
    wrapped = {"dense": {}} if wrapped is None else wrapped
    together(crew, range(len(crew)), set_up, wrapped)
    total: Found = {each: {} for each in range(len(crew))}
    for step in range(steps):
        got = together(crew, initiators, run_pass, program, step, accumulate)
        wanted = expected(program, step, initiators=initiators, replicated=wrapped)
        if accumulate == "context":
            assert_found(got, wanted)
        else:
            assert not any(gradients for found in got.values() for gradients in found.values())
            for found in wanted.values():
                total = {each: added(total[each], found[each]) for each in total}
    for each, grads in together(crew, range(len(crew)), grads_here).items():
        assert_same(grads, total[each], f"worker {each}:")
    together(crew, range(len(crew)), await_clean)
