"""Meter: what a worker's calls and passes cost, counted only while someone is interested.

A meter observes its worker. It is off until someone asks for its figures (`figures`) or holds it on (`hold`), and it
switches off 30 seconds after the last question. No timer does that: the first event after that time switches the
meter off, so an idle worker is not woken for it. A meter that is switched on again starts from zero, with a new
``since``.

Both ends count a call. The caller counts it as ``sent``, from the request to the value of its reply. The callee counts
it as ``served``, from the decoded request to the reply, including the time after an ``async def`` function gave up its
thread.

The time of a thread in a pass is split without overlaps: in runs, at gates, and waiting for other workers. A waiting
thread runs other work in the meantime; such runs are not part of the wait.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.naming import short_name
from backhaul.agent.observing import (
    Began,
    Came,
    Ended,
    Event,
    FinishedLate,
    GateOpens,
    GateWaits,
    Invoked,
    Issued,
    PassBegan,
    PassEnded,
    Resumes,
    Returned,
    RunBegan,
    RunEnded,
    Sent,
    Settled,
    Starts,
    Stops,
    Waits,
)

BOUNDS = (
    *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of the latency buckets, in seconds. One more bucket holds longer latencies."""

SECONDS_ON = 30.0
"""How long the meter stays on after a question."""

MOST_FUNCTIONS = 256
OTHERS = "(others)"
"""Stands for the functions beyond the first `MOST_FUNCTIONS`."""

_RECENT = 64
_MOST_STINTS = 256  # runs, gates or waits of one pass that are kept individually
_MOST_OPEN = 1 << 16  # unfinished calls that are remembered; some end without an event
_CALLS = ("Call", "Create", "Fetch")
_FETCH = "to_here"


class _Calls:
    """The calls of one function with one peer in one direction."""

    __slots__ = ("buckets", "count", "failed", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)


class _Served:
    """A request that is being handled."""

    __slots__ = ("began", "call", "failed", "function", "over", "peer")

    def __init__(self, peer: str, call: int, began: int, function: str) -> None:
        self.peer = peer
        self.call = call
        self.began = began
        self.function = function
        self.failed = False
        self.over = False


class _Pass:
    """This worker's part in a pass. Times are those of events."""

    __slots__ = ("backward", "began", "context", "ended", "failed", "gates", "runs", "started_here", "waits")

    def __init__(self, context: int, backward: int, began: int, started_here: bool) -> None:
        self.context = context
        self.backward = backward
        self.began = began
        self.ended: int | None = None
        self.failed = False
        self.started_here = started_here
        self.runs: list[dict[str, Any]] = []
        self.gates: list[dict[str, Any]] = []
        self.waits: list[dict[str, Any]] = []


class _Stint:
    """What a thread does in a pass: a ``run``, a ``gate`` or a ``wait``."""

    __slots__ = ("entry", "kind", "of")

    def __init__(self, kind: str, of: _Pass, entry: dict[str, Any]) -> None:
        self.kind = kind
        self.of = of
        self.entry = entry


