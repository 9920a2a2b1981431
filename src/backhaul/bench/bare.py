"""bare: Backhaul without its observation points, to measure beside Backhaul as it is.

`strip` removes the observation points from a module's source: checks whether anything observes, traces or profiles,
notes of what each thread handles and waits for, notes of waits and runs. The rest computes the same. `entrant` is a
process that loads Backhaul stripped, or as it is, forks workers, and does the work it is ordered to do.

The process must not load any of Backhaul before its loader is in place. So this file is run by its path, and imports
nothing of Backhaul at its top.
"""

from __future__ import annotations

import ast
import dis
import gc
import importlib.abc
import importlib.machinery
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType, ModuleType
from typing import Any, cast

_QUESTIONS = ("profiler_is_on", "_profiler_is_on")
_COUNTED = 20
_NOTES = ("note_wait", "note_pass")
LOOKING = (
    *("agent/observing", "agent/tracing", "agent/activity", "agent/accounts", "agent/logs"),
    *("inspection/", "remote_profile/", "profiler/", "seeing/", "drawing/"),
)
"""The modules that only observe."""


Span = tuple[int, int, int, int]
"""A part of a source: its first line and column, its last line and the column after it."""


class _Strip(ast.NodeTransformer):
    """Removes the observation points, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.spans: list[Span] = []
        self._noted: list[set[str]] = [set()]
        """For each enclosing function: its names for the notes of threads."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.attr == "tracing" and _last_name(node.value) in ("execution", "self"):
            return self._constant(node, None)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _QUESTIONS:
            return self._constant(node, False)
        if isinstance(node.func, ast.Name) and node.func.id == "Slot":
            for keyword in [each for each in node.keywords if each.arg == "thread"]:
                self._take(keyword.value)
                node.keywords.remove(keyword)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._noted.append(
            {
                target.id
                for each in ast.walk(node)
                if isinstance(each, ast.Assign) and _is_of_activity(each.value)
                for target in each.targets
                if isinstance(target, ast.Name)
            }
        )
        self.generic_visit(node)
        self._noted.pop()
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (target,) = node.targets if len(node.targets) == 1 else (None,)
        if self._is_note(target, node.value):
            self._take(node)
            return ast.Pass()  # a finally block must not be empty
        return self.generic_visit(node)

    def _is_note(self, target: ast.expr | None, value: ast.expr) -> bool:
        names = self._noted[-1]
        if isinstance(target, ast.Name):
            if _is_of_activity(value) or _last_name(value) in ("handles", "note", "observers"):
                return True
            return (bool(names) and target.id in ("thread", "before")) or (target.id == "began" and _is_time(value))
        if isinstance(target, ast.Attribute):
            if target.attr == "began" and _is_time(value):
                return True
            return target.attr == "handles" or (target.attr == "since" and _last_name(target.value) == "slot")
        return isinstance(target, ast.Subscript) and _last_name(target.value) in names

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        if self._noted[-1] and isinstance(node.test, ast.Compare) and _last_name(node.test.left) == "before":
            self._take(node, places=0)  # the end of a note, which is counted at its beginning
            return ast.Pass()
        node.test = self._answered(node.test)
        found = self.generic_visit(node)
        if isinstance(found, ast.If) and isinstance(found.test, ast.Constant) and not found.test.value:
            return found.orelse or ast.Pass()
        return found

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self._answered(node.test)
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Constant) and not node.test.value else node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        for item in [item for item in node.items if _is_wait_note(item.context_expr)]:
            self._take(item.context_expr)
            node.items.remove(item)
        return node if node.items else node.body

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            noted = call.func.attr == "append" and _last_name(call.func.value) == "ran"
            if noted or call.func.attr in _NOTES:
                self._take(node)
                return ast.Pass()
        return self.generic_visit(node)

    def _answered(self, test: ast.expr) -> ast.expr:
        """A condition without the check for observers."""
        if isinstance(test, ast.BoolOp):
            test.values = [self._answered(each) for each in test.values]
        return self._constant(test, False) if _last_name(test).endswith("observers") else test

    def _constant(self, node: ast.expr, value: bool | None) -> ast.expr:
        self._take(node)
        return ast.copy_location(ast.Constant(value), node)

    def _take(self, node: ast.expr | ast.stmt, places: int = 1) -> None:
        self.count += places
        self.spans.append((node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0))


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_of_activity(node: ast.AST) -> bool:
    """Whether the node is one of the notes about waiting threads."""
    return isinstance(node, ast.Attribute) and node.attr == "waiting" and _last_name(node.value) == "activity"


