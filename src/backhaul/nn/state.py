"""State dicts of modules whose parent is on another worker. Their entries travel under their full names.

``nn.Module.state_dict`` and ``load_state_dict`` visit all modules of a model, with one method call for each. For a
`RemoteModule` this call goes to the module's owner, where it visits the real module and its descendants.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from backhaul.devices.host import on_cpu

_ASSIGN = "assign_to_params_buffers"

Metadata = dict[str, dict[str, Any]]
"""The version and the loading options of each module, by the module's name without the last dot."""


class State(NamedTuple):
    """The entries of a state dict that a module has made."""

    entries: dict[str, Any]
    metadata: Metadata


class Loading(NamedTuple):
    """The entries that a module loads, and the problems found so far."""

    prefix: str
    entries: dict[str, Any]
    metadata: Metadata
    strict: bool
    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def save(module: nn.Module, prefix: str, keep_vars: bool) -> State:
    found = module.state_dict(prefix=prefix, keep_vars=keep_vars)
    return State(on_cpu(dict(found)), dict(getattr(found, "_metadata", {})))


def load(module: nn.Module, loading: Loading) -> tuple[list[str], list[str], list[str]]:
    """Load the module and its descendants, as ``nn.Module.load_state_dict`` does when it reaches this module.

    Returns the missing keys, the unexpected keys, and the errors.
    """
    prefix, entries, metadata, strict, missing, unexpected, errors = loading
    assign = metadata.get(prefix[:-1], {}).get(_ASSIGN, False)

    def visit(module: nn.Module, prefix: str, entries: dict[str, Any]) -> None:
        own = dict(metadata.get(prefix[:-1], {}))
        if assign:
            own[_ASSIGN] = True
        module._load_from_state_dict(entries, prefix, own, strict, missing, unexpected, errors)
        for name, child in module._modules.items():
            if child is not None:
                inside = f"{prefix}{name}."
                visit(child, inside, {key: value for key, value in entries.items() if key.startswith(inside)})
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys(missing, unexpected))

    visit(module, prefix, entries)
    return missing, unexpected, errors


def metadata_within(prefix: str, own: Mapping[str, Any]) -> Metadata:
    """The metadata of the state dict that is being loaded, for the module of that prefix and its descendants.

    torch passes each module its ``own`` part only. The descendants of a remote module need theirs too: the version of a
    BatchNorm decides whether ``num_batches_tracked`` may be missing. The whole metadata is a local variable of
    ``load_state_dict``, so it is read from that caller's frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_filename in _LOADERS and "metadata" in frame.f_locals):
        frame = frame.f_back
    found = None if frame is None else frame.f_locals["metadata"]
    whole: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    within = {name: dict(entry) for name, entry in whole.items() if f"{name}.".startswith(prefix)}
    return {**within, prefix[:-1]: dict(own)}


_LOADERS = [function.__code__.co_filename for function in (nn.Module.load_state_dict, load)]