class Meter:
    """See the module's docstring. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # a finalizer may interrupt the holder and emit an event
        # All guarded by _lock:
        self._stop: Callable[[], None] | None = None
        self._holds = 0
        self._until = 0  # on the clock of events
        self._clear()

    def _clear(self) -> None:
        self._since = time.time()
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._calls: dict[tuple[str, str, str], _Calls] = {}
        self._functions: set[str] = set()
        self._asked: dict[int, Issued] = {}  # by call number
        self._handled: dict[int, list[_Served | None]] = {}  # by thread, the innermost last; None for other messages
        self._open: dict[tuple[str, int], _Served] = {}  # by caller and number
        self._frames_sent = 0
        self._frames_received = 0
        self._recent: deque[_Pass] = deque(maxlen=_RECENT)
        self._passes: dict[int, _Pass] = {}  # those in _recent, by id
        self._pass_count = 0
        self._pass_failed = 0
        self._pass_seconds = 0.0
        self._split = {"run": 0.0, "gate": 0.0, "wait": 0.0}
        self._starters: dict[int, _Pass] = {}  # by the thread that started the pass
        self._stints: dict[int, list[_Stint]] = {}  # by thread, the innermost last
        self._turned: dict[int, int] = {}  # by thread, when its innermost stint began or was resumed

    # On and off.

    @property
    def on(self) -> bool:
        return self._stop is not None

    def hold(self) -> Callable[[], None]:
        """Keep the meter on; returns a function that ends this hold."""
        held = True

        def release() -> None:
            nonlocal held
            with self._lock:
                self._holds -= held
                held = False

        with self._lock:
            self._holds += 1
            self._switch_on()
        return release

    def _switch_on(self) -> None:
        if self._stop is None:
            self._clear()
            self._stop = self._agent.observers.add(self._observe)

    def figures(self) -> dict[str, Any]:
        """The figures counted since the meter was switched on, as plain data. The first question switches it on."""
        with self._lock:
            self._until = max(self._until, time.perf_counter_ns() + int(SECONDS_ON * 1e9))
            self._switch_on()
            return self._figures()

    def figures_if_on(self) -> dict[str, Any] | None:
        """The same, without switching the meter on or keeping it on; None if it is off."""
        with self._lock:
            if self._stop is None or (not self._holds and time.perf_counter_ns() > self._until):
                return None
            return self._figures()

    def _figures(self) -> dict[str, Any]:
        return {
            "since": self._since,
            "on": True,
            "bounds": list(BOUNDS),
            "calls": [
                {
                    "function": function,
                    "peer": peer,
                    "direction": direction,
                    "count": calls.count,
                    "failed": calls.failed,
                    "seconds": calls.seconds,
                    "buckets": list(calls.buckets),
                }
                for (function, peer, direction), calls in list(self._calls.items())
            ],
            "passes": {
                "count": self._pass_count,
                "failed": self._pass_failed,
                "seconds": self._pass_seconds,
                "runs_seconds": self._split["run"],
                "gate_seconds": self._split["gate"],
                "wait_seconds": self._split["wait"],
            },
            "recent": [self._describe(each) for each in list(self._recent)],
            "frames": {"sent": self._frames_sent, "received": self._frames_received},
        }

    def _describe(self, each: _Pass) -> dict[str, Any]:
        return {
            "context": each.context,
            "backward": each.backward,
            "started_here": each.started_here,
            "began": self._unix(each.began),
            "ended": None if each.ended is None else self._unix(each.ended),
            "failed": each.failed,
            "runs": [dict(run) for run in each.runs],
            "gates": [dict(gate) for gate in each.gates],
            "waits": [dict(wait) for wait in each.waits],
        }

    def _unix(self, at: int) -> float:
        return (at + self._offset) / 1e9

    def _observe(self, event: Event) -> None:
        act = _ACTS.get(type(event))
        if act is None:
            return
        with self._lock:
            if self._stop is None:
                return
            if event.at > self._until and not self._holds:
                self._stop()
                self._stop = None
                return
            act(self, event)

    # Calls that this worker makes.

    def _on_issued(self, event: Issued) -> None:
        if event.is_call:
            if len(self._asked) >= _MOST_OPEN:
                del self._asked[next(iter(self._asked))]
            self._asked[event.call] = event

    def _on_settled(self, event: Settled) -> None:
        issued = self._asked.pop(event.call, None)
        if issued is not None:
            self._count(short_name(issued.what), issued.peer, "sent", event.at - issued.at, event.failed)

    def _count(self, function: str, peer: str, direction: str, nanoseconds: int, failed: bool) -> None:
        if function not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                function = OTHERS
            else:
                self._functions.add(function)
        key = (function, peer, direction)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = _Calls()
        seconds = nanoseconds / 1e9
        calls.count += 1
        calls.failed += failed
        calls.seconds += seconds
        calls.buckets[bisect_left(BOUNDS, seconds)] += 1

    # Calls that this worker serves.

    def _on_began(self, event: Began | Starts) -> None:
        served = None
        if event.kind in _CALLS:
            served = _Served(event.peer, event.call, event.at, _FETCH if event.kind == "Fetch" else "")
            if event.kind == "Call":  # another thread may finish it
                if len(self._open) >= _MOST_OPEN:
                    del self._open[next(iter(self._open))]
                self._open[event.peer, event.call] = served
        if event.kind:
            self._frames_received += type(event) is Began  # the message that starts a job was counted on arrival
        self._handled.setdefault(event.thread, []).append(served)

    def _on_invoked(self, event: Invoked) -> None:
        served = self._innermost(event.thread)
        if served is not None and not served.function:
            handling = self._agent.activity.handled_by(event.thread)
            served.function = short_name(event.what, None if handling is None else handling.message)

    def _on_returned(self, event: Returned) -> None:
        served = self._innermost(event.thread)
        if served is not None:
            served.failed = event.failed

    def _innermost(self, thread: int) -> _Served | None:
        handled = self._handled.get(thread)
        return handled[-1] if handled else None

    def _on_ended(self, event: Ended | Stops) -> None:
        handled = self._handled.get(event.thread)
        if not handled or (type(event) is Stops and not event.began):
            return  # the call began before the meter was on, or never
        served = handled.pop()
        if not handled:
            del self._handled[event.thread]
        if served is not None and not served.over and (event.replies or (served.peer, served.call) not in self._open):
            self._finish(served, event.at, served.failed or event.failed)

    def _on_finished_late(self, event: FinishedLate) -> None:
        served = self._open.get((event.peer, event.call))
        if served is not None:
            self._finish(served, event.at, event.failed)

    def _finish(self, served: _Served, at: int, failed: bool) -> None:
        served.over = True
        self._open.pop((served.peer, served.call), None)
        self._count(served.function or "(unknown)", served.peer, "served", at - served.began, failed)

    # Frames.

    def _on_sent(self, event: Sent) -> None:
        self._frames_sent += event.frames

    def _on_came(self, event: Came) -> None:
        self._frames_received += event.frames

    # Passes.

    def _on_pass_began(self, event: PassBegan) -> None:
        self._starters[event.thread] = self._add(_Pass(event.context, event.backward, event.at, True))

    def _add(self, new: _Pass) -> _Pass:
        if len(self._recent) == _RECENT:
            self._passes.pop(self._recent[0].backward, None)
        self._recent.append(new)
        self._passes[new.backward] = new
        return new

    def _on_pass_ended(self, event: PassEnded) -> None:
        over = self._starters.pop(event.thread, None)
        if over is None:
            return  # the pass began before the meter was on
        while event.thread in self._stints:
            self._leave(event.thread, event.at)
        over.ended = event.at
        over.failed = event.failed
        self._pass_count += 1
        self._pass_failed += event.failed
        self._pass_seconds += (event.at - over.began) / 1e9

    def _on_run_began(self, event: RunBegan) -> None:
        mine = self._passes.get(event.backward)
        if mine is None:
            mine = self._add(_Pass(event.context, event.backward, event.at, False))
        if not mine.started_here:
            mine.ended = None
        entry = self._entry(event, sources=len(event.sources), thread=event.thread)
        self._enter(event.thread, _Stint("run", mine, entry), event.at, mine.runs)

    def _on_run_ended(self, event: RunEnded) -> None:
        mine = self._passes.get(event.backward)
        # A gate that ends with an error has no end event.
        while stints := self._stints.get(event.thread):
            kind = stints[-1].kind
            if kind == "wait":
                return  # the run began before the meter was on
            self._leave(event.thread, event.at)
            if kind == "run":
                break
        if mine is not None and not mine.started_here and all(run["ended"] for run in mine.runs):
            mine.ended = event.at

    def _on_gate_waits(self, event: GateWaits) -> None:
        mine = self._passes.get(event.backward)
        if mine is not None and self._stints.get(event.thread):
            entry = self._entry(event, source=event.source)
            self._enter(event.thread, _Stint("gate", mine, entry), event.at, mine.gates)

    def _on_gate_opens(self, event: GateOpens) -> None:
        stints = self._stints.get(event.thread)
        if stints and stints[-1].kind == "gate":
            self._leave(event.thread, event.at)

    def _on_waits(self, event: Waits) -> None:
        mine = self._starters.get(event.thread)
        if mine is not None and event.slot is None and event.thread not in self._stints:
            self._enter(event.thread, _Stint("wait", mine, self._entry(event)), event.at, mine.waits)

    def _on_resumes(self, event: Resumes) -> None:
        stints = self._stints.get(event.thread)
        if stints and stints[-1].kind == "wait" and event.slot is None:
            self._leave(event.thread, event.at)

    def _entry(self, event: Event, **more: Any) -> dict[str, Any]:
        return {"began": self._unix(event.at), "ended": None, **more}

    def _enter(self, thread: int, stint: _Stint, at: int, kept: list[dict[str, Any]]) -> None:
        """A thread begins a stint. A wait that it interrupts resumes afterwards, as a new wait."""
        stints = self._stints.setdefault(thread, [])
        if stints:
            self._add_time(thread, stints[-1], at)
            if stints[-1].kind == "wait":
                stints[-1].entry["ended"] = self._unix(at)
        stints.append(stint)
        self._turned[thread] = at
        if len(kept) < _MOST_STINTS:
            kept.append(stint.entry)

    def _leave(self, thread: int, at: int) -> None:
        stints = self._stints[thread]
        stint = stints.pop()
        self._add_time(thread, stint, at)
        stint.entry["ended"] = self._unix(at)
        if not stints:
            del self._stints[thread], self._turned[thread]
        elif stints[-1].kind == "wait":
            outer = stints[-1]
            outer.entry = {"began": self._unix(at), "ended": None}
            if len(outer.of.waits) < _MOST_STINTS:
                outer.of.waits.append(outer.entry)

    def _add_time(self, thread: int, stint: _Stint, at: int) -> None:
        self._split[stint.kind] += (at - self._turned[thread]) / 1e9
        self._turned[thread] = at


_ACTS: dict[type[Event], Callable[[Meter, Any], None]] = {
    Issued: Meter._on_issued,
    Settled: Meter._on_settled,
    Began: Meter._on_began,
    Starts: Meter._on_began,
    Invoked: Meter._on_invoked,
    Returned: Meter._on_returned,
    Ended: Meter._on_ended,
    Stops: Meter._on_ended,
    FinishedLate: Meter._on_finished_late,
    Sent: Meter._on_sent,
    Came: Meter._on_came,
    PassBegan: Meter._on_pass_began,
    PassEnded: Meter._on_pass_ended,
    RunBegan: Meter._on_run_began,
    RunEnded: Meter._on_run_ended,
    GateWaits: Meter._on_gate_waits,
    GateOpens: Meter._on_gate_opens,
    Waits: Meter._on_waits,
    Resumes: Meter._on_resumes,
}
