"""Runs programs in one process on plain autograd, and on Backhaul, and compares the outcomes.

Both use the same interpreter (`Site`), with one site for each running block. In one process a value that goes to
another worker is a clone: the receiver may change it in place, and the graph continues through it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from program import Block, Call, Fetch, Hook, Keep, Leaf, Load, Op, Pass, Program, Proxy, Retain, Wait
from program_generator import generate
from program_ops import DIRECT, OPERATIONS, device_of, random_tensor, run_disturbed
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd import ContextId
from backhaul.errors import ContextError
from backhaul.rpc import RRef
from backhaul.worker import current

CALL_SECONDS = 20.0
BACKWARD_SECONDS = 15.0


class Mismatch(AssertionError):
    """Backhaul and one process do not agree."""


@dataclass
class Place:
    """The state of one worker while a program runs."""

    values: dict[str, Tensor]
    leaves: dict[str, Tensor]
    hooks_copy: bool
    """Whether hooks copy the gradients that they see. A ``.grad`` may share memory with them, and passes add to it in
    place. What is in a context belongs to the context alone, so there they keep the gradients themselves."""
    hooked: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """By tensor: the gradients that its hook got."""
    accumulated: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """By leaf: its .grad at each call of its post-accumulate hook."""
    retained: dict[str, Tensor] = field(default_factory=dict)
    """By name: tensors that retain their gradients."""


@dataclass
class Outcome:
    """What a program has left on one worker."""

    gradients: dict[str, Tensor]  # by leaf: from the context; in one process from .grad
    grads: dict[str, Tensor | None]  # by leaf: its .grad
    hooked: dict[str, list[Tensor | None]]
    accumulated: dict[str, list[Tensor | None]]
    retained: dict[str, Tensor | None]
    messages: int = 0


def make_place(program: Program, worker: int, hooks_copy: bool) -> Place:
    place = Place({}, {}, hooks_copy)
    for leaf in program.leaves:
        if leaf.worker == worker:
            tensor = random_tensor(leaf.kind, leaf.seed, device_of(worker))
            if leaf.parameter:
                tensor = torch.nn.Parameter(tensor)
            tensor.requires_grad_(leaf.requires_grad)
            place.leaves[leaf.name] = place.values[leaf.name] = tensor
            if leaf.has_grad_before:
                tensor.grad = first_grad(leaf)
            if leaf.hook:
                tensor.register_hook(_recorder(place, leaf.name))  # type: ignore[no-untyped-call]
            if leaf.post_accumulate_hook:
                recorder = _grad_recorder(place.accumulated.setdefault(leaf.name, []))
                tensor.register_post_accumulate_grad_hook(recorder)  # type: ignore[no-untyped-call]
    return place


def first_grad(leaf: Leaf) -> Tensor:
    return random_tensor(leaf.kind, leaf.seed + 2, device_of(leaf.worker))


def _recorder(place: Place, name: str) -> Callable[[Tensor], None]:
    calls = place.hooked.setdefault(name, [])
    if place.hooks_copy:
        return lambda grad: calls.append(_copy(grad))
    return calls.append


def _grad_recorder(into: list[Tensor | None]) -> Callable[[Tensor], None]:
    return lambda leaf: into.append(_copy(leaf.grad))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def dress(values: list[Any], form: str) -> Any:
    if form == "bare":
        return values[0]
    return tuple(values) if form == "tuple" else {str(place): value for place, value in enumerate(values)}


def undress(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value[str(place)] for place in range(len(value))]
    return list(value) if isinstance(value, tuple | list) else [value]


def each_of(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure, with a function applied to its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each_of(inner, change) for key, inner in value.items()}
    return tuple(each_of(inner, change) for inner in value) if isinstance(value, tuple) else value


class _Moved(torch.autograd.Function):
    """A clone on another device. Torch's ``to`` does not support sparse gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.device = tensor.device
        return tensor.to(device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.device), None


