"""The entries of a parameter group, without its parameters: copying, comparing, and changes between them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from operator import is_
from typing import Any

import torch

Entries = dict[str, Any]

Change = tuple[Entries, list[str]]
"""New values of entries, and the names of removed entries."""

OF_PARAMETERS = frozenset({"params", "param_names"})
"""The keys of a group that list its parameters, and are not entries."""

_NOTHING = object()
_NEVER = repeat(_NOTHING)


def entries_of(group: Mapping[str, Any]) -> Entries:
    """A copy of a group's entries. Later changes of the group do not reach it."""
    return {name: copied(value) for name, value in group.items() if name not in OF_PARAMETERS}


def change(known: Entries, group: Mapping[str, Any]) -> Change | None:
    """The change that turns ``known`` into the group's entries; None if they are the same."""
    same_objects = sum(map(is_, map(known.get, group, _NEVER), group.values()))
    if same_objects == len(known) == len(group) - ("params" in group) - ("param_names" in group):
        return None
    new: Entries = {}
    for name, value in group.items():
        before = known.get(name, _NOTHING)
        if before is value or name in OF_PARAMETERS:
            continue
        if before is _NOTHING or not same(before, value):
            new[name] = copied(value)
    gone = [] if group.keys() >= known.keys() else [name for name in known if name not in group]
    return (new, gone) if new or gone else None


def apply(change: Change, to: dict[str, Any]) -> None:
    """Change entries, or a whole group. The new values are copies."""
    new, gone = change
    to.update(copied(new))
    for name in gone:
        to.pop(name, None)


def copied(value: Any) -> Any:
    """A copy of the value, with copies of its tensors and containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is list:
        return list(map(copied, value))
    if type(value) is tuple:
        items = tuple(map(copied, value))
        return value if all(map(is_, items, value)) else items  # `change` is quick if the objects are the same
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types. Tensors are compared by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    try:
        return bool(one == other)
    except Exception:  # a type without a single answer, such as an array, counts as changed
        return False
