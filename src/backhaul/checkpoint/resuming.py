"""Resume: a loop of training steps that continues when workers are lost.

A lost process takes its parts of models and optimizers with it. So a recovery waits for the process that
replaces it, lets the user build the objects again, and loads them:

- ``restore="all"``: everything is loaded from the last checkpoint, and the steps since then are repeated. The result is
  the same as without the loss, because the checkpoint includes the states of the random number generators.
- ``restore="lost"``: the lost worker's parts are loaded from the last checkpoint. The other workers keep their parts,
  which are copied from the old objects to the new ones, on each worker. Only the failed step is repeated. The parts
  then have different ages, and some workers may have done their part of the failed step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from backhaul import current_worker
from backhaul.agent.retrying import await_worker
from backhaul.checkpoint import files, portions
from backhaul.checkpoint.loading import load
from backhaul.checkpoint.objects import Dealt, Sorted, deal, is_spread, sort
from backhaul.checkpoint.parts import here, on_all
from backhaul.checkpoint.saving import save
from backhaul.errors import BackhaulError, MisuseError, OptionError, PartialError, WorkerLostError
from backhaul.ids import WorkerInfo

NOTE = "resume"
"""The name in the checkpoint for the progress of the run."""

Objects = dict[str, Any]
Step = Callable[[Objects, int], Any]


class _Progress:
    """The progress of a run: the values of the finished steps."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    @property
    def done(self) -> int:
        return len(self.values)


class _Made:
    """Objects that the user built, which worker holds which part, and in which process."""

    def __init__(self, objects: Objects) -> None:
        if NOTE in objects:
            raise OptionError(f"the name {NOTE!r} is reserved for Resume: give the object another name")
        self.objects = objects
        self.found: Sorted = sort(objects)
        self.dealt: Dealt = deal(self.found)
        self.processes = {worker: _process(worker) for worker in self.dealt.portions if worker != here()}

    def lost(self) -> set[WorkerInfo]:
        """The workers whose processes have been replaced since."""
        return {worker for worker, process in self.processes.items() if _process(worker) != process}


