"""What each thread of a worker's process does now: its stack, the request it handles, what it waits for."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType
from typing import Any

from backhaul.agent.activity import Activity, Handling, Wait
from backhaul.agent.naming import name_of_request
from backhaul.inspection.blocking import find_blocked

_LONGEST_STACK = 64

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def describe_threads(activity: Activity, *, stacks: bool = True) -> list[dict[str, Any]]:
    """The threads of this process, busiest first: those that handle something, those that wait, the others.

    With ``stacks``: also their frames, innermost last, and the lock that a thread waits for, if any.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = _current_frames()
    # Threads run on while they are inspected: so first read quickly all that changes, then do the slow parts.
    waits = activity.all_waits()
    taken = [
        (id, activity.handled_by(id), waits.get(id, []), _frames_of(frame) if stacks else None)
        for id, frame in frames.items()
    ]
    now = time.monotonic()
    blocked = find_blocked(frames) if stacks else {}
    found = []
    for id, handling, waiting, stack in taken:
        thread: dict[str, Any] = {
            "id": id,
            "name": names.get(id, "a thread that Python did not start"),
            "handles": _chain(handling, now),
            "waits": [_describe(wait, now) for wait in waiting],
        }
        if stack is not None:
            thread["blocked"] = blocked.get(id)
            thread["stack"] = [
                {
                    "file": each.filename,
                    "line": each.lineno,
                    "function": each.name,
                    "code": each.line,
                    "whose": _whose(each.filename),
                }
                for each in stack
            ]
        found.append(thread)
    found.sort(key=lambda thread: (not thread["handles"], not thread["waits"], thread["name"]))
    return found


# The frames are those of all threads of the process.
_looking = threading.Lock()


def _current_frames() -> dict[int, FrameType]:
    """`sys._current_frames`, safely.

    CPython holds a lock over all threads during the call, and a new thread needs that lock too. A garbage collection
    inside may run finalizers, which release the GIL. A thread that starts another one then waits for that lock while it
    holds the GIL, forever (python/cpython#106883).
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _frames_of(frame: FrameType) -> traceback.StackSummary:
    """The current stack, innermost frame last. Source lines are read only when needed."""
    frames = list(itertools.islice(traceback.walk_stack(frame), _LONGEST_STACK))
    return traceback.StackSummary.extract(reversed(frames), lookup_lines=False)


def _whose(file: str) -> str:
    """Whose code a file is: this package's, the user's, or an installed package's."""
    if file.startswith(_PACKAGE):
        return "backhaul"
    return "installed" if file.startswith((*_INSTALLED, "<frozen", "<string>")) else "user"


def describe_waits(activity: Activity, now: float) -> list[tuple[int, dict[str, Any]]]:
    """The waiting threads, and what each waits for."""
    return [(thread, _describe(waits[0], now)) for thread, waits in activity.all_waits().items()]


def describe_handling(handling: Handling, now: float) -> dict[str, Any]:
    message = handling.message
    found = {
        "peer": handling.peer.name,
        "kind": type(message).__name__,
        "call": getattr(message, "id", 0),
        "what": name_of_request(message),
        "seconds": now - handling.since,
    }
    if (backward := getattr(message, "backward", None)) is not None:
        found["backward"] = backward.id
    if (ref := getattr(message, "ref", None)) is not None:
        found["ref"] = str(ref)
    return found


def _chain(handling: Handling | None, now: float) -> list[dict[str, Any]]:
    """The message that a thread handles, and those it had begun before; innermost first."""
    found = []
    while handling is not None:
        found.append(describe_handling(handling, now))
        handling = handling.before
    return found


def _describe(wait: Wait, now: float) -> dict[str, Any]:
    seconds = now - wait.since
    try:
        found = wait.describe()
    except Exception as error:  # the wait may end while it is described
        return {"kind": "unknown", "what": repr(error), "seconds": seconds}
    deadline = found.pop("deadline", None)
    if deadline is not None and deadline != float("inf"):
        found["seconds_left"] = deadline - time.monotonic()
    return {**found, "seconds": seconds}
