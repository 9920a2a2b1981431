"""Adversarial programs run: in one process with plain torch, and on Backhaul; and their outcomes compared.

Both run the same text. In one process ``rpc`` is a stand-in that calls functions here, between clones as a message
makes them: the receiver may change a tensor in place, and the graph goes on through it. A function runs as at a callee,
on a thread of its own, with the autocast of its caller.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import threading
import types
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import adversarial_words as words
import torch
import torch.distributed as dist
from adversarial import Leaf, Module, Program
from adversarial_generator import generate
from adversarial_words import MODULES, SIZE, Pair, Place, hook_leaf, standing
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.masked import MaskedTensor
from torch.nn.parallel import DistributedDataParallel

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.eager import eager
from backhaul.errors import ContextError
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer
from backhaul.worker import current

BACKWARD_SECONDS = 30.0

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop foreach": (torch.optim.RMSprop, {"lr": 0.01, "foreach": True, "centered": True}),
}

REFUSALS: tuple[tuple[str, str], ...] = (
    # The feature that a program has, and what it is refused with. All of these are in docs/autograd.md.
    ("part: reentrant checkpoint", "give it use_reentrant=False"),
    ("part: reentrant checkpoint", r"When use_reentrant=True, torch\.utils\.checkpoint is incompatible"),
    ("masked bare", "the gradient of a tensor from another worker is a MaskedTensor"),
    ("masked", "the gradient of a MaskedTensor from another worker has another mask"),
    ("masked bare", "_set_data_mask"),  # torch cannot add one to a .grad that is there
    ("jagged", "Recomputed values for the following tensors have different metadata"),
    ("part: func.grad", r"torch\.func"),
    ("part: vmap", r"torch\.func"),
    ("part: vjp", r"torch\.func"),
)


class Mismatch(AssertionError):
    """Backhaul and one process do not agree."""


class NotRefused(Mismatch):
    """One process raises an error, and Backhaul does not."""


@dataclass
class Outcome:
    """What a program left on one worker."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step: by name, those in the context, or in ``.grad`` after it."""
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""
    seen: dict[str, tuple[str, Tensor | None]] = field(default_factory=dict)
    events: list[tuple[str, list[Tensor | None]]] = field(default_factory=list)
    retained: dict[str, Tensor | None] = field(default_factory=dict)
    orders: list[tuple[str, str]] = field(default_factory=list)
    """Hooks of which the first has to be called before the second."""


# What workers have.


def make_place(program: Program, worker: int, *, grads: bool) -> Place:
    """``grads``: leaves may have a ``.grad`` from the start."""
    place = Place()
    with torch.random.fork_rng():
        for leaf in program.leaves:
            if leaf.worker == worker:
                place.things[leaf.name] = tensor = make_leaf(leaf)
                if grads and "has a .grad before" in leaf.flags:
                    tensor.grad = grad_before(leaf)
                hook_leaf(place, leaf.name, tensor, leaf.flags)
        together = place.things.pop("multi-grad", [])
        if together:
            note = place.events.append
            place.things["multi-grad hook"] = register_multi_grad_hook(
                together, lambda grads: note(("multi-grad hook of leaves", [words._copy(each) for each in grads]))
            )
        for module in program.modules:
            if module.worker == worker:
                place.things[module.name] = make_module(module)
    return place


def make_leaf(leaf: Leaf) -> Any:
    generator = torch.Generator().manual_seed(leaf.seed)
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    values = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    match leaf.kind:
        case "parameter":
            return nn.Parameter(values.to(dtype))
        case "weight":
            return words.Weight(values.to(dtype))
        case "labelled leaf":
            return values.to(dtype).as_subclass(words.Labelled).requires_grad_()
        case "table":
            return nn.Parameter(torch.randn(5, SIZE, generator=generator, dtype=torch.float64))
        case "csr" | "csc" | "bsr":
            sparse = values * torch.kron(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)).double()
            made: Tensor = getattr(sparse, f"to_sparse_{leaf.kind}")(*([(2, 2)] if leaf.kind == "bsr" else []))
            return made.requires_grad_()
        case "pair leaf":
            return Pair(values, values / 3, 3.0).requires_grad_()
        case "jagged leaf":
            return words.jagged(values).detach().requires_grad_()
        case "zero":
            return nn.Parameter(values[:0])
    tensor = values.to(dtype).requires_grad_(leaf.requires_grad)
    if "grad_dtype float32" in leaf.flags and hasattr(tensor, "grad_dtype"):
        tensor.grad_dtype = torch.float32
    return tensor


