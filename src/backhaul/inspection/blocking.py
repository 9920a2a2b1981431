"""Blocking: which threads wait for a lock, or for another thread to end, and which thread they wait for.

A call waits for a peer, and Backhaul keeps notes of that. But a cycle of calls only hangs if something else
closes it, and usually that is a lock in user code: one thread holds it and waits for a call, and something that the
call leads to wants the lock. Python does not say which thread holds a lock, so this module derives it from stacks and
sources: a thread waits for a lock at ``with lock:`` or ``lock.acquire()``, and a thread inside such a block holds it.
Expressions are looked up, never evaluated, so no user code runs.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any

from backhaul.compat import is_at

_LOCK: Any = type(threading.Lock())
_RLOCK: Any = type(threading.RLock())
_DEEPEST = 64
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_OWNER = re.compile(r"owner=(\d+)")
_MISSING = object()

Blocked = dict[str, Any]
"""``on`` is "lock", "thread", "event", "condition" or "semaphore"; ``what`` is its name in the source; ``holder`` is
the thread that must act first, if known."""


def find_blocked(frames: Mapping[int, FrameType]) -> dict[int, Blocked]:
    """The blocked threads among those with these innermost frames."""
    found: dict[int, Blocked] = {}
    for thread, frame in frames.items():
        blocked = _in_threading(frame) if frame.f_code.co_filename == threading.__file__ else _at_lock(frame)
        if blocked is None:
            continue
        lock = blocked.pop("lock", None)
        if lock is not None:
            holder = _holder(lock, thread, frames)
            if holder == thread and not isinstance(lock, _LOCK):
                continue  # a reentrant lock, which the thread may take again
            blocked["holder"] = holder
        found[thread] = blocked
    return found


def _in_threading(frame: FrameType) -> Blocked | None:
    """What a thread waits for that is inside the module `threading`."""
    inner: FrameType | None = frame
    blocked: Blocked | None = None
    while inner is not None and inner.f_code.co_filename == threading.__file__:
        this = inner.f_locals.get("self")
        name = inner.f_code.co_name
        if isinstance(this, threading.Thread) and name == "join":
            return {"on": "thread", "what": this.name, "holder": this.ident}
        if isinstance(this, threading.Event) and name == "wait":
            return {"on": "event", "what": "", "holder": None}
        if isinstance(this, threading.Semaphore) and name in ("acquire", "__enter__"):
            return {"on": "semaphore", "what": "", "holder": None}
        if isinstance(this, threading.Condition) and name in ("wait", "wait_for"):
            blocked = {"on": "condition", "what": "", "holder": None}
        if isinstance(this, threading.Condition) and name == "__enter__":
            lock = this._lock  # type: ignore[attr-defined]
            blocked = {"on": "lock", "what": "", "lock": lock}
            return blocked if inner.f_back is None else _at_lock(inner.f_back) or blocked
        inner = inner.f_back
    return blocked


def _at_lock(frame: FrameType) -> Blocked | None:
    for expression, places in reversed(_taken_in(frame.f_code)):  # of several in one line, the first are already taken
        if any(_is_at(frame, place) for place in places):
            lock = _lock_of(_look_up(expression, frame))
            if lock is not None and _is_locked(lock):
                return {"on": "lock", "what": ast.unparse(expression), "lock": lock}
    return None


def _is_at(frame: FrameType, node: ast.expr | ast.stmt) -> bool:
    """Whether the frame's current instruction comes from this part of the source."""
    return is_at(frame, (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset))


def _holder(lock: Any, waiting: int, frames: Mapping[int, FrameType]) -> int | None:
    """The thread that holds a lock, if it can be determined."""
    if isinstance(lock, _RLOCK):
        owner = _OWNER.search(repr(lock))
        return int(owner[1]) if owner else None
    # The waiting thread may itself hold the lock. Then it never continues.
    found = [thread for thread in frames if any(_holds(lock, frame) for frame in _stack(frames[thread]))]
    others = [thread for thread in found if thread != waiting]
    return others[0] if len(others) == 1 else found[0] if found == [waiting] else None


