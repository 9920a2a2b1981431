"""The answers to the page's questions, as plain data: the view of the cluster, stacks, what hangs, drawings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from backhaul.errors import BackhaulError
from backhaul.seeing.findings import Stuck
from backhaul.seeing.lookout import Lookout

_REUSE_SECONDS = 0.5
_TRIES = 8
_SHORTER_POINTS = 120


class Answers:
    """Thread-safe. A worker that hangs delays only questions about itself, and only briefly."""

    def __init__(self, lookout: Lookout) -> None:
        self._lookout = lookout
        self._lock = threading.Lock()
        self._stuck: Stuck | None = None
        self._made = -_REUSE_SECONDS

    def view(self) -> dict[str, Any]:
        """All figures of the cluster."""
        with self._lookout.reading:
            view = self._lookout.look()
            found = {
                "now": time.time(),
                "workers": msgspec.to_builtins(view.rows()),
                "traffic": msgspec.to_builtins(view.traffic()),
                "curves": view.curves(),
                "passes": view.passes(),
                "contexts": view.contexts(),
            }
        for worker in found["workers"]:
            worker["history"] = worker["history"][-_SHORTER_POINTS:]
        for one in found["passes"]:  # too large for JavaScript's numbers
            one["backward"], one["context"] = str(one["backward"]), str(one["context"])
        for context in found["contexts"]:
            context["context"] = str(context["context"])
        return found

    def threads(self, worker: str) -> dict[str, Any]:
        """What each thread of a worker does. Raises `BackhaulError`."""
        found = self._lookout.ask(worker, "threads")
        for thread in found:
            thread["id"] = str(thread["id"])
        return {"worker": worker, "threads": [thread for thread in found if not _looks(thread)]}

    def stuck(self) -> dict[str, Any]:
        """What each waiting thread waits for. Concurrent questions share one answer."""
        with self._lock:
            if self._stuck is None or time.monotonic() - self._made >= _REUSE_SECONDS:
                self._stuck = self._lookout.stuck()
                self._made = time.monotonic()
            found = self._stuck
        plain: dict[str, Any] = msgspec.to_builtins(found)
        return {**plain, "lasting": msgspec.to_builtins(found.lasting), "remark": found.remark}

    def drawing(self, context: int) -> str:
        """A live context as SVG. Raises `BackhaulError` if no worker knows the context."""
        with self._lookout.reading:
            known = [one for one in self._lookout.look().contexts() if one["context"] == context]
        parts = self._parts(context, known[0]["workers"] if known else [])
        return self._draw(context, parts)

    def latest_drawing(self) -> str:
        """The context opened last, as SVG. A training loop may leave it at once, so this tries several times."""
        from backhaul import drawing

        best: list[dict[str, Any]] = []
        context = 0
        for _ in range(_TRIES):
            answers = self._lookout.ask_all("snapshot")
            found = [
                each["context"]
                for answer in answers.values()
                for each in answer.get("snapshot", {}).get("autograd", {}).get("in_detail", ())
                if each["sends"] or each["recvs"]
            ]
            if not found:
                continue
            parts = self._parts(max(found), [name for name, answer in answers.items() if "error" not in answer])
            if len(parts) >= len(best):
                best, context = parts, max(found)
            ranks = {part["rank"] for part in parts}
            if parts and all(rank in ranks for part in parts for rank in drawing.mentioned(part)):
                break
        if not best:
            raise BackhaulError("no context is open now, or each closes before it can be drawn")
        return self._draw(context, best)

    def _parts(self, context: int, workers: Iterable[str]) -> list[dict[str, Any]]:
        """The parts of a context on these workers, and on the workers that they mention."""
        from backhaul import drawing

        parts: dict[str, dict[str, Any]] = {}
        asked: set[str] = set()
        todo = set(workers)
        while todo:
            asked |= todo
            parts |= self._lookout.ask_each(sorted(todo), "context", id=context)
            mentioned = {rank for part in parts.values() for rank in drawing.mentioned(part)}
            todo = {name for rank in mentioned if (name := self._lookout.name_of(rank)) is not None} - asked
        return [part for part in parts.values() if part.get("known", True)]

    def _draw(self, context: int, parts: list[dict[str, Any]]) -> str:
        from backhaul import drawing

        if not parts:
            raise BackhaulError(f"the context {context} has ended, or its workers do not answer")
        return drawing.svg(parts)


def _looks(thread: dict[str, Any]) -> bool:
    """Whether the thread only answers questions like ours."""
    return bool(thread["handles"]) and thread["handles"][0]["kind"] == "Inspect"
