"""Portions: one worker's parts of the objects, and the work on them when a checkpoint is saved or loaded.

All of this runs on the worker that holds the portion. A load has two steps, so that all workers have read
and checked what they need before any of them changes anything: `prepare` leaves a `Reading` there, and `apply` uses it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from backhaul import current_worker
from backhaul.checkpoint import files
from backhaul.checkpoint.index import Entry
from backhaul.checkpoint.parts import Metadata, Part, described, here, load_state, metadata_below, state_of
from backhaul.errors import BackhaulError, MisuseError
from backhaul.rpc import RRef

Content = dict[str, dict[Any, Any]]
"""The content of a file: for each object, values by key, or the states of parameters by index."""

GroupOptions = list[dict[str, Any]]

_HERE = "here"  # instead of a file name, for values that are not saved


class Common(NamedTuple):
    """What the parts of an optimizer need besides the states of their parameters."""

    groups: GroupOptions
    extra: dict[Any, Any]
    """State that belongs to no parameter."""
    rest: dict[str, Any]
    """Entries of the state dict that are neither state nor groups."""


class OptimizerPart(NamedTuple):
    """The parameters of an optimizer that one worker holds."""

    name: str
    """The name of the object."""
    holder: Any
    """A reference to a `LocalOptimizer`, or an optimizer of this process that has all parameters."""
    indices: list[int]
    """The indices of its parameters among all parameters of the optimizer."""

    def shapes(self) -> list[Entry]:
        """Shapes and dtypes of its parameters."""
        if isinstance(self.holder, RRef):
            return [described(param) for param in self.holder.local_value().params]
        return [described(param) for group in self.holder.param_groups for param in group["params"]]

    def state(self) -> tuple[dict[int, Any], Common]:
        """The states of parameters, by index among all, and the rest."""
        rest: dict[str, Any] = {}
        if isinstance(self.holder, RRef):
            groups, state = self.holder.local_value().export()
        else:
            rest = dict(self.holder.state_dict())
            groups, state = rest.pop("param_groups"), rest.pop("state")
        places = range(len(self.indices))
        extra = {key: value for key, value in state.items() if key not in places}
        return {self.indices[place]: state[place] for place in places if place in state}, Common(groups, extra, rest)

    def load(self, states: Mapping[int, Any], common: Common) -> Any:
        """Load states of parameters, by index among all, and the rest."""
        state = {place: states[index] for place, index in enumerate(self.indices) if index in states} | common.extra
        if isinstance(self.holder, RRef):
            return self.holder.local_value().load(common.groups, state)
        # A copy, because torch keeps the tensors of a state dict, and these may belong to a file.
        whole = {"state": state, "param_groups": common.groups, **common.rest}
        return self.holder.load_state_dict(copy.deepcopy(whole))


class Portion(NamedTuple):
    """One worker's parts of the objects."""

    parts: list[Part]
    optimizers: list[OptimizerPart]

    def names(self) -> list[str]:
        """The names of the objects of the parts, then of the optimizer parts."""
        return [*(part.name for part in self.parts), *(part.name for part in self.optimizers)]


class Looks(NamedTuple):
    """The index entries for a portion: by part, and by optimizer part and its parameters."""

    parts: list[dict[str, Entry]]
    optimizers: list[list[Entry]]

    def files(self) -> list[str]:
        """The files that hold some of it."""
        entries = [entry for part in (*map(dict.values, self.parts), *self.optimizers) for entry in part]
        return list(dict.fromkeys(entry.file for entry in entries if entry.file is not None))


class Account(NamedTuple):
    """A worker's report on its saved portion. An entry has a file if it has a value in that file."""

    looks: Looks
    metadata: list[Metadata]
    """By part."""
    common: list[Common]
    """By optimizer part."""


def look(portion: Portion) -> Looks:
    """The index entries of the portion as it is, to compare with an index."""
    found = [state_of(part)[0] for part in portion.parts]
    return Looks(
        [{key: described(value) for key, value in values.items()} for values in found],
        [optimizer.shapes() for optimizer in portion.optimizers],
    )


def collect(name: str, portion: Portion) -> tuple[Content, Account]:
    """The content to save for the portion in the file ``name``, with tensors that can be sent."""
    content, account = _content(name, portion)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), content), account


def write(directory: str, name: str, portion: Portion) -> tuple[int, Account]:
    """Save the portion to a new file in a directory that the caller made; returns the file's size and the account."""
    if not os.path.isdir(directory):
        raise MisuseError(
            f"worker {here().name!r} does not see the directory {directory!r} to which the caller saves: save to a "
            "file system that all workers share, or with gather=True"
        )
    content, account = _content(name, portion)
    return files.write(directory, name, content), account


