"""Torch's profilers: which one records this thread, how to start one for a peer, and how to add events to results.

Torch does not say which profile is on, or with which options, and has no hook for reading one. So three methods
of its profile classes are wrapped: starting notes the profile, reading grafts the events of other
workers, and writing a trace does the same. Profiles without calls are unchanged.

A thread has at most one profiler. The `Listener`s of a thread share one: whenever one of them begins or ends, all of
them get what was recorded so far.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as _kineto

from backhaul.compat import records_cuda
from backhaul.ids import WorkerInfo
from backhaul.remote_profile import chrome
from backhaul.remote_profile.rows import Report, Span, graft, report_of

try:
    from torch.autograd import profiler_legacy as _legacy
except ImportError:  # deprecated by torch: without it, only the callers' own events are recorded
    _legacy = None  # type: ignore[assignment]

is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler records this thread. Checked for each call."""

_SPANS = "_backhaul_spans"
_parse: Callable[[Any], list[Any]] | None = None if _legacy is None else _legacy._parse_legacy_records
# Torch's profilers are patched once, for all workers of the process.
_installing = threading.Lock()
_installed = False  # by the first worker


class Options(NamedTuple):
    """What to record of an operation besides its time."""

    shapes: bool = False
    memory: bool = False
    stack: bool = False
    flops: bool = False
    modules: bool = False
    cuda: bool = False

    def config(self) -> Any:
        """Torch's object for these options."""
        made: Any = _legacy.profile(  # type: ignore[no-untyped-call]
            record_shapes=self.shapes,
            profile_memory=self.memory,
            with_stack=self.stack,
            with_flops=self.flops,
            with_modules=self.modules,
            use_cuda=self.cuda and torch.cuda.is_available(),
        )
        return made.config()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.profile: weakref.ref[Any] | None = None
        """The profile that was started last on this thread."""
        self.searched = False
        """Whether the search for a profile started before `install` found none."""
        self.reading: Any = None
        """The profile whose results are being read."""
        self.listeners: list[Listener] = []
        self.running = False
        """Whether the profiler of this thread belongs to the listeners."""


# Torch's profilers belong to a thread or to the process, and know no worker.
_here = _Thread()
_latest: weakref.ref[Any] | None = None  # the profile of the process that was started last


class Listener:
    """Records operations of this worker, on one thread at a time, for a report."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.spans: dict[int, Span] = {}
        self._began = 0
        self._records: dict[int, list[Any]] = {}

    def begin(self) -> None:
        """Record this thread from now on. Does nothing if another profiler already does."""
        if _legacy is None or (is_on() and not _here.running):
            return
        if _here.running:
            _cut()
        self._began = self._began or time.perf_counter_ns()
        _here.listeners.append(self)
        _resume()

    def end(self) -> None:
        """Stop recording. Call on the same thread."""
        if self not in _here.listeners:
            return
        try:
            if _here.running:
                _cut()
        finally:
            _here.listeners.remove(self)
        if _here.listeners and not is_on():
            _resume()

    def add(self, lists: Sequence[Sequence[Any]]) -> None:
        """Add events that the profiler has recorded, by thread."""
        for records in lists:
            if records:
                self._records.setdefault(records[0].thread_id(), []).extend(records)

    def events(self) -> list[Any]:
        """The recorded events, as torch's events, without those of other workers."""
        if _parse is None or not self._records:
            return []
        return _parse([_without_orphans(records) for records in self._records.values()])

    def report(self, me: WorkerInfo) -> Report:
        """The recorded events, as plain data."""
        return report_of(self.events(), self.spans, me, self._began or time.perf_counter_ns())


def _without_orphans(records: Sequence[Any]) -> list[Any]:
    """The records without ends of blocks that began before recording; torch does not expect such ends."""
    open: set[tuple[int, int]] = set()
    kept = []
    for record in records:
        kind = record.kind()
        if kind == "push":
            open.add((record.handle(), record.node_id()))
        if kind != "pop" or (record.handle(), record.node_id()) in open:
            kept.append(record)
    return kept