def _holds(lock: Any, frame: FrameType) -> bool:
    """Whether a frame is inside a block that has taken the lock."""
    for first, last, expression in _held_in(frame.f_code):
        if first <= frame.f_lineno <= last and _lock_of(_look_up(expression, frame)) is lock:
            return True
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _lock_of(value: Any) -> Any:
    if isinstance(value, threading.Condition):
        value = value._lock  # type: ignore[attr-defined]
    return value if isinstance(value, _LOCK | _RLOCK) else None


def _is_locked(lock: Any) -> bool:
    return repr(lock).startswith("<locked")


def _look_up(expression: ast.expr, frame: FrameType) -> Any:
    """The value of a name or of its attributes, without running user code."""
    if isinstance(expression, ast.Name):
        found = frame.f_locals.get(expression.id, _MISSING)
        return frame.f_globals.get(expression.id, _MISSING) if found is _MISSING else found
    if isinstance(expression, ast.Attribute):
        owner = _look_up(expression.value, frame)
        for place in [owner, *(type(owner).__mro__ if not isinstance(owner, type | ModuleType) else ())]:
            try:
                attributes = object.__getattribute__(place, "__dict__")
            except AttributeError:
                continue
            if expression.attr in attributes:
                return attributes[expression.attr]
    return _MISSING


@lru_cache(256)
def _taken_in(code: CodeType) -> list[tuple[ast.expr, tuple[ast.expr | ast.stmt, ...]]]:
    """The lock expressions that a function takes, and where the function may be while it waits for each."""
    found: list[tuple[ast.expr, tuple[ast.expr | ast.stmt, ...]]] = []
    for node in _nodes(code):
        if isinstance(node, ast.With):
            found += [(item.context_expr, (node, item.context_expr)) for item in node.items]
        elif (expression := _call_of(node, "acquire")) is not None and isinstance(node, ast.expr):
            found.append((expression, (node,)))
    return found


@lru_cache(256)
def _held_in(code: CodeType) -> list[tuple[int, int, ast.expr]]:
    """The lines of a function in which it may hold a lock: first line, last line, and the lock's expression."""
    found: list[tuple[int, int, ast.expr]] = []
    taken: dict[str, tuple[int, ast.expr]] = {}
    given: dict[str, int] = {}
    for node in _nodes(code):
        if isinstance(node, ast.With):
            end = node.body[-1].end_lineno or node.body[-1].lineno
            found += [(node.body[0].lineno, end, item.context_expr) for item in node.items]
        elif (expression := _call_of(node, "acquire")) is not None:
            taken.setdefault(ast.unparse(expression), (_line(node) + 1, expression))
        elif (expression := _call_of(node, "release")) is not None:
            given[ast.unparse(expression)] = _line(node) - 1
    found += [(first, given.get(text, sys.maxsize), expression) for text, (first, expression) in taken.items()]
    return found


def _call_of(node: ast.AST, method: str) -> ast.expr | None:
    """The object whose method is called, if the node is such a call."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
        return node.func.value
    return None


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _nodes(code: CodeType) -> list[ast.AST]:
    """The syntax tree nodes of the function that a code object was compiled from."""
    if _is_skipped(code.co_filename):
        return []
    for node in ast.walk(_module(code.co_filename)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorated = min([_line(node), *map(_line, getattr(node, "decorator_list", ()))])
            if decorated == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name:
                return list(ast.walk(node))
    return list(ast.walk(_module(code.co_filename))) if code.co_name == "<module>" else []


def _is_skipped(filename: str) -> bool:
    """Whether to skip a file: Python's library, torch and this package are large, and have no locks of the user."""
    if filename.startswith(_PACKAGE) or "/site-packages/torch/" in filename:
        return True
    return filename.startswith(_LIBRARY) and "-packages/" not in filename


@lru_cache(64)
def _module(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):  # not Python, or nested too deeply
        return ast.Module([], [])
