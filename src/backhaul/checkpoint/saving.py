"""Saving: every worker writes its part, then the index is swapped."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from backhaul.checkpoint import files, portions
from backhaul.checkpoint.index import Index, Model, Object, Optimizer, State, Value, file_name
from backhaul.checkpoint.objects import Dealt, Sorted, deal, is_spread, sizes_of, sort
from backhaul.checkpoint.parts import Metadata, here, on_all
from backhaul.checkpoint.portions import Account, GroupOptions
from backhaul.errors import BackhaulError, MisuseError
from backhaul.ids import WorkerInfo

COMMON = "common.pt"

_log = logging.getLogger(__name__)


def save(objects: Mapping[str, Any], path: str | os.PathLike[str], *, gather: bool = False) -> None:
    """Save objects under their names to the directory ``path``, replacing the checkpoint there.

    - ``objects``: modules that are, or contain, `RemoteModule`s; `DistributedOptimizer`s; anything else that has
      ``state_dict()`` and ``load_state_dict()``; and plain values: tensors, numbers, strings, containers of these.
    - ``gather``: this worker writes the tensors of all workers to its disk. Without it, every worker writes its own,
      and must see ``path``.

    The old checkpoint stays until the new one is completely on the disk: if this raises, or any process dies, the old
    one is unchanged. Nobody may train the objects in the meantime. Raises `PartialError`, with the errors of the
    workers, and `MisuseError` if something cannot be saved, or if another process is saving to ``path``.
    """
    directory = os.path.abspath(os.fsdecode(path))
    found = sort(objects)
    dealt = deal(found)
    with files.locked(directory):
        try:
            files.clean(directory)
        except BackhaulError as error:
            raise MisuseError(f"{error}. To save here, remove it first") from None
        try:
            files.commit(directory, _write(directory, found, dealt, list(objects), gather))
        finally:
            _clean(directory)


def _clean(directory: str) -> None:
    """Remove unused files. A failure must neither fail the save, which is already decided, nor hide its error."""
    try:
        files.clean(directory)
    except (OSError, BackhaulError) as error:
        _log.warning("cannot remove unused files in the checkpoint %r: %s", directory, error)


def _write(directory: str, found: Sorted, dealt: Dealt, names: list[str], gather: bool) -> Index:
    """Write all files; returns the index for them."""
    data = files.new_data(directory)
    inside = os.path.join(directory, data)
    file_of: dict[WorkerInfo, str] = {}
    for worker in dealt.portions:
        file_of[worker] = file_name(worker.name, [COMMON, *file_of.values()])
    written = _gathered(inside, dealt, file_of) if gather else _spread(directory, inside, dealt, file_of)
    sizes = {file_of[worker]: size for worker, (size, _) in written.items()}
    accounts = {worker: account for worker, (_, account) in written.items()}
    common = {
        "values": found.values,
        "states": {name: each.state_dict() for name, each in found.states.items()},
        "optimizers": {name: _common(name, found, dealt, accounts) for name in found.optimizers},
        "metadata": _metadata(dealt, accounts),
    }
    sizes[COMMON] = files.write(inside, COMMON, common)
    kinds = _kinds(found, dealt, accounts)
    return Index(data=data, common=COMMON, files=sizes, objects={name: kinds[name] for name in names})


Written = dict[WorkerInfo, tuple[int, Account]]


def _spread(directory: str, inside: str, dealt: Dealt, file_of: Mapping[WorkerInfo, str]) -> Written:
    """Every worker writes its file, all at once."""
    written = on_all(
        f"saving the checkpoint {directory!r} (the previous one stays)",
        {worker: (portions.write, (inside, file_of[worker], portion)) for worker, portion in dealt.portions.items()},
    )
    for worker, (size, _) in written.items():
        try:
            files.check(inside, file_of[worker], size)
        except OSError as error:
            raise BackhaulError(
                f"worker {worker.name!r} has written {file_of[worker]!r}, but this worker does not see it: {error}. "
                "Save to a file system that all workers share, or with gather=True"
            ) from error
    return written


def _gathered(inside: str, dealt: Dealt, file_of: Mapping[WorkerInfo, str]) -> Written:
    """This worker writes all files, one after the other, so that it never holds the tensors of two workers at once."""
    written: Written = {}
    for worker, portion in dealt.portions.items():
        name = file_of[worker]
        if worker == here():
            written[worker] = portions.write(inside, name, portion)
            continue
        what = f"gathering the part of {worker.name!r} for the checkpoint (the previous one stays)"
        content, account = on_all(what, {worker: (portions.collect, (name, portion))})[worker]
        written[worker] = files.write(inside, name, content), account
        del content
    return written


def _kinds(found: Sorted, dealt: Dealt, accounts: Mapping[WorkerInfo, Account]) -> dict[str, Object]:
    """The index's description of each object."""
    models: dict[str, Model] = {name: Model({}) for name in found.models}
    looks = {worker: account.looks for worker, account in accounts.items()}
    for name, keys in dealt.keys(looks):
        models[name].keys.update(keys)
    optimizers = {
        name: Optimizer(tuple(sizes_of(optimizer)), tuple(dealt.parameters(name, looks)))
        for name, optimizer in found.optimizers.items()
    }
    states, values = {name: State() for name in found.states}, {name: Value() for name in found.values}
    return {**models, **optimizers, **states, **values}


def _metadata(dealt: Dealt, accounts: Mapping[WorkerInfo, Account]) -> dict[str, Metadata]:
    found: dict[str, Metadata] = {}
    for part, metadata in dealt.in_order({worker: account.metadata for worker, account in accounts.items()}):
        found.setdefault(part.name, {}).update(metadata)
    return found


def _common(name: str, found: Sorted, dealt: Dealt, accounts: Mapping[WorkerInfo, Account]) -> dict[str, Any]:
    """The common state of an optimizer's parts."""
    optimizer = found.optimizers[name]
    said = list(dealt.of_optimizer(name, {worker: account.common for worker, account in accounts.items()}))
    groups: GroupOptions = [dict(group) for group in said[0][2].groups] if said else []
    if is_spread(optimizer):
        optimizer._refresh({worker: common.groups for worker, _, common in said})
        groups = optimizer._group_options()
    extra: dict[Any, Any] = {}
    for _, _, common in said:
        extra = common.extra | extra
    return {"groups": groups, "extra": extra, "rest": said[0][2].rest if said else {}}