class Resume:
    """Runs training steps, saves checkpoints, and continues after workers are lost.

    - ``path``: the directory of the checkpoint. If it holds one, the run continues from there.
    - ``build()``: makes the objects, as `save` takes them, and puts them on workers. It is called at the start and
      after each loss.
    - ``every``: the number of steps between two checkpoints.
    - ``restore``: ``"all"`` loads all objects from the last checkpoint and repeats the steps since, exactly.
      ``"lost"`` loads only the lost worker's parts, keeps the rest, and repeats the failed step.
    - ``replace(name)``: starts another process in the place of a lost worker, as `Cluster.restart` does. Without it,
      the run waits for a replacement, such as one from ``backhaul run --max-restarts``.
    - ``patience``: seconds to wait for a replacement.
    - ``most``: how many losses in a row, without a new checkpoint in between, the run recovers from.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        build: Callable[[], Mapping[str, Any]],
        *,
        every: int = 1,
        restore: Literal["all", "lost"] = "all",
        replace: Callable[[str], Any] | None = None,
        patience: float = 300.0,
        most: int = 10,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"Resume: every={every!r} must be a number of steps, at least 1")
        if restore not in ("all", "lost"):
            raise OptionError(f"Resume: restore={restore!r} must be 'all' or 'lost'")
        self.path = path
        self.losses: list[BackhaulError] = []
        """The losses that the run has recovered from."""
        self._build = build
        self._every = every
        self._restore = restore
        self._replace = replace
        self._patience = patience
        self._most = most

    def run(self, step: Step, steps: int) -> list[Any]:
        """Run ``step(objects, number)`` for the numbers 0 to ``steps - 1``; returns the values of all steps.

        Values must be plain: numbers, strings, tensors. After a loss, steps may run again with other objects, so keep
        no reference to the objects elsewhere. Raises the error of a step if its cause is not the loss of a worker, and
        `WorkerLostError` if a worker does not come back, or is lost too many times.
        """
        made: _Made | None = None
        progress = _Progress([])
        in_a_row = 0
        while True:
            try:
                if made is None:
                    made, progress = self._start()
                while progress.done < steps:
                    progress.values.append(step(made.objects, progress.done))
                    if progress.done % self._every == 0 or progress.done >= steps:
                        self._save(made, progress)
                        in_a_row = 0
                return progress.values[:steps]
            except BackhaulError as error:
                names = self._missing(error, made)
                in_a_row += 1
                if not names or in_a_row > self._most:
                    raise
                self.losses.append(error)
            # Outside the handler, because the error's traceback keeps the old objects alive.
            self._await(names)
            try:
                made, progress = self._recovered(made, progress)
            except BackhaulError as error:
                if not self._missing(error, None):
                    raise
                made = None  # lost again: restart the recovery

    # Objects.

    def _start(self) -> tuple[_Made, _Progress]:
        """The objects as in the checkpoint. Without a checkpoint: as built, and saved as the first one."""
        made = _Made(dict(self._build()))
        if files.read_index_if_any(os.path.abspath(os.fsdecode(self.path))) is None:
            progress = _Progress([])
            self._save(made, progress)
            return made, progress
        return made, self._load(made, {*made.processes, here()})

    def _load(self, made: _Made, workers: set[WorkerInfo]) -> _Progress:
        """Load the checkpoint into the objects and into the random number generators of these workers."""
        found = load(self.path, made.objects)
        if NOTE not in found:
            raise MisuseError(
                f"the checkpoint {os.fsdecode(self.path)!r} was not saved by Resume: load it in "
                "build() with checkpoint.load(), and give Resume a directory of its own"
            )
        note = found.pop(NOTE)
        made.objects.update(found)
        _set_generators(note["generators"], workers)
        return _Progress(note["values"])

    def _save(self, made: _Made, progress: _Progress) -> None:
        note = {"values": progress.values, "generators": _generators({*made.processes, here()})}
        save({**made.objects, NOTE: note}, self.path)

    def _recovered(self, old: _Made | None, progress: _Progress) -> tuple[_Made, _Progress]:
        if old is None or self._restore == "all":
            return self._start()
        lost = old.lost()
        if not lost:
            return old, progress  # only a connection was lost, and no process: nothing has changed
        new = _Made(dict(self._build()))
        self._load(new, lost)
        _carry(old, new, lost)
        return new, progress

    # Workers.

    def _missing(self, error: BackhaulError, made: _Made | None) -> set[str]:
        """The names of the workers that the error is about, or that are lost even if it is about something else."""
        names = set(_names_in(error))
        if not names and made is not None:
            names = {worker.name for worker in made.processes if not _answers(worker)}
            names |= {worker.name for worker in made.lost()}
        return names - {here().name}

    def _await(self, names: set[str]) -> None:
        deadline = time.monotonic() + self._patience
        for name in sorted(names):
            if self._replace is not None and not _answers(name):
                self._replace(name)
            if not await_worker(current_worker.get().agent, name, deadline):
                raise WorkerLostError(
                    f"worker {name!r} did not come back within {self._patience:g} s", name
                ) from self.losses[-1]


def _names_in(error: BaseException) -> list[str]:
    if isinstance(error, WorkerLostError):
        return [error.worker] if error.worker else []
    if isinstance(error, PartialError):
        return [name for each in error.errors.values() for name in _names_in(each)]
    return []


def _process(worker: WorkerInfo) -> str:
    found: str = current_worker.get().agent.membership.find(worker).incarnation
    return found


def _answers(worker: WorkerInfo | str) -> bool:
    return await_worker(current_worker.get().agent, worker, 0.0)


# Random number generators.


def _generators(workers: set[WorkerInfo]) -> dict[str, Any]:
    found = on_all("reading the random number generators", dict.fromkeys(workers, (_get_generator, ())))
    return {worker.name: states for worker, states in found.items()}


def _set_generators(generators: Mapping[str, Any], workers: set[WorkerInfo]) -> None:
    known = {worker: (_set_generator, (generators[worker.name],)) for worker in workers if worker.name in generators}
    on_all("setting the random number generators", known)


def _get_generator() -> list[torch.Tensor]:
    """The states of this process's generators: for the CPU, and for its GPUs if the process uses any."""
    on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpus else ())]


def _set_generator(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


# What survives a loss.


def _carry(old: _Made, new: _Made, lost: set[WorkerInfo]) -> None:
    """Copy the values of the old objects to the new ones, on workers that are not lost."""
    on_all(
        "copying the values of workers that are not lost",
        {
            worker: (portions.carry, (portion, new.dealt.portions[worker]))
            for worker, portion in old.dealt.portions.items()
            if worker not in lost
        },
    )
    for name, optimizer in new.found.optimizers.items():
        if is_spread(optimizer):
            for group, before in zip(optimizer.param_groups, old.found.optimizers[name].param_groups, strict=True):
                group.update({key: value for key, value in before.items() if key not in ("params", "param_names")})
    for name, each in new.found.states.items():
        each.load_state_dict(old.found.states[name].state_dict())
    new.objects.update({name: old.objects[name] for name in new.found.values if name in old.objects})