def _cut() -> None:
    """Stop the profiler of this thread's listeners, and give them its recording."""
    if any(listener.options.cuda for listener in _here.listeners) and torch.cuda.is_available():
        torch.cuda.synchronize()
    _here.running = False  # even if the function stopped the profiler itself, which raises here
    records = torch.autograd._disable_profiler_legacy()
    for listener in _here.listeners:
        listener.add(records)


def _resume() -> None:
    torch.autograd._enable_profiler_legacy(_wanted().config())
    _here.running = True


def _wanted() -> Options:
    """The union of what this thread's listeners want."""
    return Options(*map(any, zip(*(listener.options for listener in _here.listeners), strict=True)))


def watching() -> tuple[list[dict[int, Span]], Options | None]:
    """The destinations for spans of this thread's calls, and what to record of them. None if nothing is recorded."""
    if _here.running:
        return [listener.spans for listener in _here.listeners], _wanted()
    kind = torch._C._autograd._profiler_type()
    if kind not in (torch._C._profiler.ActiveProfilerType.LEGACY, torch._C._profiler.ActiveProfilerType.KINETO):
        return [], None  # only emits ranges for an external profiler
    profile = _profile()
    if profile is None:
        return [], None
    options = Options(
        profile.record_shapes,
        profile.profile_memory,
        profile.with_stack,
        profile.with_flops,
        profile.with_modules,
        records_cuda(profile),
    )
    return [vars(profile).setdefault(_SPANS, {})], options


def _profile() -> Any:
    """The profile that records this thread, as far as it can be determined."""
    found = None if _here.profile is None else _here.profile()
    if found is None and _latest is not None:
        found = _latest()  # torch passes a thread's profiler on to its helper threads
    if found is None and not _here.searched:
        _here.searched = True
        found = _find()
        _here.profile = None if found is None else weakref.ref(found)
    return found


def _find() -> Any:
    """A profile that was started before this process had a worker."""
    kinds = (_kineto.profile,) if _legacy is None else (_kineto.profile, _legacy.profile)
    for each in gc.get_objects():
        if issubclass(type(each), kinds):
            state = vars(each)
            if state.get("entered") and state.get("kineto_results") is None and state.get("function_events") is None:
                return each
    return None


def install() -> None:
    """Make torch's profiles show the work of other workers for calls. Calling it again changes nothing."""
    global _installed
    with _installing:
        if _installed:
            return
        _replace(_kineto.profile, "_start_trace", _starting)
        _replace(_kineto.profile, "_parse_kineto_results", _reading_kineto)
        _replace(_kineto.profile, "export_chrome_trace", _exporting)
        if _legacy is not None:
            _replace(_legacy.profile, "_start_trace", _starting)
            _replace(_legacy.profile, "__exit__", _ending_legacy)
            _replace(_legacy, "_parse_legacy_records", _reading_legacy)
        _installed = True


def _replace(holder: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace a function by ``new``, which gets the old function as its first argument."""
    old = getattr(holder, name)

    @functools.wraps(old)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return new(old, *args, **kwargs)

    setattr(holder, name, replaced)


def _starting(start: Callable[..., Any], profile: Any) -> Any:
    global _latest
    if _here.running:
        _cut()  # a recorded function starts its own profile, which takes precedence
    _here.profile = _latest = weakref.ref(profile)
    _here.searched = False
    return start(profile)


def _reading_kineto(read: Callable[..., list[Any]], profile: Any, *args: Any, **kwargs: Any) -> list[Any]:
    events = read(profile, *args, **kwargs)
    graft(events, vars(profile).get(_SPANS, {}))
    return events


def _ending_legacy(end: Callable[..., Any], profile: Any, *args: Any) -> Any:
    _here.reading = profile
    try:
        return end(profile, *args)
    finally:
        _here.reading = None


def _reading_legacy(read: Callable[[Any], list[Any]], records: Any) -> list[Any]:
    events = read(records)
    if _here.reading is not None:
        graft(events, vars(_here.reading).get(_SPANS, {}))
    return events


def _exporting(export: Callable[..., Any], profile: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    done = export(profile, path, *args, **kwargs)
    spans = vars(profile).get(_SPANS)
    if spans and getattr(profile, "kineto_results", None) is not None:
        chrome.extend(path, spans)
    return done