def _content(name: str, portion: Portion) -> tuple[Content, Account]:
    content: Content = {}
    account = Account(Looks([], []), [], [])
    for part in portion.parts:
        values, metadata = state_of(part)
        content.setdefault(part.name, {}).update(values)
        account.looks.parts.append({key: described(value, name) for key, value in values.items()})
        account.metadata.append(metadata)
    for optimizer in portion.optimizers:
        states, common = optimizer.state()
        content.setdefault(optimizer.name, {}).update(states)
        account.looks.optimizers.append(
            [
                Entry(name if index in states else None, shape.shape, shape.dtype)
                for index, shape in zip(optimizer.indices, optimizer.shapes(), strict=True)
            ]
        )
        account.common.append(common)
    return content, account


class Reading:
    """The values that a portion will get. Lives on the portion's worker between the two steps of a load."""

    def __init__(self, portion: Portion, wanted: Looks, metadata: list[Metadata], common: list[Common]) -> None:
        self._share = portion
        self._wanted = wanted
        self._metadata = metadata
        self._common = common
        self._parts: list[dict[Any, Any]] = [{} for _ in portion.parts]
        self._optimizers: list[dict[Any, Any]] = [{} for _ in portion.optimizers]

    def take(self, file: str, content: Mapping[str, Any]) -> None:
        """Pick the wanted values from the content of a file."""
        found = picked(file, content, self._share, self._wanted)
        for into, values in zip(chain(self._parts, self._optimizers), found, strict=True):
            into.update(values)

    def apply(self) -> dict[str, Any]:
        """Change the portion. Returns what the optimizers return."""
        for part, values, metadata in zip(self._share.parts, self._parts, self._metadata, strict=True):
            # The module does not copy values that are not tensors. Copy them here, so that it does not hold the file.
            kept = {key: copy.deepcopy(value) for key, value in values.items() if not isinstance(value, torch.Tensor)}
            load_state(part, values | kept, metadata)
        return {
            optimizer.name: optimizer.load(states, common)
            for optimizer, states, common in zip(self._share.optimizers, self._optimizers, self._common, strict=True)
        }


def carry(old: Portion, new: Portion) -> None:
    """Copy the values of the portion ``old`` to ``new``, which has the same objects, in this process."""
    content, account = _content(_HERE, old)
    metadata = [metadata_below(part, each) for part, each in zip(old.parts, account.metadata, strict=True)]
    reading = Reading(new, account.looks, metadata, account.common)
    reading.take(_HERE, content)
    reading.apply()


def picked(file: str, content: Mapping[str, Any], portion: Portion, wanted: Looks) -> list[dict[Any, Any]]:
    """The values from a file's content that the parts of a portion, then its optimizer parts, want."""
    found = []
    for part, entries in zip(portion.parts, wanted.parts, strict=True):
        found.append(pick(file, content, part.name, entries, tensors=True))
    for optimizer, states in zip(portion.optimizers, wanted.optimizers, strict=True):
        numbered = dict(zip(optimizer.indices, states, strict=True))
        found.append(pick(file, content, optimizer.name, numbered, tensors=False))
    return found


def pick(
    file: str, content: Mapping[str, Any], name: str, wanted: Mapping[Any, Entry], *, tensors: bool
) -> dict[Any, Any]:
    """The wanted values of an object in a file. Raises `BackhaulError` if they differ from the index."""
    damaged = f"the file {file!r} is damaged, or of another checkpoint"
    values = content.get(name, {})
    found = {}
    for key, entry in wanted.items():
        if entry.file != file:
            continue
        if not isinstance(values, dict) or key not in values:
            raise BackhaulError(f"{damaged}: it has no {key!r} of {name!r}")
        found[key] = values[key]
        is_said = described(values[key], file) if tensors else entry
        if is_said != entry:
            raise BackhaulError(
                f"{damaged}: {key!r} of {name!r} is {_named(is_said)} there but {_named(entry)} in the index"
            )
    return found


def prepare(
    directory: str,
    sizes: Mapping[str, int],
    portion: Portion,
    wanted: Looks,
    metadata: list[Metadata],
    common: list[Common],
) -> tuple[Any, dict[str, str]]:
    """Read the values that the portion will get. Returns a `Reading`, and the files not seen here, with the reasons.

    In a worker, the reading is returned as a reference.
    """
    reading = Reading(portion, wanted, metadata, common)
    unseen: dict[str, str] = {}
    for file in wanted.files():
        try:
            content = files.read(directory, file, sizes[file], mmap=True)
        except OSError as error:
            unseen[file] = f"{type(error).__name__}: {error}"
        else:
            reading.take(file, content)
    return reading if current_worker.get_or_none() is None else RRef(reading), unseen


def supply(reading: Any, file: str, content: Content) -> None:
    """Give a reading the content of a file that its worker does not see."""
    _reading(reading).take(file, content)


def apply(reading: Any) -> dict[str, Any]:
    return _reading(reading).apply()


def _reading(reading: Any) -> Reading:
    found: Reading = reading.local_value() if isinstance(reading, RRef) else reading
    return found


def _named(entry: Entry) -> str:
    return "no tensor" if entry.shape is None else f"{entry.dtype} of shape {list(entry.shape)}"
