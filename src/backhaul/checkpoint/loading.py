"""Loading: all workers first read and check what they need, and only then change their objects."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from backhaul.checkpoint import files, portions
from backhaul.checkpoint.index import (
    Entry,
    Index,
    Model,
    Object,
    Optimizer,
    State,
    Value,
    model_problems,
    optimizer_problems,
    shortened,
)
from backhaul.checkpoint.objects import Dealt, Sorted, deal, is_spread, sizes_of, sort
from backhaul.checkpoint.parts import Metadata, here, metadata_below, on_all
from backhaul.checkpoint.portions import Common, Looks, Portion, pick, picked
from backhaul.errors import BackhaulError, MisuseError
from backhaul.ids import WorkerInfo

T = TypeVar("T")

_TRIES = 10
_KINDS = {Model: "a model", Optimizer: "an optimizer", State: "another object with a state", Value: "a plain value"}


def load(path: str | os.PathLike[str], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load the checkpoint in the directory ``path`` into objects, in place; returns its plain values.

    ``objects`` are as in `save`, under the same names. They may live on other workers than when they were
    saved, or in one process. Objects of the checkpoint that are not given are skipped. Plain values in ``objects`` are
    not changed.

    Every worker reads the parts it needs; this worker sends them to a worker that does not see the files. Keys, shapes
    and numbers of parameters are checked, and everything is read, before anything changes. Raises FileNotFoundError if
    there is no checkpoint, `MisuseError` if it does not fit the objects, `BackhaulError` if it is damaged, and
    `PartialError`, naming the workers, if some could not read their parts or change their objects.
    """
    directory = os.path.abspath(os.fsdecode(path))
    found = sort(objects)
    dealt = deal(found)
    looks = on_all(
        "looking at the objects", {worker: (portions.look, (each,)) for worker, each in dealt.portions.items()}
    )
    ready = _from_current(directory, lambda index: _prepare(directory, index, found, dealt, looks))
    answers = on_all(
        f"loading the checkpoint {directory!r}",
        {worker: (portions.apply, (reading,)) for worker, reading in ready.readings.items()},
    )
    for name, optimizer in found.optimizers.items():
        if is_spread(optimizer):
            loaded = {worker: answer[name] for worker, answer in answers.items() if name in answer}
            optimizer._show_loaded(loaded, ready.content.optimizers[name].groups)
    for name, each in found.states.items():
        each.load_state_dict(ready.content.states[name])
    return ready.content.values


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything in the checkpoint in the directory ``path``, by name, as one process would have it.

    A model or optimizer appears as the state dict that it would have in one process. Needs no workers. Raises
    FileNotFoundError if there is no checkpoint, and `BackhaulError` if it is damaged.
    """
    directory = os.path.abspath(os.fsdecode(path))
    return _from_current(directory, lambda index: _read(directory, index))


def _from_current(directory: str, work: Callable[[Index], T]) -> T:
    """Call ``work`` with the index. Repeat if a save replaced the checkpoint, and so removed files, in the meantime."""
    for _ in range(_TRIES):
        index = files.read_index(directory)
        try:
            return work(index)
        except (OSError, BackhaulError):
            if files.read_index(directory).data == index.data:
                raise
    raise BackhaulError(f"the checkpoint {directory!r} is replaced faster than it can be read")


class _Content(NamedTuple):
    """The content of the common file."""

    values: dict[str, Any]
    states: dict[str, Any]
    optimizers: dict[str, Common]
    metadata: dict[str, Metadata]


class _Ready(NamedTuple):
    content: _Content
    readings: dict[WorkerInfo, Any]


def _prepare(directory: str, index: Index, found: Sorted, dealt: Dealt, looks: Mapping[WorkerInfo, Looks]) -> _Ready:
    """Check that the checkpoint fits the objects, and make all workers read it."""
    problems = _problems(index, found, dealt, looks)
    if problems:
        raise MisuseError(
            f"the checkpoint {directory!r} does not fit the objects, and nothing was loaded:{shortened(problems)}"
        )
    content = _content(directory, index)
    inside = os.path.join(directory, index.data)
    work = {}
    wanted = {}
    for worker, portion in dealt.portions.items():
        wanted[worker] = _wanted(index, portion, looks[worker])
        metadata = [metadata_below(part, content.metadata.get(part.name, {})) for part in portion.parts]
        common = [
            _common_for(worker, found.optimizers[part.name], content.optimizers[part.name])
            for part in portion.optimizers
        ]
        work[worker] = (portions.prepare, (inside, index.files, portion, wanted[worker], metadata, common))
    prepared = on_all(f"reading the checkpoint {directory!r} (nothing has been changed)", work)
    for worker, (reading, unseen) in prepared.items():
        for file, why in unseen.items():
            _supply(inside, index, worker, reading, file, why, dealt.portions[worker], wanted[worker])
    return _Ready(content, {worker: reading for worker, (reading, _) in prepared.items()})


def _problems(index: Index, found: Sorted, dealt: Dealt, looks: Mapping[WorkerInfo, Looks]) -> list[str]:
    """Why the checkpoint does not fit the objects."""
    problems = []
    kinds: list[tuple[type[Object], Iterable[str]]] = [
        (Model, found.models),
        (Optimizer, found.optimizers),
        (State, found.states),
        (Value, found.values),
    ]
    for kind, names in kinds:
        for name in names:
            saved = index.objects.get(name)
            if saved is None:
                has = ", ".join(map(repr, index.objects)) or "nothing"
                problems.append(f"there is no {name!r} in the checkpoint; it has {has}")
            elif not isinstance(saved, kind):
                problems.append(f"{name!r} is {_KINDS[type(saved)]} in the checkpoint but {_KINDS[kind]} here")
    if problems:
        return problems
    keys: dict[str, dict[str, Entry]] = {name: {} for name in found.models}
    for name, entries in dealt.keys(looks):
        keys[name].update(entries)
    models, optimizers = index.of_kind(Model), index.of_kind(Optimizer)
    for name, entries in keys.items():
        problems += [f"{name!r}: {each}" for each in model_problems(models[name], entries)]
    for name, optimizer in found.optimizers.items():
        wrong = optimizer_problems(optimizers[name], sizes_of(optimizer), dealt.parameters(name, looks))
        problems += [f"{name!r}: {each}" for each in wrong]
    return problems


def _content(directory: str, index: Index) -> _Content:
    """The content of the common file, checked against the index."""
    inside = os.path.join(directory, index.data)
    try:
        found = files.read(inside, index.common, index.files[index.common], mmap=False)
    except OSError as error:
        raise BackhaulError(f"the checkpoint {directory!r} is incomplete: {error}") from error

    def of_kind(kind: type, section: str) -> dict[str, Any]:
        names = [name for name, each in index.objects.items() if isinstance(each, kind)]
        content = found.get(section)
        if not isinstance(content, dict) or not content.keys() >= set(names):
            raise BackhaulError(f"the file {index.common!r} is damaged: some of its {section} are missing")
        return {name: content[name] for name in names}

    optimizers = of_kind(Optimizer, "optimizers")
    try:
        commons = {name: Common(each["groups"], each["extra"], each["rest"]) for name, each in optimizers.items()}
        sizes = {name: [len(group["params"]) for group in common.groups] for name, common in commons.items()}
    except (TypeError, KeyError) as error:
        raise BackhaulError(f"the file {index.common!r} is damaged: {error!r} in its optimizers") from None
    for name, each in index.objects.items():
        if isinstance(each, Optimizer) and sizes[name] != list(each.groups):
            raise BackhaulError(f"the file {index.common!r} is damaged: the groups of {name!r} differ from the index")
    return _Content(of_kind(Value, "values"), of_kind(State, "states"), commons, of_kind(Model, "metadata"))


def _wanted(index: Index, portion: Portion, look: Looks) -> Looks:
    """The index's entries for everything in a portion."""
    models, optimizers = index.of_kind(Model), index.of_kind(Optimizer)
    return Looks(
        [
            {key: models[part.name].keys[key] for key in entries}
            for part, entries in zip(portion.parts, look.parts, strict=True)
        ],
        [[optimizers[part.name].parameters[number] for number in part.indices] for part in portion.optimizers],
    )


