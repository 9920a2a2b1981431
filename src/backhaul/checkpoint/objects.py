"""The objects of a checkpoint, sorted by kind, and assigned to the workers that hold them."""

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
    """The objects by kind. Raises `OptionError` for invalid names."""
    if not isinstance(objects, Mapping):
        raise OptionError(f"objects must be a dict, as in {{'model': model, 'epoch': 3}}, not {type(objects).__name__}")
    found = Sorted({}, {}, {}, {})
    for name, value in objects.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise OptionError(
                f"{name!r} is not a valid name for an object in a checkpoint: give a string of printable characters"
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
    """Models and optimizers, by the workers that hold their parts."""

    parts: list[Part]
    """Parts of models, in the order of their keys. Each worker's portion keeps the same order."""
    portions: dict[WorkerInfo, Portion]

    def in_order(self, of_workers: Mapping[WorkerInfo, Sequence[T]]) -> Iterator[tuple[Part, T]]:
        """The parts of models, each paired with its worker's item."""
        said = {worker: iter(values) for worker, values in of_workers.items()}
        return ((part, next(said[part.worker()])) for part in self.parts)

    def keys(self, looks: Mapping[WorkerInfo, Looks]) -> Iterator[tuple[str, dict[str, Entry]]]:
        """The keys of models in order, part by part, with the names of the models."""
        for part, entries in self.in_order({worker: look.parts for worker, look in looks.items()}):
            yield part.name, entries

    def parameters(self, name: str, looks: Mapping[WorkerInfo, Looks]) -> list[Entry]:
        """The parameters of an optimizer in order."""
        found: dict[int, Entry] = {}
        for _, part, each in self.of_optimizer(name, {worker: look.optimizers for worker, look in looks.items()}):
            found.update(zip(part.indices, each, strict=True))
        return [found[index] for index in sorted(found)]

    def of_optimizer(
        self, name: str, of_workers: Mapping[WorkerInfo, Sequence[T]]
    ) -> Iterator[tuple[WorkerInfo, OptimizerPart, T]]:
        """The parts of an optimizer, each paired with its worker's item."""
        for worker, portion in self.portions.items():
            for part, value in zip(portion.optimizers, of_workers[worker], strict=True):
                if part.name == name:
                    yield worker, part, value


def deal(objects: Sorted) -> Dealt:
    """Assign the parts of models and optimizers to the workers that hold them."""
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
    """Whether the optimizer's parts can be saved and loaded on their workers.

    An optimizer with hooks on its state dict, or its own methods for it, must see the whole state at once.
    """
    return (
        isinstance(optimizer, DistributedOptimizer)
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
        and all(getattr(type(optimizer), method) is getattr(DistributedOptimizer, method) for method in _METHODS)
    )


def sizes_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """The number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]
