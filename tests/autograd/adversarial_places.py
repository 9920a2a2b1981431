"""The state of workers while an adversarial program runs, and at its end: leaves, modules, notes."""

from __future__ import annotations

import linecache
import types
from dataclasses import dataclass, field
from typing import Any

import adversarial_words as words
import torch
import torch.distributed as dist
from adversarial import Leaf, Module, Program
from adversarial_words import MODULES, SIZE, Pair, Place, hook_leaf
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from backhaul.nn import RemoteModule

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop foreach": (torch.optim.RMSprop, {"lr": 0.01, "foreach": True, "centered": True}),
}


@dataclass
class Outcome:
    """What a program has left on one worker."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """For each step: the gradients in the context, or in ``.grad`` after it, by name."""
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""
    seen: dict[str, tuple[str, Tensor | None]] = field(default_factory=dict)
    events: list[tuple[str, list[Tensor | None]]] = field(default_factory=list)
    retained: dict[str, Tensor | None] = field(default_factory=dict)
    orders: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of hooks; the first must be called before the second. Known only in one process."""


def make_place(program: Program, worker: int, *, grads: bool) -> Place:
    """A new place. ``grads``: leaves may have a ``.grad`` from the start."""
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
    )


def grads_of(place: Place) -> dict[str, Tensor]:
    return {name: leaf.grad.detach().clone() for name, leaf in trainable(place).items() if leaf.grad is not None}


def optimize(program: Program, place: Place) -> None:
    """Make a step of the worker's own optimizer with ``.grad``."""
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
