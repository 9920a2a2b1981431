"""The cost of being ready for observers, with nothing switched on."""

from __future__ import annotations

import ast
import dis
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import backhaul
from backhaul import autograd, rpc
from backhaul.bench import bare
from backhaul.testing import InProcessCluster

PACKAGE = Path(backhaul.__file__).parent
MOST = 0.02
"""The limit for observation points: their share of all bytecodes of a call, or of a step, at both ends together."""

ONCE_A_THREAD = {"agent/activity new_note", "agent/activity __init__"}
"""For a slow request, another thread takes the lead."""

LEFT = r"if .*observers( or | and |:)|profiler_is_on\(\)|with .*activity\.waits|\.handles = "


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ("if self.observers:\n    emit()\nwork()", "pass\nwork()"),
        ("if observers or x:\n    emit()", "if False or x:\n    emit()"),
        ("if self._agent.observers:\n    emit()\nelse:\n    other()", "other()"),
        ("frame = told() if self._observers else handle()", "frame = handle()"),
        ("observers = serving.observers", "pass"),
        ("if profiler_is_on():\n    return_()\nwork()", "pass\nwork()"),
        ("tracing = self.execution.tracing", "tracing = None"),
        ("with self.activity.waits(lambda: 1), lock:\n    work()", "with lock:\n    work()"),
        ("with self.activity.waits(lambda: 1):\n    work()", "work()"),
        ("self.record.note_wait(1, 2, 3)", "pass"),
        ("local.record.ran.append((1, 2))", "pass"),
        ("began = perf_counter_ns()", "pass"),
        ("note.handles = (peer, envelope, monotonic())", "pass"),
        ("slot = Slot(1, thread=get_ident())", "slot = Slot(1)"),
        ("slot.since = now", "pass"),
        ("if self.connection.active:\n    work()", "if self.connection.active:\n    work()"),
        ("self.observers.add(meter)", "self.observers.add(meter)"),
    ],
)
def test_observing_code_is_stripped(source: str, left: str) -> None:
    tree, count = bare.strip(source)
    assert ast.unparse(tree) == left
    assert count == (source != left)


def test_notes_about_threads_are_stripped() -> None:
    source = """
def wait(self):
    waiting = self.activity.waiting
    thread = get_ident()
    before = waiting.get(thread)
    waiting[thread] = Wait(before)
    try:
        return work()
    finally:
        if before is None:
            del waiting[thread]
        else:
            waiting[thread] = before
"""
    tree, count = bare.strip(source)
    text = ast.unparse(tree).replace("    pass\n    pass\n    pass\n    pass\n", "")
    assert text == "def wait(self):\n    try:\n        return work()\n    finally:\n        pass"
    assert count == 4


@pytest.mark.long
def test_the_stripped_package_contains_no_observing_code() -> None:
    counts: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        if "bench" in path.parts:
            continue
        tree, count = bare.strip(path.read_text())
        compile(tree, str(path), "exec")
        counts[str(path.relative_to(PACKAGE))] = count
        text = ast.unparse(tree)
        assert not re.search(LEFT, text), path
    for hot in (
        *("agent/outgoing.py", "agent/calling.py", "agent/reading.py", "agent/leading.py", "agent/serving.py"),
        *("agent/execution.py", "agent/translation.py", "autograd/engine.py", "autograd/progress.py"),
    ):
        assert counts[hot] > 2, hot


def nothing() -> None:
    pass


def test_a_call_enters_no_observing_code_and_a_pass_only_notes_its_waits() -> None:
    """With nothing switched on. Counted at both ends, on all threads of the workers."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            for each in bare.LOOKING:
                if f"/backhaul/{each}" in name:
                    found[f"{each} {frame.f_code.co_name}"] += 1

    threading.setprofile(count)  # for the threads of the workers
    try:
        with InProcessCluster(2) as workers, workers[0].as_current():
            rpc.rpc_sync("worker1", nothing)
            x = torch.ones(3, requires_grad=True)
            found.clear()
            sys.setprofile(count)
            try:
                for _ in range(20):
                    rpc.rpc_sync("worker1", nothing)
                of_calls = dict(found)
                found.clear()
                for _ in range(5):
                    with autograd.context() as context:
                        autograd.backward(context, [rpc.rpc_sync("worker1", torch.tanh, args=(x,)).sum()])
                of_passes = dict(found)
            finally:
                sys.setprofile(None)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert set(of_calls) <= ONCE_A_THREAD
    assert set(of_passes) <= ONCE_A_THREAD | {"agent/activity waits"}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_being_ready_to_be_observed_takes_under_2_percent_of_all_bytecodes() -> None:
    for work, (looking, everything) in bare.count().items():
        assert 0 < looking / everything < MOST, work


def test_only_checks_and_notes_count_as_observing() -> None:
    source = """
def work(self):
    if self.observers:
        self.observers.emit(1)
    return self.frame if self.ready else None
"""
    names: dict[str, Any] = {}
    code = compile(source, "work.py", "exec")
    exec(code, names)
    looks = bare.instructions_that_look(names["work"].__code__, bare.spans_that_look(source))
    found = [each.opname for each in dis.get_instructions(names["work"]) if looks[each.offset // 2]]
    if sys.version_info >= (3, 11):
        assert [name for name in found if name.startswith("LOAD")] == ["LOAD_FAST", "LOAD_ATTR"]
        assert sum("JUMP" in name for name in found) == 1
    else:
        assert len(found) == 3


def test_a_measurement_warms_up_first() -> None:
    calls: list[float] = []
    taken = bare.measure(lambda: calls.append(time.perf_counter()), 0.02, 0.05)
    assert 0 < taken < 0.02
    assert calls[-1] - calls[0] >= 0.05
