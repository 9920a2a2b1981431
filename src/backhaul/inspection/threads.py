"""What each thread of a worker's process does now: its stack, the request that it handles, what it waits for."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Any

from backhaul.agent.activity import Activity, Handling, Wait
from backhaul.inspection.names import name_of_request

_LONGEST_STACK = 64


def describe_threads(activity: Activity, *, stacks: bool = True) -> list[dict[str, Any]]:
    """The threads of this process, the busiest first: those that handle something, those that wait, the others.

    ``stacks``: with their frames, the innermost last.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    now = time.monotonic()
    found = []
    for id, frame in sys._current_frames().items():
        thread: dict[str, Any] = {
            "id": id,
            "name": names.get(id, "a thread that Python did not start"),
            "handles": _chain(activity.handling.get(id), now),
            "waits": _waits(activity.waiting.get(id), now),
        }
        if stacks:
            thread["stack"] = [
                {"file": each.filename, "line": each.lineno, "function": each.name, "code": each.line}
                for each in traceback.extract_stack(frame, _LONGEST_STACK)
            ]
        found.append(thread)
    found.sort(key=lambda thread: (not thread["handles"], not thread["waits"], thread["name"]))
    return found


def describe_handling(handling: Handling, now: float) -> dict[str, Any]:
    message = handling.message
    return {
        "peer": handling.peer.name,
        "kind": type(message).__name__,
        "call": getattr(message, "id", 0),
        "what": name_of_request(message),
        "seconds": now - handling.since,
    }


def _chain(handling: Handling | None, now: float) -> list[dict[str, Any]]:
    """The message that a thread handles, and those that it had begun with before; the innermost first."""
    found = []
    while handling is not None:
        found.append(describe_handling(handling, now))
        handling = handling.before
    return found


def _waits(wait: Wait | None, now: float) -> list[dict[str, Any]]:
    found = []
    while wait is not None:
        found.append({**_described(wait), "seconds": now - wait.since})
        wait = wait.before
    return found


def _described(wait: Wait) -> dict[str, Any]:
    try:
        found = wait.describe()
    except Exception as error:  # what it waits for may end while it is described
        return {"kind": "unknown", "what": repr(error)}
    deadline = found.pop("deadline", None)
    if deadline is not None and deadline != float("inf"):
        found["seconds_left"] = deadline - time.monotonic()
    return found