def crossed(value: Any, to: int) -> Any:
    """The value that another worker gets: a clone on its device. A tensor that occurs twice arrives as one."""
    clones: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in clones:
            there = device_of(to)
            clones[id(tensor)] = tensor.clone() if tensor.device == there else _Moved.apply(tensor, there)
        return clones[id(tensor)]

    return each_of(value, clone)


def callback(value: Any) -> Any:
    """The callback of mode ``then``."""
    return each_of(value, lambda tensor: tensor.sin() if tensor.dtype == torch.float64 else tensor)


class Site:
    """Where one block runs."""

    disturbs = False
    """Whether operations on a GPU are delayed, or run on other streams."""

    def __init__(self, program: Program, worker: int, place: Place) -> None:
        self.program = program
        self.worker = worker
        self.place = place
        self.values: dict[str, Any] = {}

    def call(self, call: Call, payload: Any) -> Any:
        """The value; a future for modes async and then; a reference for remote."""
        raise NotImplementedError

    def fetch(self, rref: Any) -> Any:
        raise NotImplementedError

    def proxy(self, rref: Any) -> Any:
        raise NotImplementedError

    def run(self, block: Block, payload: Any) -> Any:
        values = self.values
        values.update(zip(block.params, undress(payload), strict=True))
        for instruction in block.code:
            self.perform(instruction)
        return dress([values[name] for name in block.results], block.form)

    def perform(self, instruction: Any) -> None:
        values = self.values
        match instruction:
            case Op(outs, operation, ins, number):
                given = [values[name] for name in ins]
                if self.disturbs:
                    result = run_disturbed(OPERATIONS[operation], number, given)
                else:
                    result = OPERATIONS[operation].run(number, *given)
                values.update(zip(outs, undress(result), strict=True))
                if OPERATIONS[operation].in_place:
                    self._renew_views()
            case Load(out, key):
                values[out] = self.place.values[key]
            case Keep(name, key):
                self.place.values[key] = values[name]
            case Call(mode, _, _, args, outs, form):
                result = self.call(instruction, dress([values[name] for name in args], form))
                late = mode in ("async", "then", "remote")
                values.update(zip(outs, [result] if late else undress(result), strict=True))
            case Wait(future, outs):
                values.update(zip(outs, undress(values[future].wait()), strict=True))
            case Fetch(rref, outs):
                values.update(zip(outs, undress(self.fetch(values[rref])), strict=True))
            case Proxy(rref, out):
                values[out] = self.proxy(values[rref])
            case Hook(name):
                if values[name].requires_grad:
                    values[name].register_hook(_recorder(self.place, name))
            case Retain(name):
                if values[name].requires_grad:
                    values[name].retain_grad()
                    self.place.retained[name] = values[name]

    def _renew_views(self) -> None:
        """Let torch make the ``grad_fn`` of views anew after a change in place.

        Otherwise it does so when they are used next, with a lock. Two threads that use a view then, one of them in a
        custom function, may block each other forever.
        """
        for each in (*self.values.values(), *self.place.values.values()):
            if isinstance(each, Tensor) and each._is_view():
                with contextlib.suppress(RuntimeError):  # one of several views that an operation has made
                    each.grad_fn  # noqa: B018

    def roots(self, which: Pass) -> tuple[list[Any], list[Tensor | None]]:
        """The roots of a pass and their gradients."""
        source = self.values if which.initiator == self.program.driver else self.place.values
        roots = [source[root.name] for root in which.roots]
        device = device_of(self.worker)
        grads = [
            random_tensor(root.grad_kind, root.grad_seed, device) if root.grad_kind else None for root in which.roots
        ]
        return roots, grads


def outcome_of(place: Place, gradients: dict[str, Tensor], messages: int = 0) -> Outcome:
    return Outcome(
        {name: grad.detach() for name, grad in gradients.items()},
        {name: _copy(leaf.grad) for name, leaf in place.leaves.items()},
        place.hooked,
        place.accumulated,
        {name: _copy(tensor.grad) for name, tensor in place.retained.items()},
        messages,
    )


