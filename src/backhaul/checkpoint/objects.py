"""The objects of a checkpoint, sorted by what is kept of them, and dealt out to the workers that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn

from backhaul.checkpoint.index import Entry
from backhaul.checkpoint.parts import Part, here, parts_of
from backhaul.checkpoint.portions import Looks, OptimizerPart, Portion
from backhaul.errors import OptionError
from backhaul.ids import WorkerInfo
from backhaul.optim import DistributedOptimizer

T = TypeVar("T")

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_METHODS = ("state_dict", "load_state_dict")


class Sorted(NamedTuple):
    """Objects by kind."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    states: dict[str, Any]
    """Others that have ``state_dict()`` and ``load_state_dict()``."""
    values: dict[str, Any]


def sort(objects: Mapping[str, Any]) -> Sorted:
    """Objects by kind. Raises `OptionError` for names that are none."""
    if not isinstance(objects, Mapping):
        raise OptionError(f"objects must be a dict, as in {{'model': model, 'epoch': 3}}, not {type(objects).__name__}")
    found = Sorted({}, {}, {}, {})
    for name, value in objects.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise OptionError(
                f"{name!r} is no name for an object in a checkpoint: give a string of printable characters"
            )
        if isinstance(value, nn.Module):
            found.models[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            found.optimizers[name] = value
        elif all(callable(getattr(value, method, None)) for method in _METHODS):
            found.states[name] = value
        else:
            found.values[name] = value
    return found


class Dealt(NamedTuple):
    """Models and optimizers, by the workers that have them."""

    parts: list[Part]
    """Of models, in the order of their keys; those of one worker are in the same order in its portion."""
    portions: dict[WorkerInfo, Portion]

    def in_order(self, of_workers: Mapping[WorkerInfo, Sequence[T]]) -> Iterator[tuple[Part, T]]:
        """The parts of models, each with what its worker has said of it."""
        said = {worker: iter(values) for worker, values in of_workers.items()}
        return ((part, next(said[part.worker()])) for part in self.parts)

    def keys(self, looks: Mapping[WorkerInfo, Looks]) -> Iterator[tuple[str, dict[str, Entry]]]:
        """The keys of models in their order, piece by piece, with the names of the models."""
        for part, entries in self.in_order({worker: look.parts for worker, look in looks.items()}):
            yield part.name, entries

    def parameters(self, name: str, looks: Mapping[WorkerInfo, Looks]) -> list[Entry]:
        """The parameters of an optimizer in their order."""
        found: dict[int, Entry] = {}
        for _, part, each in self.of_optimizer(name, {worker: look.optimizers for worker, look in looks.items()}):
            found.update(zip(part.indices, each, strict=True))
        return [found[index] for index in sorted(found)]

    def of_optimizer(
        self, name: str, of_workers: Mapping[WorkerInfo, Sequence[T]]
    ) -> Iterator[tuple[WorkerInfo, OptimizerPart, T]]:
        """The parts of an optimizer, each with what its worker has said of it."""
        for worker, portion in self.portions.items():
            for part, value in zip(portion.optimizers, of_workers[worker], strict=True):
                if part.name == name:
                    yield worker, part, value


def deal(objects: Sorted) -> Dealt:
    """What each worker has of models and optimizers."""
    parts = parts_of(objects.models)
    portions: dict[WorkerInfo, Portion] = {}

    def portion(worker: WorkerInfo) -> Portion:
        return portions.setdefault(worker, Portion([], []))

    for part in parts:
        portion(part.worker()).parts.append(part)
    for name, optimizer in objects.optimizers.items():
        if is_spread(optimizer):
            for worker, rref in optimizer._locals.items():
                places = {place: index for index, (owner, place) in enumerate(optimizer._places) if owner == worker}
                indices = [places[place] for place in sorted(places)]
                portion(worker).optimizers.append(OptimizerPart(name, rref, indices))
        else:
            indices = list(range(sum(sizes_of(optimizer))))
            portion(here()).optimizers.append(OptimizerPart(name, optimizer, indices))
    return Dealt(parts, portions)


def is_spread(optimizer: torch.optim.Optimizer) -> TypeGuard[DistributedOptimizer]:
    """Whether its parts can be saved and loaded where they are.

    One with hooks on its state dict, or methods of its own for it, has to see all of it at once.
    """
    return (
        isinstance(optimizer, DistributedOptimizer)
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
        and all(getattr(type(optimizer), method) is getattr(DistributedOptimizer, method) for method in _METHODS)
    )


def sizes_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """How many parameters its groups have."""
    return [len(group["params"]) for group in optimizer.param_groups]