def _common_for(worker: WorkerInfo, optimizer: Any, common: Common) -> Common:
    """The common state of an optimizer for one worker's part."""
    if not is_spread(optimizer):
        return common
    groups, extra = optimizer._split(common.groups, common.extra)[worker]
    return Common(groups, extra, {})


def _supply(
    inside: str, index: Index, worker: WorkerInfo, reading: Any, file: str, why: str, portion: Portion, wanted: Looks
) -> None:
    """Send a worker its values from a file that it does not see."""
    needs = f"worker {worker.name!r} needs the file {file!r} of the checkpoint but does not see it: {why}"
    if worker == here():
        raise BackhaulError(needs)
    try:
        content = files.read(inside, file, index.files[file], mmap=True)
    except OSError as error:
        raise BackhaulError(f"{needs}. This worker, {here().name!r}, does not see it either: {error}") from error
    needed: dict[str, dict[Any, Any]] = {}
    for name, values in zip(portion.names(), picked(file, content, portion, wanted), strict=True):
        needed.setdefault(name, {}).update(values)
    what = f"sending {worker.name!r} what it needs of {file!r} (nothing has been changed)"
    on_all(what, {worker: (portions.supply, (reading, file, needed))})


def _read(directory: str, index: Index) -> dict[str, Any]:
    inside = os.path.join(directory, index.data)
    common = _content(directory, index)
    try:
        contents = {
            file: files.read(inside, file, size, mmap=False)
            for file, size in index.files.items()
            if file != index.common
        }
    except OSError as error:
        raise BackhaulError(f"the checkpoint {directory!r} is incomplete: {error}") from error

    def values(name: str, entries: Mapping[Any, Entry], *, tensors: bool) -> dict[Any, Any]:
        found = {}
        for file, content in contents.items():
            found.update(pick(file, content, name, entries, tensors=tensors))
        return {key: found[key] for key in entries if key in found}

    found: dict[str, Any] = {}
    for name, saved in index.objects.items():
        if isinstance(saved, Model):
            found[name] = OrderedDict(values(name, saved.keys, tensors=True))
            found[name]._metadata = OrderedDict(common.metadata[name])
        elif isinstance(saved, Optimizer):
            states = values(name, dict(enumerate(saved.parameters)), tensors=False)
            groups, extra, rest = common.optimizers[name]
            found[name] = {"state": states | extra, "param_groups": groups, **rest}
        else:
            found[name] = common.states[name] if isinstance(saved, State) else common.values[name]
    return found