# In one process.


@dataclass
class _LocalFuture:
    value: Any

    def wait(self) -> Any:
        return self.value


@dataclass
class _LocalRef:
    owner: int
    value: Any


class _LocalSite(Site):
    def __init__(self, program: Program, worker: int, places: list[Place]) -> None:
        super().__init__(program, worker, places[worker])
        self.places = places

    def call(self, call: Call, payload: Any) -> Any:
        way = [call.via, call.to] if call.mode == "forward" else [call.to]
        for worker in way:
            payload = crossed(payload, worker)
        if call.mode == "direct":
            value = DIRECT[call.function][0](*undress(payload))
        else:
            block = self.program.blocks[call.block]
            value = _LocalSite(self.program, call.to, self.places).run(block, payload)
        if call.mode == "remote":
            return _LocalRef(call.to, value)
        for worker in [*reversed(way[:-1]), self.worker]:
            value = crossed(value, worker)
        if call.mode == "async":
            return _LocalFuture(value)
        return _LocalFuture(callback(value)) if call.mode == "then" else value

    def fetch(self, rref: _LocalRef) -> Any:
        return rref.value if rref.owner == self.worker else crossed(rref.value, self.worker)

    def proxy(self, rref: _LocalRef) -> Any:
        return crossed(rref.value.sin(), self.worker)


def run_locally(program: Program) -> list[Outcome]:
    """The outcome on every worker, if all were one process."""
    places = [make_place(program, worker, True) for worker in range(program.size)]
    if program.accumulate == "context":
        for place in places:
            for leaf in place.leaves.values():
                leaf.grad = None
    site = _LocalSite(program, program.driver, places)
    site.run(program.blocks[0], ())
    for which in program.passes:
        initiator = site if which.initiator == program.driver else _LocalSite(program, which.initiator, places)
        roots, grads = initiator.roots(which)
        roots = [root.value if isinstance(root, _LocalRef) else root for root in roots]
        pairs = [
            (root, grad if grad is None else grad.to(root.device))
            for root, grad in zip(roots, grads, strict=True)
            if root.requires_grad
        ]
        torch.autograd.backward(
            [root for root, _ in pairs], [grad for _, grad in pairs], retain_graph=which.retain_graph
        )
    return [
        outcome_of(place, {name: leaf.grad for name, leaf in place.leaves.items() if leaf.grad is not None})
        for place in places
    ]


# On Backhaul.

_programs: dict[int, Program] = {}
_places: dict[tuple[int, int], Place] = {}
_placing = threading.Lock()


def install(key: int, program: Program) -> None:
    """Make a program known to the workers of this process, as ``key``."""
    _programs[key] = program


def program_of(key: int) -> Program:
    """The program of a key. A worker in a separate process generates it from the seed."""
    with _placing:
        if key not in _programs:
            _programs[key] = generate(key)
        return _programs[key]


def forget_all() -> None:
    _programs.clear()
    _places.clear()


def _place(key: int) -> Place:
    program, worker = program_of(key), current().info.id
    with _placing:
        if (key, worker) not in _places:
            _places[key, worker] = make_place(program, worker, program.accumulate == "grad")
        return _places[key, worker]


