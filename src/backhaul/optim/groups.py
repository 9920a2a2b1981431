"""Sorts the parameters that the user gives into groups, and by the workers on which they live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from backhaul.errors import OptionError
from backhaul.ids import WorkerInfo
from backhaul.refs.rref import RRef

_EXPECTED = "give an RRef to a parameter, a parameter of this worker, or a tuple (name, one of these)"


class GroupPart(NamedTuple):
    """One worker's part of a parameter group, as it is sent to that worker."""

    number: int
    """The index of the group among all groups."""
    params: list[RRef[torch.Tensor]]
    names: list[str] | None
    entries: dict[str, Any]
    """The entries that the user has given."""


class Group(NamedTuple):
    """A parameter group whose parameters are on any workers."""

    params: list[RRef[torch.Tensor]]
    names: list[str] | None
    entries: dict[str, Any]

    def parts(self, number: int, otherwise: WorkerInfo) -> dict[WorkerInfo, GroupPart]:
        """The parts of the group by worker, in the order of the parameters. An empty group is on ``otherwise``."""
        found: dict[WorkerInfo, GroupPart] = {}
        for place, param in enumerate(self.params):
            part = found.setdefault(param.owner(), self._part(number))
            part.params.append(param)
            if self.names is not None and part.names is not None:
                part.names.append(self.names[place])
        return found or {otherwise: self._part(number)}

    def _part(self, number: int) -> GroupPart:
        return GroupPart(number, [], None if self.names is None else [], self.entries)


def groups_from(params_rref: Any) -> tuple[list[Group], bool]:
    """The groups, and whether the user gave groups. Raises `OptionError` for values that are not parameters."""
    items = _listed(params_rref)
    if not items:
        raise OptionError(f"an optimizer needs parameters, and params_rref is empty: {_EXPECTED}")
    if isinstance(items[0], Mapping):
        groups = [group_from(item) for item in items]
        require_alike([group.names is not None for group in groups])
        return groups, True
    return [group_from({"params": items})], False


def group_from(given: Any) -> Group:
    """One group, from a mapping with ``params``."""
    if not isinstance(given, Mapping):
        raise OptionError(
            f"a parameter group must be a dict with the parameters under 'params', not {given!r:.100}: give either "
            "groups or parameters"
        )
    if "params" not in given:
        raise OptionError("a parameter group has no 'params'")
    params = given["params"]
    items = [params] if isinstance(params, RRef | torch.Tensor) else _listed(params)
    names = [item[0] for item in items if isinstance(item, tuple)]
    if names and len(names) != len(items):
        raise OptionError("some parameters of a group have names and others do not: name all of them, or none")
    entries = {name: value for name, value in given.items() if name not in ("params", "param_names")}
    require_constants(entries)
    return Group([_rref(item) for item in items], names or None, entries)


def require_constants(entries: Mapping[str, Any]) -> None:
    """Raise `OptionError` for options that require grad, which a remote step cannot honour.

    In one process, a differentiable step gives gradients to such options.
    """
    for name, value in entries.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise OptionError(
                f"{name} requires grad, and no gradient comes back through a remote step: give {name}.detach()"
            )


def require_alike(named: Sequence[bool]) -> None:
    if any(named) and not all(named):
        raise OptionError("the parameters of some groups have names and those of others do not: name all, or none")


def rrefs_from(params_rref: Any) -> list[RRef[torch.Tensor]]:
    """References to the parameters of an iterable, or to a single parameter."""
    if isinstance(params_rref, RRef | torch.Tensor):
        return [_rref(params_rref)]
    return [_rref(item) for item in _listed(params_rref)]


def _listed(items: Any) -> list[Any]:
    if isinstance(items, set | frozenset):
        raise OptionError("parameters need an order, which a set does not have: give a list")
    if isinstance(items, RRef | torch.Tensor | Mapping) or not isinstance(items, Iterable):
        raise OptionError(f"{type(items).__name__} is not a list of parameters: {_EXPECTED}, in a list")
    return list(items)


def _rref(item: Any) -> RRef[torch.Tensor]:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        item = item[1]
    if isinstance(item, torch.Tensor):
        return RRef(item)
    if not isinstance(item, RRef):
        raise OptionError(f"{item!r:.100} cannot be optimized: {_EXPECTED}")
    return item
