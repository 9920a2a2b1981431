"""The index of a checkpoint: its contents, their files, and whether they fit the objects to load them into.

A directory with this file is a checkpoint::

    {"format": "backhaul checkpoint", "version": 1,
     "data": "data-<32 hexadecimal digits>",          the directory of the files, beside the index
     "common": "common.pt",                           the file for everything that belongs to no worker
     "files": {"common.pt": 2310, "worker1.pt": 81204},     sizes in bytes
     "objects": {"model": {"kind": "model", "keys": {"0.weight": {"file": ..., "shape": ..., "dtype": ...}}},
                 "adam": {"kind": "optimizer", "groups": [2], "parameters": [{"file": ..., ...}, ...]},
                 "scheduler": {"kind": "state"}, "epoch": {"kind": "value"}}}

Pure: bytes in, structs out. The bytes may be damaged, or crafted to lead elsewhere. `decode` checks everything in an
`Index`, except that the files hold what it says.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec

from backhaul.errors import BackhaulError

FORMAT = "backhaul checkpoint"
VERSION = 1

_DATA = re.compile(r"data-[0-9a-f]{32}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.pt")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_SHOWN = 8

Size = Annotated[int, msgspec.Meta(ge=0)]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key of a model, or a parameter of an optimizer: the file with its value, and its shape and dtype."""

    file: str | None = None
    """None if there is nothing to save: a parameter for which the optimizer has no state."""
    shape: tuple[Size, ...] | None = None
    """None for a value that is not a tensor, and for an uninitialized parameter."""
    dtype: str | None = None


class Model(msgspec.Struct, frozen=True, tag_field="kind", tag="model"):
    """A module: the entries of its state dict, in their order."""

    keys: dict[str, Entry]


class Optimizer(msgspec.Struct, frozen=True, tag_field="kind", tag="optimizer"):
    """An optimizer: the number of parameters in each group, and all parameters in order."""

    groups: tuple[Size, ...]
    parameters: tuple[Entry, ...]


class State(msgspec.Struct, frozen=True, tag_field="kind", tag="state"):
    """Any other object with a state dict, which is in the common file."""


class Value(msgspec.Struct, frozen=True, tag_field="kind", tag="value"):
    """A plain value, in the common file."""


Object = Model | Optimizer | State | Value
K = TypeVar("K", Model, Optimizer, State, Value)


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint."""

    format: str = FORMAT
    version: int = VERSION
    data: str
    common: str
    files: dict[str, Size]
    objects: dict[str, Object]

    def of_kind(self, kind: type[K]) -> dict[str, K]:
        """The objects of one kind."""
        return {name: each for name, each in self.objects.items() if isinstance(each, kind)}


class _Head(msgspec.Struct):
    format: str
    version: int


# Made once, at import: msgspec crashes if two threads are the first to decode a type.
_head_decoder = msgspec.json.Decoder(_Head)
_index_decoder = msgspec.json.Decoder(Index)


def encode(index: Index) -> bytes:
    """The bytes of the file. Raises `BackhaulError` for an index that `decode` would refuse."""
    content = msgspec.json.encode(index) + b"\n"
    decode(content)
    return content


def decode(content: bytes) -> Index:
    """The index in these bytes. Raises `BackhaulError` if it is unusable."""
    try:
        head = _head_decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BackhaulError(f"it is damaged, or not the index of a checkpoint: {error}") from None
    if head.format != FORMAT:
        raise BackhaulError(f"it is not the index of a checkpoint: its format is {head.format!r}, not {FORMAT!r}")
    if head.version != VERSION:
        raise BackhaulError(
            f"it has version {head.version}, but this Backhaul reads version {VERSION}; "
            "install the Backhaul that wrote it, or a newer one"
        )
    try:
        index = _index_decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BackhaulError(f"it is damaged: {error}") from None
    wrong = _first_wrong(index)
    if wrong is not None:
        raise BackhaulError(f"it is damaged: {wrong}")
    return index


def is_data_name(name: str) -> bool:
    """Whether a data directory may have this name."""
    return _DATA.fullmatch(name) is not None


def file_name(worker: str, taken: Collection[str]) -> str:
    """A file name for a worker that is not taken, even on a file system that ignores case."""
    stem = _UNSAFE.sub("_", worker)[:128].lstrip(".-") or "worker"
    lowered = {name.lower() for name in taken}
    name, count = f"{stem}.pt", 1
    while name.lower() in lowered:
        name, count = f"{stem}-{count}.pt", count + 1
    return name


def model_problems(saved: Model, found: Mapping[str, Entry]) -> list[str]:
    """Why a saved model cannot be loaded into a module with the keys ``found``."""
    problems = []
    missing = [key for key in found if key not in saved.keys]
    unexpected = [key for key in saved.keys if key not in found]
    if missing:
        problems.append(f"the checkpoint has no {_listed(missing)}")
    if unexpected:
        problems.append(f"the module has no {_listed(unexpected)}")
    for key, entry in saved.keys.items():
        if key in found and not _fits(entry, found[key]):
            there, mine = _shape(entry), _shape(found[key])
            problems.append(f"{key!r} has shape {there} in the checkpoint and {mine} in the module")
    return problems


def optimizer_problems(saved: Optimizer, groups: Sequence[int], found: Sequence[Entry]) -> list[str]:
    """Why a saved optimizer cannot be loaded into one with these group sizes and parameters."""
    if len(saved.parameters) != len(found):
        return [f"the checkpoint has {len(saved.parameters)} parameters and the optimizer {len(found)}"]
    if saved.groups != tuple(groups):
        return [
            f"the parameter groups of the checkpoint have {_counts(saved.groups)} parameters, "
            f"those of the optimizer {_counts(groups)}"
        ]
    return [
        f"parameter {number} has shape {_shape(entry)} in the checkpoint and {_shape(other)} in the optimizer"
        for number, (entry, other) in enumerate(zip(saved.parameters, found, strict=True))
        if not _fits(entry, other)
    ]


def shortened(problems: Sequence[str]) -> str:
    """The problems as lines of a message; only the first ones if there are many."""
    lines = list(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return "".join(f"\n  {line}" for line in lines)


def _first_wrong(index: Index) -> str | None:
    if not is_data_name(index.data):
        return f"{index.data!r} is not the name of a data directory"
    for name in index.files:
        if _FILE.fullmatch(name) is None:
            return f"{name!r} is not the name of a file in the data directory"
    if index.common not in index.files:
        return f"the file {index.common!r} is not listed"
    for name, item in index.objects.items():
        entries: Collection[Entry] = ()
        if isinstance(item, Model):
            entries = item.keys.values()
            if any(entry.file is None for entry in entries):
                return f"a key of {name!r} has no file"
        elif isinstance(item, Optimizer):
            entries = item.parameters
            if sum(item.groups) != len(entries):
                return f"the groups of {name!r} have {sum(item.groups)} parameters, but there are {len(entries)}"
        for entry in entries:
            if entry.file is not None and (entry.file not in index.files or entry.file == index.common):
                return f"the file {entry.file!r} of {name!r} is not one of those listed for it"
    return None


def _fits(saved: Entry, found: Entry) -> bool:
    return saved.shape is None or found.shape is None or saved.shape == found.shape


def _shape(entry: Entry) -> str:
    return str(list(entry.shape or ()))


def _counts(groups: Sequence[int]) -> str:
    return " + ".join(map(str, groups)) or "no"


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more
