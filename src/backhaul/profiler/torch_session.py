"""TorchSession: torch's profiler for one process, over all its threads; and a probe that watches the interpreter.

Torch has only one profiler for each process. It must record every thread (``profile_all_threads``), because the
functions of peers run on threads that existed before it started. Any thread may start and stop it.

The **probe** is a thread that repeatedly sleeps for a few milliseconds. Going to sleep gives up its processor once.
If the thread gave it up more often, another thread held the interpreter when the probe woke. Lateness alone would prove
nothing: on a busy machine every thread is late.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from backhaul.errors import MisuseError

PROBE_SECONDS = 0.005
_QUIET = "KINETO_LOG_LEVEL"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEMORY_EVERY = 4
"""Memory is sampled at every fourth sample of the interpreter."""


# Torch has one profiler in a process.
_claiming = threading.Lock()
_active: weakref.ref[TorchSession] | None = None
"""The session that is recording in this process."""


class TorchSession:
    """One recording of torch's profiler. Call `warm` if wanted, then `record`, then `stop`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        options = dict(options)
        activities = options.pop("activities", None)
        config = dict(options.pop("experimental_config", None) or {})
        if options.get("with_stack"):
            config.setdefault("verbose", True)  # otherwise operators have no stacks
        self._action = ProfilerAction.NONE
        self._began = False
        self.recorded = False
        self._make = partial(
            profile,
            activities=None if activities is None else [ProfilerActivity.__members__[name] for name in activities],
            schedule=lambda step: self._action,
            experimental_config=_ExperimentalConfig(**{**config, "profile_all_threads": True}),
            acc_events=True,  # else torch warns that it forgets the previous cycle, though there is none
            **options,
        )
        self._profile: profile | None = None

    def warm(self) -> None:
        self._go(ProfilerAction.WARMUP)

    def record(self) -> None:
        self._go(ProfilerAction.RECORD)

    def stop(self) -> bool:
        """End the recording. False if there is none, because another profiler was started in this process."""
        if self._began and self._profile is not None:
            self._began = False
            self._profile.stop()
        self._release()
        self.recorded = self._start() > 0
        return self.recorded

    def _start(self) -> int:
        """When the recording began, in nanoseconds of Unix time; 0 if there is none, since reading it would crash."""
        inner = None if self._profile is None else self._profile.profiler
        return 0 if inner is None or inner.kineto_results is None else inner.kineto_results.trace_start_ns()

    def _go(self, action: ProfilerAction) -> None:
        self._action = action
        with _quiet():
            if self._profile is None:
                self._claim()
                self._profile = self._make()
                self._profile.record_steps = False  # a profile of the cluster has its own steps
                self._profile.start()
                self._began = True
            else:
                self._profile.step()

    def _claim(self) -> None:
        global _active
        with _claiming:
            if _active is not None and _active() is not None:
                raise MisuseError(
                    "torch has only one profiler for each process, and another profile of the cluster uses it in this "
                    "process: end it first"
                )
            _active = weakref.ref(self)

    def _release(self) -> None:
        global _active
        with _claiming:
            if _active is not None and _active() is self:
                _active = None

    def trace(self) -> bytes:
        """Kineto's own trace as JSON; empty if nothing was recorded."""
        if self._profile is None or not self.recorded:
            return b""
        handle, path = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            self._profile.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()
        finally:
            os.unlink(path)

    def operators(self, most: int) -> tuple[Iterator[dict[str, Any]], int]:
        """The operators as plain data, and how many were dropped. Times are nanoseconds of Unix time."""
        if self._profile is None or not self.recorded:
            return iter(()), 0
        start = self._start()
        found: Any = self._profile.events()  # type: ignore[no-untyped-call]
        events = [event for event in found or () if not getattr(event, "is_python_function", False)]
        return (_plain(event, start) for event in events[:most]), max(0, len(events) - most)


def _plain(event: Any, start: int) -> dict[str, Any]:
    return {
        "name": event.name,
        "native": event.device_resource_id,
        "device": event.device_type.name,
        "begin": start + round(event.time_range.start * 1000),
        "end": start + round(event.time_range.end * 1000),
        "cpu": event.cpu_time_total,
        "self_cpu": event.self_cpu_time_total,
        "device_time": event.device_time_total,
        "self_device": event.self_device_time_total,
        "memory": event.cpu_memory_usage,
        "device_memory": event.device_memory_usage,
        "flops": event.flops or 0,
        "shapes": json.dumps(event.input_shapes) if event.input_shapes else "",
        "stack": list(event.stack or ()),
        "inner": event.cpu_parent is not None,
        "annotation": bool(event.is_user_annotation),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without Kineto's output: Kineto writes to stderr at start and stop unless told before its first use."""
    if _QUIET in os.environ:
        yield
        return
    os.environ[_QUIET] = "99"
    try:
        yield
    finally:
        os.environ.pop(_QUIET, None)


class Probe:
    """Samples every few milliseconds whether the interpreter is free, and memory if asked to."""

    def __init__(self, name: str, *, memory: bool) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._looks: list[tuple[int, int]] = []
        self._sizes: list[tuple[int, int, int]] = []
        self._thread = threading.Thread(target=self._run, name=f"backhaul-{name}-profile", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, Any]:
        """Looks: when, and how many nanoseconds the probe waited for the GIL. Sizes: when, resident, on devices."""
        looks, self._looks = self._looks, []
        sizes, self._sizes = self._sizes, []
        return {"looks": [list(look) for look in looks], "sizes": [list(size) for size in sizes]}

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            given_up = _given_up()
            due = time.perf_counter_ns() + round(PROBE_SECONDS * 1e9)
            time.sleep(PROBE_SECONDS)
            now = time.perf_counter_ns()
            held = _given_up() - given_up > 1
            self._looks.append((now, max(1, now - due) if held else 0))
            if self._memory and turn % _MEMORY_EVERY == 0:
                self._sizes.append((now, _resident(), _on_devices()))
            turn += 1


def _given_up() -> int:
    """How many times this thread has given up its processor to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _on_devices() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