def _is_time(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) in ("monotonic", "perf_counter_ns")


def _is_wait_note(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "waits"
        and _last_name(node.func.value) == "activity"
    )


def _parse(source: str) -> ast.Module:
    """Parse without the garbage collector: code that it runs confuses the parser of Python 3.11, a SystemError."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_on:
            gc.enable()


def strip(source: str) -> tuple[ast.Module, int]:
    """The module without its observation points, and their number."""
    stripping = _Strip()
    tree = stripping.visit(_parse(source))
    return ast.fix_missing_locations(tree), stripping.count


def spans_that_look(source: str) -> list[Span]:
    """The parts of a module that `strip` removes."""
    stripping = _Strip()
    stripping.visit(_parse(source))
    return stripping.spans


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module from source, stripped or not."""

    stripped = False
    places = 0

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        if not self.stripped:
            return compile(source, path, "exec", dont_inherit=True)
        tree, count = strip(source)
        Loader.places += count
        return compile(tree, path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Loads all modules of Backhaul through `Loader`, except those of the benchmark itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "backhaul" or name.startswith("backhaul.bench"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def entrant(how: str, place: str, processor: str) -> None:
    """Do what the lines on standard input say, ``work seconds``; answer each with two times of a run, as JSON.

    These are seconds by the clock, the median, and seconds of all processes, the mean. All run on ``processor``. The
    first line says when they are to start; what comes before runs on other processors, if there are any.
    """
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {int(processor)} or os.sched_getaffinity(0))
    Loader.stripped = how == "bare"
    sys.meta_path.insert(0, Finder())
    import torch

    torch.set_num_threads(1)
    from backhaul import rpc
    from backhaul.bench.watched_work import WORKS

    if not sys.stdin.readline():  # the pair before may still be measured
        return
    os.sched_setaffinity(0, {int(processor)})
    names = [f"{how}{rank}" for rank in range(3)]
    rank = 0
    children = []
    for each in (1, 2):
        child = os.fork()
        if child == 0:
            rank = each
            break
        children.append(child)
    options = rpc.RpcOptions(init_method=f"file://{place}/{how}")
    rpc.init_rpc(names[rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        clocks = [processor_clock(process) for process in (os.getpid(), *children)]
        print(json.dumps(Loader.places), flush=True)
        for line in sys.stdin:
            work, seconds = json.loads(line)
            do = partial(WORKS[work], names[1:])
            print(json.dumps(measure_both(do, seconds, seconds / 10, clocks)), flush=True)
    rpc.shutdown()


def processor_clock(process: int) -> int:
    """The clock that shows what all threads of a process have used, as clock_getcpuclockid(3) makes it."""
    return ~process << 3 | 2


def count() -> dict[str, tuple[int, int]]:
    """How many bytecodes each work executes at both ends: those of observation points, and those of all of Backhaul.

    The workers are in this process. Their watch threads do not count: their work depends on the time it takes.
    The numbers are exact, except that threads may have to wait, or take over from each other, more or less often.
    """
    from backhaul.bench.watched_work import WORKS
    from backhaul.testing import InProcessCluster

    counting = _Counting()
    threading.settrace(counting.enter)  # for new threads
    found = {}
    try:
        with InProcessCluster(3) as workers, workers[0].as_current():
            names = [worker.info.name for worker in workers[1:]]
            for work, do in WORKS.items():
                do(names)
                counting.looking = counting.all = 0
                sys.settrace(counting.enter)
                for _ in range(_COUNTED):
                    do(names)
                sys.settrace(None)
                found[work] = counting.looking // _COUNTED, counting.all // _COUNTED
    finally:
        sys.settrace(None)
        threading.settrace(cast(Any, None))
    return found


class _Counting:
    """A trace function for all threads. Two threads that count at once may lose one in a million."""

    def __init__(self) -> None:
        self.all = 0
        self.looking = 0
        self._spans: dict[str, list[Span]] = {}
        self._looks: dict[CodeType, list[bool]] = {}
        self._ticks: dict[int, bool] = {}  # by thread: whether it is a worker's clock-driven thread

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        thread = threading.get_ident()
        if thread not in self._ticks:
            self._ticks[thread] = threading.current_thread().name.endswith("-watch")
        if self._ticks[thread] or "/backhaul/" not in code.co_filename or "/backhaul/bench/" in code.co_filename:
            return None
        if code not in self._looks:
            self._looks[code] = self._find(code)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.count

    def _find(self, code: CodeType) -> list[bool]:
        """For each instruction: whether it belongs to an observation point."""
        if code.co_filename not in self._spans:
            with open(code.co_filename, encoding="utf-8") as file:
                self._spans[code.co_filename] = spans_that_look(file.read())
        if code.co_name in _NOTES or any(f"/backhaul/{each}" in code.co_filename for each in LOOKING):
            return [True] * (len(code.co_code) // 2)
        return instructions_that_look(code, self._spans[code.co_filename])

    def count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.all += 1
            self.looking += self._looks[frame.f_code][frame.f_lasti // 2]
        return self.count


def instructions_that_look(code: CodeType, spans: Sequence[Span]) -> list[bool]:
    """For each instruction of a function: whether it comes from one of these parts of its source."""
    looks = [any(_is_within(place, span) for span in spans) for place in _places(code)]
    for each in dis.get_instructions(code):  # the jump of a check has the position of all that it may skip
        number = each.offset // 2
        if each.opname.startswith(("POP_JUMP", "TO_BOOL")) and number and looks[number - 1]:
            looks[number] = True
    return looks


def _places(code: CodeType) -> Iterator[Span | None]:
    """The source position of each instruction. Python 3.10 knows only the line."""
    if sys.version_info < (3, 11):
        lines = {offset: line for first, last, line in code.co_lines() for offset in range(first, last, 2)}
        for offset in range(0, len(code.co_code), 2):
            line = lines.get(offset)
            yield None if line is None else (line, sys.maxsize, line, 0)
        return
    for line, last, column, end in code.co_positions():
        whole = line is None or last is None or column is None or end is None
        yield None if whole else cast(Span, (line, column, last, end))


def _is_within(place: Span | None, span: Span) -> bool:
    return place is not None and span[:2] <= place[:2] and place[2:] <= span[2:]


def measure(do: Callable[[], None], seconds: float, warm_up: float) -> float:
    """The median time of ``do`` over ``seconds`` of repeated runs, after a warm-up."""
    return measure_both(do, seconds, warm_up, ())[0]


def measure_both(do: Callable[[], None], seconds: float, warm_up: float, clocks: Sequence[int]) -> tuple[float, float]:
    """The same, and the mean of what these clocks show."""
    end = time.perf_counter() + warm_up
    while time.perf_counter() < end:
        do()
    taken = []
    used = -sum(map(time.clock_gettime, clocks))
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        do()
        taken.append(time.perf_counter() - start)
    used += sum(map(time.clock_gettime, clocks))
    return (statistics.median(taken), used / len(taken)) if taken else (seconds, used)


if __name__ == "__main__":
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != os.path.dirname(os.path.abspath(__file__))]
    entrant(*sys.argv[1:])
