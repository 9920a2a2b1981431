"""profile: a block that is profiled on all workers at once. It drives the parts of the other workers (`session`).

    with profile() as prof:      introduce, align the clocks, arm, record  ──► the window begins
        …                        prof.step()
                                 the window ends  ──► stop and fetch, on every worker; disarm
    prof.export_chrome_trace("trace.json")

The holder controls the workers with ordinary calls that are not recorded. They run outside the autograd context that
the block may be in. A worker that becomes unreachable is left out, with a warning.
"""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from backhaul import worker as workers
from backhaul.errors import MisuseError, OptionError
from backhaul.ids import WorkerInfo
from backhaul.profiler.averages import Averages, average
from backhaul.profiler.gathered import Gathered, Operator
from backhaul.profiler.holder import Holder
from backhaul.profiler.replay import Told, replay
from backhaul.profiler.summary import Summary, summarise
from backhaul.profiler.trace import chrome_trace
from backhaul.worker import Worker

CLOCK_ROUNDS = 20
MAX_EVENTS = 1_000_000
_ROWS_AT_ONCE = 5_000
_FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
_PASSED = (*_FLAGS, "experimental_config", "post_processing_timeout_s")
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

Schedule = Callable[[int], ProfilerAction]


class profile:
    """Profiles the time of a ``with`` block on all workers, with torch's profiler and Backhaul's own events.

    - ``workers``: ``"all"``, or names, ranks, `WorkerInfo` or handles. This worker always takes part.
    - ``activities``: of `torch.profiler.ProfilerActivity`; by default all that the process supports.
    - ``schedule``, ``on_trace_ready``: as in torch. Call `step` after each step; all workers step together.
    - ``clock_rounds``: the number of round trips for aligning each clock.
    - ``max_events``: beyond this number, a worker's Backhaul events and torch operators are dropped, with a warning.
    - all other arguments are options of `torch.profiler.profile`. ``experimental_config`` is a dict of its fields.

    The results are available after the block, or in ``on_trace_ready``: `export_chrome_trace`, `key_averages`, `table`,
    `events`, `summary`. An exception in the block propagates; everything recorded before it is available.

    Raises `MisuseError` in a federation, and if a worker is already being profiled. Not thread-safe.
    """

    def __init__(
        self,
        workers: Literal["all"] | Iterable[Any] = "all",
        activities: Iterable[ProfilerActivity] | None = None,
        *,
        schedule: Schedule | None = None,
        on_trace_ready: Callable[[profile], None] | None = None,
        clock_rounds: int = CLOCK_ROUNDS,
        max_events: int = MAX_EVENTS,
        **torch_profiler_options: Any,
    ) -> None:
        self._named = workers if isinstance(workers, str) else list(workers)
        if isinstance(self._named, str) and self._named != "all":
            raise OptionError(f'workers={self._named!r} must be "all" or a list of workers, as in [{self._named!r}]')
        self._options = _checked(activities, torch_profiler_options)
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._clock_rounds = _positive("clock_rounds", clock_rounds)
        self._max_events = _positive("max_events", max_events)
        self._holder: Holder | None = None
        self._used = False
        self._action = ProfilerAction.NONE
        self._step = 0
        self._gathered: Gathered | None = None
        self._told: dict[str, Told] | None = None

    def __enter__(self) -> profile:
        if self._used:
            raise MisuseError("a profile is for one block: make a new one with backhaul.profiler.profile(...)")
        worker = workers.current()
        if not worker.options.policy.shows:
            raise MisuseError(
                "the members of a federation do not share internal data, so they cannot be profiled together; "
                "use torch.profiler on each of them"
            )
        if torch.autograd._profiler_enabled():
            raise MisuseError(
                "a torch profiler already runs on this thread, and torch has only one for each process; end it"
            )
        action = ProfilerAction.RECORD if self._schedule is None else self._schedule(0)
        self._used = True
        self._holder = Holder(worker, self._members(worker), self._options, self._clock_rounds, self._max_events)
        try:
            self._go(action)
        except BaseException:
            self._holder.close()
            self._holder = None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        holder = self._require_running("leave")
        try:
            if self._action in _RECORDING:
                if holder.marked:
                    holder.mark(f"ProfilerStep#{self._step}")
                self._collect()
        finally:
            self._holder = None
            holder.close()

    def step(self) -> None:
        """Begin the next step, on all workers."""
        holder = self._require_running("step")
        holder.mark(f"ProfilerStep#{self._step}")
        self._step += 1
        if self._schedule is None:
            return
        action = self._schedule(self._step)
        if self._action is ProfilerAction.RECORD_AND_SAVE or (self._action in _RECORDING and action not in _RECORDING):
            self._collect()
            self._action = ProfilerAction.NONE
        self._go(action)

    def _go(self, action: ProfilerAction) -> None:
        holder = self._require_running("step")
        if action is ProfilerAction.WARMUP and self._action is ProfilerAction.NONE:
            holder.warm()
        elif action in _RECORDING and self._action not in _RECORDING:
            holder.record()
        self._action = action

    def _collect(self) -> None:
        self._gathered, self._told = self._require_running("collect").collect(), None
        self._warn_of_gaps(self._gathered)
        if self._on_trace_ready is not None:
            self._on_trace_ready(self)

    def _warn_of_gaps(self, gathered: Gathered) -> None:
        dropped = {each.worker: each.dropped for each in gathered.recordings if each.dropped}
        if dropped:
            listed = ", ".join(f"{count} of worker {name!r}" for name, count in dropped.items())
            text = f"the profile is incomplete: max_events={self._max_events} was reached, and {listed} were dropped"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        disturbed = [each.worker for each in gathered.recordings if each.disturbed]
        if disturbed:
            listed = ", ".join(map(repr, disturbed))
            text = (
                f"the profile has no operators of worker {listed}: another torch.profiler was started in that process "
                "during the block, and torch has only one for each process"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _require_running(self, what: str) -> Holder:
        if self._holder is None:
            raise MisuseError(f"cannot {what}: the profile runs only inside its with block")
        return self._holder

    def _members(self, worker: Worker) -> list[WorkerInfo]:
        if self._named == "all":
            return worker.get_worker_infos()
        found = {worker.info.id: worker.info}
        for each in self._named:
            info = each if isinstance(each, str | int | WorkerInfo) else getattr(each, "info", each)
            if not isinstance(info, str | int | WorkerInfo):
                raise OptionError(f"{each!r} is neither a name nor a rank nor a handle of a worker")
            info = worker.get_worker_info(info)
            found[info.id] = info
        return [found[rank] for rank in sorted(found)]

    # Results.

    def _result(self) -> tuple[Gathered, dict[str, Told]]:
        if self._gathered is None:
            raise MisuseError(
                "the profile has no result: the block has not ended"
                if self._holder is not None or not self._used
                else "the profile has no result: its schedule never recorded a step"
            )
        if self._told is None:
            gathered = self._gathered
            self._told = {
                each.worker: replay(
                    each.threads,
                    each.worker,
                    gathered.begin,
                    gathered.end,
                    gathered.home_thread if each.worker == gathered.home else None,
                )
                for each in gathered.recordings
            }
        return self._gathered, self._told

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write one trace of all workers, for Perfetto or chrome://tracing. A name that ends in .gz is compressed."""
        # Not escaped, because Perfetto shows escape sequences literally.
        name = os.fspath(path)
        trace = self.chrome_trace()
        rows = trace.pop("traceEvents")
        with gzip.open(name, "wb") if name.endswith(".gz") else open(name, "wb") as file:
            # A few rows at a time: encoding all at once would hold the GIL for seconds.
            file.write(json.dumps(trace, ensure_ascii=False).encode()[:-1] + b', "traceEvents": [')
            for at in range(0, len(rows), _ROWS_AT_ONCE):
                part = json.dumps(rows[at : at + _ROWS_AT_ONCE], ensure_ascii=False).encode()[1:-1]
                file.write((b",\n" if at else b"") + part)
            file.write(b"]}")

    def chrome_trace(self) -> dict[str, Any]:
        """The content that `export_chrome_trace` writes."""
        return chrome_trace(*self._result())

    def events(self) -> list[Operator]:
        """The torch operators of all workers, in order of time."""
        return list(self._result()[0].operators)

    def key_averages(self, group_by_input_shape: bool = False, group_by_stack_n: int = 0) -> Averages:
        """The operators of all workers, summed by name and worker."""
        return average(
            self._result()[0].operators, group_by_input_shape=group_by_input_shape, group_by_stack_n=group_by_stack_n
        )

    def table(self, sort_by: str | None = "self_cpu_time_total", row_limit: int = 100) -> str:
        """The averages as text."""
        return self.key_averages().table(sort_by, row_limit)

    def summary(self) -> Summary:
        """Where the time of each worker went, and the longest chain of a step. Prints as a table."""
        return summarise(*self._result())

    def __repr__(self) -> str:
        state = "running" if self._holder is not None else "done" if self._gathered is not None else "not used"
        return f"<backhaul.profiler.profile, {state}>"


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r} must be a positive number")
    return value


def _checked(activities: Iterable[ProfilerActivity] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as plain data."""
    for name, value in options.items():
        if name not in _PASSED:
            raise OptionError(f"{name} is not an option of a profile of the cluster; there are {', '.join(_PASSED)}")
        if name in _FLAGS and not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} must be True or False")
    config = options.get("experimental_config")
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(
            "experimental_config must be a dict of its fields, as in {'verbose': True}: torch's object cannot be sent"
        )
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    if activities is not None:
        found["activities"] = [activity.name for activity in activities]
    return found
