"""Runs adversarial programs on Backhaul. `adversarial_local` runs the same text in one process."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from typing import Any

import adversarial_words as words
from adversarial import Program
from adversarial_comparison import Mismatch
from adversarial_generator import generate
from adversarial_places import OPTIMIZERS, Outcome, grads_of, load, make_place, optimize, outcome_of, trainable
from adversarial_words import Place
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import ContextError
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer
from backhaul.worker import current

BACKWARD_SECONDS = 30.0

_programs: dict[str, Program] = {}
_places: dict[int, Place] = {}
"""The places by rank. One program runs at a time."""


def prepare(program: Program, ranks: Sequence[int], key: str) -> None:
    """Load a program for the workers of this process, and make their places."""
    module = load(program, key, rpc)
    sys.modules[key] = module
    _programs[key] = program
    _places.update((rank, make_place(program, rank, grads=True)) for rank in ranks)
    words._find[:] = [lambda: _places.get(current().info.id)]


def prepare_seed(seed: int) -> None:
    """`prepare`, in a process with one worker."""
    prepare(generate(seed), [current().info.id], f"adversarial_{seed}")


def forget_all() -> None:
    for key in _programs:
        sys.modules.pop(key, None)
        linecache.cache.pop(f"<{key}>", None)
    _programs.clear()
    _places.clear()


def the_module(name: str) -> nn.Module:
    """Returns an existing module, for a `RemoteModule`."""
    found: nn.Module = _places[current().info.id].things[name]
    return found


def the_parameter(name: str) -> Tensor:
    return trainable(_places[current().info.id])[name]


def optimize_here(key: str) -> None:
    optimize(_programs[key], _places[current().info.id])


def gradients_here(context: int) -> dict[str, Tensor]:
    """The gradients in the context, or in ``.grad`` if there is no context."""
    place = _places[current().info.id]
    try:
        found = dist_autograd.get_gradients(context)
    except ContextError:  # no part of the program ran here
        return {}
    names = {leaf: name for name, leaf in trainable(place).items()}
    unknown = [leaf for leaf in found if leaf not in names]
    if unknown:
        raise Mismatch(f"gradients of tensors that are no leaves of this worker's: {unknown}")
    return {names[leaf]: gradient.detach().clone() for leaf, gradient in found.items()}


def grads_here() -> dict[str, Tensor]:
    return grads_of(_places[current().info.id])


def outcome_here() -> Outcome:
    return outcome_of(_places[current().info.id], [])


At = Callable[..., Any]
"""``at(rank, function, *args)`` runs a function of this module on a worker, without a Backhaul call if possible."""


def drive(program: Program, key: str, at: At) -> list[Outcome]:
    """Run a program. Called on its driver."""
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
