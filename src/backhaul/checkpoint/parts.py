"""Parts: which worker holds which keys of a model.

A model is walked in the order of its state dict. At a `RemoteModule`, the owner continues the walk, and so on. So the
parts come in the order of the state dict that the model would have in one process. A part is either a whole module with
everything below it, or, if there are remote modules below, the tensors of one module alone.

A module may change the state dict of everything below it, by hooks or overridden methods. Such a module must see all of
that, so it is one whole part even if it contains remote modules; their tensors are then sent to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from backhaul import current_worker
from backhaul.checkpoint.index import Entry
from backhaul.errors import MisuseError
from backhaul.ids import WorkerInfo
from backhaul.nn import RemoteModule
from backhaul.rpc import RRef
from backhaul.spread import Work, spread

# Remote modules that hold each other in a cycle would be walked forever.
_MAX_DEPTH = 64
_NO_LIMIT = 0.0
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")

Metadata = dict[str, dict[str, Any]]
"""Notes of modules in a state dict beside the tensors, such as versions, by prefix without the last dot."""


class Part(NamedTuple):
    """Keys of a model that one worker holds."""

    name: str
    """The name of the object."""
    prefix: str
    """The prefix of its keys in the state dict of the whole model."""
    holder: Any
    """The module that contains the part, or a reference to that module …"""
    path: str
    """… under this name."""
    whole: bool
    """Whether the modules below it belong to the part."""

    def module(self) -> nn.Module:
        """The part itself. Call only on its worker."""
        module = self.holder.local_value() if isinstance(self.holder, RRef) else self.holder
        for child in self.path.split(".") if self.path else ():
            module = module._modules[child]
        return module  # type: ignore[no-any-return]

    def worker(self) -> WorkerInfo:
        return self.holder.owner() if isinstance(self.holder, RRef) else here()


def here() -> WorkerInfo:
    """This worker; in a process without a worker, a stand-in."""
    worker = current_worker.get_or_none()
    return WorkerInfo(0, "local") if worker is None else worker.info


def on_all(what: str, work: Mapping[WorkerInfo, Work]) -> dict[WorkerInfo, Any]:
    """`spread` without a timeout. Also works in a process without a worker, which has only itself to ask."""
    if current_worker.get_or_none() is None:
        return {worker: function(*args) for worker, (function, args) in work.items()}
    return spread(what, work, _NO_LIMIT)


def parts_of(models: Mapping[str, nn.Module]) -> list[Part]:
    """The parts of models, from all workers that hold some. Parts of one model are in the order of its keys."""
    found: list[Part | _Remote] = [part for name, model in models.items() for part in _walk(name, "", model, model, "")]
    for _ in range(_MAX_DEPTH):
        todo: dict[WorkerInfo, list[_Remote]] = {}
        for part in found:
            if isinstance(part, _Remote):
                todo.setdefault(part.module.owner(), []).append(part)
        if not todo:
            return [part for part in found if isinstance(part, Part)]
        answers = on_all(
            "listing the contents of remote modules",
            {worker: (survey, (remotes,)) for worker, remotes in todo.items()},
        )
        walked = {worker: iter(answer) for worker, answer in answers.items()}
        found = [
            each
            for part in found
            for each in (next(walked[part.module.owner()]) if isinstance(part, _Remote) else [part])
        ]
    raise MisuseError(f"remote modules are nested more than {_MAX_DEPTH} deep: does one of them hold itself?")


class _Remote(NamedTuple):
    """A part that its owner must still walk."""

    name: str
    prefix: str
    module: RRef[nn.Module]


def survey(remotes: Sequence[_Remote]) -> list[list[Part | _Remote]]:
    """Walk modules of this worker, for others."""
    return [list(_walk(name, prefix, module, module.local_value(), "")) for name, prefix, module in remotes]


def _walk(name: str, prefix: str, holder: Any, module: nn.Module, path: str) -> Iterator[Part | _Remote]:
    remote_inside = any(isinstance(each, RemoteModule) for each in module.modules())
    whole = not remote_inside or _changes_nested_state(module)
    if isinstance(module, RemoteModule) and module._is_party:
        raise MisuseError(
            f"{module} belongs to a party, which saves and loads it itself: leave it out of the checkpoint"
        )
    if isinstance(module, RemoteModule) and not whole:
        yield _Remote(name, prefix, module.module_rref)
        return
    yield Part(name, prefix, holder, path, whole)
    if not whole:
        # Not named_children(): that skips modules that appear twice, and the state dict does not.
        for child, below in module._modules.items():
            if below is None:
                continue
            yield from _walk(name, f"{prefix}{child}.", holder, below, f"{path}.{child}" if path else child)


def _changes_nested_state(module: nn.Module) -> bool:
    """Whether a module changes the state dict of the modules below it, or behind it."""
    usual = RemoteModule if isinstance(module, RemoteModule) else nn.Module
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return True
    return any(
        method in vars(module) or getattr(type(module), method) is not getattr(usual, method) for method in _METHODS
    )


def state_of(part: Part) -> tuple[dict[str, Any], Metadata]:
    """The values of a part by their full keys, and its metadata. Call only on its worker."""
    module = part.module()
    found: dict[str, Any]
    if part.whole:
        found = module.state_dict()
        metadata = getattr(found, "_metadata", {})
    else:
        found = {}
        module._save_to_state_dict(found, "", False)
        metadata = {"": {"version": module._version}}
    values = {part.prefix + key: value for key, value in found.items()}
    return values, {_joined(part.prefix, place): dict(noted) for place, noted in metadata.items()}


def load_state(part: Part, values: Mapping[str, Any], metadata: Metadata) -> None:
    """Set a part to values by their full keys, with its `metadata_below`. Call only on its worker."""
    module = part.module()
    state = OrderedDict((key.removeprefix(part.prefix), value) for key, value in values.items())
    if part.whole:
        state._metadata = metadata  # type: ignore[attr-defined]
        module.load_state_dict(state, strict=True)
        return
    problems: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    module._load_from_state_dict(state, "", metadata.get("", {}), True, missing, unexpected, problems)
    if missing or unexpected or problems:
        raise MisuseError(f"{type(module).__name__} does not accept its tensors: {[*problems, *missing, *unexpected]}")


def metadata_below(part: Part, metadata: Metadata) -> Metadata:
    """The metadata of a whole model, restricted to a part, by prefixes within the part."""
    start = part.prefix.removesuffix(".")
    return {
        place.removeprefix(part.prefix) if place != start else "": noted
        for place, noted in metadata.items()
        if place == start or place.startswith(part.prefix)
    }


def described(value: Any, file: str | None = None) -> Entry:
    """The index entry for a value."""
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return Entry(file)
    return Entry(file, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _joined(prefix: str, place: str) -> str:
    """The full prefix, without the last dot, of a place below a part."""
    return f"{prefix}{place}" if place else prefix.removesuffix(".")