class _BackhaulSite(Site):
    disturbs = True

    def __init__(self, key: int) -> None:
        super().__init__(program_of(key), current().info.id, _place(key))
        self.key = key

    def call(self, call: Call, payload: Any) -> Any:
        to = f"worker{call.to}"
        if call.mode == "direct":
            return rpc.rpc_sync(to, DIRECT[call.function][0], args=undress(payload), timeout=CALL_SECONDS)
        args = (self.key, call.block, payload)
        match call.mode:
            case "sync":
                return rpc.rpc_sync(to, step, args=args, timeout=CALL_SECONDS)
            case "coroutine":
                return rpc.rpc_sync(to, step_in_coroutine, args=args, timeout=CALL_SECONDS)
            case "forward":
                return rpc.rpc_sync(f"worker{call.via}", forward, args=(to, *args), timeout=CALL_SECONDS)
            case "async":
                return rpc.rpc_async(to, step, args=args, timeout=CALL_SECONDS)
            case "then":
                future = rpc.rpc_async(to, step, args=args, timeout=CALL_SECONDS)
                return future.then(lambda done: callback(done.wait()))
            case _:
                return rpc.remote(to, step, args=args, timeout=CALL_SECONDS)

    def fetch(self, rref: RRef[Any]) -> Any:
        return rref.to_here(timeout=CALL_SECONDS)

    def proxy(self, rref: RRef[Any]) -> Any:
        return rref.rpc_sync(timeout=CALL_SECONDS).sin()


def step(key: int, block: int, payload: Any) -> Any:
    """Run a block here."""
    site = _BackhaulSite(key)
    return site.run(site.program.blocks[block], payload)


async def step_in_coroutine(key: int, block: int, payload: Any) -> Any:
    return step(key, block, payload)


@rpc.functions.async_execution
def forward(to: str, key: int, block: int, payload: Any) -> rpc.Future[Any]:
    return rpc.rpc_async(to, step, args=(key, block, payload), timeout=CALL_SECONDS)


def _backward(site: Site, which: Pass, context: int) -> None:
    roots, grads = site.roots(which)
    dist_autograd.backward(
        context,
        roots,
        which.retain_graph,
        grad_tensors=grads if any(grad is not None for grad in grads) else None,
        timeout=BACKWARD_SECONDS,
        accumulate=site.program.accumulate,
    )
    for grad, again in zip(grads, site.roots(which)[1], strict=True):
        if grad is not None and again is not None and not torch.equal(grad, again):
            raise Mismatch("a grad_tensor was changed")


def backward_here(key: int, number: int, context: int) -> None:
    """A pass whose initiator is not the driver."""
    site = _BackhaulSite(key)
    _backward(site, site.program.passes[number], context)


def collect(key: int, context: int) -> Outcome:
    """What the program has left on this worker."""
    place = _place(key)
    names = {leaf: name for name, leaf in place.leaves.items()}
    try:
        gradients = dist_autograd.get_gradients(context)
    except ContextError:  # no part of the program ran here
        return outcome_of(place, {})
    unknown = [leaf for leaf in gradients if leaf not in names]
    if unknown:
        raise Mismatch(f"gradients of tensors that are no leaves of this worker's: {unknown}")
    messages = len(ContextId(context).sends)
    return outcome_of(place, {names[leaf]: grad for leaf, grad in gradients.items()}, messages)


def drive(key: int, collect_from: Callable[[int, int, int], Outcome]) -> list[Outcome]:
    """Run a program, on its driver. The outcome on every worker; ``collect_from(worker, key, context)`` gets one."""
    program = program_of(key)
    with dist_autograd.context() as context:
        site = _BackhaulSite(key)
        site.run(program.blocks[0], ())
        for number, which in enumerate(program.passes):
            if which.initiator == program.driver:
                _backward(site, which, context)
            else:
                args = (key, number, context)
                rpc.rpc_sync(f"worker{which.initiator}", backward_here, args=args, timeout=CALL_SECONDS)
        return [collect_from(worker, key, int(context)) for worker in range(program.size)]


# Compared.