def grad_before(leaf: Leaf) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(leaf.seed + 1)).to(
        getattr(torch, leaf.dtype)
    )


def make_module(module: Module) -> nn.Module:
    torch.manual_seed(module.seed)
    dtype: torch.dtype = getattr(torch, module.dtype)
    made = MODULES.get(module.kind, words.Plain)(dtype)
    if isinstance(made, words.Listening):
        made.name = module.name
    if module.kind in ("ddp", "fsdp"):
        need_group()
        if module.kind == "ddp":
            return DistributedDataParallel(made)
        from torch.distributed.fsdp import fully_shard

        return fully_shard(made)
    return made


def need_group() -> None:
    """A process group of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def trainable(place: Place) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, thing in place.things.items():
        if isinstance(thing, nn.Module) and not isinstance(thing, RemoteModule):
            found.update((f"{name}.{key}", each) for key, each in thing.named_parameters() if each.requires_grad)
        elif isinstance(thing, Tensor) and thing.requires_grad:
            found[name] = thing
    return found


def outcome_of(place: Place, gradients: list[dict[str, Tensor]]) -> Outcome:
    values = {name: words._copy(each) for name, each in trainable(place).items()}
    for name, thing in place.things.items():
        if isinstance(thing, nn.Module) and not isinstance(thing, RemoteModule):
            values.update((f"{name}.{key}", words._copy(each)) for key, each in thing.named_buffers())
    return Outcome(
        gradients,
        {name: words._copy(each.grad) for name, each in trainable(place).items()},
        {name: value for name, value in values.items() if value is not None},
        place.seen,
        place.events,
        {name: words._copy(tensor.grad) for name, tensor in place.retained.items()},
        _orders(place),
    )


def _orders(place: Place) -> list[tuple[str, str]]:
    found = []
    for first, node in place.watched.items():
        reached: set[Any] = set()
        stack = [node]
        while stack:
            for following, _ in stack.pop().next_functions:
                if following is not None and following not in reached:
                    reached.add(following)
                    stack.append(following)
        found += [(first, second) for second, other in place.watched.items() if other in reached]
    return found


def optimize(program: Program, place: Place) -> None:
    """A step of the worker's own optimizer, with what is in ``.grad``."""
    if place.optimizer is None:
        params = list(trainable(place).values())
        if not params:
            return
        kind, options = OPTIMIZERS[program.optimizer]
        place.optimizer = kind(params, **options)
    place.optimizer.step()
    place.optimizer.zero_grad()


def load(program: Program, name: str, rpc: Any) -> types.ModuleType:
    """The program's text as a module of this name."""
    module = types.ModuleType(name)
    public = {key: value for key, value in vars(words).items() if not key.startswith("__")}
    vars(module).update(public, rpc=rpc)
    file = f"<{name}>"
    linecache.cache[file] = len(program.text), None, program.text.splitlines(keepends=True), file
    exec(compile(program.text, file, "exec"), vars(module))
    return module


# In one process.


