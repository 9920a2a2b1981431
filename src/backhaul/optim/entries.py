"""The entries of a parameter group, without its parameters: copied, compared, and what has changed in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Entries = dict[str, Any]

Change = tuple[Entries, list[str]]
"""New values of entries, and the names of those that are gone."""

OF_PARAMETERS = frozenset({"params", "param_names"})
"""What of a group is not one of its entries, but says whose they are."""


def entries_of(group: Mapping[str, Any]) -> Entries:
    """A copy of a group's entries that no change of the group reaches."""
    return {name: copied(value) for name, value in group.items() if name not in OF_PARAMETERS}


def change(known: Entries, group: Mapping[str, Any]) -> Change | None:
    """What has to happen to ``known`` for it to be as the group's entries; None if it is."""
    new = {
        name: copied(value)
        for name, value in group.items()
        if name not in OF_PARAMETERS and not (name in known and same(known[name], value))
    }
    gone = [name for name in known if name not in group]
    return (new, gone) if new or gone else None


def apply(change: Change, to: dict[str, Any]) -> None:
    """Change entries, or a whole group. What is put there is shared with nobody."""
    new, gone = change
    to.update(copied(new))
    for name in gone:
        to.pop(name, None)


def copied(value: Any) -> Any:
    """The value with tensors and containers of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types; tensors by their values."""
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
    except Exception:  # a type that does not tell, such as an array: it is taken for another value
        return False