def compare(program: Program, expected: list[Outcome], found: list[Outcome]) -> None:
    """Compare two outcomes. Raises `Mismatch`."""
    for worker, (want, have) in enumerate(zip(expected, found, strict=True)):
        into_grad = program.accumulate == "grad"
        if into_grad and have.gradients:
            raise Mismatch(f"worker{worker} has gradients in the context: {list(have.gradients)}")
        for leaf in program.leaves:
            if leaf.worker == worker:
                name = leaf.name
                got = have.grads[name] if into_grad else have.gradients.get(name)
                _same(program, f"gradient of {name} on worker{worker}", want.gradients.get(name), got)
                if not into_grad:
                    before = first_grad(leaf) if leaf.has_grad_before else None
                    _same(program, f".grad of {name} on worker{worker}", before, have.grads[name])
        for name, grad in want.retained.items():
            _same(program, f"retained grad of {name} on worker{worker}", grad, have.retained.get(name))
        for name in {*want.hooked, *have.hooked}:
            calls = have.hooked.get(name, [])
            _same_calls(program, f"hook on {name} on worker{worker}", want.hooked.get(name, []), calls)
        for name in {*want.accumulated, *have.accumulated}:
            what = f"post-accumulate hook on {name} on worker{worker}"
            calls, got_calls = want.accumulated.get(name, []), have.accumulated.get(name, [])
            if into_grad or len(program.passes) == 1:
                if len(got_calls) > len(calls):
                    raise Mismatch(f"{what}: called with {got_calls}, in one process with {calls}")
                _same_calls(program, what, _changes(calls), _changes(got_calls))
            elif not len(_changes(calls)) <= len(got_calls) <= len(calls):
                # In a context each pass shows its own gradient only.
                raise Mismatch(f"{what}: called with {got_calls}, in one process with {calls}")


def _same_calls(program: Program, what: str, want: list[Tensor | None], have: list[Tensor | None]) -> None:
    """Whether the gradients and their order are the same. Only calls without a gradient may be missing."""
    if len(have) > len(want):
        raise Mismatch(f"{what}: called {len(have)} times, with {have}; in one process {len(want)} times, with {want}")
    mine = [grad for grad in map(_solid, want) if grad is not None]
    theirs = [grad for grad in map(_solid, have) if grad is not None]
    if len(mine) != len(theirs):
        raise Mismatch(f"{what}: called with {have}, in one process with {want}")
    for one, other in zip(mine, theirs, strict=True):
        _same(program, what, one, other)


def _changes(grads: list[Tensor | None]) -> list[Tensor | None]:
    """What post-accumulate hooks saw, without calls in which .grad had not changed."""
    solid = [_solid(grad) for grad in grads]
    return [
        grad
        for before, grad in pairwise([None, *solid])
        if grad is not None and (before is None or not torch.equal(before, grad))
    ]


def _solid(grad: Tensor | None) -> Tensor | None:
    """The gradient, dense; None if it is zero."""
    if grad is None:
        return None
    dense = grad.to_dense() if grad.is_sparse else grad
    return dense if dense.count_nonzero() else None


def _same(program: Program, what: str, want: Tensor | None, have: Tensor | None) -> None:
    """Whether two gradients are equal. None counts as zero."""
    if want is not None and have is not None:
        kinds = [(grad.dtype, grad.shape, grad.layout, grad.device) for grad in (want, have)]
        if kinds[0] != kinds[1]:
            raise Mismatch(f"{what} is {_brief(have)}, in one process {_brief(want)}")
    mine, theirs = _solid(want), _solid(have)
    if mine is None and theirs is None:
        return
    if mine is None or theirs is None:
        # A gradient that is zero up to rounding counts as None.
        other = theirs if mine is None else mine
        if other is not None and other.abs().max() > program.tolerance:
            raise Mismatch(f"{what} is {have}, in one process {want}")
        return
    wide = torch.complex128 if mine.is_complex() else torch.float64
    mine, theirs = mine.to(wide), theirs.to(wide)
    difference = float((mine - theirs).abs().max())
    if not difference <= program.tolerance * max(1.0, float(mine.abs().max())):
        raise Mismatch(f"{what} is off by {difference:.3g}: {have}, in one process {want}")


def _brief(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} on {tensor.device}"