def crossed(value: Any) -> Any:
    """What another worker gets: clones. A tensor that occurs twice arrives as one."""
    clones: dict[int, Any] = {}
    grad = torch.is_grad_enabled()

    def clone(each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple(map(clone, each))
        if not isinstance(each, Tensor):
            return each
        if id(each) not in clones:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                clones[id(each)] = each.clone()
        return clones[id(each)]

    return clone(value)


class _LocalFuture:
    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> Any:
        return self.value

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.value
        yield

    def then(self, callback: Callable[[Any], Any]) -> _LocalFuture:
        return _LocalFuture(callback(self))


class _LocalRef:
    def __init__(self, value: Any, place: Place) -> None:
        self.value = value
        self.place = place

    def to_here(self) -> Any:
        return self.value if words.place_here() is self.place else crossed(self.value)

    def rpc_sync(self) -> _LocalRef:
        return self

    def sin(self) -> Any:
        return crossed(self.value.sin())


def _elsewhere(place: Place, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function as at a callee: on a thread of its own, which has nothing of its caller's but the autocast."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    result: Future[Any] = Future()

    def run() -> None:
        try:
            with standing(place), torch.autocast("cpu", autocast[1], enabled=autocast[0]):
                value = function(*args)
                if inspect.iscoroutine(value):
                    try:
                        value.send(None)
                    except StopIteration as end:
                        value = end.value
                result.set_result(value.value if isinstance(value, _LocalFuture) else value)
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result.result()


class _LocalRpc:
    functions = rpc.functions

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places

    def _run(self, to: str, function: Callable[..., Any], args: Any) -> tuple[Place, Any]:
        place = self.places[int(to.removeprefix("worker"))]
        return place, _elsewhere(place, function, *crossed(args))

    @eager
    def rpc_sync(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        return crossed(self._run(to, function, args)[1])

    @eager
    def rpc_async(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        return _LocalFuture(self.rpc_sync(to, function, args))

    @eager
    def remote(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        place, value = self._run(to, function, args)
        return _LocalRef(value, place)


class _LocalModule:
    def __init__(self, place: Place, module: nn.Module) -> None:
        self.place = place
        self.module = module

    @eager
    def __call__(self, x: Tensor) -> Any:
        return crossed(_elsewhere(self.place, self.module, crossed(x)))


def run_locally(program: Program) -> list[Outcome]:
    """The outcome on every worker, if all were one process."""
    into_grad = program.accumulate == "grad"
    places = [make_place(program, worker, grads=into_grad) for worker in range(program.size)]
    for module in program.modules:
        if module.remote:
            there = places[module.worker]
            places[0].things[f"remote {module.name}"] = _LocalModule(there, there.things[module.name])
    text = load(program, f"local_{program.seed}", _LocalRpc(places))
    gradients: list[list[dict[str, Tensor]]] = [[] for _ in places]
    for _ in range(program.iterations):
        if not into_grad:
            for place in places:
                for leaf in trainable(place).values():
                    leaf.grad = None
        with standing(places[0]):
            roots = text.main()
        roots = roots if isinstance(roots, tuple) else (roots,)
        for each in program.passes:
            with standing(places[0]):
                chosen = [roots[root] for root in each.roots]
                # Roots that need no grad are passed over, as in `backhaul.autograd.backward`, but for the only one.
                chosen = [root for root in chosen if root.requires_grad] or chosen
                torch.autograd.backward(chosen, retain_graph=each.retain_graph)
        for place, found in zip(places, gradients, strict=True):
            found.append(_grads(place))
        if program.optimizer:
            for place in places:
                optimize(program, place)
    return [outcome_of(place, found) for place, found in zip(places, gradients, strict=True)]


def _grads(place: Place) -> dict[str, Tensor]:
    return {name: leaf.grad.detach().clone() for name, leaf in trainable(place).items() if leaf.grad is not None}


# On Backhaul.

_programs: dict[str, Program] = {}
_places: dict[int, Place] = {}
"""By rank: one program runs at a time."""


def prepare(program: Program, ranks: Sequence[int], key: str) -> None:
    """Make a program known to the workers of this process, and what these have."""
    module = load(program, key, rpc)
    sys.modules[key] = module
    _programs[key] = program
    _places.update((rank, make_place(program, rank, grads=True)) for rank in ranks)
    words._find[:] = [lambda: _places.get(current().info.id)]


def prepare_seed(seed: int) -> None:
    """The same in a process of one worker."""
    prepare(generate(seed), [current().info.id], f"adversarial_{seed}")


def forget_all() -> None:
    for key in _programs:
        sys.modules.pop(key, None)
        linecache.cache.pop(f"<{key}>", None)
    _programs.clear()
    _places.clear()


def the_module(name: str) -> nn.Module:
    """For a `RemoteModule`: one that is there already."""
    found: nn.Module = _places[current().info.id].things[name]
    return found


def the_parameter(name: str) -> Tensor:
    return trainable(_places[current().info.id])[name]


def optimize_here(key: str) -> None:
    optimize(_programs[key], _places[current().info.id])


def gradients_here(context: int) -> dict[str, Tensor]:
    """Those in the context; in ``.grad`` if there is none."""
    place = _places[current().info.id]
    try:
        found = dist_autograd.get_gradients(context)
    except ContextError:  # nothing of the program has come here
        return {}
    names = {leaf: name for name, leaf in trainable(place).items()}
    unknown = [leaf for leaf in found if leaf not in names]
    if unknown:
        raise Mismatch(f"gradients of tensors that are no leaves of this worker's: {unknown}")
    return {names[leaf]: gradient.detach().clone() for leaf, gradient in found.items()}


def grads_here() -> dict[str, Tensor]:
    return _grads(_places[current().info.id])


def outcome_here() -> Outcome:
    return outcome_of(_places[current().info.id], [])


At = Callable[..., Any]
"""``at(rank, function, *args)`` runs a function of this module on a worker, by no call of Backhaul's if that can be."""


def drive(program: Program, key: str, at: At) -> list[Outcome]:
    """Run a program from its driver, on which this is called."""
    for module in program.modules:
        if module.remote:
            made = RemoteModule(f"worker{module.worker}", the_module, args=(module.name,))  # type: ignore[arg-type]
            _places[0].things[f"remote {module.name}"] = made
    optimizer: DistributedOptimizer | None = None
    into_grad = program.accumulate == "grad"
    if program.optimizer and not into_grad:
        rrefs = [
            rpc.remote(f"worker{rank}", the_parameter, args=(name,))
            for rank in range(program.size)
            for name in at(rank, trainable_here)
        ]
        kind, options = OPTIMIZERS[program.optimizer]
        optimizer = DistributedOptimizer(kind, rrefs, **options)
    gradients: list[list[dict[str, Tensor]]] = [[] for _ in range(program.size)]
    for _ in range(program.iterations):
        with dist_autograd.context() as context:
            roots = sys.modules[key].main()
            roots = roots if isinstance(roots, tuple) else (roots,)
            for each in program.passes:
                dist_autograd.backward(
                    context,
                    [roots[root] for root in each.roots],
                    each.retain_graph,
                    timeout=BACKWARD_SECONDS,
                    accumulate=program.accumulate,
                )
            for rank, found in enumerate(gradients):
                if into_grad and (inside := at(rank, gradients_here, int(context))):
                    raise Mismatch(f"worker{rank} has gradients in the context: {list(inside)}")
                found.append(at(rank, grads_here) if into_grad else at(rank, gradients_here, int(context)))
            if optimizer is not None:
                optimizer.step(context)
        del roots
        if program.optimizer and into_grad:
            for rank in range(program.size):
                at(rank, optimize_here, key)
    outcomes = []
    for rank, found in enumerate(gradients):
        outcome: Outcome = at(rank, outcome_here)
        outcome.gradients = found
        outcomes.append(outcome)
    return outcomes


def trainable_here() -> list[str]:
    return list(trainable(_places[current().info.id]))


def refusal(program: Program, error: BaseException) -> str | None:
    """Which of the refusals that are documented this is, if any."""
    for feature, text in REFUSALS:
        if program.features[feature] and re.search(text, str(error)):
            return f"refused: {text}"
    return None


# Compared.


def compare(program: Program, expected: list[Outcome], found: list[Outcome]) -> int:
    """Raises `Mismatch`. Returns how many gradients are the same bit by bit."""
    rule = _Comparison(program)
    for rank, (want, have) in enumerate(zip(expected, found, strict=True)):
        rule.worker(f"worker{rank}", want, have, rank)
    return rule.exact


class _Comparison:
    def __init__(self, program: Program) -> None:
        self.program = program
        features = program.features
        low = any("bfloat16" in leaf.dtype for leaf in program.leaves)
        if features["with: autocast"] or features["half"] or low:
            self.tolerance = 6e-2
        else:
            coarse = any(each.dtype == "float32" for each in (*program.leaves, *program.modules)) or features["float"]
            self.tolerance = 2e-4 if coarse else 1e-9
        self.compiled = any("compiled" in feature for feature in features)
        self.exact = 0

    def worker(self, where: str, want: Outcome, have: Outcome, rank: int) -> None:
        for step, (mine, theirs) in enumerate(zip(want.gradients, have.gradients, strict=True)):
            for name in {**mine, **theirs}:
                what = f"gradient of {name} on {where} in step {step}"
                self.same(what, mine.get(name), theirs.get(name))
        if self.program.accumulate == "context":
            for leaf in self.program.leaves:
                if leaf.worker == rank and leaf.requires_grad:
                    before = grad_before(leaf) if "has a .grad before" in leaf.flags else None
                    self.same(f".grad of {leaf.name} on {where}", before, have.grads[leaf.name])
        for name in {**want.values, **have.values}:
            self.same(f"{name} on {where} at the end", want.values.get(name), have.values.get(name))
        for name in {**want.seen, **have.seen}:
            (kind, value), (its, got) = want.seen.get(name, ("", None)), have.seen.get(name, ("", None))
            if kind.replace("Parameter", "Tensor").replace("Weight", "Tensor") != its.replace(
                "Parameter", "Tensor"
            ).replace("Weight", "Tensor"):
                raise Mismatch(f"{name} on {where} is a {its!r}, in one process a {kind!r}")
            self.same(f"{name} on {where}", value, got)
        for name in {**want.retained, **have.retained}:
            self.same(f"retained grad of {name} on {where}", want.retained.get(name), have.retained.get(name))
        self.events(where, want, have)

    def events(self, where: str, want: Outcome, have: Outcome) -> None:
        for name in dict.fromkeys(name for name, _ in (*want.events, *have.events)):
            mine = [given for each, given in want.events if each == name]
            theirs = [given for each, given in have.events if each == name]
            if name.startswith("post-accumulate") and self.program.accumulate == "context":
                mine, theirs = mine[:1], theirs[:1]  # in a context each pass shows its own gradient only
            mine, theirs = ([given for given in calls if _counts(given)] for calls in (mine, theirs))
            if len(mine) != len(theirs):
                raise Mismatch(
                    f"{name!r} on {where}: called {len(theirs)} times, with {theirs}; "
                    f"in one process {len(mine)} times, with {mine}"
                )
            for one, other in zip(mine, theirs, strict=True):
                for a, b in zip(one, other, strict=True):
                    self.same(f"what {name!r} on {where} was called with", a, b)
        if len(self.program.passes) * self.program.iterations == 1:
            called = [name for name, _ in have.events]
            for first, second in want.orders:
                if first in called and second in called and called.index(first) > called.index(second):
                    raise Mismatch(f"{second!r} on {where} was called before {first!r}, which comes first")

    def same(self, what: str, want: Tensor | None, have: Tensor | None) -> None:
        """None is as good as zero."""
        if want is not None and have is not None:
            kinds = [_brief(each) for each in (want, have)]
            if kinds[0] != kinds[1]:
                raise Mismatch(f"{what} is {kinds[1]}, in one process {kinds[0]}")
        mine, theirs = _solid(want), _solid(have)
        if mine is None and theirs is None:
            return
        if mine is not None and theirs is not None and torch.equal(mine, theirs):
            self.exact += 1
            return
        if mine is None or theirs is None:
            other = theirs if mine is None else mine
            if other is not None and not float(other.abs().max()) <= self.tolerance:
                raise Mismatch(f"{what} is {have}, in one process {want}")
            return
        if mine.shape != theirs.shape:
            raise Mismatch(f"{what} is {have}, in one process {want}")
        wide = torch.complex128 if mine.is_complex() else torch.float64
        mine, theirs = mine.to(wide), theirs.to(wide)
        if torch.equal(mine.isnan(), theirs.isnan()):
            mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        difference = float((mine - theirs).abs().max())
        if not difference <= self.tolerance * max(1.0, float(mine.abs().max())):
            raise Mismatch(f"{what} is off by {difference:.3g}: {have}, in one process {want}")


def _counts(given: list[Tensor | None]) -> bool:
    """Whether a call of a hook has something to say. Those with zeros, or without a gradient, may be left out."""
    return not given or any(_solid(each) is not None for each in given)


def _solid(value: Any) -> Tensor | None:
    """What a tensor holds, dense; None if it is zero or empty."""
    if value is None:
        return None
    value = value.detach()
    if isinstance(value, Pair):
        value = torch.stack([value.first, value.second])
    elif isinstance(value, MaskedTensor):
        value = torch.stack([value.to_tensor(0.0), value.get_mask().to(value.dtype)])
    elif value.is_nested:
        value = value.values()
    elif hasattr(value, "full_tensor"):
        value = value.full_tensor()
    elif value.layout is not torch.strided:
        value = value.to_dense()
    value = value.as_subclass(Tensor)
    return value if value.numel() and value.count_nonzero() else None


def _brief(tensor: Any) -> str:
    kind = type(tensor).__name__.replace("Parameter", "Tensor").replace("Weight", "Tensor")
    shape = "" if tensor.is_nested else tuple(tensor.shape)
    return f"{kind} {tensor.dtype} {shape} {tensor.layout}"
